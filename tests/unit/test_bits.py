"""Bits per weight element and sizes of Ultra's checkpoints as the report prints them."""

import pytest

from nemotron_ultra.config.bits import (
    BASELINE,
    BITS,
    EXPERTS_AND_MAMBA,
    ROUTED_EXPERTS,
    SHIPPED,
    count_bits,
    points,
)
from nemotron_ultra.config.compose import load_recipe

ULTRA = load_recipe("ultra_pretrain").model


@pytest.mark.parametrize(
    ("choice", "bits"), [(SHIPPED, "5.03"), (ROUTED_EXPERTS, "5.43"), (EXPERTS_AND_MAMBA, "4.85")]
)
def test_bits_per_element_of_report_table_13(choice, bits):
    """Routers in FP32."""
    assert f"{count_bits(ULTRA, choice).bits_per_element:.2f}" == bits


def test_only_fp32_routers_give_the_shipped_figure():
    bf16 = {glob: stored for glob, stored in SHIPPED.items() if stored != "fp32"}
    assert f"{count_bits(ULTRA, bf16).bits_per_element:.3f}" == "5.022"
    assert f"{count_bits(ULTRA, SHIPPED).bits_per_element:.3f}" == "5.028"


def test_published_sizes():
    """352.3 GB quantised; 1121 GB in BF16, to the byte the total_size of the released index."""
    assert f"{count_bits(ULTRA).bytes / 1e9:.1f}" == "352.3"
    assert count_bits(ULTRA, BASELINE).bytes == 1_121_049_257_984
    assert f"{count_bits(ULTRA, BASELINE).bytes / 1e9:.0f}" == "1121"


def test_each_operator_of_report_table_12():
    table = count_bits(ULTRA)
    found = {row.kind: (row.format, round(row.elements / 1e9, 2)) for row in table.rows if row.elements > 1e8}
    assert found == {
        "routed experts": ("nvfp4", 515.40),
        "Mamba in_proj": ("fp8", 13.79),
        "shared experts": ("fp8", 8.05),
        "MTP": ("bf16", 11.21),
        "Mamba out_proj": ("fp8", 6.44),
        "attention q, k, v, o": ("bf16", 1.66),
        "latent projections": ("bf16", 1.61),
        "embedding": ("bf16", 1.07),
        "head": ("bf16", 1.07),
        "router": ("fp32", 0.20),
    }
    assert table.elements == 560_524_603_904


def test_biases_are_not_quantised():
    model = load_recipe("pretrain", ["model.use_bias=true", "model.mlp_bias=true"]).model
    rows = {(row.kind, row.format): row.elements for row in count_bits(model).rows}
    assert rows["Mamba in_proj", "bf16"] == 3 * 1032 and rows["shared experts", "bf16"] == 3 * (384 + 192)
    assert BITS["nvfp4"] == 4.5 and len(points(model)) == 4
