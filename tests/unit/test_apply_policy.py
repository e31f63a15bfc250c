"""A policy on a built model: who gets which product, what the engine keeps, what is refused."""

import pytest
import torch

from micro import micro_batches, micro_engine, micro_model, objective, step, weights
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.config.precision import PrecisionConfig, PrecisionRule
from nemotron_ultra.engine.recompute import recompute_blocks
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.precision.apply import apply_policy
from nemotron_ultra.precision.experts import QuantizedExperts
from nemotron_ultra.precision.formats import Mxfp8, Nvfp4
from nemotron_ultra.precision.linear import QuantizedProduct

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
NVFP4 = load_recipe("pretrain", ["precision=nvfp4"]).precision


def nvfp4_engine(seed=0, dtype=torch.bfloat16, **options):
    model = micro_model(dtype, **SIZES)
    return micro_engine(model, policy=apply_policy(model, NVFP4, seed=seed), **options)


def policy_of(*rules, **options):
    rules = [PrecisionRule(match=match, format=format) for match, format in rules]
    return PrecisionConfig(name="x", rules=rules, nvfp4={}, **options)


def test_products_are_those_of_the_table():
    engine = nvfp4_engine()
    module = engine.model.get_submodule
    assert isinstance(module("backbone.layers.0.mixer.in_proj").product.format, Nvfp4)
    assert isinstance(module("backbone.layers.0.mixer.out_proj").product.format, Mxfp8)
    assert isinstance(module("backbone.layers.1.mixer.experts").run, QuantizedExperts)
    for name, format in engine.policy.table.formats.items():
        product = getattr(module(name), "product", None)
        assert isinstance(product, QuantizedProduct) == (format in ("nvfp4", "mxfp8") and product is not None)


def test_plain_policies_leave_the_model_alone():
    model = micro_model()
    applied = apply_policy(model, PrecisionConfig(name="fp32"))
    assert applied.state is None and not applied.own_operands
    assert not any("product" in vars(module) for module in model.modules())


def test_training_follows_the_plain_model_and_reports_non_finite_elements():
    batches = micro_batches(2)
    plain, low = micro_engine(micro_model(torch.bfloat16, **SIZES)), nvfp4_engine()
    losses = [[step(engine, batches)["loss"] for _ in range(8)] for engine in (plain, low)]
    assert losses[1] != losses[0] and losses[1][-1] < losses[1][0] - 0.5
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert step(low, batches)["precision/non_finite"] == 0
    assert "precision/non_finite" not in step(plain, batches)


def test_random_state_travels_with_the_engine():
    batches = micro_batches(2)
    whole, part = nvfp4_engine(), nvfp4_engine()
    for engine in (whole, part):
        step(engine, batches)
    resumed = nvfp4_engine(seed=99)
    saved = part.state_dict()
    resumed.load_state_dict(saved)
    metrics = [step(engine, batches) for engine in (whole, resumed)]
    assert metrics[0] == metrics[1]
    found, expected = weights(resumed.model), weights(whole.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_seed_changes_gradients_and_not_the_loss():
    engines = [nvfp4_engine(seed=seed) for seed in (0, 1)]
    found = [engine.forward_backward(micro_batches(1), objective()) for engine in engines]
    assert found[0] == found[1]
    a, b = (engine.master.gradients()["backbone.layers.0.mixer.in_proj.weight"] for engine in engines)
    assert not torch.equal(a, b)


def test_micro_batches_share_one_operand_per_step():
    engine = nvfp4_engine()
    product = engine.model.get_submodule("backbone.layers.0.mixer.in_proj").product
    engine.forward_backward(micro_batches(2), objective())
    made = product.operands
    engine.forward_backward(micro_batches(2), objective())
    engine.evaluate(micro_batches(1), objective())
    assert product.operands is made
    engine.optimizer_step()
    engine.evaluate(micro_batches(1), objective())
    assert product.operands is not made


def test_weights_with_operands_of_their_own_are_not_cast_for_the_step():
    engine = nvfp4_engine()
    parameters = dict(engine.model.named_parameters())
    with engine.master.computing():
        assert parameters["backbone.layers.0.mixer.in_proj.weight"].dtype == torch.bfloat16
        assert parameters["backbone.layers.2.mixer.q_proj.weight"].dtype == torch.float32
    gradients = engine.forward_backward(micro_batches(1), objective()) and engine.master.gradients()
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    grad = gradients["backbone.layers.0.mixer.in_proj.weight"]
    assert not torch.equal(grad, grad.bfloat16().float())


def test_float32_weights_are_quantised_anew_after_each_step():
    engine = nvfp4_engine(dtype=torch.float32)
    losses = [step(engine, micro_batches(1))["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    product = engine.model.get_submodule("backbone.layers.0.mixer.in_proj").product
    made = product.operands
    step(engine, micro_batches(1))
    step(engine, micro_batches(1))
    assert product.operands is not made


def test_recomputed_blocks_give_the_same_gradients():
    found = []
    for recompute in (False, True):
        engine = nvfp4_engine()
        if recompute:
            recompute_blocks(engine.model)
        engine.forward_backward(micro_batches(1), objective())
        found.append(engine.master.gradients())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_module_without_a_low_precision_product_is_refused():
    with pytest.raises(ConfigError, match="lm_head cannot be nvfp4: the head has no low-precision product"):
        apply_policy(micro_model(), policy_of(("lm_head", "nvfp4")))


def test_width_that_is_no_multiple_of_a_block_is_refused():
    rules = [("backbone.layers.1.mixer.experts", "nvfp4")]
    with pytest.raises(ConfigError, match=r"backbone.layers.1.mixer.experts \[4, 16, 24\] cannot be nvfp4"):
        apply_policy(micro_model(), policy_of(*rules))


def test_gradients_are_lowered_by_name():
    model = micro_model()
    policy = policy_of(gradients_bf16=["backbone.layers.0.mixer.in_proj"])
    engine = micro_engine(model, policy=apply_policy(model, policy))
    engine.forward_backward(micro_batches(2), objective())
    gradients = engine.master.gradients()
    lowered = {name for name, g in gradients.items() if torch.equal(g, g.bfloat16().float()) and g.any()}
    assert lowered == {"backbone.layers.0.mixer.in_proj.weight"}
    assert "loss" in step(engine, micro_batches(1))
