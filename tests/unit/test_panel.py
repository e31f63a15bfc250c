"""What the start panel and run.json say of precision: the policy's table, and how it is computed here."""

import torch

from micro import micro_model
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.config.precision import PrecisionConfig, PrecisionRule
from nemotron_ultra.precision.policy import module_shapes, plan_policy
from nemotron_ultra.trainers.panel import precision_rows, precision_text

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAIN = PrecisionConfig(name="bf16", weights="bf16", default="bf16")


def table(policy, **sizes):
    model = micro_model(torch.bfloat16, **sizes)
    return plan_policy(module_shapes(model), policy, model.config), model


def nvfp4_table():
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
    return table(load_recipe("pretrain", ["precision=nvfp4"]).precision, **sizes)[0]


def test_a_cpu_computes_in_float32_whatever_the_weights_are_stored_in():
    policy, model = table(PLAIN)
    rows = precision_rows(policy, CPU)
    assert {row["computed"] for row in rows} == {"fp32"} and {row["weights"] for row in rows} == {"bf16"}
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    assert {"Mamba in_proj", "routed experts", "router", "head"} <= {row["modules"] for row in rows}
    text = precision_text(policy, CPU)
    assert text == "weights bf16, products fp32, gradients, masters and moments fp32"


def test_on_a_gpu_only_the_router_is_float32():
    rows = precision_rows(table(PLAIN)[0], GPU)
    assert {row["computed"] for row in rows if "router" not in row["modules"]} == {"bf16"}
    assert {row["computed"] for row in rows if "router" in row["modules"]} == {"fp32"}


def test_emulation_is_said():
    policy = nvfp4_table()
    text = precision_text(policy, CPU)
    assert "nvfp4, mxfp8 emulated: operands exact, products in fp32" in text
    assert "% of GEMM FLOPs: Mamba in_proj" in text and "gradients, masters and moments fp32" in text
    (row,) = [row for row in precision_rows(policy, GPU) if row["modules"] == "Mamba in_proj"]
    assert row["computed"] == "emulated: operands exact, products in bf16"


def test_warnings_and_lowered_gradients_are_said():
    policy = PrecisionConfig(
        name="x",
        rules=[PrecisionRule(match="*.no_such", format="fp32")],
        gradients_bf16=["*.in_proj"],
    )
    text = precision_text(table(policy)[0], CPU)
    assert "gradients fp32 but bf16 for *.in_proj; masters" in text
    assert "'*.no_such' -> fp32, matches no module" in text
