"""Transformer Engine's part: what is told apart, what is refused, and the wiring against a stand-in.

The stand-in has the signatures of TE 2.20 and multiplies in bf16; it shows no arithmetic of TE.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from micro import micro_batches, micro_engine, micro_model, objective, step
from nemotron_ultra.config import requirements
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.config.policy import config_modules, plan_policy
from nemotron_ultra.config.precision import Nvfp4Config
from nemotron_ultra.config.te import check_environment, multiple, obstacles, realise, refusals
from nemotron_ultra.errors import BackendError
from nemotron_ultra.ops import with_te
from nemotron_ultra.ops.with_te import TeGroupedProduct, TeProduct, capability, here
from nemotron_ultra.precision.apply import apply_policy
from nemotron_ultra.precision.linear import QuantizedProduct
from nemotron_ultra.precision.te_experts import TeExperts
from nemotron_ultra.trainers.panel import precision_rows, precision_text

B200 = capability("2.20.2", (10, 0))
NVFP4 = load_recipe("pretrain", ["precision=nvfp4"]).precision
FITTING = {
    "hidden_size": 64,
    "mamba_num_heads": 32,  # 1,120 outputs of in_proj
    "moe_latent_size": 32,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}


def planned(recipe, *overrides):
    run = load_recipe(recipe, list(overrides))
    modules = config_modules(run.model)
    return plan_policy(modules, run.precision, run.model), modules


def policy(**changes):
    return replace(NVFP4, **changes)


@pytest.mark.parametrize(
    ("version", "gpu", "kind", "formats"),
    [
        (None, None, "no_te", ()),
        (None, (10, 0), "no_te", ()),
        ("2.20.2", None, "no_gpu", ()),
        ("2.20.2", (9, 0), "no_fp4_gpu", ()),
        ("2.13.0", (9, 0), "no_fp4_gpu", ()),
        ("2.13.0", (10, 0), "old_te", ()),
        ("1.9", (12, 0), "old_te", ()),
        ("main", (10, 0), "old_te", ()),
        ("2.14.0+5a1b", (10, 0), "full", ("nvfp4", "mxfp8")),
        ("3.0", (10, 3), "full", ("nvfp4", "mxfp8")),
        ("2.20.2", (10, 1), "mxfp8_only", ("mxfp8",)),
        ("2.20.2", (11, 0), "mxfp8_only", ("mxfp8",)),
        ("2.20.2", (12, 0), "no_rht_sr", ("nvfp4",)),
        ("2.20.2", (12, 1), "no_rht_sr", ("nvfp4",)),
        ("2.20.2", (13, 0), "unknown_gpu", ()),
    ],
)
def test_places_are_told_apart(version, gpu, kind, formats):
    found = capability(version, gpu)
    assert (found.kind, found.formats) == (kind, formats)
    assert "Transformer Engine" in found.why or "compute capability" in found.why


def test_scale_rule_follows_the_version():
    assert capability("2.13.0", (10, 0)).scale_rule == "te_2_13" and B200.scale_rule == "te"
    assert capability(None, (10, 0)).scale_rule is None
    assert "scale_rule=te_2_13" in capability("2.9", (10, 0)).why


def test_a_model_on_a_cpu_has_no_gpu_whatever_the_machine_has(monkeypatch):
    monkeypatch.setattr(with_te, "installed_version", lambda: "2.20.2")
    assert here("cpu").kind == here(torch.device("meta")).kind == "no_gpu"
    monkeypatch.setattr(with_te, "installed_version", lambda: None)
    assert here("cpu").kind == "no_te" and "transformer_engine" not in sys.modules


def test_report_policy_has_no_obstacle_on_the_whole_recipe():
    assert [list(obstacles(format, NVFP4, B200)) for format in ("nvfp4", "mxfp8")] == [[], []]


@pytest.mark.parametrize(
    ("changes", "formats", "said"),
    [
        ({"weights": "fp32"}, ("nvfp4", "mxfp8"), "precision.weights=fp32"),
        ({"gradients_bf16": ["*.experts"]}, ("nvfp4", "mxfp8"), "gradients_bf16 is not empty"),
        ({"nvfp4": Nvfp4Config(scale_rule="te_2_13")}, ("nvfp4",), "precision.nvfp4.scale_rule=te_2_13"),
        (
            {
                "nvfp4": Nvfp4Config(
                    scale_rule="four_over_six_mse", hadamard="none", stochastic_rounding="none"
                )
            },
            ("nvfp4",),
            "trains with scale_rule=te",
        ),
    ],
)
def test_options_that_it_has_no_form_of(changes, formats, said):
    for format in ("nvfp4", "mxfp8"):
        found = list(obstacles(format, policy(**changes), B200))
        assert len(found) == (format in formats) and all(said in line for line in found)


@pytest.mark.parametrize("hadamard", ["none", "wgrad"])
@pytest.mark.parametrize("rounding", ["none", "gradients"])
def test_sm_12_trains_without_transform_and_stochastic_rounding_only(hadamard, rounding):
    options = Nvfp4Config(hadamard=hadamard, stochastic_rounding=rounding)
    found = list(obstacles("nvfp4", policy(nvfp4=options), capability("2.20.2", (12, 0))))
    assert bool(found) == ((hadamard, rounding) != ("none", "none"))
    assert not found or "set precision.nvfp4.hadamard=none" in found[0]


def test_every_layer_of_ultra_fits():
    table, modules = planned("ultra_pretrain")
    assert refusals(table, modules) == []
    assert [row.name for row in realise(table, modules, B200, {})] == ["te", "te"]


def test_refused_layers_are_listed_with_the_mend():
    (refusal,) = refusals(*planned("pretrain", "precision=nvfp4"))
    assert refusal.layers == tuple(f"backbone.layers.{i}.mixer.in_proj" for i in (0, 2, 5))
    assert (refusal.format, refusal.rule.side, refusal.size) == ("nvfp4", "outputs", 1032)
    text = str(refusal)
    assert "backbone.layers.0.mixer.in_proj [1032, 192] and 2 more: nvfp4" in text
    assert "outputs in multiples of 32" in text and "got 1,032, 1,056 would do" in text
    assert "change model.mamba_num_heads, mamba_head_dim, n_groups or ssm_state_size" in text


def test_both_sides_of_an_expert_count():
    overrides = ("precision=nvfp4", "model.moe_intermediate_size=48", "model.moe_latent_size=64")
    found = [r for r in refusals(*planned("pretrain", *overrides)) if r.layers[0].endswith(".experts")]
    assert {(r.rule.side, r.size) for r in found} == {("outputs", 48), ("inputs", 48)}
    assert all("model.moe_latent_size (hidden_size without it) and moe_inter" in str(r) for r in found)


def test_rows_are_filled_to_multiples_of_the_block_too():
    assert multiple("tokens") % 32 == multiple("tokens of an expert") % 32 == 0
    assert multiple("inputs") == multiple("outputs") == 32


def test_auto_takes_each_format_where_it_fits():
    table, modules = planned("pretrain", "precision=nvfp4")
    low, high = realise(table, modules, B200, {})
    assert (low.format, low.name, high.format, high.name) == ("nvfp4", "emulate", "mxfp8", "te")
    assert "1,056 would do" in low.why and high.why == B200.why
    assert {row.why for row in realise(table, modules, capability(None, None), {})} == {
        "no Transformer Engine is installed"
    }


def test_emulation_can_be_asked_for():
    table, modules = planned("ultra_pretrain", "precision.backend=emulate")
    rows = realise(table, modules, B200, {"NVTE_USE_FAST_MATH": "1"})
    assert {(row.name, row.why) for row in rows} == {("emulate", "precision.backend=emulate")}


def test_te_asked_for_lists_everything_that_does_not_fit():
    table, modules = planned("pretrain", "precision=nvfp4", "precision.backend=te", "precision.weights=fp32")
    with pytest.raises(BackendError) as error:
        realise(table, modules, B200, {})
    said = str(error.value)
    assert said.count("precision.weights=fp32") == 1 and "1,056 would do" in said
    with pytest.raises(BackendError, match=r'no Transformer Engine is installed; .*install the extra "te"'):
        realise(table, modules, capability(None, (10, 0)), {})


def test_plain_policies_have_nothing_to_realise():
    table, modules = planned("pretrain", "precision=bf16", "precision.backend=te")
    assert realise(table, modules, capability(None, None), {}) == ()


@pytest.mark.parametrize(
    "setting",
    ["NVTE_USE_FAST_MATH=1", "NVTE_BACKWARD_OVERRIDE=high_precision", "NVTE_NVFP4_4OVER6=all"],
)
def test_variables_that_change_its_numbers_are_refused(setting):
    name, value = setting.split("=")
    table, modules = planned("ultra_pretrain")
    with pytest.raises(BackendError, match=f"got {setting}; unset {name}"):
        realise(table, modules, B200, {name: value})
    check_environment({name: "0"})
    assert realise(table, modules, capability("2.20.2", (9, 0)), {name: value})[0].name == "emulate"


def test_a_run_that_asks_for_it_without_it_is_refused_before_anything_is_built(monkeypatch):
    config = load_recipe("pretrain", ["precision=nvfp4", "precision.backend=te"])
    machine = requirements.Machine(2, 64 * 10**9, ())
    monkeypatch.setattr(requirements, "installed_version", lambda: None)
    with pytest.raises(BackendError, match=r'precision.backend: te needs .* install the extra "te"'):
        requirements.check_requirements(config, machine)
    monkeypatch.setattr(requirements, "installed_version", lambda: "2.20.2")
    requirements.check_requirements(config, machine)


def test_library_that_does_not_load_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(BackendError, match=r'Transformer Engine does not load; got .*the extra "te"'):
        with_te.make_recipe("nvfp4")


def test_panel_says_who_multiplies_and_why():
    table, modules = planned("ultra_pretrain")
    rows = realise(table, modules, capability(None, None), {})
    text = precision_text(table, torch.device("cpu"), rows)
    assert "mxfp8 emulated: operands exact, products in fp32, because no Transformer Engine is inst" in text
    text = precision_text(table, torch.device("cuda"), realise(table, modules, B200, {}))
    assert "nvfp4, mxfp8 by Transformer Engine 2.20.2 on compute capability 10.0" in text
    facts = precision_rows(table, torch.device("cpu"), rows)
    assert {row["why"] for row in facts if row["format"] == "nvfp4"} == {rows[0].why}
    assert {row["why"] for row in facts if row["format"] == "bf16"} == {""}


class _Fused(torch.autograd.Function):
    """y = x W^T; the weight gradient goes to weight.main_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        if ctx.weight.requires_grad:
            ctx.weight.main_grad.addmm_(dy.float().T, x.float())
        return dy @ ctx.weight, None


