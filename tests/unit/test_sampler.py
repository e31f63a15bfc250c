"""The sampler: its distribution, its log-probabilities, and requests that do not feel their company."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from micro import joined, micro_batches, micro_engine, micro_model, step, weights
from nemotron_ultra.errors import CheckpointError, ConfigError, DataError
from nemotron_ultra.generation import Completion, Sampler, generate
from nemotron_ultra.generation.base import Generator
from nemotron_ultra.generation.draw import draw, uniforms
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.score import score

PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11], [3, 4, 5], [9], list(range(3, 40)), [3, 4, 5], [60, 61]]


def rescored(model: HybridLM, prompt: list[int], completion: Completion) -> torch.Tensor:
    tokens_T = torch.tensor(prompt + completion.tokens)
    return score(model, tokens_T[:-1], tokens_T[1:])[len(prompt) - 1 :]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def test_greedy_equals_full_forwards():
    model = micro_model()
    for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, 12), strict=True):
        ids = list(prompt)
        for token in completion.tokens:
            assert token == int(model(torch.tensor(ids), mtp_depths=0).logits_TV[-1].argmax())
            ids.append(token)
        assert completion.finish_reason == "length" and completion.versions == [0] * 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stop_ids", [(), tuple(range(8))])
def test_logprobs_equal_score(temperature, stop_ids):
    model = micro_model()
    found = generate(model, PROMPTS * 3, 16, temperature=temperature, stop_ids=stop_ids)
    for prompt, completion in zip(PROMPTS * 3, found, strict=True):
        expected = rescored(model, prompt, completion)
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4


def test_logprobs_are_of_the_heated_distribution():
    model = micro_model(torch.float64)
    (completion,) = generate(model, [[5, 6]], 10, temperature=0.5)
    ids = torch.tensor([5, 6, *completion.tokens])
    logprob_TV = (model(ids, mtp_depths=0).logits_TV / 0.5).log_softmax(-1)[1:-1]
    expected = logprob_TV.gather(1, ids[2:, None])[:, 0]
    assert (torch.tensor(completion.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("max_slots", [256, 7, 3, 1])
def test_alone_and_in_company_the_same(max_slots):
    """Stop ids make rows leave at different times, so company changes all the while."""
    model, seeds = micro_model(), range(100, 100 + len(PROMPTS))
    options = {"temperature": 1.0, "stop_ids": [3, 11]}
    alone = [generate(model, [p], 40, seeds=[s], **options)[0] for p, s in zip(PROMPTS, seeds, strict=True)]
    together = generate(model, PROMPTS, 40, seeds=seeds, max_slots=max_slots, **options)
    assert tokens(together) == tokens(alone)
    assert {c.finish_reason for c in alone} == {"stop", "length"}
    for one, other in zip(alone, together, strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_shorter_limit_gives_the_beginning():
    model = micro_model()
    long, short = (generate(model, PROMPTS, n, temperature=1.0) for n in (33, 9))
    assert [t[:9] for t in tokens(long)] == tokens(short)


def test_equal_prompts_are_read_once():
    sampler = Sampler(micro_model(), max_slots=32)
    found = sampler.generate([[3, 4, 5, 6]] * 16 + [[8, 9]] * 16, max_new_tokens=5)
    assert sampler.stats["prefill_tokens"] == 6 and sampler.stats["steps"] == 4
    assert sampler.stats["prefills"] == 1 and sampler.stats["new_tokens"] == 160
    assert len(set(map(tuple, tokens(found)))) > 16  # seeds differ, so samples do


def test_stop_id_is_kept_and_ends_the_request():
    model = micro_model()
    free = generate(model, PROMPTS, 30, temperature=1.0)
    stop = free[1].tokens[6]
    for one, other in zip(free, generate(model, PROMPTS, 30, temperature=1.0, stop_ids=[stop]), strict=True):
        expected = one.tokens[: one.tokens.index(stop) + 1] if stop in one.tokens else one.tokens
        assert other.tokens == expected and len(other.logprobs) == len(expected)
        assert other.finish_reason == ("stop" if stop in one.tokens else "length")


def test_a_stop_id_as_last_token_is_a_stop():
    model = micro_model()
    (free,) = generate(model, [[5]], 4)
    (stopped,) = generate(model, [[5]], free.tokens.index(free.tokens[-1]) + 1, stop_ids=free.tokens[-1:])
    assert stopped.finish_reason == "stop"


def test_ids_beyond_the_vocabulary_are_never_drawn():
    """The log-probability is that of the ten ids drawn from: above the model's by the others' mass."""
    model = micro_model(torch.float64)
    (completion,) = generate(model, [[5, 6]], 60, temperature=1.0, vocab_size=10)
    assert set(completion.tokens) <= set(range(10))
    logprob_TV = model(torch.tensor([5, 6, *completion.tokens]), mtp_depths=0).logits_TV.log_softmax(-1)
    mass_T = logprob_TV[1:-1, :10].logsumexp(-1)
    expected = rescored(model, [5, 6], completion) - mass_T
    assert (torch.tensor(completion.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("ids", [5, 64, 131])
def test_frequencies_are_the_distribution(ids):
    """Chi-square of 20,000 draws in at most 24 bins of ids: even 23 exceed 60 once in 25,000 times."""
    logits_V = torch.randn(ids, generator=torch.Generator().manual_seed(ids)) * 2
    uniform_B = uniforms(range(20_000), 1)[:, 0]
    token_B, logprob_B = draw(logits_V.expand(20_000, -1), 0.7, uniform_B)
    p_V = (logits_V.double() / 0.7).softmax(0)
    assert (logprob_B - p_V.log()[token_B]).abs().max() < 1e-5
    bins_V = torch.arange(ids) % 24
    expected = torch.zeros(24, dtype=torch.float64).index_add_(0, bins_V, p_V * 20_000)[: min(ids, 24)]
    found = torch.bincount(bins_V[token_B], minlength=24)[: min(ids, 24)]
    assert ((found - expected).square() / expected).sum() < 60


def test_draw_never_takes_an_id_without_odds():
    """At both ends of u, and for odds that float32 rounds to nothing beside the largest."""
    logits_V = torch.full((200,), -torch.inf)
    logits_V[[70, 130]] = torch.tensor([0.0, -90.0])
    edge_B = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    token_B, logprob_B = draw(logits_V.expand(3, -1), 1.0, edge_B)
    assert set(token_B.tolist()) <= {70, 130} and bool(logprob_B.isfinite().all())


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    logits_V = torch.randn(300, generator=torch.Generator().manual_seed(1))
    edges_V = logits_V.double().softmax(0).cumsum(0)
    middle_V = edges_V - logits_V.double().softmax(0) / 2
    token_V, _ = draw(logits_V.expand(300, -1), 1.0, middle_V)
    assert token_V.tolist() == list(range(300))


def test_uniforms_depend_on_seed_and_place_alone():
    many, few = uniforms([7, -1, 2**40 + 7], 50), uniforms([2**40 + 7, 7], 3)
    assert torch.equal(many[[2, 0], :3], few)
    assert len(many.unique()) == 150 and many.min() >= 0 and many.max() < 1
    assert abs(uniforms(range(4000), 1).mean() - 0.5) < 4 / math.sqrt(12 * 4000)


def test_generators_own_randomness_only():
    model, before = micro_model(), torch.get_rng_state()
    generate(model, PROMPTS, 5, temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())


def test_load_weights_copies_and_numbers_tokens():
    learner, sampler = micro_model(), Sampler(micro_model())
    learner.init_weights(8)
    generator: Generator = sampler
    generator.load_weights(learner.state_dict().items(), 5)
    found = generator.generate(PROMPTS, max_new_tokens=6, temperature=0.0)
    assert tokens(found) == tokens(generate(learner, PROMPTS, 6))
    assert generator.version == 5 and found[0].versions == [5] * 6
    kept = weights(sampler.model)
    learner.init_weights(9)
    assert all(torch.equal(t, kept[name]) for name, t in sampler.model.state_dict().items())


def test_weights_that_do_not_fit_change_nothing():
    sampler = Sampler(micro_model())
    kept, new = weights(sampler.model), weights(micro_model())
    new["lm_head.weight"] = new["lm_head.weight"][:32]
    new["strange"] = new.pop("backbone.norm_f.weight")
    with pytest.raises(CheckpointError, match=r"backbone.norm_f.weight, strange, lm_head.weight"):
        sampler.load_weights(new.items(), 1)
    assert sampler.version == 0
    assert all(torch.equal(t, kept[name]) for name, t in sampler.model.state_dict().items())


def test_beside_training_in_a_thread():
    """Tokens and weights are those of one after the other, and load_weights waits for a running generate."""
    batches = [joined(micro_batches(2, seed)) for seed in range(6)]
    plain, beside = micro_engine(), micro_engine()
    expected = tokens(generate(micro_model(), PROMPTS * 4, 60, temperature=1.0))
    sampler, found = Sampler(micro_model()), []
    seeds = list(range(len(PROMPTS) * 4))
    work = {"max_new_tokens": 60, "temperature": 1.0, "seeds": seeds}
    thread = threading.Thread(target=lambda: found.extend(sampler.generate(PROMPTS * 4, **work)))
    thread.start()
    for batch in batches:
        step(beside, [batch])
    sampler.load_weights(beside.model.state_dict().items(), 1)
    thread.join()
    for batch in batches:
        step(plain, [batch])
    assert tokens(found) == expected
    assert {v for c in found for v in c.versions} <= {0, 1}
    assert all(torch.equal(t, plain.model.state_dict()[n]) for n, t in beside.model.state_dict().items())


def test_no_graph_and_no_inference_tensors():
    sampler = Sampler(micro_model().train())
    sampler.generate(PROMPTS, max_new_tokens=3)
    loss = sampler.model(torch.arange(3, 20), mtp_depths=0).hidden_TD.sum()
    loss.backward()  # buffers left by generation may be written by training
    assert all(p.grad is not None for p in sampler.model.backbone.layers[0].parameters())


def test_no_prompts_no_completions():
    assert generate(micro_model(), [], 5) == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompts": [[3], []]}, DataError, "prompt 1 is empty"),
        ({"prompts": [[3], [4, 64]]}, DataError, r"prompt 1: a token id.*got 64.*0 to 63"),
        ({"prompts": [[-1]]}, DataError, r"prompt 0: a token id.*got -1"),
        ({"max_new_tokens": 0}, ConfigError, r"max_new_tokens.*got 0.*1 or more"),
        ({"temperature": -0.5}, ConfigError, r"temperature.*got -0.5"),
        ({"temperature": math.nan}, ConfigError, r"temperature.*got nan"),
        ({"draft_tokens": -2}, ConfigError, r"draft_tokens.*got -2.*0 \(no drafts\) or more"),
        ({"stop_ids": [64]}, ConfigError, r"stop_ids.*got 64.*0 to 63"),
        ({"seeds": [1, 2]}, ConfigError, r"seeds.*got 2.*1, one per prompt"),
        ({"seed": "a"}, ConfigError, r"seed.*got 'a'"),
        ({"max_slots": 0}, ConfigError, r"max_slots.*got 0"),
        ({"max_slots": 2.5}, ConfigError, r"max_slots.*got 2.5"),
        ({"vocab_size": True}, ConfigError, r"vocab_size.*got True"),
        ({"vocab_size": 65}, ConfigError, r"vocab_size.*got 65.*1 to 64"),
    ],
)
def test_bad_input_is_one_error(changes, error, message):
    with pytest.raises(error, match=message):
        generate(micro_model(), **{"prompts": [[3, 4]], "max_new_tokens": 4} | changes)
