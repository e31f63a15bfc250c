"""Which module gets which format: the report's table for Ultra and Super, warnings, refusals."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from micro import micro_model
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.config.plan import flops_by_block
from nemotron_ultra.config.policy import which
from nemotron_ultra.config.precision import PrecisionConfig, PrecisionRule
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.precision.policy import PolicyTable, config_modules, module_shapes, plan_policy

LAST = tuple(range(92, 108))
SUPER = ("model=super", "precision=nvfp4", "precision.last_layers=14")
KINDS_OF_MOE = ("routed experts", "shared experts", "latent projections", "router")


@functools.cache
def ultra() -> PolicyTable:
    """The policy of the Ultra recipe on the model built on the meta device."""
    config = load_recipe("ultra_pretrain")
    with torch.device("meta"):
        model = HybridLM(config.model)
    return plan_policy(module_shapes(model), config.precision, config.model)


def table(*overrides: str) -> PolicyTable:
    config = load_recipe("pretrain", overrides)
    return plan_policy(config_modules(config.model), config.precision, config.model)


def at(pattern: str, letter: str, end: int) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(pattern[:end]) if x == letter)


def share(found: PolicyTable, format: str) -> tuple[str, str]:
    return f"{100 * found.parameter_share(format):.2f}", f"{100 * found.flop_share(format):.2f}"


def test_nvfp4_layers_of_ultra():
    """Report 2.2: experts, shared experts and Mamba in_proj of layers 0..91, and nothing else."""
    pattern, found = load_recipe("ultra_pretrain").model.pattern, ultra()
    for kind, letter, count in (
        ("routed experts", "E", 40),
        ("shared experts", "E", 40),
        ("Mamba in_proj", "M", 41),
    ):
        assert (
            found.layers("nvfp4", kind) == at(pattern, letter, 92) and len(at(pattern, letter, 92)) == count
        )
    assert {row.kind for row in found.rows if row.format == "nvfp4"} == {
        "routed experts",
        "shared experts",
        "Mamba in_proj",
    }
    assert len(found.layers("nvfp4")) == 81 and found.policy.kept_layers(108) == 16


def test_mxfp8_layers_of_ultra():
    pattern, found = load_recipe("ultra_pretrain").model.pattern, ultra()
    assert found.layers("mxfp8") == found.layers("mxfp8", "Mamba out_proj") == at(pattern, "M", 92)
    assert [row.kind for row in found.rows if row.format == "mxfp8"] == ["Mamba out_proj"]


def test_bf16_and_fp32_of_ultra():
    """Attention, latents, MTP, embedding and head everywhere; all of the last 16 but the router."""
    pattern, found = load_recipe("ultra_pretrain").model.pattern, ultra()
    assert found.layers("bf16", "attention q, k, v, o") == at(pattern, "*", 108)
    assert found.layers("bf16", "latent projections") == at(pattern, "E", 108)
    assert {"MTP", "embedding", "head"} <= {row.kind for row in found.rows if row.format == "bf16"}
    for kind in ("routed experts", "shared experts", "Mamba in_proj", "Mamba out_proj"):
        assert set(found.layers("bf16", kind)) <= set(LAST)
    assert set(LAST) <= set(found.layers("bf16"))
    assert found.layers("fp32") == found.layers("fp32", "router") == at(pattern, "E", 108)
    assert {row.kind for row in found.rows if row.format == "fp32"} == {"router", "MTP router"}


def test_shares_of_ultra():
    """Percent of parameters and of the weight products' operations for a token, by format."""
    found = ultra()
    got = {format: share(found, format) for format in found.used()}
    assert got == {
        "nvfp4": ("79.92", "62.61"),
        "mxfp8": ("0.98", "9.33"),
        "bf16": ("19.06", "27.70"),
        "fp32": ("0.04", "0.36"),
    }
    expert, shared, in_proj = 2 * 2048 * 5120, 2 * 8192 * 10240, 8192 * (2 * 16384 + 2 * 8 * 128 + 256)
    nvfp4 = 40 * (512 * expert + shared) + 41 * in_proj
    assert found.parameter_share("nvfp4") == nvfp4 / found.parameters and found.parameters == 560_524_578_816
    work = 2 * (40 * (22 * expert + shared) + 41 * in_proj)
    assert found.flop_share("nvfp4") * found.flops == pytest.approx(work, rel=1e-12)


def test_the_configuration_alone_gives_the_same_table():
    config = load_recipe("ultra_pretrain")
    assert plan_policy(config_modules(config.model), config.precision, config.model) == ultra()
    for overrides in (["model=super"], ["model=nano"], ["model.moe_latent_size=0", "model.use_bias=true"]):
        model = load_recipe("pretrain", overrides).model
        with torch.device("meta"):
            built = module_shapes(HybridLM(model))
        assert config_modules(model) == built


