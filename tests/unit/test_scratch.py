"""Recycled memory is never shared by two live tensors, is used again, and its idle part is bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from nemotron_ultra.ops import scratch
from nemotron_ultra.ops.linear import linear
from nemotron_ultra.ops.scratch import SMALLEST_BYTES, Scratch, Shelf, recycled

LIKE = torch.zeros(1)
SHAPE = (SMALLEST_BYTES // 4, 1)


def test_memory_is_used_again_only_after_the_last_reference(monkeypatch):
    monkeypatch.setattr(scratch, "shelf", Shelf())
    first = recycled(SHAPE, LIKE)
    view, address = first[3:], first.data_ptr()
    del first
    second = recycled(SHAPE, LIKE)
    assert second.data_ptr() != address and address % 64 == 0
    del view
    assert recycled(SHAPE, LIKE).data_ptr() == address


def test_autograd_keeps_its_saved_memory(monkeypatch):
    monkeypatch.setattr(scratch, "shelf", Shelf())
    value = recycled(SHAPE, LIKE).fill_(3.0).requires_grad_()
    loss = value.square().sum()
    kept = value.detach()
    del value
    assert recycled(SHAPE, LIKE).fill_(0.0).data_ptr() != kept.data_ptr()
    loss.backward()
    assert (kept == 3).all()


def test_idle_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(scratch, "shelf", Shelf())
    monkeypatch.setattr(scratch, "SHELF_BYTES", 2 * SMALLEST_BYTES)
    tensors = [recycled(SHAPE, LIKE) for _ in range(4)]
    del tensors
    assert scratch.shelf.idle == 2 * SMALLEST_BYTES


def test_threads_never_share_a_lease(monkeypatch):
    monkeypatch.setattr(scratch, "shelf", Shelf())

    def lease(number: int) -> bool:
        mine = [recycled(SHAPE, LIKE).fill_(number) for _ in range(3)]
        return all((t == number).all() for t in mine)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lease, range(60)))
    assert scratch.shelf.idle == sum(n * len(blocks) for n, blocks in scratch.shelf.blocks.items())


def test_scratch_grows_and_keeps_types_apart():
    own = Scratch()
    small = own.take("a", (2, 3), LIKE)
    assert own.take("a", (6,), LIKE).data_ptr() == small.data_ptr()
    assert own.take("a", (4, 4), LIKE).shape == (4, 4)
    assert own.take("a", (2,), LIKE.double()).dtype == torch.float64


def test_linear_equals_torch(monkeypatch):
    monkeypatch.setattr("nemotron_ultra.ops.linear.ROWS", 3)
    x, weight = (torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for bias in (None, torch.randn(7, dtype=torch.float64, requires_grad=True)):
        inputs = [t for t in (x, weight, bias) if t is not None]
        got, want = linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(got, want)
        for pair in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)), strict=True):
            torch.testing.assert_close(*pair)
