"""Cut and heated distributions: what stays, in which order, and that draws follow them."""

from __future__ import annotations

import pytest
import torch

from nemotron_ultra.generation.base import Request
from nemotron_ultra.generation.draw import Uniforms, uniforms
from nemotron_ultra.generation.sampling import RowOptions, heated, next_tokens

LOGITS_V = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64).log()


def options(*changes: dict) -> RowOptions:
    return RowOptions.of([Request(prompt=(1,), max_new_tokens=1, **c) for c in changes], "cpu")


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.25}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),  # of 0.85 that top_k leaves, 0.7 is more than 80 %
        ({"min_p": 0.29, "top_p": 0.9}, [0, 1, 2]),
        ({"temperature": 0.5, "top_p": 0.7}, [0]),  # squared and normalised the first has 0.77
        ({"temperature": 2.0, "min_p": 0.5}, [0, 1, 2]),
    ],
)
def test_what_stays(changes, kept):
    """Ids in another order than their odds; what stays is divided by its sum."""
    order = torch.tensor([3, 0, 4, 2, 1])
    scaled_V = heated(LOGITS_V[order][None], options(changes))[0]
    expected_V = torch.full((5,), -torch.inf, dtype=torch.float64)
    expected_V[kept] = LOGITS_V[kept] / changes.get("temperature", 1.0)
    assert torch.allclose(scaled_V.softmax(0), expected_V.softmax(0)[order], atol=1e-12)


def test_of_equally_likely_ids_the_first_stay():
    scaled_V = heated(torch.zeros(1, 6), options({"top_k": 2}))[0]
    assert scaled_V.isfinite().nonzero()[:, 0].tolist() == [0, 1]


def test_every_row_has_its_own_cuts():
    changes = [{}, {"top_k": 1}, {"temperature": 0.0, "top_k": 1}, {"top_p": 0.6}, {"min_p": 0.2}]
    together = heated(LOGITS_V.expand(5, -1), options(*changes))
    for row, change in enumerate(changes[:2] + changes[3:]):
        row += row > 1
        assert torch.equal(together[row], heated(LOGITS_V[None], options(change))[0])
    assert torch.equal(together[2], LOGITS_V)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "top_p": 0.95}])
def test_draws_follow_the_distribution(temperature, cuts):
    """Chi-square of 10,000 draws over 24 ids: 23 degrees of freedom exceed 60 once in 25,000 times."""
    logits_V = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 1.5
    row = options({"temperature": temperature} | cuts)
    p_V = heated(logits_V[None].double(), row)[0].softmax(0)
    many = options(*[{"temperature": temperature} | cuts] * 10_000)
    uniform_B = uniforms(range(10_000), 1)[:, 0]
    token_B, logprob_B, model_B = next_tokens(logits_V.expand(10_000, -1), 24, many, uniform_B)
    assert (logprob_B - p_V.log()[token_B]).abs().max() < 1e-5
    assert (model_B - logits_V.log_softmax(0)[token_B]).abs().max() < 1e-5
    found_V, likely_V = torch.bincount(token_B, minlength=24), p_V > 0
    assert found_V[~likely_V].sum() == 0
    expected_V = p_V[likely_V] * 10_000
    assert ((found_V[likely_V] - expected_V).square() / expected_V).sum() < 60


def test_greedy_and_drawn_rows_in_one_batch():
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    mixed = options({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 3})
    uniform_B = uniforms(range(4), 1)[:, 0]
    token_B, logprob_B, model_B = next_tokens(logits_BV, 50, mixed, uniform_B)
    assert token_B[[0, 2]].tolist() == logits_BV[[0, 2]].argmax(-1).tolist()
    assert torch.allclose(logprob_B[[0, 2]], model_B[[0, 2]].double(), atol=1e-6)
    for row, change in ((1, {"temperature": 0.7}), (3, {"top_k": 3})):
        alone = next_tokens(logits_BV[row : row + 1], 50, options(change), uniform_B[row : row + 1])
        assert alone[0].item() == token_B[row] and alone[1].item() == logprob_B[row]


def test_numbers_in_turn_are_those_at_once():
    source = Uniforms(7)
    assert [source.next() for _ in range(150)] == uniforms([7], 150)[0].tolist()