def test_super_keeps_14_layers():
    """Super report: 14 of 88 layers; the same list of formats."""
    pattern, found = load_recipe("pretrain", ["model=super"]).model.pattern, table(*SUPER)
    assert found.policy.kept_layers(88) == 14 and max(found.layers("nvfp4")) == 73
    assert found.layers("nvfp4", "routed experts") == at(pattern, "E", 74)
    assert found.layers("nvfp4", "Mamba in_proj") == found.layers("mxfp8") == at(pattern, "M", 74)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((1, 4, 6), "E 1-6"),
        ((1, 4), "E 1-4"),
        ((1, 6), "1, 6"),
        ((0, 1, 2, 5), "0-2, 5"),
        ((3,), "* 3"),
        (tuple(range(7)), "0-6"),
        ((), ""),
    ],
)
def test_rows_name_their_layers_exactly(layers, text):
    assert which(layers, "MEM*EME") == text


def test_facts_and_summary_name_layers():
    (row,) = [
        row for row in ultra().facts() if (row["format"], row["modules"]) == ("nvfp4", "routed experts")
    ]
    assert (row["which"], row["layers"], row["share of parameters"]) == ("E 1-90", 40, "76.6 %")
    assert "routed experts (E 1-90)" in ultra().summary()[0] and len(ultra().summary()) == 4


def test_tiny_is_mostly_nvfp4():
    found = table("precision=nvfp4")
    assert found.policy.kept_layers(7) == 1 and found.layers("nvfp4") == (0, 1, 2, 4, 5)
    assert found.layers("mxfp8") == (0, 2, 5) and found.layers("bf16", "routed experts") == (6,)
    assert load_recipe("ultra_pretrain_phase2").precision.last_layers == 16


@pytest.mark.parametrize(("layers", "kept"), [(1, 0), (4, 1), (7, 1), (10, 2), (52, 8), (88, 13), (108, 16)])
def test_last_share_is_rounded_to_whole_layers(layers, kept):
    shares = PrecisionConfig(name="x", last_share=0.15)
    assert shares.kept_layers(layers) == kept
    assert PrecisionConfig(name="x", last_share=0.15, last_layers=2).kept_layers(layers) == min(2, layers)
    assert shares.formats == ["fp32", "bf16"] and PrecisionConfig(name="x").formats == ["fp32"]


def test_operations_are_those_of_the_plan():
    """MoE layers and head are weight products only, so both counts of them must agree."""
    model = load_recipe("pretrain").model
    found, plan = table("precision=nvfp4"), flops_by_block(model, 1)
    of = {kind: sum(row.flops for row in found.rows if row.kind == kind) for kind in KINDS_OF_MOE}
    assert sum(of.values()) == pytest.approx(plan["moe"], rel=1e-12)
    head = sum(row.flops for row in found.rows if row.kind == "head")
    mtp = sum(row.flops for row in found.rows if row.kind in ("MTP", "MTP router"))
    pairs = (
        2 * model.depths * model.num_attention_heads * model.head_dim
    )  # attention's own products at length 1
    assert head == 3 * plan["head"] and mtp + 2 * plan["head"] + pairs == pytest.approx(
        plan["mtp"], rel=1e-12
    )


def test_parameters_are_those_of_the_model():
    model = micro_model()
    policy = PrecisionConfig(name="x", default="bf16", weights="bf16")
    found = plan_policy(module_shapes(model), policy, model.config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert sum(row["parameters"] for row in found.facts()) == found.parameters
    products = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    routers = {name for name in found.formats if name.endswith(("gate", "experts"))}
    assert set(found.formats) == products | routers and products


def test_first_match_wins_and_the_router_stays_fp32():
    rules = [rule("*.in_proj", "mxfp8"), rule("*.mixer.gate", "bf16"), rule("*", "bf16")]
    found = planned(PrecisionConfig(name="x", rules=rules))
    assert found.formats["backbone.layers.0.mixer.in_proj"] == "mxfp8"
    assert found.formats["backbone.layers.0.mixer.out_proj"] == found.formats["lm_head"] == "bf16"
    assert found.formats["backbone.layers.1.mixer.gate"] == "fp32"
    (warning,) = found.warnings
    assert warning == "warning: rules.1, '*.mixer.gate' -> bf16, has no effect: the router computes in fp32"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([("*.inproj", "bf16")], "rules.0, '*.inproj' -> bf16, matches no module"),
        ([("*", "fp32"), ("lm_head", "bf16")], "rules.1, 'lm_head' -> bf16, is never reached"),
        (
            [("*.norm", "bf16")],
            "rules.0, '*.norm' -> bf16, has no effect: what it matches has no weight product",
        ),
    ],
)
def test_a_rule_without_effect_is_named(rules, said):
    found = planned(PrecisionConfig(name="x", rules=[rule(*one) for one in rules]))
    assert len(found.warnings) == 1 and said in found.warnings[0]
    assert found.lines()[-1] == found.warnings[0]
    assert not planned(PrecisionConfig(name="x", rules=[rule("lm_head", "bf16")])).warnings


