"""y = x R in chunks of 16, R = diag(s) H / 4: random Hadamard transform of the weight gradient (report 2.2).

H is the 16 x 16 Sylvester matrix, s the fixed signs of Transformer Engine, the same for all layers and steps.
R R^T = I, so two operands that are both transformed give the product of the plain ones. Inputs are bfloat16,
sums float32, and the result is rounded to bfloat16 once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops.blocks import slabs
from nemotron_ultra.ops.scratch import scratch

CHUNK = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard(x_bf16: Tensor) -> Tensor:
    """Random Hadamard transform along the last axis, [..., K] bfloat16 -> the same.

    ConfigError where x is not bfloat16 or K is not a multiple of 16.
    """
    if x_bf16.dtype != torch.bfloat16:
        raise ConfigError(
            "the random Hadamard transform takes bfloat16 only, as Transformer Engine does",
            got=str(x_bf16.dtype).removeprefix("torch."),
            allowed="bfloat16",
            do="call x.bfloat16() first, so that its rounding is yours to choose",
        )
    if x_bf16.ndim == 0 or x_bf16.shape[-1] % CHUNK:
        raise ConfigError(
            "the random Hadamard transform works on chunks of 16 along the last axis",
            got=f"shape {tuple(x_bf16.shape)}",
            allowed="a last axis that is a multiple of 16",
            do="pad the last axis with zeros to the next multiple of 16",
        )
    rows = x_bf16.float().reshape(-1, CHUNK)
    return torch.mm(rows, rotation(x_bf16.device)).to(torch.bfloat16).view(x_bf16.shape)


def rotate(x: Tensor, down: bool) -> Tensor:
    """The transform of float32 [R, C] along C, or down the rows, rounded to bfloat16.

    -> float32 scratch memory, valid until the next call of this thread.
    """
    y = scratch.take("hadamard.y", x.shape, x)
    if x.numel() == 0:
        return y
    matrix = rotation(x.device)
    for rows in slabs(x, CHUNK):
        part, out = x[rows], y[rows]
        if down:
            chunks = part.view(-1, CHUNK, x.shape[1])
            torch.bmm(matrix.T.expand(len(chunks), -1, -1), chunks, out=out.view(chunks.shape))
        else:
            torch.mm(part.view(-1, CHUNK), matrix, out=out.view(-1, CHUNK))
        short = scratch.take("hadamard.short", part.shape, rotation(x.device, torch.bfloat16))
        out.copy_(short.copy_(out))
    return y


@lru_cache(maxsize=8)
def rotation(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """R [16, 16], exact in float32 and in bfloat16."""
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    with torch.inference_mode(False):
        return (torch.tensor(SIGNS, dtype=torch.float32)[:, None] * matrix / 4).to(device, dtype)
