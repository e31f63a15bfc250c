"""FP32 masters and FP32 gradients beside weights of any dtype (report 2.7).

A weight kept in bf16 gets an FP32 master and an FP32 gradient buffer; each micro-batch's gradient is added
to the buffer as soon as autograd has it. An fp32 weight is its own master and `.grad` is its buffer. The
report's first divergence came from BF16 accumulation, which loses the 0.05-scaled MTP part of the shared
head's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Newer versions of torch let a leaf ask for gradients in FP32, so that the uses of a shared weight inside one
# micro-batch are added in FP32 too; older ones add those in the weight's dtype and micro-batches in FP32.
_GRAD_DTYPE = "grad_dtype" in dir(torch.Tensor)


class MasterWeights:
    """The FP32 side of a model's trainable parameters, by name.

    `masters[name]` is an FP32 parameter whose `.grad` is the FP32 gradient summed since `clear()`.
    format_of: "fp32" or "bf16" for a parameter's name: the buffer that its micro-batches are added up in;
    bf16 shows the report's failure. own_operands: names of weights that their products convert by themselves.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        format_of: Callable[[str], str] | None = None,
        own_operands: Collection[str] = (),
    ):
        self.weights = {name: p for name, p in parameters if p.requires_grad}
        self.masters = {name: self._master(p) for name, p in self.weights.items()}
        self.lowered = {name for name in self.weights if format_of and format_of(name) == "bf16"}
        self.buffers: dict[str, Tensor] = {}
        self._own_operands = frozenset(own_operands) if _GRAD_DTYPE else frozenset()
        moved = {name: self._mover(master) for name, master in self.separate.items()}
        moved |= {name: self._lowering_mover(name) for name in self.lowered}
        self._handles = [
            self.weights[name].register_post_accumulate_grad_hook(move) for name, move in moved.items()
        ]

    @property
    def separate(self) -> dict[str, Tensor]:
        """Masters that are not the weights themselves."""
        return {name: m for name, m in self.masters.items() if m is not self.weights[name]}

    @staticmethod
    def _master(weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype == torch.float32:
            return weight
        if _GRAD_DTYPE:
            weight.grad_dtype = torch.float32
        return nn.Parameter(weight.detach().float())

    @staticmethod
    def _mover(master: nn.Parameter) -> Callable[[Tensor], None]:
        def move(weight: Tensor) -> None:
            grad = weight.grad.float()
            weight.grad = None
            master.grad = grad if master.grad is None else master.grad.add_(grad)

        return move

    def _lowering_mover(self, name: str) -> Callable[[Tensor], None]:
        """Adds into a bf16 buffer, one rounding an add."""

        def move(weight: Tensor) -> None:
            grad = weight.grad
            weight.grad = None
            self.buffers[name] = (
                self.buffers[name].add_(grad) if name in self.buffers else grad.to(torch.bfloat16)
            )

        return move

    @contextmanager
    def computing(self) -> Iterator[None]:
        """On a CPU 16-bit weights are float32 inside: cast once for all micro-batches, gradients unrounded.

        Products cast their weight to float32 there anyway and keep the copy for the backward. A GPU computes
        in the stored dtype, and so does a product with operands of its own.
        """
        names = [name for name in self.separate if name not in self._own_operands]
        cast = {name: self.weights[name] for name in names if self.weights[name].device.type == "cpu"}
        stored = {name: weight.data for name, weight in cast.items()}
        try:
            for weight in cast.values():
                weight.data = weight.data.float()
            yield
        finally:
            for name, weight in cast.items():
                weight.data = stored[name]

    def gradients(self) -> dict[str, Tensor]:
        """FP32 gradients of the parameters that took part."""
        for name, buffer in self.buffers.items():
            self.masters[name].grad = buffer.float()
        self.buffers = {}
        for name, fused in self._take_main_grads():
            master = self.masters[name]
            master.grad = fused if master.grad is None else master.grad.add_(fused)
        return {name: m.grad for name, m in self.masters.items() if m.grad is not None}

    def _take_main_grads(self) -> list[tuple[str, Tensor]]:
        """FP32 sums that products added up in `weight.main_grad` by themselves (ops/with_te.py)."""
        held = [(name, getattr(weight, "main_grad", None)) for name, weight in self.weights.items()]
        for name, fused in held:
            if fused is not None:
                self.weights[name].main_grad = None
        return [(name, fused) for name, fused in held if fused is not None]

    def clear(self) -> None:
        self.buffers = {}
        self._take_main_grads()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights that the model computes with."""
        for name, master in self.separate.items():
            self.weights[name].copy_(master)


def global_norm(grads: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all gradients, fp32 scalar."""
    norms = torch._foreach_norm(list(grads))
    return (
        torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        if norms
        else torch.zeros(())
    )


def first_non_finite(tensors: dict[str, Tensor]) -> str | None:
    """Name of the first tensor that holds a NaN or an infinity."""
    return next((name for name, t in tensors.items() if not bool(torch.isfinite(t).all())), None)
