"""Tokens are drawn from the model's distribution, with drafts and without: chi-square over three tokens."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from drafting import agreeing_model
from nemotron_ultra.generation import Drafting, Request, Sampler
from nemotron_ultra.generation.draw import uniforms
from nemotron_ultra.generation.sampling import RowOptions, heated
from nemotron_ultra.generation.verify import by_rejection, draft_token, repeated
from nemotron_ultra.model.hybrid import HybridLM

IDS, PROMPT, SAMPLES = 6, (2, 5, 1), 3000
WAYS = {"none": 0, "match": Drafting(tokens=2), "rejection": Drafting(tokens=2, sampled=True)}


def model() -> HybridLM:
    return agreeing_model(torch.float32, sharp=0.5, vocab_size=IDS)


@torch.no_grad()
def exact(net: HybridLM, temperature: float) -> np.ndarray:
    """Probability of each of the IDS^3 answers, by full forwards."""
    table = np.ones((IDS,) * 3)
    for answer in product(range(IDS), repeat=2):
        logits_TV = net(torch.tensor([*PROMPT, *answer]), mtp_depths=0).logits_TV[-3:]
        first, second, third = (logits_TV.double() / temperature).softmax(-1).numpy()
        table[answer] = first[answer[0]] * second[answer[1]] * third
    return table.ravel()


def excess(counts: np.ndarray, chances: np.ndarray) -> float:
    """(chi-square - degrees) / sqrt(2 degrees), near a standard normal number; rare answers are one cell."""
    expected = chances * counts.sum()
    often = expected >= 5
    expected = np.append(expected[often], expected[~often].sum() + 1e-12)
    counts = np.append(counts[often], counts[~often].sum())
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5


def drawn(net: HybridLM, temperature: float, drafts: int | Drafting) -> tuple[np.ndarray, Sampler]:
    sampler = Sampler(net, draft_tokens=drafts)
    completions = sampler.generate([PROMPT] * SAMPLES, max_new_tokens=3, temperature=temperature)
    numbers = [np.ravel_multi_index(tuple(c.tokens), (IDS,) * 3) for c in completions]
    return np.bincount(numbers, minlength=IDS**3), sampler


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("way", WAYS)
def test_answers_have_the_model_s_distribution(way, temperature):
    """3,000 seeded answers; beside them, the distribution of a temperature that is 40 % off does not fit."""
    net = model()
    counts, sampler = drawn(net, temperature, WAYS[way])
    assert excess(counts, exact(net, temperature)) < 3.5
    assert excess(counts, exact(net, temperature * 1.4)) > 6
    if way != "none":
        assert 0.2 < sampler.stats["acceptance_rate"] < 0.98


@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.7, "min_p": 0.05}])
def test_rejection_gives_p_for_any_q(cuts):
    """One place, 20,000 rows: drafts of a q that has little to do with p, cut as p is."""
    rows, random = 20_000, torch.Generator().manual_seed(3)
    target_BV, draft_BV = (torch.randn(1, 7, generator=random).mul(1.5).expand(rows, -1) for _ in range(2))
    options = RowOptions.of([Request(prompt=(1,), max_new_tokens=1, temperature=0.9, **cuts)] * rows, "cpu")
    numbers_BN = uniforms([11], 4 * rows)[0].view(rows, 4)
    draft_B, q_BV = draft_token(draft_BV, options, numbers_BN[:, 0])
    verdict = by_rejection(
        torch.stack([target_BV] * 2, 1),
        draft_B[:, None],
        q_BV[:, None],
        7,
        repeated(options, 2),
        (numbers_BN[:, 1:2], numbers_BN[:, 2:]),
    )
    p_V = heated(target_BV, options)[0].double().softmax(-1).numpy()
    counts = np.bincount(verdict.token_BK[:, 0].numpy(), minlength=7)
    assert excess(counts, p_V) < 3 and not counts[p_V == 0].any()
    shared = np.minimum(p_V, q_BV[0].numpy()).sum()
    assert verdict.accepted_B.double().mean() == pytest.approx(shared, abs=0.01)
    torch.testing.assert_close(
        verdict.logprob_BK[:, 0].exp(), torch.from_numpy(p_V)[verdict.token_BK[:, 0]], atol=1e-6, rtol=0
    )
