import pytest
import torch

from nemotron_ultra.ops.attention import _layout, causal_attention
from nemotron_ultra.ops.segments import Segments


def segments_of(*lengths: int) -> Segments:
    return Segments(sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int())


def plain(q, k, v):
    """One document, every step written out."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("shp,thp->hst", q, k) * q.shape[2] ** -0.5
    future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu(1)
    return torch.einsum("hst,thp->shp", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def qkv(tokens: int, heads: int = 4, groups: int = 2):
    g = torch.Generator().manual_seed(3)
    shapes = [(tokens, heads, 8), (tokens, groups, 8), (tokens, groups, 8)]
    return [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(7,), (5, 5, 5), (1, 9, 4), (1, 1, 20, 3, 18, 2)], ids=str)
def test_equals_documents_one_by_one(lengths, groups):
    inputs = qkv(sum(lengths), groups=groups)
    grad = torch.randn_like(inputs[0])
    y = causal_attention(*inputs, segments_of(*lengths))
    mine = torch.autograd.grad(y, inputs, grad)
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    expected = torch.cat([plain(*part) for part in parts])
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
    for a, b in zip(mine, torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_no_document_sees_another():
    q, k, v = qkv(12)
    grads = torch.autograd.grad(causal_attention(q, k, v, segments_of(5, 4, 3))[5:9].sum(), [q, k, v])
    for grad in grads:
        assert grad[:5].abs().max() == 0 and grad[9:].abs().max() == 0


def test_layout_wastes_little_and_finds_every_token():
    lengths = tuple(torch.randint(1, 200, (60,), generator=torch.Generator().manual_seed(0)).tolist())
    rectangles, back_T = _layout(lengths, "cpu")
    places = torch.cat([r.flatten() for r in rectangles])
    assert torch.equal(places[back_T], torch.arange(sum(lengths)))
    assert places.numel() < 1.25 * sum(lengths)
