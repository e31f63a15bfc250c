"""What a config entails: the report's counts, the FLOPs of the benchmark model, memory, milestones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from nemotron_ultra import ModelConfig, load_recipe
from nemotron_ultra.config.plan import (
    activation_bytes,
    count_parameters,
    flops_by_block,
    flops_per_token,
    layer_flops,
    make_plan,
)

# Report 2.1 and Table 1, in billions (millions for a layer); active counts one embedding matrix.
TOTALS = {"ultra": (560.52, 549.31, 54.99), "super": (123.61, 120.67, 12.23), "nano": (31.58, 31.58, 3.23)}
LAYERS = {
    "ultra": {"mamba": 421.65, "attention": 138.42, "moe": 10943, "mtp": 11216, "embedding": 1073.7},
    "super": {"mamba": 109.64, "attention": 35.66, "moe": 2873, "mtp": 2942},
    "nano": {"mamba": 38.74, "attention": 23.40, "moe": 1297},
}
ACTIVE = {"ultra": {"moe": 667, "mtp": 940}, "super": {"moe": 176}, "nano": {"moe": 80}}

BENCHMARK = ModelConfig(
    pattern="MEMEM*EMEM*E",
    vocab_size=8192,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    mamba_num_heads=8,
    mamba_head_dim=64,
    ssm_state_size=64,
    n_groups=2,
    n_routed_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
    moe_shared_expert_intermediate_size=512,
    moe_latent_size=128,
)


def model_config(name):
    return load_recipe("pretrain", [f"model={name}"]).model


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_of_the_report(name):
    counted = count_parameters(model_config(name))
    found = (counted.total / 1e9, counted.without_mtp / 1e9, counted.active / 1e9)
    assert found == pytest.approx(TOTALS[name], abs=0.006)
    for block, millions in LAYERS[name].items():
        layer = counted.block(block)
        assert layer.total / layer.layers / 1e6 == pytest.approx(millions, rel=5e-4)
    for block, millions in ACTIVE[name].items():
        layer = counted.block(block)
        assert layer.active / layer.layers / 1e6 == pytest.approx(millions, abs=0.5)


def test_flops_of_the_benchmark_model():
    assert count_parameters(BENCHMARK).total == pytest.approx(19.08e6, abs=5e3)
    found = [layer_flops(BENCHMARK, letter, 512) / 1e6 for letter in "ME*"]
    assert found == pytest.approx([1.141, 1.196, 0.655], abs=5e-4)
    assert flops_by_block(BENCHMARK, 512)["head"] / 1e6 == pytest.approx(4.19, abs=5e-3)
    assert flops_per_token(BENCHMARK, 512) / 1e6 == pytest.approx(17.19, abs=5e-3)


def test_only_attention_grows_with_the_length():
    short, long = flops_by_block(BENCHMARK, 512), flops_by_block(BENCHMARK, 16384)
    assert long["attention"] > 5 * short["attention"]
    assert all(long[name] == short[name] for name in ("mamba", "moe", "head"))


def test_plain_moe_dense_mlp_and_mtp_count():
    config = ModelConfig(
        pattern="E-", vocab_size=10, hidden_size=4, intermediate_size=6, n_routed_experts=3,
        moe_intermediate_size=5, num_nextn_predict_layers=1, mtp_pattern="-", mtp_depths=3,
    )  # fmt: skip
    assert layer_flops(config, "-", 8) == 4 * 4 * 6
    assert layer_flops(config, "E", 8) == 2 * 4 * 3 + 4 * 4 * 5
    assert flops_by_block(config, 8)["mtp"] == 3 * (4 * 16 + 4 * 4 * 6 + 2 * 4 * 10)
    assert count_parameters(config).block("mtp").total == 3 * 4 + 2 * 16 + 4 + 2 * 4 * 6


def test_memory_of_weights_gradients_and_optimizer():
    plan = make_plan(load_recipe("pretrain"))
    biases = plan.parameters.total - plan.parameters.trainable
    assert biases == (3 + 1) * plan.model.n_routed_experts
    assert plan.weight_bytes == 4 * plan.parameters.total
    assert plan.gradient_bytes == 4 * plan.parameters.trainable
    assert plan.optimizer_bytes == 8 * plan.parameters.trainable
    bf16 = make_plan(load_recipe("pretrain", ["precision=bf16"]))
    assert bf16.weight_bytes == 2 * plan.parameters.total
    assert bf16.optimizer_bytes == 12 * plan.parameters.trainable


def test_activations_are_linear_in_tokens_and_shrink_with_recompute():
    assert activation_bytes(BENCHMARK, 4096) == 2 * activation_bytes(BENCHMARK, 2048)
    assert activation_bytes(BENCHMARK, 2048, recompute=True) < 0.35 * activation_bytes(BENCHMARK, 2048)


def test_milestones_in_tokens_and_steps():
    run = load_recipe(
        "pretrain",
        ["trainer.steps=100", "trainer.global_batch_size=8", "data.sequence_length=128",
         "schedule.warmup_tokens=10000", "schedule.decay_tokens=30000"],
    )  # fmt: skip
    plan = make_plan(run)
    assert (plan.tokens_per_step, plan.tokens) == (1024, 102_400)
    found = [(m.name, m.tokens, m.step) for m in plan.milestones]
    assert found == [("warmup ends", 10_000, 10), ("decay starts", 72_400, 71), ("run ends", 102_400, 100)]


def test_data_phases_are_milestones():
    run = load_recipe("pretrain")
    first, last = run.data.phases[0], replace(run.data.phases[0], until_tokens=None)
    phases = [replace(first, until_tokens=300_000), last]
    plan = make_plan(replace(run, data=replace(run.data, phases=phases)))
    phase = next(m for m in plan.milestones if "phase" in m.name)
    assert (phase.name, phase.step) == ("data phase 2 starts", -(-300_000 // plan.tokens_per_step))


def test_lines_are_readable():
    text = "\n".join(make_plan(load_recipe("pretrain", ["model=ultra"])).lines())
    for part in ("560.5 B total", "54.99 B active", "1,121,049,257,984 bytes in 51,023 tensors", "run ends"):
        assert part in text
    assert all(len(line) < 110 for line in text.splitlines()[1:])


def test_a_plan_needs_no_torch():
    code = (
        "import sys, nemotron_ultra.config.plan, nemotron_ultra.config.hf; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
