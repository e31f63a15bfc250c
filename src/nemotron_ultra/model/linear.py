"""y = x W^T + b, computed in the dtype of x whatever the weights are stored in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear that casts stored weights to its input's dtype and leaves drawing them to `model/init.py`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: `HybridLM.init_weights` draws every parameter by name."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)
