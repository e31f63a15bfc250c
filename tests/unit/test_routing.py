from itertools import pairwise

import torch

from nemotron_ultra.ops.routing import (
    balance_loss,
    expert_counts,
    routing_weights,
    select_experts,
    updated_bias,
)
from nemotron_ultra.ops.segments import Segments

SCORES = torch.tensor([[0.9, 0.8, 0.1, 0.2], [0.1, 0.3, 0.5, 0.4]])


def chosen(*args) -> list[list[int]]:
    return select_experts(*args).sort(-1).values.tolist()


def test_bias_moves_the_choice_and_not_the_weight():
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0])
    indices = select_experts(SCORES, bias, 1)
    assert indices.tolist() == [[2], [2]]
    assert torch.equal(routing_weights(SCORES, indices, False, 2.0), torch.tensor([[0.2], [1.0]]))


def test_groups_are_ranked_by_their_two_best():
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2]])
    assert chosen(scores, None, 2, 3, 1) == [[2, 3]]
    assert chosen(scores, None, 2, 3, 2) == [[0, 2]] or chosen(scores, None, 2, 3, 2) == [[0, 3]]
    assert chosen(scores, None, 2) in ([[0, 2]], [[0, 3]])


def test_dropped_groups_lose_even_against_negative_scores():
    scores, bias = torch.full((1, 4), 0.1), torch.tensor([-5.0, -5.0, -9.0, -9.0])
    assert chosen(scores, bias, 2, 2, 1) == [[0, 1]]


def test_groups_of_one_expert():
    assert chosen(SCORES, None, 2, 4, 2) == [[0, 1], [2, 3]]


def test_top_1_normalised_is_exactly_the_factor():
    indices = select_experts(SCORES, None, 1)
    assert torch.equal(routing_weights(SCORES, indices, True, 2.5), torch.full((2, 1), 2.5))


def test_weights_sum_to_the_factor():
    weights = routing_weights(SCORES, select_experts(SCORES, None, 3), True, 5.0)
    torch.testing.assert_close(weights.sum(-1), torch.full((2,), 5.0))


def test_counts_and_bias_update():
    counts = expert_counts(torch.tensor([[0, 1], [0, 2]]), 4)
    assert counts.tolist() == [2, 1, 1, 0]
    bias = updated_bias(torch.zeros(4), counts, 1e-3)
    torch.testing.assert_close(bias, torch.tensor([-1e-3, 0.0, 0.0, 1e-3]))
    stacked = updated_bias(torch.zeros(2, 4), torch.stack([counts, counts.flip(0)]))
    assert torch.equal(stacked[0], bias) and torch.equal(stacked[1], bias.flip(0))


def test_balance_loss_is_the_written_formula_per_document():
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(9, 6, generator=g, dtype=torch.float64, requires_grad=True)
    bounds, k, experts = [0, 1, 6, 9], 2, 6
    expected = 0.0
    for a, b in pairwise(bounds):
        p = scores[a:b] / scores[a:b].sum(-1, keepdim=True)
        count = torch.zeros(experts, dtype=torch.float64)
        for row in scores[a:b].detach():
            count[row.topk(k).indices] += 1
        length = b - a
        expected = expected + length * experts / (k * length**2) * (count * p.sum(0)).sum()
    loss = balance_loss(scores, k, Segments(9, torch.tensor(bounds, dtype=torch.int32)))
    torch.testing.assert_close(loss, expected)
    (mine,), (theirs,) = (torch.autograd.grad(x, scores) for x in (loss, expected))
    torch.testing.assert_close(mine, theirs)


def test_even_routing_gives_one_per_token():
    scores = torch.eye(4, dtype=torch.float64).repeat(3, 1) * 1e-9 + 0.5
    loss = balance_loss(scores, 1, Segments(12))
    torch.testing.assert_close(loss, torch.tensor(12.0, dtype=torch.float64))
