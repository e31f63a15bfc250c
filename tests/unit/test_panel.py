"""Tables of the start panel: formats by the ordered rules, and what a CPU really computes in."""

import torch

from micro import micro_model
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.config.precision import PrecisionConfig, PrecisionRule
from nemotron_ultra.trainers.panel import format_of, precision_rows

ULTRA = load_recipe("ultra_pretrain").precision


def test_ultra_formats_by_layer():
    """Report 2.2: the last 16 of 108 layers, attention, latent projections and MTP stay in BF16."""
    at = {
        "backbone.layers.0.mixer.in_proj": "nvfp4",
        "backbone.layers.0.mixer.out_proj": "mxfp8",
        "backbone.layers.1.mixer.experts": "nvfp4",
        "backbone.layers.1.mixer.shared_experts.up_proj": "nvfp4",
        "backbone.layers.1.mixer.fc1_latent_proj": "bf16",
        "backbone.layers.7.mixer.q_proj": "bf16",
        "backbone.layers.92.mixer.in_proj": "bf16",
        "mtp.layers.0.mixer.q_proj": "bf16",
        "lm_head": "bf16",
    }
    assert {name: format_of(name, ULTRA, 108) for name in at} == at


def test_first_matching_rule_wins():
    rules = [PrecisionRule(match="*.in_proj", format="mxfp8"), PrecisionRule(match="*", format="bf16")]
    precision = PrecisionConfig(name="x", default="fp32", rules=rules)
    assert format_of("backbone.layers.0.mixer.in_proj", precision, 4) == "mxfp8"
    assert format_of("lm_head", precision, 4) == "bf16"


def test_a_cpu_computes_in_float32_whatever_the_weights_are_stored_in():
    model = micro_model(torch.bfloat16)
    policy = PrecisionConfig(name="bf16", weights="bf16", default="bf16")
    rows = precision_rows(model, policy, torch.device("cpu"))
    assert {row["products"] for row in rows} == {"fp32"} and {row["weights"] for row in rows} == {"bf16"}
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    kinds = {row["layers"] for row in rows}
    assert {"mamba in_proj", "attention q_proj", "moe experts", "moe gate"} <= kinds
    assert {"norms", "mtp", "lm_head", "embeddings"} <= kinds
