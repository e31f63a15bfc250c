"""Which function computes each operation, and why: one row per (operation, backend), chosen when the model is
built.

Only backends that are in this package stand here. `passed_over` says what else was measured and lost; figures
are float32 on two Zen 3 threads (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemotron_ultra.ops import decode_kernels
from nemotron_ultra.ops.attention import causal_attention
from nemotron_ultra.ops.cross_entropy import linear_cross_entropy
from nemotron_ultra.ops.experts import routed_experts
from nemotron_ultra.ops.mamba_interior import mamba_interior
from nemotron_ultra.ops.step import ssd_step


@dataclass(frozen=True)
class Backend:
    """One row. letters: the pattern letters that need the operation; "" means every model does."""

    op: str
    name: str
    function: Callable[..., Any]
    letters: str
    why: str
    passed_over: str

    @property
    def module(self) -> str:
        return self.function.__module__

    def line(self) -> str:
        return f"{self.op}: {self.name} ({self.module}): {self.why}; passed over: {self.passed_over}"


TABLE = (
    Backend(
        op="mamba",
        name="slabs",
        function=mamba_interior,
        letters="M",
        why="convolution, scan and gated norm as one function, slab by slab, backward by hand",
        passed_over="the three as functions of their own (same result, more memory)",
    ),
    Backend(
        op="attention",
        name="sdpa",
        function=causal_attention,
        letters="*",
        why="torch's flash kernel on rectangles of similar document length",
        passed_over="query blocks as batched products (13 % less a layer at 4 x 512, 1 % of a step)",
    ),
    Backend(
        op="experts",
        name="sorted",
        function=routed_experts,
        letters="E",
        why="rows sorted by expert, one product per expert and thread, backward by hand",
        passed_over="torch._grouped_mm (38 against 50 GFLOP per CPU-second at 256 rows an expert)",
    ),
    Backend(
        op="cross_entropy",
        name="chunked",
        function=linear_cross_entropy,
        letters="",
        why="head in chunks of tokens, gradient made in the forward",
        passed_over="logits of all tokens (holds [T, V] three times)",
    ),
    Backend(
        op="decode",
        name="compiled" if decode_kernels.compiler() else "torch",
        function=decode_kernels.run_layers if decode_kernels.compiler() else ssd_step,
        letters="",
        why=(
            "consecutive float32 layers on a CPU in one call, weights read once; other layers by torch"
            if decode_kernels.compiler()
            else "no C compiler (CC, cc, gcc, clang) on this machine"
        ),
        passed_over="one function of torch an operation (2 to 4 x the time of a step)",
    ),
)


def choose(op: str) -> Backend:
    """The row of an operation. KeyError for a name that is not in the table."""
    return {row.op: row for row in TABLE}[op]


def rows(pattern: str) -> list[Backend]:
    """Rows that a model of this layer pattern uses, in the order of the table."""
    return [row for row in TABLE if not row.letters or set(row.letters) & set(pattern)]
