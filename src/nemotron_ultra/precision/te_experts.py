"""y_t = sum_k w_tk * down_k relu(up_k x_t)^2 by Transformer Engine's grouped products.

Choices are sorted by expert and filled up with rows of zeros as `precision.experts` does it, to 128 rows an
expert. Never run on a GPU: see `ops/with_te.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemotron_ultra.config.te import multiple
from nemotron_ultra.ops.with_te import TeGroupedProduct
from nemotron_ultra.precision.experts import plan_rows, sorted_rows


class TeExperts:
    """Takes the place of `ops.experts.routed_experts`, one object per module.

    Gradients of the two stacks go to their `main_grad` in FP32, those of x and of the routing weights through
    autograd.
    """

    def __init__(self, recipe: Any):
        self.up, self.down = TeGroupedProduct(recipe), TeGroupedProduct(recipe)

    def __call__(
        self, x_TL: Tensor, indices_TK: Tensor, weights_TK: Tensor, up_EFL: Tensor, down_ELF: Tensor
    ) -> Tensor:
        plan = plan_rows(indices_TK, len(up_EFL), multiple("tokens of an expert"))
        rows_NL = sorted_rows(x_TL.bfloat16(), plan)
        hidden_NF = self.up(rows_NL, plan.sizes, up_EFL).relu().square()
        y_NL = self.down(hidden_NF, plan.sizes, down_ELF)
        y_TKL = y_NL[plan.place_TK].to(x_TL.dtype)
        return (y_TKL * weights_TK.to(x_TL.dtype)[..., None]).sum(1)
