"""How much of a small gradient survives in a buffer beside a large one: the shared head, MTP (report 2.7).

    each micro-batch adds   s h2,  s h1,  g          s = 0.05: an MTP loss scale of 0.1 over two depths
    kept  = <buffer with MTP - buffer without, M> / |M|^2        M = sum of s (h1 + h2), in FP64
    error = |buffer with MTP - (M + sum of g)| / |M|

An addend below half a unit in the last place of the sum is lost: in BF16 that is 2^-9 to 2^-8 of it. The
buffers are those of the engine, `precision.grads.MasterWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemotron_ultra.precision.grads import MasterWeights

ELEMENTS = 4096
SEED = 4
SIGNAL = 0.1  # share of a noisy gradient that returns in every micro-batch, beside noise of unit size
FORMATS = ("fp32", "bf16")

Draw = Callable[[], tuple[Tensor, Tensor, Tensor]]


def accumulation_rows(
    *, micro_batches: int = 1024, mtp_scale: float = 0.05, elements: int = ELEMENTS, seed: int = SEED
) -> list[dict[str, Any]]:
    """A row for each kind of gradient, buffer format and power of two up to `micro_batches`.

    Keys: gradients ("coherent": the same in every micro-batch; "noisy"), buffer ("fp32", "bf16"), n, kept,
    noop (share of MTP adds that change no bit of an element), mtp_error, total_error (of the whole sum).
    """
    return [
        row | {"gradients": name}
        for name, draw in (("coherent", coherent(elements, seed)), ("noisy", noisy(elements, seed)))
        for row in _rows(draw, micro_batches, mtp_scale, elements)
    ]


def coherent(elements: int, seed: int) -> Draw:
    """The same main and MTP gradients in every micro-batch."""
    g, h1, h2 = torch.randn(3, elements, generator=torch.Generator().manual_seed(seed))
    return lambda: (g, h1, h2)


def noisy(elements: int, seed: int) -> Draw:
    """A tenth of signal in noise of unit size, drawn anew for every micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    signal = SIGNAL * torch.randn(3, elements, generator=generator)

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        g, h1, h2 = signal + torch.randn(3, elements, generator=generator)
        return g, h1, h2

    return draw


class _Buffer:
    """One gradient buffer of the engine, and how many adds left an element of it as it was."""

    def __init__(self, format: str, elements: int):
        self.weight = nn.Parameter(torch.zeros(elements))
        self.master = MasterWeights([("head", self.weight)], format_of=lambda name: format)
        self.unchanged = 0

    @property
    def value(self) -> Tensor:
        held = self.master.buffers.get("head", self.weight.grad)
        return torch.zeros_like(self.weight) if held is None else held.detach()

    def add(self, gradient: Tensor, *, count: bool = False) -> None:
        before = self.value.clone() if count else None
        (self.weight * gradient).sum().backward()
        if before is not None:
            self.unchanged += int((self.value == before).sum())


def _rows(draw: Draw, micro_batches: int, mtp_scale: float, elements: int) -> Iterator[dict[str, Any]]:
    both = {format: _Buffer(format, elements) for format in FORMATS}
    main_only = {format: _Buffer(format, elements) for format in FORMATS}
    exact_main, exact_mtp = torch.zeros(2, elements, dtype=torch.float64)
    for n in range(1, micro_batches + 1):
        g, h1, h2 = draw()
        parts = (mtp_scale * h2, mtp_scale * h1)
        exact_main += g.double()
        exact_mtp += parts[0].double() + parts[1].double()
        for format in FORMATS:
            both[format].add(parts[0], count=True)
            both[format].add(parts[1], count=True)
            both[format].add(g)
            main_only[format].add(g)
        if n & (n - 1) == 0:
            for format in FORMATS:
                yield _row(n, format, both[format], main_only[format], exact_main, exact_mtp)


def _row(
    n: int, format: str, both: _Buffer, main_only: _Buffer, exact_main: Tensor, exact_mtp: Tensor
) -> dict[str, Any]:
    total, exact = both.value.double(), exact_main + exact_mtp
    part = total - main_only.value.double()
    error = (total - exact).norm()
    return {
        "buffer": format,
        "n": n,
        "kept": float(part @ exact_mtp / (exact_mtp @ exact_mtp)),
        "noop": both.unchanged / (2 * n * len(exact)),
        "mtp_error": float(error / exact_mtp.norm()),
        "total_error": float(error / exact.norm()),
    }
