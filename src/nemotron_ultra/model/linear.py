"""y = x W^T + b, computed in the dtype of x whatever the weights are stored in, or by the product that a
precision policy puts in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

# (x [..., K], stored weight [N, K], stored bias [N] or None) -> [..., N] in the dtype of x.
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Linear(nn.Linear):
    """nn.Linear that casts stored weights to its input's dtype and leaves drawing them to `model/init.py`.

    `product` computes it; a precision policy sets another one on a finished module.
    """

    product: Product = staticmethod(plain_product)

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: `HybridLM.init_weights` draws every parameter by name."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)
