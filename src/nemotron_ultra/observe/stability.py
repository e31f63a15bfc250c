"""MaxVio of an MoE layer: r = max_e load_e / mean_e load_e <= E/k (report 2.7); arXiv 2408.15664 logs r - 1.

The report does not say which of the two it plots; its bound E/k = 23.27 fits r. Both are logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def max_violation(counts_LE: Tensor) -> tuple[Tensor, Tensor]:
    """Load imbalance of each MoE layer from the tokens that each expert received.

    Args: counts_LE [MoE layers, experts], any integer or float dtype, summed over the global batch.
    Returns: ratio_L = max / mean in [1, E/k] and violation_L = ratio - 1 in [0, E/k - 1], float64.
    A layer that received no token counts as balanced (ratio 1).
    """
    loads_LE = counts_LE.double()
    mean_L = loads_LE.mean(dim=-1)
    peak_L = loads_LE.amax(dim=-1)
    ratio_L = (peak_L / mean_L).where(mean_L > 0, 1.0)
    return ratio_L, ratio_L - 1.0


def stability_metrics(
    counts_LE: Tensor | None, residual_norm_L: Tensor | None = None, labels: Sequence[object] | None = None
) -> dict[str, float]:
    """`moe/<label>/max_load`, `moe/<label>/max_vio`, their summary over layers, and `residual/<layer>`.

    Args: counts_LE as in `max_violation`, or None for a model without MoE layers; residual_norm_L [layers]:
    RMS of the residual stream after each layer; labels: one per MoE layer, else its place among them.
    """
    metrics: dict[str, float] = {}
    if counts_LE is not None and counts_LE.numel():
        ratio_L, violation_L = (tensor.cpu() for tensor in max_violation(counts_LE))
        names = range(len(ratio_L)) if labels is None else labels
        for name, ratio, violation in zip(names, ratio_L.tolist(), violation_L.tolist(), strict=True):
            metrics[f"moe/{name}/max_load"] = ratio
            metrics[f"moe/{name}/max_vio"] = violation
        metrics["moe/max_vio_median"] = violation_L.quantile(0.5).item()
        metrics["moe/max_vio_max"] = violation_L.max().item()
    if residual_norm_L is not None:
        metrics |= {f"residual/{layer}": norm for layer, norm in enumerate(residual_norm_L.tolist())}
    return metrics
