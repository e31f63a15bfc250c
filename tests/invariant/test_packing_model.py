"""A pack equals its documents one by one: logits, MTP, router counts, loss and every gradient."""

import pytest
import torch

from nemotron_ultra import HybridLM, TokenBatch
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.objectives.next_token import NextToken

CONFIG = ModelConfig(
    pattern="ME*-M",
    vocab_size=31,
    hidden_size=12,
    head_dim=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_num_heads=4,
    mamba_head_dim=5,
    ssm_state_size=6,
    n_groups=2,
    chunk_size=8,
    intermediate_size=16,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    moe_latent_size=6,
    moe_shared_expert_intermediate_size=10,
    num_nextn_predict_layers=1,
    initializer_range=0.3,
)
PACKS = [(1, 17, 3, 9), (8, 8, 8), (1, 1, 2), (23, 5)]


def documents(lengths: tuple[int, ...]) -> list[list[int]]:
    g = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(31, (n,), generator=g).tolist() for n in lengths]


@pytest.fixture
def model() -> HybridLM:
    return HybridLM(CONFIG, dtype=torch.float64)


@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_outputs(model, lengths):
    batch = TokenBatch.from_documents(documents(lengths))
    packed = model(batch.tokens_T, batch.cu_seqlens)
    alone = [model(torch.tensor(d)) for d in documents(lengths)]
    torch.testing.assert_close(packed.logits_TV, torch.cat([o.logits_TV for o in alone]))
    torch.testing.assert_close(packed.mtp_logits_JTV, torch.cat([o.mtp_logits_JTV for o in alone], 1))
    assert torch.equal(packed.router.counts_LE, sum(o.router.counts_LE for o in alone))
    torch.testing.assert_close(packed.router.balance_loss, sum(o.router.balance_loss for o in alone))


@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_gradients(model, lengths):
    objective, batch = NextToken(), TokenBatch.from_documents(documents(lengths))
    counts = objective.count(batch)
    objective(model(batch.tokens_T, batch.cu_seqlens), batch, counts)[0].backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for document in documents(lengths):
        single = TokenBatch.from_documents([document])
        objective(model(single.tokens_T, single.cu_seqlens), single, counts)[0].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, atol=1e-11, rtol=1e-7, msg=name)
