"""What every `Generator` promises, as checks of a generator and a model with the same weights.

Each check takes (generator, model); the generator holds the model's weights as version 0 and may be left with
others. Expected numbers come from full forwards of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from micro import micro_model, weights
from nemotron_ultra.errors import CheckpointError, ConfigError, DataError
from nemotron_ultra.generation.base import Completion, Generator
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.rl.publish import Publisher

PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11], [3, 4, 5], [9], list(range(3, 40)), [3, 4, 5], [60, 61]]
SEEDS = list(range(100, 100 + len(PROMPTS)))
CLOSE = 1e-5

Check = Callable[[Generator, HybridLM], None]


def contract_model(**changes) -> HybridLM:
    """Every kind of block; heads of 32, the smallest that vLLM's CPU attention has."""
    return micro_model(**{"head_dim": 32} | changes)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


@torch.no_grad()
def greedy(model: HybridLM, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, by one full forward a token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor(ids), mtp_depths=0).logits_TV[-1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def expected(model: HybridLM, prompt: list[int], drawn: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the drawn tokens under softmax(logits / temperature)."""
    ids = torch.tensor(prompt + drawn)
    logprob_TV = (model(ids, mtp_depths=0).logits_TV.double() / temperature).log_softmax(-1)
    return logprob_TV[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]


def distance(found: list[float], wanted: torch.Tensor) -> float:
    assert len(found) == len(wanted) and all(map(math.isfinite, found))
    return float((torch.tensor(found, dtype=torch.float64) - wanted).abs().max())


def one_completion_per_prompt_in_order(generator: Generator, model: HybridLM) -> None:
    found = generator.generate(PROMPTS, max_new_tokens=12, temperature=0.0)
    assert tokens(found) == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert {c.finish_reason for c in found} == {"length"}
    assert generator.generate([], max_new_tokens=4) == []


def prompt_seed_and_weights_decide(generator: Generator, model: HybridLM) -> None:
    """Stop ids make requests leave at different times, so company changes all the while."""
    options = {"max_new_tokens": 30, "temperature": 1.0, "stop_ids": [3, 11]}
    pairs = list(zip(PROMPTS, SEEDS, strict=True))
    alone = [generator.generate([p], seeds=[s], **options)[0] for p, s in pairs]
    together = generator.generate(PROMPTS, seeds=SEEDS, **options)
    backwards = generator.generate(PROMPTS[::-1], seeds=SEEDS[::-1], **options)
    assert tokens(together) == tokens(alone) == tokens(backwards[::-1])
    assert [c.finish_reason for c in together] == [c.finish_reason for c in alone]
    equal_prompts = [together[0].tokens, together[2].tokens, together[5].tokens]
    assert len(set(map(tuple, equal_prompts))) == 3  # their seeds differ


def any_integer_is_a_seed(generator: Generator, model: HybridLM) -> None:
    seeds = [0, -1, 2**40 + 7, 2**63 - 1, -(2**63), 5_000_015]
    found = generator.generate([[3, 4]] * 6, max_new_tokens=20, temperature=1.0, seeds=seeds)
    assert len(set(map(tuple, tokens(found)))) == 6


def a_stop_id_ends_and_is_kept(generator: Generator, model: HybridLM) -> None:
    options = {"max_new_tokens": 30, "temperature": 1.0, "seeds": SEEDS}
    free = generator.generate(PROMPTS, **options)
    stop = free[1].tokens[6]
    for one, other in zip(free, generator.generate(PROMPTS, stop_ids=[stop], **options), strict=True):
        wanted = one.tokens[: one.tokens.index(stop) + 1] if stop in one.tokens else one.tokens
        assert other.tokens == wanted and len(other.logprobs) == len(other.versions) == len(wanted)
        assert other.finish_reason == ("stop" if stop in one.tokens else "length")
    last = free[1].tokens.index(stop) + 1  # the stop id as the last token that is allowed
    (short,) = generator.generate(
        PROMPTS[1:2], max_new_tokens=last, temperature=1.0, seeds=SEEDS[1:2], stop_ids=[stop, 63]
    )
    assert short.finish_reason == "stop" and short.tokens[-1] == stop


def no_other_id_ends_a_request(generator: Generator, model: HybridLM) -> None:
    """The model's own end-of-sequence id is an id like any other unless it is asked for."""
    end = model.config.eos_token_id
    found = generator.generate([[3, 4]] * 20, max_new_tokens=40, temperature=1.0)
    assert any(end in c.tokens[:-1] for c in found) and {len(c.tokens) for c in found} == {40}


def logprobs_are_of_what_was_drawn_from(generator: Generator, model: HybridLM) -> None:
    for temperature in (0.0, 1.0, 0.7):
        found = generator.generate(PROMPTS, max_new_tokens=16, temperature=temperature, seeds=SEEDS)
        for prompt, one in zip(PROMPTS, found, strict=True):
            drawn = expected(model, prompt, one.tokens, temperature or 1.0)
            assert distance(one.logprobs, drawn) < CLOSE
            assert distance(one.model_logprobs, expected(model, prompt, one.tokens)) < CLOSE


def frequencies_are_the_distribution(generator: Generator, model: HybridLM) -> None:
    """Chi-square of 800 first tokens in 16 bins of ids: 15 degrees exceed 50 once in 90,000 times."""
    found = generator.generate([[5, 6]] * 800, max_new_tokens=1, temperature=0.5)
    with torch.no_grad():
        p_V = (model(torch.tensor([5, 6]), mtp_depths=0).logits_TV[-1].double() / 0.5).softmax(0)
    wanted = p_V.view(-1, 16).sum(0) * 800
    count = torch.bincount(torch.tensor(tokens(found)).flatten() % 16, minlength=16)
    assert float(((count - wanted).square() / wanted).sum()) < 50


def new_weights_are_used_and_named(generator: Generator, model: HybridLM) -> None:
    before = generator.generate(PROMPTS, max_new_tokens=12, temperature=0.0)
    assert generator.version == 0 and before[0].versions == [0] * 12
    other = contract_model()
    for version, seed in ((5, 8), (6, 9)):
        other.init_weights(seed)
        Publisher(generator).publish(other.state_dict().items(), version)
        found = generator.generate(PROMPTS, max_new_tokens=12, temperature=0.0)
        assert tokens(found) == [greedy(other, prompt, 12) for prompt in PROMPTS] != tokens(before)
        assert {v for c in found for v in c.versions} == {version}
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert distance(one.logprobs, expected(other, prompt, one.tokens)) < CLOSE


def the_learner_goes_on_without_the_generator(generator: Generator, model: HybridLM) -> None:
    """Weights are copied: changing the published tensors afterwards changes nothing."""
    other = contract_model()
    other.init_weights(8)
    generator.load_weights(other.state_dict().items(), 1)
    found = generator.generate(PROMPTS, max_new_tokens=8, temperature=0.0)
    other.init_weights(9)
    assert tokens(generator.generate(PROMPTS, max_new_tokens=8, temperature=0.0)) == tokens(found)


def weights_that_do_not_fit_change_nothing(generator: Generator, model: HybridLM) -> None:
    before = generator.generate(PROMPTS, max_new_tokens=8, temperature=0.0)
    other = contract_model()
    other.init_weights(8)
    wrong = weights(other)
    wrong["lm_head.weight"] = wrong["lm_head.weight"][:32]
    wrong["strange"] = wrong.pop("backbone.norm_f.weight")
    with pytest.raises(CheckpointError, match=r"backbone.norm_f.weight, strange, lm_head.weight"):
        generator.load_weights(wrong.items(), 1)
    after = generator.generate(PROMPTS, max_new_tokens=8, temperature=0.0)
    assert generator.version == 0 and tokens(after) == tokens(before)


def bad_input_is_one_error_before_any_work(generator: Generator, model: HybridLM) -> None:
    cases = [
        ({"prompts": [[3], []]}, DataError, "prompt 1 is empty"),
        ({"prompts": [[3], [4, 64]]}, DataError, r"prompt 1: a token id.*got 64.*0 to 63"),
        ({"prompts": [[-1]]}, DataError, r"prompt 0: a token id.*got -1"),
        ({"max_new_tokens": 0}, ConfigError, r"max_new_tokens.*got 0.*1 or more"),
        ({"temperature": -0.5}, ConfigError, r"temperature.*got -0.5"),
        ({"temperature": math.nan}, ConfigError, r"temperature.*got nan"),
        ({"stop_ids": [64]}, ConfigError, r"stop_ids.*got 64.*0 to 63"),
        ({"seeds": [1, 2]}, ConfigError, r"seeds.*got 2.*1, one per prompt"),
    ]
    for changes, error, message in cases:
        with pytest.raises(error, match=message):
            generator.generate(**{"prompts": [[3, 4]], "max_new_tokens": 4} | changes)
    assert len(generator.generate([[3, 4]], max_new_tokens=4)[0].tokens) == 4


def generating_leaves_the_random_state_alone(generator: Generator, model: HybridLM) -> None:
    before = torch.get_rng_state()
    generator.generate(PROMPTS, max_new_tokens=5, temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())


CONTRACT: list[Check] = [
    one_completion_per_prompt_in_order,
    prompt_seed_and_weights_decide,
    any_integer_is_a_seed,
    a_stop_id_ends_and_is_kept,
    no_other_id_ends_a_request,
    logprobs_are_of_what_was_drawn_from,
    frequencies_are_the_distribution,
    new_weights_are_used_and_named,
    the_learner_goes_on_without_the_generator,
    weights_that_do_not_fit_change_nothing,
    bad_input_is_one_error_before_any_work,
    generating_leaves_the_random_state_alone,
]