def test_a_gradient_glob_without_effect_is_named():
    found = planned(PrecisionConfig(name="x", gradients_bf16=["*.experts.up_proj", "*.q_prj"]))
    assert found.warnings == (
        "warning: gradients_bf16, '*.q_prj', matches no module and no parameter of this model",
    )
    policy = found.policy
    assert policy.gradient_format("backbone.layers.1.mixer.experts.up_proj") == "bf16"
    assert policy.gradient_format("backbone.layers.1.mixer.experts.down_proj") == "fp32"
    assert "gradients fp32 but bf16 for *.experts.up_proj" in found.lines()[0]


@pytest.mark.parametrize("glob", ["lm_head", "lm_head.weight", "lm_*", "*", "*.embeddings"])
def test_gradients_that_mtp_shares_stay_fp32(glob):
    """Report 2.7, by the policy object and by the whole configuration."""
    policy = PrecisionConfig(name="x", gradients_bf16=[glob])
    for refused in (
        lambda: planned(policy),
        lambda: load_recipe("pretrain", [f"precision.gradients_bf16=[{glob!r}]"]),
    ):
        with pytest.raises(ConfigError, match=r"while MTP is on.*report 2\.7"):
            refused()
    allowed = dataclasses.replace(policy, allow_bf16_head_gradients=True)
    assert planned(allowed).policy == allowed
    without = load_recipe("pretrain", ["model.num_nextn_predict_layers=0"]).model
    assert plan_policy(config_modules(without), policy, without).policy == policy


@pytest.mark.parametrize(
    ("format", "changes", "said"),
    [
        (
            "nvfp4",
            ["model.hidden_size=200"],
            r"in_proj \[1032, 200\] cannot be nvfp4: its 200 inputs .* of 16.*hidden",
        ),
        (
            "mxfp8",
            ["model.hidden_size=208"],
            r"its 208 inputs are not a multiple of 32; change model.hidden_size",
        ),
        (
            "nvfp4",
            ["model.moe_intermediate_size=100"],
            r"experts \[16, 96, 100\].*change model.moe_latent_size",
        ),
        (
            "nvfp4",
            ["model.head_dim=50", "model.num_key_value_heads=4"],
            r"o_proj .*model.num_attention_heads x head_dim",
        ),
    ],
)
def test_blocks_must_divide_the_inputs(format, changes, said):
    rules = "precision.rules=[{match: lm_head, format: bf16}]"
    overrides = ["precision=nvfp4", rules, f"precision.default={format}"]
    load_recipe("pretrain", overrides)
    with pytest.raises(ConfigError, match=said):
        load_recipe("pretrain", [*overrides, *changes])


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_a_head_in_low_precision_is_refused_before_anything_is_built(format):
    overrides = ["precision=nvfp4", "precision.rules=[]", f"precision.default={format}"]
    with pytest.raises(ConfigError, match=f"precision.rules: lm_head cannot be {format}.*bf16 or fp32"):
        load_recipe("pretrain", overrides)


def test_shipped_policies_have_no_idle_rule():
    for overrides in ([], ["precision=bf16"], ["precision=nvfp4"], SUPER):
        assert table(*overrides).warnings == ()
    assert ultra().warnings == ()
    assert table().used() == ("fp32",) and table("precision=bf16").used() == ("bf16", "fp32")


@pytest.mark.parametrize("recipe", [["recipe=pretrain", "precision=nvfp4"], ["recipe=ultra_pretrain"]])
def test_tables_of_the_page(recipe):
    """docs/precision.md shows what --plan prints."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "precision.md").read_text()
    name, *overrides = recipe
    config = load_recipe(name.removeprefix("recipe="), overrides)
    lines = plan_policy(config_modules(config.model), config.precision, config.model).lines()
    assert "\n".join(lines) in page


def planned(policy: PrecisionConfig) -> PolicyTable:
    model = load_recipe("pretrain").model
    return plan_policy(config_modules(model), policy, model)


def rule(match: str, format: str) -> PrecisionRule:
    return PrecisionRule(match=match, format=format)