class _Linear(nn.Module):
    def __init__(self, in_features, out_features, fuse_wgrad_accumulation=False, **options):
        super().__init__()
        assert fuse_wgrad_accumulation and options["bias"] is False
        shape, options = (out_features, in_features), (options["params_dtype"], options["device"])
        self.weight = nn.Parameter(torch.empty(shape, dtype=options[0], device=options[1]))

    def forward(self, inp):
        assert len(inp) % 32 == 0 and inp.dtype == self.weight.dtype == torch.bfloat16
        return _Fused.apply(inp, self.weight)


class _GroupedLinear(nn.Module):
    def __init__(self, num_gemms, in_features, out_features, **options):
        super().__init__()
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", _Linear(in_features, out_features, **options).weight)

    def forward(self, inp, m_splits):
        assert all(size % 128 == 0 for size in m_splits) and sum(m_splits) == len(inp)
        parts = enumerate(inp.split(m_splits))
        return torch.cat([_Fused.apply(part, getattr(self, f"weight{i}")) for i, part in parts])


@pytest.fixture
def stand_in(monkeypatch):
    """Calls of autocast, in a list; `transformer_engine` is the stand-in."""
    calls = []
    te, package, common = (ModuleType(name) for name in ("te", "transformer_engine", "common"))

    def autocast(enabled=True, recipe=None):
        calls.append((enabled, recipe.name))
        return nullcontext()

    te.Linear, te.GroupedLinear, te.autocast = _Linear, _GroupedLinear, autocast
    common.recipe = SimpleNamespace(
        MXFP8BlockScaling=lambda: SimpleNamespace(name="mxfp8"),
        NVFP4BlockScaling=lambda **options: SimpleNamespace(name="nvfp4", options=options),
    )
    package.pytorch, package.common = te, common
    for name, module in {"": package, ".pytorch": te, ".common": common}.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    return calls


