"""Which gradient buffers keep the MTP part of a shared head: the report's divergence and its cure (2.7).

Each step adds two MTP gradients of scale 0.05 and the main one, as the micro-batches of a global batch do.
The same main and MTP gradients return in every step.
"""

import json

import pytest
import torch
from torch import nn

from nemotron_ultra.precision.grads import MasterWeights

ELEMENTS, SCALE = 4096, 0.05


def accumulated(steps: int, buffer: str, mtp: bool = True, seed: int = 0):
    """(gradient after `steps`, share of MTP adds that changed no bit of an element) by MasterWeights."""
    draw = torch.Generator().manual_seed(seed)
    main, mtp1, mtp2 = torch.randn(3, ELEMENTS, generator=draw)
    weight = nn.Parameter(torch.zeros(ELEMENTS))
    master = MasterWeights([("head", weight)], format_of=lambda name: buffer)
    lost, adds = 0, 0
    for _ in range(steps):
        for grad in [SCALE * mtp2, SCALE * mtp1, main] if mtp else [main]:
            before = master.buffers["head"].clone() if "head" in master.buffers else None
            (weight * grad).sum().backward()
            if before is not None and grad is not main:
                lost += int((master.buffers["head"] == before).sum())
            adds += ELEMENTS * (grad is not main)
    return master.gradients()["head"].double(), lost / max(adds, 1)


def kept(steps: int, buffer: str, seed: int = 0) -> tuple[float, float, float, float]:
    """(kept share of the MTP sum, its relative error, lost adds, error of the total), against float64."""
    draw = torch.Generator().manual_seed(seed)
    main, mtp1, mtp2 = torch.randn(3, ELEMENTS, generator=draw).double()
    part = steps * ((SCALE * mtp1.float()).double() + (SCALE * mtp2.float()).double())
    exact = part + steps * main
    with_mtp, lost = accumulated(steps, buffer, seed=seed)
    without, _ = accumulated(steps, buffer, mtp=False, seed=seed)
    share = float((with_mtp - without) @ part / (part @ part))
    error = with_mtp - exact
    return share, float(error.norm() / part.norm()), lost, float(error.norm() / exact.norm())


@pytest.mark.parametrize("steps", [1, 8, 64, 256, 1024])
def test_fp32_buffer_keeps_the_mtp_part(steps):
    share, error, _, _ = kept(steps, "fp32")
    assert error < 1e-3
    assert abs(share - 1) < 1e-3


@pytest.mark.parametrize("seed", [0, 4])
def test_bf16_buffer_loses_the_mtp_part_as_micro_batches_grow(seed):
    assert kept(8, "bf16", seed)[0] > 0.98
    share, _, lost, _ = kept(64, "bf16", seed)
    assert share < 0.8 and lost > 0.5
    assert kept(256, "bf16", seed)[0] < 0.5
    share, _, _, total = kept(512, "bf16", seed)
    assert share < 0.15 and total > 0.25


@pytest.mark.parametrize("row", [3, 6, 8, 9])
def test_bf16_losses_are_those_of_the_stored_experiment(golden, row):
    stored = coherent(golden)[row]
    share, error, lost, total = kept(stored["n"], "bf16", seed=4)
    bf16 = stored["bf16"]
    assert share == pytest.approx(bf16["mtp_kept"], abs=0.05)
    assert error == pytest.approx(bf16["mtp_rel_err"], rel=0.1)
    assert lost == pytest.approx(bf16["mtp_noop_adds"], abs=0.05)
    assert total == pytest.approx(bf16["total_rel_err"], rel=0.1)


def coherent(golden) -> list[dict]:
    return json.loads((golden / "nvfp4" / "bf16_accum.json").read_text())["coherent"]


def test_lowered_by_name_and_cleared():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    master = MasterWeights([("a", a), ("b", b)], format_of=lambda name: "bf16" if name == "a" else "fp32")
    third = torch.full((3,), 1 / 3)
    ((a + b) * third).sum().backward()
    grads = master.gradients()
    assert torch.equal(grads["a"], third.bfloat16().float()) and torch.equal(grads["b"], third)
    assert a.grad is grads["a"]
    master.clear()
    assert master.gradients() == {}
