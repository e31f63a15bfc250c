"""What must agree: 1 x 8 micro-batches and 8 x 1, and documents packed together or apart."""

import pytest
import torch

from micro import joined, micro_batches, micro_engine, objective, step, weights


def gradients(batches):
    engine = micro_engine(clip=0.0)
    metrics = engine.forward_backward(batches, objective())
    return metrics, {name: grad.clone() for name, grad in engine.master.gradients().items()}


def worst(one, other):
    """Largest difference of any tensor, relative to that tensor's largest entry."""
    return max(float((one[n] - other[n]).abs().max() / (one[n].abs().max() + 1e-12)) for n in one)


def test_one_pass_of_eight_equals_eight_passes_of_one():
    batches = micro_batches(8)
    together, apart = gradients([joined(batches)]), gradients(batches)
    for name, value in together[0].items():
        assert apart[0][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
    assert together[1].keys() == apart[1].keys()
    assert all(torch.isfinite(g).all() for g in apart[1].values())
    norm = torch.stack([g.norm() for g in together[1].values()]).norm()
    difference = torch.stack([(together[1][n] - apart[1][n]).norm() for n in apart[1]]).norm()
    assert float(difference / norm) < 1e-6


def test_weights_agree_after_a_step():
    batches = micro_batches(8)
    one, other = micro_engine(lr=2.5e-4), micro_engine(lr=2.5e-4)  # report 2.4
    step(one, [joined(batches)])
    step(other, batches)
    assert torch.equal(one.counts_LE, other.counts_LE)
    for name, tensor in weights(one.model).items():
        torch.testing.assert_close(weights(other.model)[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_uneven_micro_batches_weigh_by_tokens():
    """A mean of means would not agree: the micro-batches have different numbers of labels."""
    batches = micro_batches(3)
    assert len({float(b.weight_T.sum()) for b in batches}) > 1
    together, apart = gradients([joined(batches)]), gradients(batches)
    assert apart[0]["loss"] == pytest.approx(together[0]["loss"], rel=1e-6)
    assert apart[0]["mtp_2/loss"] == pytest.approx(together[0]["mtp_2/loss"], rel=1e-6)


def test_packed_equals_separate():
    engine, batches = micro_engine(), micro_batches(4)
    packed = engine.evaluate([joined(batches)], objective())
    assert engine.evaluate(batches, objective()) == pytest.approx(packed, rel=1e-6)
    single = [engine.model(b.tokens_T, b.cu_seqlens).hidden_TD.detach() for b in batches]
    both = joined(batches)
    hidden_TD = engine.model(both.tokens_T, both.cu_seqlens).hidden_TD.detach()
    torch.testing.assert_close(hidden_TD, torch.cat(single), rtol=1e-5, atol=1e-5)