def bf16(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False, False)),
        ({"hadamard": "none"}, (True, False, False)),
        ({"stochastic_rounding": "none"}, (False, True, False)),
        ({"weight_block": "1x16"}, (False, False, True)),
    ],
)
def test_recipe_has_the_options_of_the_policy(stand_in, options, expected):
    made = with_te.make_recipe("nvfp4", Nvfp4Config(**options)).options
    names = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    assert made == dict(zip(names, expected, strict=True))
    assert with_te.make_recipe("mxfp8").name == "mxfp8"


def test_product_shares_the_weight_and_fills_rows_up(stand_in):
    weight, bias = nn.Parameter(bf16(64, 32)), nn.Parameter(bf16(64, seed=1))
    x = bf16(2, 5, 32, seed=2).float().requires_grad_()
    product = TeProduct(with_te.make_recipe("nvfp4"))
    y = product(x, weight, bias)
    expected = x @ weight.float().T + bias.float()
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=5e-2)
    assert y.dtype == torch.float32 and stand_in == [(True, "nvfp4")]
    assert product.linear.weight.data_ptr() == weight.data_ptr()
    with torch.no_grad():
        weight.mul_(2)
        torch.testing.assert_close(product(x, weight), 2 * (y - bias.float()), rtol=1e-2, atol=5e-2)


