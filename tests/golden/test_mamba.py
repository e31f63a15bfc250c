"""Scan, convolution, gated norm and whole mixer against float64 references: outputs, states, gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.mamba2 import Mamba2Mixer
from nemotron_ultra.ops.conv import causal_conv_silu_window
from nemotron_ultra.ops.norm import gated_rms_norm
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.ssd import ssd_scan

# Bounds relative to the largest value of the reference tensor.
BOUNDS = {torch.float64: 1e-10, torch.float32: 5e-6}
DTYPES = pytest.mark.parametrize("dtype", list(BOUNDS), ids=["fp64", "fp32"])
SCANS = ["basic", "init_odd_length", "dt_limit", "shorter_than_chunk", "one_group_long"]


def load(golden: Path, name: str, dtype: torch.dtype) -> dict:
    file = golden / "ssd" / f"ssd_{name}.safetensors"
    if not file.exists():
        pytest.skip(f"golden file {file.name} is not beside this checkout")
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in load_file(file).items()}


def meta(golden: Path, name: str) -> dict:
    return json.loads((golden / "ssd" / "ssd_meta.json").read_text())["cases"][name]


def close(got: torch.Tensor, want: torch.Tensor, bound: float | None = None) -> None:
    bound = BOUNDS[want.dtype] if bound is None else bound
    error = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
    assert got.shape == want.shape and error <= bound, f"relative error {error:.2e} above {bound:.0e}"


def leaves(case: dict, *names: str) -> list[torch.Tensor | None]:
    return [case[n].clone().requires_grad_() if n in case else None for n in names]


@DTYPES
@pytest.mark.parametrize("name", SCANS)
def test_scan(golden, name, dtype):
    case, facts = load(golden, name, dtype), meta(golden, name)
    names = ["x", "dt", "A", "B", "C", "D", "dt_bias", "initial_states"]
    inputs = leaves(case, *names)
    limit = tuple(facts.get("dt_limit", (0.0, float("inf"))))
    y, final = ssd_scan(*inputs[:7], limit, inputs[7], chunk_size=facts["chunk"])
    close(y, case["y"])
    close(final, case["final_state"])
    ((y * case["grad_out_y"]).sum() + (final * case["grad_out_final_state"]).sum()).backward()
    for key, leaf in zip(names, inputs, strict=True):
        if leaf is not None:
            close(leaf.grad, case[f"grad_{key}"])


@DTYPES
@pytest.mark.parametrize("chunk", [1, 3, 16, 128])
def test_packed_scan(golden, chunk, dtype):
    case = load(golden, "packed", dtype)
    names = ["x", "dt", "A", "B", "C", "D", "dt_bias"]
    inputs = leaves(case, *names)
    y, final = ssd_scan(*inputs, cu_seqlens=case["cu_seqlens"], chunk_size=chunk)
    close(y, case["y"])
    close(final, case["final_states"])
    (y * case["grad_out_y"]).sum().backward()
    for key, leaf in zip(names, inputs, strict=True):
        close(leaf.grad, case[f"grad_{key}"])
    y, final = ssd_scan(
        *inputs, initial_state_BHPN=case["initial_states"], cu_seqlens=case["cu_seqlens"], chunk_size=chunk
    )
    close(y, case["y_init"])
    close(final, case["final_states_init"])


@DTYPES
def test_state_after_every_token(golden, dtype):
    case = load(golden, "steps", dtype)
    state = case["initial_states"]
    for t in range(case["x"].shape[1]):
        cut = {k: case[k][:, t : t + 1] for k in ("x", "dt", "B", "C")}
        y, state = ssd_scan(
            cut["x"],
            cut["dt"],
            case["A"],
            cut["B"],
            cut["C"],
            case["D"],
            case["dt_bias"],
            initial_state_BHPN=state,
        )
        close(y, case["y"][:, t : t + 1])
        close(state, case["states"][:, t])


def flat(x_BCL: torch.Tensor) -> torch.Tensor:
    return x_BCL.transpose(1, 2).reshape(-1, x_BCL.shape[1])


@DTYPES
def test_convolution(golden, dtype):
    case = load(golden, "conv", dtype)
    x, weight, bias, initial = leaves(case, "x", "weight", "bias", "initial_states")
    rows, _, length = x.shape
    segments = Segments(rows * length, torch.arange(rows + 1, dtype=torch.int32) * length)
    y, window = causal_conv_silu_window(flat(x), weight, bias, segments)
    close(y, flat(case["y"]))
    close(window, case["final_states"])
    y, window = causal_conv_silu_window(flat(x), weight, bias, segments, initial)
    close(y, flat(case["y_init"]))
    close(window, case["final_states_init"])
    (y * flat(case["grad_out_y"])).sum().backward()
    for key, leaf in (("x", x), ("weight", weight), ("bias", bias), ("initial_states", initial)):
        close(leaf.grad, case[f"grad_{key}"])


@DTYPES
@pytest.mark.parametrize("name", ["packed", "steps"])
def test_convolution_of_packed_documents(golden, name, dtype):
    case = load(golden, name, dtype)
    x = case["conv_x"]
    bounds = case.get("cu_seqlens", torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[2])
    segments = Segments(x.shape[0] * x.shape[2], bounds)
    y, window = causal_conv_silu_window(
        flat(x), case["conv_weight"], case["conv_bias"], segments, case.get("conv_initial_states")
    )
    close(y, flat(case["conv_y"]))
    close(window, case["conv_final_states"])


@DTYPES
def test_gated_norm(golden, dtype):
    case = load(golden, "gated_norm", dtype)
    x, z, weight = leaves(case, "x", "z", "weight")
    groups = x.shape[-1] // int(case["group_size"])
    y = gated_rms_norm(x, z, weight, float(case["eps"]), groups)
    close(y, case["y"])
    assert (y - case["y_norm_before_gate"]).abs().max() > 0.1  # the wrong order would be seen
    (y * case["grad_out_y"]).sum().backward()
    for key, leaf in (("x", x), ("z", z), ("weight", weight)):
        close(leaf.grad, case[f"grad_{key}"])


def mixer(case: dict, facts: dict) -> Mamba2Mixer:
    config = ModelConfig(
        pattern="M",
        vocab_size=1,
        hidden_size=facts["hidden"],
        mamba_num_heads=facts["heads"],
        mamba_head_dim=facts["head_dim"],
        ssm_state_size=facts["state"],
        n_groups=facts["groups"],
        conv_kernel=facts["width"],
        chunk_size=facts["chunk"],
        layer_norm_epsilon=facts["eps"],
    )
    block = Mamba2Mixer(config).to(case["u"].dtype)
    block.load_state_dict({key: case[name].view_as(block.state_dict()[key]) for key, name in KEYS.items()})
    return block


KEYS = {
    "in_proj.weight": "in_proj",
    "conv1d.weight": "conv_weight",
    "conv1d.bias": "conv_bias",
    "A_log": "A_log",
    "D": "D",
    "dt_bias": "dt_bias",
    "norm.weight": "norm_weight",
    "out_proj.weight": "out_proj",
}


@DTYPES
@pytest.mark.parametrize("prefix", ["", "packed_"], ids=["single", "packed"])
def test_whole_mixer(golden, prefix, dtype):
    case, facts = load(golden, "block", dtype), meta(golden, "block")
    block, u = mixer(case, facts), case["u"][0].clone().requires_grad_()
    out = block(u, Segments(len(u), case["cu_seqlens"] if prefix else None))
    close(out, case[f"{prefix}out"][0])
    (out * case["grad_out"][0]).sum().backward()
    close(u.grad, case[f"{prefix}grad_u"][0])
    for key, name in KEYS.items():
        got = block.get_parameter(key).grad
        close(got.view_as(case[f"{prefix}grad_{name}"]), case[f"{prefix}grad_{name}"])
