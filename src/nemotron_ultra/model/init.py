"""Initial weights (report 1.3, 1.4), each drawn by a generator seeded with (seed, parameter name).

std is config.initializer_range; "out" divides it by sqrt(number of backbone layers) where
rescale_prenorm_residual is on.

| parameter | draw |
|---|---|
| embeddings, lm_head, gate, q/k/v_proj, in_proj, up_proj, fc1_latent_proj, eh_proj | N(0, std) |
| o_proj, out_proj, down_proj (experts, shared, MLP), fc2_latent_proj | N(0, std), out |
| conv1d.weight, conv1d.bias | U(-b, b), b = 1 / sqrt(conv_kernel) (Kaiming, a = sqrt 5) |
| A_log | log U(1, 16) |
| D, every norm weight | 1 |
| dt_bias | inverse softplus of exp U(log time_step_min, log time_step_max), at least time_step_floor |
| other biases, e_score_correction_bias | 0 |

A name-seeded draw does not depend on the order of construction, on other layers, or on the storage dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig

OUTPUT_PROJECTIONS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "down_proj",
    "fc2_latent_proj.weight",
)
Draw = Callable[[ModelConfig, Tensor, torch.Generator], None]


def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Overwrite all parameters and zero the correction biases. Same seed, same weights, bit by bit."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fresh = torch.empty(parameter.shape, dtype=torch.float32)
            draw_of(name)(config, fresh, generator(seed, name))
            parameter.copy_(fresh)
        for _, buffer in model.named_buffers():
            buffer.zero_()


def generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_of(name: str) -> Draw:
    """The rule of the table for a parameter's full name."""
    tail = name.rsplit(".", 1)[-1]
    owner = name.split(".")[-2] if "." in name else ""
    if tail == "D" or "norm" in owner:
        return _ones
    if owner == "conv1d":
        return _conv
    special = {"A_log": _a_log, "dt_bias": _dt_bias, "bias": _zeros}
    if tail in special:
        return special[tail]
    return _output if name.endswith(OUTPUT_PROJECTIONS) else _normal


def _ones(config: ModelConfig, w: Tensor, g: torch.Generator) -> None:
    w.fill_(1.0)


def _zeros(config: ModelConfig, w: Tensor, g: torch.Generator) -> None:
    w.zero_()


def _normal(config: ModelConfig, w: Tensor, g: torch.Generator) -> None:
    w.normal_(0.0, config.initializer_range, generator=g)


def _output(config: ModelConfig, w: Tensor, g: torch.Generator) -> None:
    scale = math.sqrt(config.num_layers) if config.rescale_prenorm_residual else 1.0
    w.normal_(0.0, config.initializer_range / scale, generator=g)


def _conv(config: ModelConfig, w: Tensor, g: torch.Generator) -> None:
    bound = 1.0 / math.sqrt(config.conv_kernel)
    w.uniform_(-bound, bound, generator=g)


def _a_log(config: ModelConfig, w: Tensor, g: torch.Generator) -> None:
    w.uniform_(1.0, 16.0, generator=g).log_()


def _dt_bias(config: ModelConfig, w: Tensor, g: torch.Generator) -> None:
    w.uniform_(math.log(config.time_step_min), math.log(config.time_step_max), generator=g)
    dt = w.exp_().clamp_(min=config.time_step_floor)
    # softplus^-1(dt) = dt + log(1 - exp(-dt))
    dt.add_(torch.log(-torch.expm1(-dt)))