def test_weight_gradients_add_up_in_fp32_outside_of_grad(stand_in):
    weight, bias = nn.Parameter(bf16(64, 32)), nn.Parameter(bf16(64))
    product = TeProduct(with_te.make_recipe("nvfp4"))
    xs = [bf16(7, 32, seed=seed).requires_grad_() for seed in (1, 2)]
    for x in xs:
        product(x, weight, bias).float().square().sum().backward()
    dys = [2 * (x @ weight.T + bias) for x in xs]
    expected = sum(dy.float().T @ x.float() for dy, x in zip(dys, xs, strict=True))
    assert weight.grad is None and weight.main_grad.dtype == torch.float32
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-2, atol=1.0)
    assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())
    assert bias.grad is not None and xs[0].grad is not None


def test_frozen_weights_get_no_gradient(stand_in):
    weight = nn.Parameter(bf16(64, 32), requires_grad=False)
    x = bf16(4, 32).requires_grad_()
    TeProduct(with_te.make_recipe("mxfp8"))(x, weight).sum().backward()
    assert x.grad is not None and getattr(weight, "main_grad", None) is None
    with torch.inference_mode():
        assert (
            TeGroupedProduct(with_te.make_recipe("mxfp8"))(bf16(128, 32), [128], weight[None]).shape[1] == 64
        )


def test_fp32_weights_are_refused(stand_in):
    with pytest.raises(BackendError, match=r"got torch.float32; set precision.weights=bf16"):
        TeProduct(with_te.make_recipe("mxfp8"))(torch.ones(2, 32), nn.Parameter(torch.ones(32, 32)))


def test_experts_follow_the_plain_ones(stand_in):
    model = micro_model(torch.bfloat16, **FITTING)
    experts = model.get_submodule("backbone.layers.1.mixer.experts")
    x = torch.randn(9, 32).requires_grad_()
    indices = torch.tensor([[0, 2], [1, 2], [0, 1]]).repeat(3, 1)  # none for the last expert
    weights = torch.rand(9, 2).requires_grad_()
    arguments = (x, indices, weights, experts.up_proj, experts.down_proj)
    plain = experts.run(*arguments[:3], *(p.float() for p in arguments[3:]))
    found = TeExperts(with_te.make_recipe("nvfp4"))(*arguments)
    torch.testing.assert_close(found, plain, rtol=3e-2, atol=3e-2 * float(plain.detach().abs().max()))
    expected = torch.autograd.grad(plain.square().sum(), arguments[:1] + arguments[2:])
    found.square().sum().backward()
    held = (x.grad, weights.grad, experts.up_proj.main_grad, experts.down_proj.main_grad)
    for a, b in zip(held, expected, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0.1, atol=0.05 * float(b.abs().max()))
    assert not held[2][3].any() and experts.up_proj.grad is None


def te_engine(seed=0):
    model = micro_model(torch.bfloat16, **FITTING)
    return micro_engine(model, policy=apply_policy(model, NVFP4, seed=seed, found=B200))


def test_engine_trains_on_its_fp32_gradients(stand_in):
    plain, engine = micro_engine(micro_model(torch.bfloat16, **FITTING)), te_engine()
    module = engine.model.get_submodule
    assert isinstance(module("backbone.layers.0.mixer.in_proj").product, TeProduct)
    assert isinstance(module("backbone.layers.1.mixer.experts").run, TeExperts)
    assert [row.name for row in engine.policy.realised] == ["te", "te"]
    losses = [[step(e, micro_batches(2))["loss"] for _ in range(6)] for e in (plain, engine)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1][-1] < losses[1][0] - 0.3
    assert {name for _, name in stand_in} == {"nvfp4", "mxfp8"}


def test_gradients_are_taken_once_and_cleared(stand_in):
    engine, name = te_engine(), "backbone.layers.0.mixer.in_proj.weight"
    weight = dict(engine.model.named_parameters())[name]
    engine.forward_backward(micro_batches(2), objective())
    first = engine.master.gradients()[name].clone()
    assert first.any() and weight.main_grad is None
    assert torch.equal(engine.master.gradients()[name], first)
    engine.master.clear()
    assert name not in engine.master.gradients()
    engine.forward_backward(micro_batches(2), objective())
    assert torch.equal(engine.master.gradients()[name], first)


def test_random_state_of_the_library_is_in_the_checkpoint(stand_in):
    engine = te_engine(seed=3)
    saved = engine.precision.state_dict()
    drawn = torch.rand(3)
    engine.precision.load_state_dict(saved)
    assert torch.equal(torch.rand(3), drawn)


def test_a_format_that_does_not_fit_is_emulated_beside_the_other(stand_in):
    model = micro_model(torch.bfloat16, **FITTING | {"mamba_num_heads": 4})
    applied = apply_policy(model, NVFP4, found=B200)
    assert [row.name for row in applied.realised] == ["emulate", "te"]
    layer = model.get_submodule("backbone.layers.0.mixer")
    assert isinstance(layer.in_proj.product, QuantizedProduct)
    assert isinstance(layer.out_proj.product, TeProduct)
