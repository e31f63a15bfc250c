"""RMS(x; w) = w x / sqrt(mean(x^2) + eps), and the grouped norm of y silu(z): the norm comes after the gate.

Statistics are float32 at least. Each backward keeps one number a row and group, not the normalised tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.scratch import scratch

SLAB_ELEMENTS = 1 << 17


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, rounded once to the dtype of x. x [..., D], weight [D] -> [..., D]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():  # for a row or two the autograd function is half of the time
        return (rows * _rstd(rows, eps)).mul_(weight).view(x.shape).to(x.dtype)
    return _RMSNorm.apply(rows, weight.to(dtype), eps).view(x.shape).to(x.dtype)


def gated_rms_norm(y_TD: Tensor, z_TD: Tensor, weight_D: Tensor, eps: float, groups: int) -> Tensor:
    """RMSNorm of y silu(z) in `groups` equal parts of the last axis. y, z [..., D], weight [D] -> like y."""
    dtype = torch.promote_types(y_TD.dtype, torch.float32)
    y, z = (t.to(dtype).reshape(-1, t.shape[-1]) for t in (y_TD, z_TD))
    return _GatedRMSNorm.apply(y, z, weight_D.to(dtype), eps, groups).view(y_TD.shape).to(y_TD.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = _rstd(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        product = torch.mul(dy, x, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
        inner = torch.mv(product, weight)[:, None]  # sum over D of dy w x
        d_weight = torch.mv(product.T, rstd.flatten())
        dx = torch.mul(dy, weight, out=product).mul_(rstd)
        return dx.addcmul_(x, inner.mul_(rstd.pow(3)).div_(-x.shape[1])), d_weight, None


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, z, weight, eps, groups):
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        rstd = y.new_empty(len(y), groups)
        for rows in _slabs(y):
            gated_norm_rows(y[rows], z[rows], weight, eps, out[rows], rstd[rows])
        ctx.save_for_backward(y, z, weight, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        y, z, weight, rstd = ctx.saved_tensors
        dy, dz = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for _ in range(2))
        d_weight = torch.zeros_like(weight)
        for rows in _slabs(y):
            back = gated_norm_rows_back(d_out[rows], y[rows], z[rows], weight, rstd[rows], d_weight)
            d_gated, gate, slope = back
            torch.mul(d_gated, gate, out=dy[rows])
            torch.mul(d_gated.mul_(y[rows]), slope, out=dz[rows])
        return dy, dz, d_weight, None, None


def _slabs(y: Tensor) -> list[slice]:
    step = max(1, SLAB_ELEMENTS // y.shape[1])
    return [slice(first, min(first + step, len(y))) for first in range(0, len(y), step)]


def gated_norm_rows(y, z, weight_D, eps: float, out: Tensor, rstd_RG: Tensor) -> None:
    """Rows of the gated norm into `out` [R, D], with 1 / RMS of each group into `rstd_RG`."""
    gate = torch.ops.aten.silu.out(z, out=scratch.take("norm.gate", y.shape, y))
    gated = torch.mul(y, gate, out=gate).unflatten(-1, (rstd_RG.shape[1], -1))
    rstd_RG.copy_(_rstd(gated, eps).squeeze(-1))
    torch.mul(gated, rstd_RG[..., None], out=out.unflatten(-1, (rstd_RG.shape[1], -1)))
    out.mul_(weight_D)


def silu_slope(v: Tensor, sigmoid: Tensor, spare: Tensor) -> Tensor:
    """d silu(v) / dv = s + s v (1 - s), s = sigmoid(v), in the memory of `sigmoid`; `spare` may be v."""
    torch.addcmul(v, v, sigmoid, value=-1, out=spare)
    return sigmoid.addcmul_(sigmoid, spare)


def gated_norm_rows_back(d_out, y, z, weight_D, rstd_RG, d_weight_D) -> tuple[Tensor, Tensor, Tensor]:
    """-> scratch [R, D]: the gradient of y silu(z), silu(z) and its slope. Adds to d_weight_D."""
    groups = rstd_RG.shape[1]
    sigmoid = torch.sigmoid(z, out=scratch.take("norm.sigmoid", y.shape, y))
    gate = torch.mul(z, sigmoid, out=scratch.take("norm.gate", y.shape, y))
    gated = torch.mul(y, gate, out=scratch.take("norm.gated", y.shape, y))
    product = torch.mul(d_out, gated, out=scratch.take("norm.product", y.shape, y))
    by_group = product.unflatten(-1, (groups, -1))
    width, inner = y.shape[1] // groups, torch.empty_like(rstd_RG)  # sum over a group of d_out w v
    for group in range(groups):  # as one batched product with vectors it takes nine times as long
        columns = slice(group * width, (group + 1) * width)
        inner[:, group] = torch.mv(product[:, columns], weight_D[columns])
    d_weight_D += torch.bmm(rstd_RG.T.unsqueeze(1), by_group.transpose(0, 1)).flatten()
    torch.mul(d_out, weight_D, out=product)
    by_group.mul_(rstd_RG[..., None])
    pull = inner.mul_(rstd_RG.pow(3)).div_(-width)
    by_group.addcmul_(gated.unflatten(-1, (groups, -1)), pull[..., None])
    slope = silu_slope(z, sigmoid, gated)
    return product, gate, slope
