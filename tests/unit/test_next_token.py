from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nemotron_ultra import HybridLM, TokenBatch
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.objectives.next_token import NextToken

CONFIG = ModelConfig(
    pattern="*E",
    vocab_size=13,
    hidden_size=8,
    head_dim=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    num_nextn_predict_layers=1,
)
BATCH = TokenBatch.from_documents([[1, 2, 3, 4, 5], [6], [7, 8, 9]])


@pytest.fixture(scope="module")
def model() -> HybridLM:
    return HybridLM(CONFIG, dtype=torch.float64)


def run(model, objective, batch=BATCH, counts=None):
    output = model(batch.tokens_T, batch.cu_seqlens)
    return output, *objective(output, batch, counts or objective.count(batch))


def test_counts_stop_at_the_end_of_documents():
    counts = NextToken(mtp_depths=3).count(BATCH)
    assert counts == {"loss": 6.0, "tokens": 9.0, "mtp_1": 4.0, "mtp_2": 2.0, "mtp_3": 1.0}


def test_loss_is_the_written_sum(model):
    output, loss, metrics = run(model, NextToken(mtp_loss_scale=0.3, balance_coefficient=0.01))
    main = F.cross_entropy(output.logits_TV[[0, 1, 2, 3, 6, 7]], torch.tensor([2, 3, 4, 5, 8, 9]))
    one = F.cross_entropy(output.mtp_logits_JTV[0][[0, 1, 2, 6]], torch.tensor([3, 4, 5, 9]))
    two = F.cross_entropy(output.mtp_logits_JTV[1][[0, 1]], torch.tensor([4, 5]))
    balance = output.router.balance_loss / 9
    torch.testing.assert_close(loss, main + 0.15 * one + 0.15 * two + 0.01 * balance)
    expected = {"loss": main, "mtp_1/loss": one, "mtp_2/loss": two, "balance_loss": balance}
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value.detach())
    assert not any(m.requires_grad for m in metrics.values())


def test_accept_is_the_rate_of_argmax_hits(model):
    output, _, metrics = run(model, NextToken())
    hits = output.mtp_logits_JTV[0].argmax(-1)[[0, 1, 2, 6]] == torch.tensor([3, 4, 5, 9])
    assert metrics["mtp_1/accept"].item() == pytest.approx(hits.double().mean().item())


def test_micro_batches_add_up(model):
    objective = NextToken()
    parts = [TokenBatch.from_documents(d) for d in ([[1, 2, 3, 4, 5]], [[6], [7, 8, 9]])]
    counts = [objective.count(p) for p in parts]
    total = {k: counts[0][k] + counts[1][k] for k in counts[0]}
    losses, metrics = zip(*(run(model, objective, p, total)[1:] for p in parts), strict=True)
    _, whole, whole_metrics = run(model, objective)
    torch.testing.assert_close(sum(losses), whole)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(metrics[0][name] + metrics[1][name], value)


def test_weights_of_a_label_follow_it_to_every_depth(model):
    weight = BATCH.weight_T.clone()
    weight[3] = 0  # the label 5 of the first document
    batch = TokenBatch(**{**vars(BATCH), "weight_T": weight})
    counts = NextToken(mtp_depths=2).count(batch)
    assert counts == {"loss": 5.0, "tokens": 9.0, "mtp_1": 3.0, "mtp_2": 1.0}


def test_documents_too_short_for_a_depth(model):
    batch = TokenBatch.from_documents([[1, 2], [3]])
    _, loss, metrics = run(model, NextToken(), batch)
    assert loss.isfinite() and metrics["mtp_2/loss"] == 0


def test_backbone_gets_gradients_from_every_term(model):
    _, loss, _ = run(model, NextToken())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()


def test_evaluation_has_no_balance_term(model):
    with torch.no_grad():
        _, loss, metrics = run(model, NextToken())
    assert "balance_loss" not in metrics and not loss.requires_grad


def test_fractional_weights_keep_the_precision_of_the_model(model):
    weight = BATCH.weight_T / 3
    batch = TokenBatch(**{**vars(BATCH), "weight_T": weight})
    output, loss, _ = run(model, NextToken(mtp_loss_scale=0.0, balance_coefficient=0.0), batch)
    rows = torch.tensor([0, 1, 2, 3, 6, 7])
    expected = F.cross_entropy(output.logits_TV[rows], torch.tensor([2, 3, 4, 5, 8, 9]))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_few_trained_tokens_skip_the_head_of_the_others(model):
    """Loss, metrics and gradients are those of the written sum, also where one token of nine is trained."""
    weight_T = torch.tensor([0.0, 0, 1, 0, 0, 0, 0, 0, 0])
    batch = replace(BATCH, weight_T=weight_T)
    output, loss, metrics = run(model, NextToken(mtp_loss_scale=0.3, balance_coefficient=0), batch)
    main = F.cross_entropy(output.logits_TV[[2]], torch.tensor([4]))
    one = F.cross_entropy(output.mtp_logits_JTV[0][[1]], torch.tensor([4]))
    two = F.cross_entropy(output.mtp_logits_JTV[1][[0]], torch.tensor([4]))
    torch.testing.assert_close(loss, main + 0.15 * one + 0.15 * two)
    torch.testing.assert_close(metrics["mtp_2/loss"], two.detach())
    found = torch.autograd.grad(loss, [model.lm_head.weight], retain_graph=True)[0]
    expected = torch.autograd.grad(main + 0.15 * one + 0.15 * two, [model.lm_head.weight])[0]
    torch.testing.assert_close(found, expected)
    assert run(model, NextToken(), replace(BATCH, weight_T=torch.zeros(9)))[1].isfinite()
