"""The torch engine: what a step does, what evaluation leaves alone, and what is refused."""

from dataclasses import replace

import pytest
import torch

from micro import joined, micro_batches, micro_engine, micro_model, objective, step, weights
from nemotron_ultra.config.optim import OptimConfig
from nemotron_ultra.engine.recompute import recompute_blocks
from nemotron_ultra.engine.schedule import Schedule
from nemotron_ultra.engine.torch_engine import TorchEngine
from nemotron_ultra.errors import CheckpointError, NonFiniteError
from nemotron_ultra.precision.grads import first_non_finite, global_norm


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_loss_falls_on_one_batch():
    engine, batches = micro_engine(), micro_batches(2)
    losses = [step(engine, batches)["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5
    assert engine.step == 12 and engine.tokens == 12 * sum(b.num_tokens for b in batches)


def test_metrics_of_a_step():
    metrics = step(micro_engine(), micro_batches(2))
    assert metrics["lr"] == 1e-2 and metrics["grad_norm"] > 0
    assert {"loss", "mtp_1/loss", "mtp_2/loss", "mtp_1/accept", "balance_loss"} <= metrics.keys()


def test_steps_are_those_of_torch_adamw():
    """Bit for bit, with decay on matrices only."""
    engine, twin = micro_engine(clip=0.0, router_bias_rate=0.0), micro_engine(router_bias_rate=0.0)
    twins = dict(twin.model.named_parameters())
    groups = [
        {"params": [p for p in twins.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in twins.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for batches in (micro_batches(2), micro_batches(2, seed=1)):
        step(engine, batches)
        twin.forward_backward(batches, objective())
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(engine.model), weights(twin.model))


def test_vectors_do_not_decay():
    engine = micro_engine()
    kept = {name for name in engine.master.masters if not engine.optimizer.decay_of(name)}
    assert {"A_log", "D", "dt_bias", "bias"} <= {name.rsplit(".", 1)[-1] for name in kept}
    assert not {name for name in kept if "proj" in name or "embeddings" in name or "experts" in name}


def test_clipping_bounds_the_gradient():
    engine, batches = micro_engine(clip=1e-3), micro_batches(2)
    engine.forward_backward(batches, objective())
    gradients = engine.master.gradients()
    reported = engine.optimizer_step()["grad_norm"]
    assert reported > 1e-3
    assert float(global_norm(gradients.values())) == pytest.approx(1e-3, rel=1e-2)


def test_router_bias_moves_against_the_load():
    engine, batches = micro_engine(router_bias_rate=1e-3), micro_batches(3)
    step(engine, batches)
    for (_, moe), counts_E in zip(engine.model.moe_layers(), engine.counts_LE, strict=True):
        expected = 1e-3 * torch.sign(counts_E.float().mean() - counts_E)
        torch.testing.assert_close(moe.gate.e_score_correction_bias, expected)
    per_layer = sum(b.num_tokens for b in batches) * 2
    assert engine.counts_LE.sum(1).tolist() == [
        per_layer,
        per_layer,
        2 * per_layer,
    ]  # the MTP layer serves 2 depths


def test_evaluate_leaves_everything_alone():
    engine = micro_engine()
    step(engine, micro_batches(1))
    before, counts, random = weights(engine.model), engine.counts_LE.clone(), torch.get_rng_state()
    metrics = engine.evaluate(micro_batches(3, seed=5), objective())
    assert metrics["loss"] > 0 and "mtp_2/loss" in metrics
    assert same(before, weights(engine.model)) and torch.equal(counts, engine.counts_LE)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in engine.model.parameters())


def test_evaluation_between_accumulation_changes_nothing():
    batches = micro_batches(2)
    plain, disturbed = micro_engine(), micro_engine()
    step(plain, batches)
    disturbed.forward_backward(batches, objective())
    disturbed.evaluate(micro_batches(1, seed=9), objective())
    disturbed.optimizer_step()
    assert same(weights(plain.model), weights(disturbed.model))


def test_logprob_is_the_log_softmax():
    engine, batch = micro_engine(), micro_batches(1)[0]
    logits_TV = engine.model(batch.tokens_T, batch.cu_seqlens).logits_TV.detach()
    expected_T = logits_TV.log_softmax(-1).gather(1, batch.labels_T[:, None])[:, 0]
    torch.testing.assert_close(engine.logprob(batch), expected_T, rtol=1e-5, atol=1e-5)


def test_export_names_are_the_models():
    engine = micro_engine()
    assert same(dict(engine.export_weights()), engine.model.state_dict())


def test_state_continues_bit_for_bit():
    engine, batches = micro_engine(), micro_batches(6)
    for batch in batches[:3]:
        step(engine, [batch])
    state = {k: v for k, v in engine.state_dict().items() if k != "model"}
    state = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    other = micro_engine(micro_model())
    other.load_state_dict(state | {"model": weights(engine.model)})
    for batch in batches[3:]:
        assert step(engine, [batch]) == step(other, [batch])
    assert same(weights(engine.model), weights(other.model))


def test_state_of_another_model_is_refused():
    state = micro_engine().state_dict()
    with pytest.raises(CheckpointError, match="does not fit"):
        micro_engine(micro_model(pattern="ME")).load_state_dict(state)


def test_nan_weight_names_layer_and_documents():
    engine, batches = micro_engine(), micro_batches(2)
    with torch.no_grad():
        engine.model.backbone.layers[2].mixer.q_proj.weight[0, 0] = float("nan")
    before = weights(engine.model)
    with pytest.raises(NonFiniteError, match=r"loss of step 1 .* backbone\.layers\.2") as caught:
        step(engine, batches)
    assert "micro:0:0" in str(caught.value) and "micro:0:1" in str(caught.value)
    assert all(
        torch.equal(a, b) or torch.isnan(b).any()
        for a, b in zip(weights(engine.model).values(), before.values(), strict=True)
    )
    assert engine.step == 0 and all(p.grad is None for p in engine.model.parameters())


def test_nan_in_a_batch_is_refused():
    engine, batches = micro_engine(), micro_batches(2)
    weight_T = batches[1].weight_T.clone()
    weight_T[0] = float("nan")
    before = weights(engine.model)
    with pytest.raises(NonFiniteError, match=r"weight of step 1 .* count of loss") as caught:
        step(engine, [batches[0], replace(batches[1], weight_T=weight_T)])
    assert "micro:1:0" in str(caught.value) and "micro:0:0" not in str(caught.value)
    assert same(before, weights(engine.model))


def test_infinite_gradient_names_the_parameter():
    engine, batches = micro_engine(), micro_batches(1)
    handle = engine.model.backbone.layers[0].mixer.A_log.register_hook(lambda grad: grad * float("inf"))
    before = weights(engine.model)
    with pytest.raises(NonFiniteError, match=r"gradient of step 1 .* backbone\.layers\.0\.mixer\.A_log"):
        step(engine, batches)
    assert same(before, weights(engine.model)) and engine.step == 0
    handle.remove()
    step(engine, batches)
    assert engine.step == 1


@pytest.mark.parametrize("pattern", ["ME*-E", "M"])
def test_recompute_gives_the_same_step(pattern):
    plain, again = micro_engine(micro_model(pattern=pattern)), micro_model(pattern=pattern)
    assert recompute_blocks(again) == len(pattern) + 2
    again = micro_engine(again)
    one, other = step(plain, micro_batches(2)), step(again, micro_batches(2))
    assert one == other
    assert same(weights(plain.model), weights(again.model))


def test_bf16_weights_have_fp32_masters_and_gradients():
    engine, batches = micro_engine(micro_model(torch.bfloat16), lr=1e-4), micro_batches(2)
    engine.forward_backward(batches, objective())
    assert {g.dtype for g in engine.master.gradients().values()} == {torch.float32}
    masters = {name: m.detach().clone() for name, m in engine.master.separate.items()}
    engine.optimizer_step()
    name = "backbone.layers.0.mixer.in_proj.weight"
    assert engine.model.get_parameter(name).dtype == torch.bfloat16
    assert not torch.equal(engine.master.masters[name], masters[name])
    assert torch.equal(engine.model.get_parameter(name), engine.master.masters[name].bfloat16())


def test_small_updates_survive_bf16_weights():
    """1e-6 is lost when added to a bf16 weight near 1, and kept by its master."""
    engine = micro_engine(micro_model(torch.bfloat16), lr=1e-6)
    for _ in range(3):
        step(engine, micro_batches(1))
    name = "backbone.layers.0.norm.weight"
    moved = (engine.master.masters[name].detach() - 1).abs()
    assert 1e-6 < float(moved.max()) < 4e-6
    assert torch.equal(engine.model.get_parameter(name).float(), torch.ones_like(moved))


def test_gradients_of_bf16_weights_are_those_of_fp32_ones():
    """Report 2.7: a bf16 buffer loses a fifth of the MTP part of the head's gradient at 64 micro-batches."""
    batches = [b for i in range(8) for b in micro_batches(1, seed=i)]
    engine = micro_engine(micro_model(torch.bfloat16))
    twin = micro_engine(micro_model(torch.bfloat16).float())
    assert engine.forward_backward(batches, objective()) == twin.forward_backward(batches, objective())
    assert same(engine.master.gradients(), twin.master.gradients())
    assert all(w.dtype == torch.bfloat16 and w.grad is None for w in engine.master.weights.values())


def test_first_non_finite_keeps_the_order():
    tensors = {"a": torch.ones(2), "b": torch.tensor([1.0, float("inf")]), "c": torch.tensor([float("nan")])}
    assert first_non_finite(tensors) == "b" and first_non_finite({"a": torch.ones(1)}) is None


def test_two_forward_backwards_before_one_step_count_together():
    engine, batches = micro_engine(), micro_batches(2)
    engine.forward_backward(batches[:1], objective())
    first = engine.counts_LE.clone()
    engine.forward_backward(batches[1:], objective())
    assert int(engine.counts_LE.sum()) > int(first.sum())
    engine.optimizer_step()
    assert engine.tokens == sum(b.num_tokens for b in batches)


def test_residual_norm_does_not_depend_on_the_split():
    one, other, batches = micro_engine(), micro_engine(), micro_batches(3)
    one.forward_backward([joined(batches)], objective())
    other.forward_backward(batches, objective())
    torch.testing.assert_close(one.residual_norm_L, other.residual_norm_L, rtol=1e-5, atol=1e-6)


def test_a_step_may_move_the_schedule_by_a_fixed_number_of_tokens():
    """Rows of tasks are of many lengths; the decay still ends at the step that the plan says."""
    schedule = Schedule(name="cosine", peak=1e-2, total_tokens=3000)
    engine = TorchEngine(micro_model(), OptimConfig(lr=1e-2), schedule, tokens_per_step=1000)
    rates = [step(engine, micro_batches(1, seed))["lr"] for seed in range(3)]
    assert rates == pytest.approx([schedule(1000), schedule(2000), 0.0])
