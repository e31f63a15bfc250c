"""The scan against its recurrence, token by token, and where documents, chunks and decays meet."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nemotron_ultra.ops.ssd import ssd_scan

NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias")


def draw(length: int, heads: int = 4, groups: int = 2, width: int = 3, state: int = 5, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(1, length, heads, width),
        "dt": normal(1, length, heads),
        "A": -normal(heads).exp(),
        "B": normal(1, length, groups, state),
        "C": normal(1, length, groups, state),
        "D": normal(heads),
        "dt_bias": normal(heads),
    }


def recurrence(case: dict, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = exp(dt A) S_{t-1} + dt x B^T, y_t = S_t C + D x."""
    dt = torch.nn.functional.softplus(case["dt"] + case["dt_bias"])
    share = case["x"].shape[2] // case["B"].shape[2]
    B, C = (case[k].repeat_interleave(share, 2) for k in "BC")
    state = case["x"].new_zeros(1, *case["x"].shape[2:], B.shape[-1]) if state is None else state
    outputs = []
    for t in range(case["x"].shape[1]):
        x, step = case["x"][:, t], dt[:, t, :, None, None]
        state = (step * case["A"][:, None, None]).exp() * state + step * x[..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1) + case["D"][:, None] * x)
    return torch.stack(outputs, 1), state


def scan(case: dict, **options):
    return ssd_scan(*[case[name] for name in NAMES], **options)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1), (3, 3)])
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 128), (2, 2), (37, 8), (64, 64), (65, 64), (150, 128), (9, 1)]
)
def test_equals_the_recurrence(length, chunk, heads, groups):
    case = draw(length, heads, groups)
    for got, want in zip(scan(case, chunk_size=chunk), recurrence(case), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bounds", [[0, 5, 6, 20], [0, 1, 2, 3, 4], [0, 8, 16, 24], [0, 70, 71, 135]])
def test_gradients_of_a_pack_are_those_of_its_documents(bounds):
    case = draw(bounds[-1])
    states = torch.randn(len(bounds) - 1, 4, 3, 5, dtype=torch.float64)
    weight_y, weight_s = torch.randn_like(case["x"]), torch.randn_like(states)
    leaves = {k: v.clone().requires_grad_() for k, v in case.items()}
    initial = states.clone().requires_grad_()
    y, final = scan(leaves, initial_state_BHPN=initial, cu_seqlens=torch.tensor(bounds), chunk_size=16)
    ((y * weight_y).sum() + (final * weight_s).sum()).backward()
    want = {k: v.clone().requires_grad_() for k, v in case.items()}
    want_initial = states.clone().requires_grad_()
    for doc, (first, last) in enumerate(pairwise(bounds)):
        cut = {k: v[:, first:last] if k in ("x", "dt", "B", "C") else v for k, v in want.items()}
        y, final = recurrence(cut, want_initial[doc : doc + 1])
        ((y * weight_y[:, first:last]).sum() + (final * weight_s[doc]).sum()).backward()
    for name in NAMES:
        torch.testing.assert_close(leaves[name].grad, want[name].grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(initial.grad, want_initial.grad, rtol=1e-10, atol=1e-10)


def test_two_calls_with_the_state_between_equal_one():
    case = draw(40)
    whole, _ = scan(case)
    state, parts = None, []
    for cut in (slice(0, 13), slice(13, 40)):
        part = {k: v[:, cut] if k in ("x", "dt", "B", "C") else v for k, v in case.items()}
        y, state = scan(part, initial_state_BHPN=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [50.0, 1e4])
def test_strong_decays_stay_finite(scale, dtype):
    case = {k: v.to(dtype) for k, v in draw(130).items()}
    case["A"] = case["A"] * scale
    leaves = {k: v.clone().requires_grad_() for k, v in case.items()}
    y, final = scan(leaves)
    (y.sum() + final.sum()).backward()
    assert y.isfinite().all() and final.isfinite().all()
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())
    want, _ = recurrence({k: v.double() for k, v in case.items()})
    assert (y - want).abs().max() < 5e-6 * want.abs().max()


def test_steps_that_underflow_to_zero_have_finite_gradients():
    leaves = {k: v.float().requires_grad_() for k, v in draw(20).items()}
    y, _ = ssd_scan(*[leaves[n] if n != "dt" else leaves[n] - 400 for n in NAMES])
    y.sum().backward()
    torch.testing.assert_close(y, leaves["D"][:, None] * leaves["x"])
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())


def test_limits_stop_the_gradient_of_dt():
    case = draw(12)
    case["dt"].requires_grad_()
    y, _ = scan(case, dt_limit=(0.5, 0.5001))
    y.sum().backward()
    raw = torch.nn.functional.softplus(case["dt"] + case["dt_bias"])
    outside = (raw < 0.5) | (raw > 0.5001)
    assert (case["dt"].grad[outside] == 0).all()


def test_nothing_leaks_between_documents():
    case = {k: v.float() for k, v in draw(30).items()}
    leaves = {k: v.clone().requires_grad_() for k, v in case.items()}
    y, _ = scan(leaves, cu_seqlens=torch.tensor([0, 11, 30]))
    y[:, 11:].sum().backward()
    for name in ("x", "dt", "B", "C"):
        assert (leaves[name].grad[:, :11] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_float32_gradients_keep_their_digits(seed):
    case = draw(200, heads=2, groups=1, width=8, state=8, seed=seed)
    grads = []
    for dtype in (torch.float64, torch.float32):
        leaves = {k: v.to(dtype, copy=True).requires_grad_() for k, v in case.items()}
        y, final = scan(leaves)
        (y.square().sum() + final.sum()).backward()
        grads.append({k: v.grad.double() for k, v in leaves.items()})
    for name in NAMES:
        want, got = (g[name] for g in grads)
        assert (got - want).abs().max() < 5e-6 * want.abs().max(), name


def test_half_precision_input_is_computed_in_float32():
    case = {k: v.bfloat16() for k, v in draw(20).items()}
    y, state = scan(case)
    want, _ = recurrence({k: v.double() for k, v in case.items()})
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=0.01, atol=0.01)


def test_gradients_may_be_taken_twice_from_one_graph():
    leaves = {k: v.requires_grad_() for k, v in draw(20).items()}
    y, _ = scan(leaves)
    first = torch.autograd.grad(y.sum(), leaves["dt"], retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), leaves["dt"])[0])


def test_weak_decays_after_a_strong_one_are_exact_in_float32():
    case = draw(64)
    case["dt"] = torch.where(torch.arange(64)[:, None] % 2 == 0, 40.0, -9.0) - case["dt_bias"]
    case["dt"], case["A"] = case["dt"][None], -torch.ones(4, dtype=torch.float64)
    single = {name: value.float() for name, value in case.items()}
    exact = recurrence({name: value.double() for name, value in single.items()})
    for got, want in zip(scan(single), exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 * want.abs().max().item())
