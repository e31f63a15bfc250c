"""The mean of the loss inside each conversation: weights, the step it begins at, the stream of tasks."""

import pytest
import torch

from nemotron_ultra.config.trainer import TrainerConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.loss_mean import LossMean, mean_inside_conversations


def batch_of(*weights):
    lengths = [len(row) for row in weights]
    flat = [float(w) for row in weights for w in row]
    tokens_T = torch.arange(len(flat))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return TokenBatch(tokens_T=tokens_T, labels_T=tokens_T, weight_T=torch.tensor(flat), cu_seqlens=bounds)


def test_weights_of_each_conversation_sum_to_one():
    found = mean_inside_conversations(batch_of([0, 1, 1, 0], [0, 0], [1, 1, 1, 0, 1], [1]))
    assert found.weight_T.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0.25, 0.25, 0.25, 0, 0.25, 1]
    assert found.weight_T.dtype == torch.float32


def test_weights_that_are_none_stay_none():
    batch = batch_of([0, 0, 0])
    assert mean_inside_conversations(batch).weight_T.tolist() == [0, 0, 0]


def test_tokens_first_then_conversations():
    mean, batch = LossMean(over="conversations", after=2), batch_of([0, 1, 1, 1, 1])
    assert [float(mean([batch], step)[0].weight_T.sum()) for step in range(4)] == [4, 4, 1, 1]
    assert LossMean()([batch], 9) == [batch]


def test_as_the_trainer_says():
    base = dict(name="sft", steps=9, global_batch_size=1, micro_batch_size=1)
    assert LossMean.of(TrainerConfig(**base)) == LossMean()
    both = TrainerConfig(**base, loss_mean="conversations", loss_mean_after=4)
    assert LossMean.of(both) == LossMean(over="conversations", after=4)


@pytest.mark.parametrize("lengths", [(3, 1, 5), (1, 1, 1), (40,)])
def test_any_weights_keep_their_proportions(lengths):
    draw = torch.Generator().manual_seed(sum(lengths))
    batch = batch_of(*[torch.rand(n, generator=draw).tolist() for n in lengths])
    found = mean_inside_conversations(batch)
    for before, after in zip(batch.weight_T.split(lengths), found.weight_T.split(lengths), strict=True):
        torch.testing.assert_close(after, before / before.sum())
