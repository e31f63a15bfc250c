"""score: the log-probability of given tokens, equal to a log-softmax over all logits."""

from __future__ import annotations

import pytest
import torch

from micro import micro_batches, micro_engine, micro_model
from nemotron_ultra.model.score import score


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_equals_log_softmax_of_the_logits(dtype, bound):
    model, (batch,) = micro_model(dtype), micro_batches(1)
    logits_TV = model(batch.tokens_T, batch.cu_seqlens, mtp_depths=0).logits_TV
    expected_T = logits_TV.log_softmax(-1).gather(1, batch.labels_T[:, None])[:, 0]
    found_T = score(model, batch.tokens_T, batch.labels_T, batch.cu_seqlens)
    assert found_T.dtype == dtype and found_T.shape == batch.labels_T.shape
    assert (found_T - expected_T).abs().max() < bound


def test_documents_do_not_see_each_other():
    model, (batch,) = micro_model(torch.float64), micro_batches(1)
    packed_T = score(model, batch.tokens_T, batch.labels_T, batch.cu_seqlens)
    _, middle, end = batch.cu_seqlens.tolist()
    for part in (slice(0, middle), slice(middle, end)):
        alone_T = score(model, batch.tokens_T[part], batch.labels_T[part])
        assert (packed_T[part] - alone_T).abs().max() < 1e-12


def test_makes_no_graph_and_leaves_training_alone():
    model, (batch,) = micro_model().train(), micro_batches(1)
    logprob_T = score(model, batch.tokens_T, batch.labels_T, batch.cu_seqlens)
    assert not logprob_T.requires_grad and model.training
    assert all(p.grad is None for p in model.parameters())


def test_equals_the_engines_anchor_bit_for_bit():
    engine, (batch,) = micro_engine(), micro_batches(1)
    found_T = score(engine.model, batch.tokens_T, batch.labels_T, batch.cu_seqlens)
    assert torch.equal(found_T, engine.logprob(batch))
