"""MaxVio in both definitions, its bounds, and the metric keys made from it."""

import pytest
import torch

from nemotron_ultra.observe.stability import max_violation, stability_metrics


def test_both_definitions_by_hand():
    ratio_L, violation_L = max_violation(torch.tensor([[1, 2, 3, 2], [5, 5, 5, 5]]))
    assert ratio_L.tolist() == [1.5, 1.0] and violation_L.tolist() == [0.5, 0.0]


def test_bound_is_experts_over_top_k():
    """All tokens to the same k of E experts."""
    counts_LE = torch.zeros(1, 512, dtype=torch.int64)
    counts_LE[0, :22] = 1000
    ratio_L, violation_L = max_violation(counts_LE)
    assert ratio_L.item() == pytest.approx(512 / 22) and violation_L.item() == pytest.approx(512 / 22 - 1)


def test_random_loads_stay_in_bounds():
    draw = torch.Generator().manual_seed(0)
    counts_LE = torch.randint(0, 1000, (20, 16), generator=draw)
    ratio_L, _ = max_violation(counts_LE)
    assert (ratio_L >= 1).all() and (ratio_L <= 16).all()


def test_layer_without_tokens_is_balanced():
    assert max_violation(torch.zeros(2, 4, dtype=torch.int64))[0].tolist() == [1.0, 1.0]


def test_large_counts_are_exact():
    counts_LE = torch.tensor([[2**53 - 1, 2**53 - 1]])
    assert max_violation(counts_LE)[1].item() == 0.0


def test_metrics_and_summary():
    counts_LE = torch.tensor([[4, 0], [3, 1], [2, 2]])
    metrics = stability_metrics(counts_LE, torch.tensor([0.5, 2.0]))
    assert metrics["moe/0/max_load"] == 2.0 and metrics["moe/0/max_vio"] == 1.0
    assert metrics["moe/max_vio_median"] == 0.5 and metrics["moe/max_vio_max"] == 1.0
    assert metrics["residual/0"] == 0.5 and metrics["residual/1"] == 2.0
    assert all(type(value) is float for value in metrics.values())


def test_labels_and_models_without_experts():
    assert "moe/mtp.0/max_vio" in stability_metrics(torch.ones(1, 2), labels=["mtp.0"])
    assert stability_metrics(None) == {} and stability_metrics(torch.zeros(0, 4)) == {}
