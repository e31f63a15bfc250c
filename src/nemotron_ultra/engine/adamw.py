"""AdamW by parameter name, on torch's fused kernel (report 2.4: 0.9, 0.95, 1e-8, decay 0.1 on matrices only).

The same numbers as torch.optim.AdamW(fused=True), bit for bit; constructing that class imports torch's
compiler, two seconds of every start, and keeps its state by position.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from nemotron_ultra.config.optim import OptimConfig
from nemotron_ultra.errors import CheckpointError


class AdamW:
    """Moments of `masters` (name -> fp32 parameter). Vectors (norms, biases, A_log, D, dt_bias) do not
    decay.
    """

    def __init__(self, masters: dict[str, nn.Parameter], config: OptimConfig):
        self.masters, self.config = masters, config
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        self.steps: dict[str, Tensor] = {}

    def decay_of(self, name: str) -> float:
        return self.config.weight_decay if self.masters[name].ndim >= 2 else 0.0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every master that has a gradient."""
        names = [name for name, master in self.masters.items() if master.grad is not None]
        self._begin(name for name in names if name not in self.steps)
        for decay in {self.decay_of(name) for name in names}:
            group = [name for name in names if self.decay_of(name) == decay]
            adamw(
                [self.masters[name] for name in group],
                [self.masters[name].grad for name in group],
                [self.exp_avg[name] for name in group],
                [self.exp_avg_sq[name] for name in group],
                [],
                [self.steps[name] for name in group],
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self.config.eps,
                maximize=False,
            )
        # The fused kernel writes without a new version, by which products know that a weight has changed.
        increment_version([self.masters[name] for name in names])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "steps": self.steps}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Copies of the saved moments. Raises CheckpointError if they belong to other parameters."""
        for kind in ("exp_avg", "exp_avg_sq", "steps"):
            for name, value in state[kind].items():
                shape = () if kind == "steps" else getattr(self.masters.get(name), "shape", None)
                if value.shape != shape:
                    raise CheckpointError(
                        f"the optimizer state of the checkpoint does not fit the model at {name}",
                        got=f"{kind} {list(value.shape)}",
                        allowed=list(shape) if shape is not None else "no such parameter",
                        do="use the model that the run was started with",
                    )
        self.exp_avg, self.exp_avg_sq, self.steps = (
            {name: value.to(self.masters[name].device, copy=True) for name, value in state[kind].items()}
            for kind in ("exp_avg", "exp_avg_sq", "steps")
        )

    def _begin(self, names) -> None:
        for name in names:
            master = self.masters[name]
            self.exp_avg[name], self.exp_avg_sq[name] = torch.zeros_like(master), torch.zeros_like(master)
            self.steps[name] = torch.zeros((), device=master.device)
