"""The reference engine: loss over the global batch, FP32 gradients, AdamW on FP32 masters (report 2.4, 2.7).

One step:
    N = counts of the whole global batch            known before the first backward, so losses simply add up
    for each micro-batch: backward(loss(batch) / N)  gradients add up in FP32
    g = g * min(1, clip / |g|);  w = AdamW(w, g, lr(tokens));  router bias += rate * sign(mean load - load)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemotron_ultra.config.optim import OptimConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.engine.adamw import AdamW
from nemotron_ultra.engine.base import Metrics, Objective
from nemotron_ultra.engine.schedule import Schedule
from nemotron_ultra.errors import CheckpointError, NonFiniteError
from nemotron_ultra.model.hybrid import HybridLM, ModelOutput
from nemotron_ultra.model.router import RouterStats
from nemotron_ultra.model.score import score
from nemotron_ultra.ops.routing import updated_bias
from nemotron_ultra.precision.grads import MasterWeights, first_non_finite, global_norm

if TYPE_CHECKING:
    from nemotron_ultra.precision.apply import AppliedPolicy


class TorchEngine:
    """Runs a HybridLM on one device.

    `step` counts optimizer steps, `tokens` consumed tokens. After forward_backward, `counts_LE` holds the
    tokens that each expert got in the global batch (int64 [MoE layers, E], rows named by `router_names`) and
    `residual_norm_L` the RMS of the residual stream after each layer.
    tokens_per_step: by how much a step moves the schedule; None: by the tokens of its batches.
    policy: the precision policy that was put in place on `model`; None: every product is a plain one.
    """

    def __init__(
        self,
        model: HybridLM,
        optim: OptimConfig,
        schedule: Schedule,
        *,
        router_bias_rate: float = 1e-3,
        tokens_per_step: float | None = None,
        policy: AppliedPolicy | None = None,
    ):
        self.model, self.schedule, self.tokens_per_step = model, schedule, tokens_per_step
        self.clip, self.router_bias_rate = optim.clip, router_bias_rate
        self.step, self.tokens = 0, 0.0
        self.counts_LE: Tensor | None = None
        self.residual_norm_L: Tensor | None = None
        self.router_names: list[str] = []
        self.device = next(model.parameters()).device
        self.policy = policy
        self.precision = None if policy is None else policy.state
        self.master = MasterWeights(
            model.named_parameters(),
            format_of=None if policy is None else policy.gradient_format,
            own_operands=() if policy is None else policy.own_operands,
        )
        self._documents: list[str] = []
        self._pending_tokens = 0
        self.optimizer = AdamW(self.master.masters, optim)

    def forward_backward(self, batches: Sequence[TokenBatch], objective: Objective) -> Metrics:
        """Add the gradients of one global batch. Returns the objective's metrics of the whole batch.

        Raises NonFiniteError, with the weights untouched, if a micro-batch's loss is NaN or infinite.
        """
        counts = self._count(batches, objective)
        totals: dict[str, Tensor] = {}
        squares_L: Tensor | float = 0.0
        tokens = sum(batch.num_tokens for batch in batches)
        if not self._pending_tokens:
            self.counts_LE, self._documents = None, []
        with self.master.computing():
            for batch in batches:
                self._documents += batch.stats.get("documents", [])
                output, loss, metrics = self._forward(batch, objective, counts)
                self._check_loss(loss, output, batch)
                loss.backward()
                _add(totals, metrics)
                self._count_routing(output.router)
                squares_L = squares_L + output.residual_norm_L.square() * (batch.num_tokens / tokens)
                self._pending_tokens += batch.num_tokens
        self.residual_norm_L = squares_L.sqrt()
        return objective.finish({name: float(value) for name, value in totals.items()})

    def optimizer_step(self) -> Metrics:
        """Apply and clear the gradients. Returns lr and the gradient norm before clipping.

        Raises NonFiniteError, with the weights untouched, if a gradient is NaN or infinite.
        """
        gradients = self.master.gradients()
        norm = global_norm(gradients.values())
        if not bool(torch.isfinite(norm)):
            self._refuse(
                "gradient", first_non_finite(gradients) or "the norm of all gradients", self._documents, norm
            )
        if self.clip and float(norm) > self.clip:
            torch._foreach_mul_(list(gradients.values()), self.clip / (float(norm) + 1e-6))
        lr = self.schedule(self._schedule_tokens())
        self.optimizer.step(lr)
        self.master.publish()
        self._update_router_bias()
        self.master.clear()
        self.step += 1
        self.tokens += self._pending_tokens
        self._pending_tokens = 0
        counted = {} if self.precision is None else {"precision/non_finite": self.precision.take_non_finite()}
        return {"grad_norm": float(norm), "lr": lr, **counted}

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TokenBatch], objective: Objective) -> Metrics:
        """The objective's metrics over `batches`; leaves weights, router counts and biases, and random
        state alone.
        """
        counts = self._count(batches, objective)
        totals: dict[str, Tensor] = {}
        for batch in batches:
            _add(totals, self._forward(batch, objective, counts)[2])
        return objective.finish({name: float(value) for name, value in totals.items()})

    def logprob(self, batch: TokenBatch) -> Tensor:
        """Log-probability of each label under the weights of now, [T]."""
        batch = to_device(batch, self.device)
        return score(self.model, batch.tokens_T, batch.labels_T, batch.cu_seqlens)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the model, as its state dict has them."""
        yield from self.model.state_dict().items()

    def state_dict(self) -> dict[str, Any]:
        """What a bit-exact continuation needs, the model's tensors included (references, not copies)."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "model": self.model.state_dict(),
            "master": {name: m.detach() for name, m in self.master.separate.items()},
            "optimizer": self.optimizer.state_dict(),
            "rng": _rng_state(),
            "precision": {} if self.precision is None else self.precision.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Raises CheckpointError if the parameters differ."""
        _same_names("weights", set(state["model"]), set(self.model.state_dict()))
        _same_names("master weights", set(state["master"]), set(self.master.separate))
        self.step, self.tokens, self._pending_tokens = state["step"], state["tokens"], 0
        self.model.load_state_dict(state["model"])
        self.master.clear()
        with torch.no_grad():
            for name, master in self.master.separate.items():
                master.copy_(state["master"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        _set_rng_state(state["rng"])
        rounding = state.get("precision", {})
        if self.precision is not None and rounding:
            self.precision.load_state_dict(rounding)

    def _schedule_tokens(self) -> float:
        """Where this step stands in the schedule, its own tokens included."""
        if self.tokens_per_step is None:
            return self.tokens + self._pending_tokens
        return (self.step + 1) * self.tokens_per_step

    def _count(self, batches: Sequence[TokenBatch], objective: Objective) -> dict[str, float]:
        """The denominators over the global batch; one bad weight would spoil them for every micro-batch."""
        counts: dict[str, float] = {}
        for batch in batches:
            for name, value in objective.count(batch).items():
                if not math.isfinite(value):
                    self._refuse("weight", f"the count of {name}", batch.stats.get("documents", []), value)
                counts[name] = counts.get(name, 0.0) + float(value)
        return counts

    def _forward(self, batch: TokenBatch, objective: Objective, counts: dict[str, float]):
        batch = to_device(batch, self.device)
        depths = min(objective.mtp_depths, self.model.config.depths)
        output = self.model(batch.tokens_T, batch.cu_seqlens, mtp_depths=depths)
        return output, *objective(output, batch, counts)

    def _count_routing(self, router: RouterStats) -> None:
        if router.names:
            self.router_names = router.names
            self.counts_LE = router.counts_LE if self.counts_LE is None else self.counts_LE + router.counts_LE

    @torch.no_grad()
    def _update_router_bias(self) -> None:
        if self.counts_LE is None or not self.router_bias_rate:
            return
        for (_, moe), counts_E in zip(self.model.moe_layers(), self.counts_LE, strict=True):
            bias_E = moe.gate.e_score_correction_bias
            bias_E.copy_(updated_bias(bias_E, counts_E, self.router_bias_rate))

    def _check_loss(self, loss: Tensor, output: ModelOutput, batch: TokenBatch) -> None:
        if bool(torch.isfinite(loss)):
            return
        where = "the loss (all layers are finite)"
        bad_L = ~torch.isfinite(output.residual_norm_L)
        if bool(bad_L.any()):
            where = f"backbone.layers.{int(bad_L.int().argmax())}"
        self._refuse("loss", where, batch.stats.get("documents", []), loss.detach())

    def _refuse(self, what: str, where: str, documents: list[str], value: Tensor | float) -> None:
        self.master.clear()
        self._pending_tokens = 0
        shown = ", ".join(map(str, documents[:20])) + (
            f" and {len(documents) - 20} more" if len(documents) > 20 else ""
        )
        raise NonFiniteError(
            f"the {what} of step {self.step + 1} is not finite, first seen in {where}",
            got=f"{float(value)} on documents: {shown or 'unknown'}",
            do="nothing of this step was applied or saved; look at those documents, lower optim.lr, "
            "or go on from an earlier checkpoint by deleting the latest ones",
        )


def to_device(batch: TokenBatch, device: torch.device) -> TokenBatch:
    """The batch with every tensor on `device`; cu_seqlens stays, its values are needed on the host."""
    if device.type == "cpu":
        return batch
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "cu_seqlens"}
    moved = {n: t.to(device, non_blocking=True) for n, t in tensors.items() if isinstance(t, Tensor)}
    return replace(batch, **moved)


def _add(totals: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
    """Combine the metrics of one more micro-batch into `totals`."""
    for name, value in metrics.items():
        combine = _COMBINE.get(name.rsplit("/", 1)[-1], torch.add)
        totals[name] = combine(totals[name], value.detach()) if name in totals else value.detach()


_COMBINE = {"min": torch.minimum, "max": torch.maximum}


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _same_names(what: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise CheckpointError(
            f"{what} of the checkpoint does not fit the model",
            got=f"missing {sorted(expected - found)[:8]}, unexpected {sorted(found - expected)[:8]}",
            do="use the model and precision that the run was started with",
        )
