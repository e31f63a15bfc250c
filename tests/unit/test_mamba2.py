"""The mixer's fused interior against convolution, scan and gated norm called one by one; packs and slabs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.mamba2 import Mamba2Mixer
from nemotron_ultra.ops.conv import causal_conv_silu
from nemotron_ultra.ops.mamba_interior import document_shares
from nemotron_ultra.ops.norm import gated_rms_norm
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.ssd import ssd_scan


def mixer(dtype=torch.float64, **changes) -> Mamba2Mixer:
    sizes = {
        "hidden_size": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 3,
        "ssm_state_size": 5,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
    }
    block = Mamba2Mixer(ModelConfig(pattern="M", vocab_size=1, **(sizes | changes)))
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.5
    return block


def by_parts(block: Mamba2Mixer, u_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    s = block.sizes
    z, xbc, dt = block.in_proj(u_TD).split([s.inner, s.channels, s.heads], -1)
    xbc = causal_conv_silu(xbc, block.conv1d.weight[:, 0], block.conv1d.bias, segments)
    x, B, C = xbc.split([s.inner, s.groups * s.state, s.groups * s.state], -1)
    y, _ = ssd_scan(
        x.view(1, -1, s.heads, s.head_dim),
        dt[None],
        -block.A_log.exp(),
        B.reshape(1, -1, s.groups, s.state),
        C.reshape(1, -1, s.groups, s.state),
        block.D,
        block.dt_bias,
        s.dt_limit,
        cu_seqlens=segments.cu_seqlens,
    )
    return block.out_proj(gated_rms_norm(y[0].flatten(-2), z, block.norm.weight, s.eps, s.groups))


def pack(bounds: list[int]) -> Segments:
    return Segments(bounds[-1], torch.tensor(bounds, dtype=torch.int32))


PACKS = [[0, 1], [0, 3], [0, 29], [0, 8, 16, 32], [0, 1, 2, 3, 4, 9], [0, 7, 26, 27, 35], [0, 5, 100, 131]]
VARIANTS = [
    {},
    {"n_groups": 1, "conv_kernel": 2, "use_conv_bias": False},
    {"n_groups": 4, "use_bias": True, "time_step_limit": (0.3, 0.9)},
    {"chunk_size": 128, "conv_kernel": 3},
]


@pytest.mark.parametrize("bounds", PACKS, ids=str)
@pytest.mark.parametrize("changes", VARIANTS, ids=["plain", "one_group", "limits", "one_chunk"])
def test_interior_equals_its_parts(bounds, changes, monkeypatch):
    monkeypatch.setattr("nemotron_ultra.ops.ssd_chunks.SLAB_ELEMENTS", 600)  # two chunks of eight tokens
    block, segments = mixer(**changes), pack(bounds)
    u = torch.randn(bounds[-1], 6, dtype=torch.float64, requires_grad=True)
    inputs = [u, *block.parameters()]
    got, want = block(u, segments), by_parts(block, u, segments)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight = torch.randn_like(got)
    for mine, theirs in zip(*(torch.autograd.grad(o, inputs, weight) for o in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("changes", VARIANTS, ids=["plain", "one_group", "limits", "one_chunk"])
def test_documents_walked_by_three_threads(changes, three_threads):
    bounds = [0, 13, 20, 61, 70, 99]
    assert len(document_shares(tuple(bounds), 3)) == 3
    block, segments = mixer(**changes), pack(bounds)
    u = torch.randn(99, 6, dtype=torch.float64, requires_grad=True)
    inputs = [u, *block.parameters()]
    got, want = block(u, segments), by_parts(block, u, segments)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    grads, again = (torch.autograd.grad(block(u, segments).square().sum(), inputs) for _ in range(2))
    for first, second, whole in zip(
        grads, again, torch.autograd.grad(want.square().sum(), inputs), strict=True
    ):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, whole, rtol=1e-9, atol=1e-9)


def test_shares_are_whole_documents_of_about_equal_tokens():
    cut = [(s.rows.start, s.rows.stop, s.bounds) for s in document_shares((0, 10, 45, 50, 90, 100), 2)]
    assert cut == [(0, 50, (0, 10, 45, 50)), (50, 100, (0, 40, 50))]
    for bounds, count in [((0, 100), 2), ((0, 70, 100), 2), ((0, 50, 100), 1), ((0, 1), 8)]:
        (whole,) = document_shares(bounds, count)
        assert whole == (slice(0, bounds[-1]), bounds)


def test_inference_by_three_threads(three_threads):
    block, u = mixer(), torch.randn(40, 6, dtype=torch.float64)
    segments = pack([0, 13, 26, 40])
    with torch.inference_mode():
        first = block(u, segments)
    torch.testing.assert_close(block(u, segments), first.clone())


def test_a_pack_equals_its_documents_in_float32():
    block, bounds = mixer(torch.float32, chunk_size=128), [0, 1, 3, 90, 200]
    u = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    packed = block(u, pack(bounds))
    for first, last in pairwise(bounds):
        alone = block(u[first:last], Segments(last - first))
        assert (packed[first:last] - alone).abs().max() <= 5e-6 * packed.abs().max()


def test_gradients_do_not_cross_documents():
    block = mixer(torch.float32)
    u = torch.randn(30, 6, requires_grad=True)
    out = block(u, pack([0, 11, 30]))
    early = torch.autograd.grad(out[:11].sum(), u, retain_graph=True)[0]
    late = torch.autograd.grad(out[11:].sum(), u)[0]
    assert (early[11:] == 0).all() and (late[:11] == 0).all()


def test_weights_stored_in_bf16_are_computed_in_float32():
    block = mixer(torch.bfloat16)
    wide = mixer(torch.bfloat16).float()
    u = torch.randn(20, 6)
    assert torch.equal(block(u, Segments(20)), wide(u, Segments(20)))


def test_inference_then_training_share_scratch():
    block, u = mixer(), torch.randn(40, 6, dtype=torch.float64)
    with torch.inference_mode():
        first = block(u, Segments(40))
    out = block(u, Segments(40))
    out.sum().backward()
    torch.testing.assert_close(out, first.clone())


def test_checkpointing_gives_the_same_gradients():
    block = mixer()
    u = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    twice = checkpoint(lambda v: block(block(v, Segments(40)), Segments(40)), u, use_reentrant=True)
    twice.sum().backward()
    got = u.grad
    want = torch.autograd.grad(block(block(u, Segments(40)), Segments(40)).sum(), u)[0]
    torch.testing.assert_close(got, want)


def test_meta_device_costs_no_memory():
    with torch.device("meta"):
        block = Mamba2Mixer(ModelConfig(pattern="M", vocab_size=1, mamba_num_heads=2, hidden_size=4))
    assert all(p.is_meta for p in block.parameters())
