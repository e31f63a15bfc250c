import pytest
import torch
import torch.nn.functional as F

from nemotron_ultra.ops import cross_entropy
from nemotron_ultra.ops.cross_entropy import linear_cross_entropy
from nemotron_ultra.ops.logprob import token_logprob


@pytest.fixture(params=[1, 3, 100], ids=["row", "chunks", "whole"])
def rows(request, monkeypatch):
    """Tokens per chunk, for a vocabulary of 11."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * 11 * request.param)


def case(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=g, dtype=dtype, requires_grad=True)
    head = torch.randn(11, 5, generator=g, dtype=dtype, requires_grad=True)
    labels = torch.randint(11, (7,), generator=g)
    return hidden, head, labels, torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 1.0, 1.0], dtype=dtype)


def test_loss_and_gradients_equal_the_plain_formula(rows):
    hidden, head, labels, weight = case()
    loss, nll, correct = linear_cross_entropy(hidden, head, labels, weight)
    logits = hidden @ head.T
    expected_nll = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(nll, expected_nll)
    assert torch.equal(correct, logits.argmax(-1) == labels)
    expected = (expected_nll * weight).sum()
    torch.testing.assert_close(loss, expected)
    mine = torch.autograd.grad(3 * loss, [hidden, head])
    for a, b in zip(mine, torch.autograd.grad(3 * expected, [hidden, head]), strict=True):
        torch.testing.assert_close(a, b)


def test_no_gradient_is_made_without_grad(rows):
    hidden, head, labels, weight = case()
    with torch.no_grad():
        loss, _, _ = linear_cross_entropy(hidden, head, labels, weight)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, head, labels, weight)[0].detach())


def test_extreme_logits_stay_finite(rows):
    hidden, head, labels, weight = case(torch.float32)
    loss, nll, _ = linear_cross_entropy(hidden * 1e3, head, labels, weight)
    expected = F.cross_entropy(hidden * 1e3 @ head.T, labels, reduction="none")
    torch.testing.assert_close(nll, expected.detach(), rtol=1e-5, atol=1e-3)
    assert torch.isfinite(torch.autograd.grad(loss, hidden)[0]).all()


def test_nan_input_gives_nan_loss():
    hidden, head, labels, weight = case()
    assert linear_cross_entropy(hidden * torch.nan, head, labels, weight)[0].isnan()


def test_bf16_head_on_float32_hidden():
    hidden, head, labels, weight = case(torch.float32)
    stored = head.detach().bfloat16().requires_grad_()
    loss, _, _ = linear_cross_entropy(hidden, stored, labels, weight)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, stored.float(), labels, weight)[0])
    loss.backward()
    assert stored.grad.dtype == torch.bfloat16


def test_token_logprob_equals_log_softmax(rows):
    hidden, head, labels, weight = case()
    mine = token_logprob(hidden, head, labels)
    expected = (hidden @ head.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(mine, expected)
    pairs = zip(*(torch.autograd.grad(x, [hidden, head], weight) for x in (mine, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)
