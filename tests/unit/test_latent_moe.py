import pytest
import torch

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.latent_moe import LatentMoE
from nemotron_ultra.ops.experts import dispatch, relu_squared, routed_experts
from nemotron_ultra.ops.segments import Segments


def config(**changes) -> ModelConfig:
    sizes = dict(pattern="E", vocab_size=8, hidden_size=10, n_routed_experts=6, num_experts_per_tok=2)
    widths = dict(moe_intermediate_size=5, moe_latent_size=4, moe_shared_expert_intermediate_size=7)
    return ModelConfig(**{**sizes, **widths, **changes})


def layer(c: ModelConfig) -> LatentMoE:
    module = LatentMoE(c).double()
    g = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return module


def inputs(tokens: int, width: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    return torch.randn(tokens, width, generator=g, dtype=torch.float64, requires_grad=True)


def by_loop(moe: LatentMoE, x: torch.Tensor, routing) -> torch.Tensor:
    v = x if moe.fc1_latent_proj is None else x @ moe.fc1_latent_proj.weight.T
    rows = []
    for t in range(x.shape[0]):
        row = 0
        for e, w in zip(routing.indices_TK[t], routing.weights_TK[t], strict=True):
            row = row + w * (moe.experts.down_proj[e] @ (moe.experts.up_proj[e] @ v[t]).relu() ** 2)
        rows.append(row)
    y = torch.stack(rows)
    y = y if moe.fc2_latent_proj is None else y @ moe.fc2_latent_proj.weight.T
    shared = moe.shared_experts
    return y + (x @ shared.up_proj.weight.T).relu() ** 2 @ shared.down_proj.weight.T


@pytest.mark.parametrize("changes", [{}, {"moe_latent_size": 0}, {"num_experts_per_tok": 1}], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_equals_one_token_and_expert_at_a_time(tokens, changes):
    """Three tokens are fewer than the experts; one leaves most of them without tokens."""
    moe, x = layer(config(**changes)), inputs(tokens, 10)
    y, routing = moe(x, Segments(tokens))
    expected = by_loop(moe, x, routing)
    torch.testing.assert_close(y, expected)
    wanted = [x, *moe.parameters()]
    grad = torch.randn_like(y)
    mine = torch.autograd.grad(y, wanted, grad, retain_graph=True)
    theirs = torch.autograd.grad(expected, wanted, grad, retain_graph=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_by_finite_differences():
    x, g = inputs(5, 3), torch.Generator().manual_seed(4)
    up, down, w = (
        torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True)
        for s in ((4, 6, 3), (4, 3, 6), (5, 2))
    )
    indices = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 1], [1, 0]])
    assert torch.autograd.gradcheck(
        lambda x, w, up, down: routed_experts(x, indices, w, up, down), (x, w, up, down)
    )


def test_experts_without_tokens_get_zero_gradients():
    x, up, down = inputs(2, 3), torch.ones(3, 4, 3).double(), torch.ones(3, 3, 4).double()
    up.requires_grad_(), down.requires_grad_()
    w = torch.ones(2, 1, dtype=torch.float64)
    routed_experts(x.abs(), torch.tensor([[2], [2]]), w, up, down).sum().backward()
    assert up.grad[:2].abs().max() == 0 and down.grad[:2].abs().max() == 0
    assert up.grad[2].abs().max() > 0


def test_dispatch_sorts_stably():
    plan = dispatch(torch.tensor([[1, 0], [0, 3]]), 4)
    assert plan.token_N.tolist() == [0, 1, 0, 1] and plan.sizes == [2, 1, 0, 1]
    assert plan.place_TK.tolist() == [[2, 0], [1, 3]]


def test_no_shared_expert():
    moe = layer(config(moe_shared_expert_intermediate_size=0))
    assert moe.shared_experts is None
    assert moe(inputs(3, 10), Segments(3))[0].shape == (3, 10)


def test_weights_in_bf16_compute_in_float32():
    moe = layer(config()).bfloat16()
    y, routing = moe(inputs(4, 10).detach().float(), Segments(4))
    assert y.dtype == routing.gate_out_TE.dtype == torch.float32
    y.sum().backward()
    assert moe.experts.up_proj.grad.dtype == torch.bfloat16


def test_balance_loss_is_made_only_when_asked():
    moe, x = layer(config()), inputs(4, 10)
    assert moe(x, Segments(4))[1].balance_loss is None
    assert moe(x, Segments(4), True)[1].balance_loss.requires_grad


def test_relu_squared():
    x = inputs(4, 5)
    assert torch.autograd.gradcheck(lambda x: relu_squared(x * 1), (x,))
    torch.testing.assert_close(relu_squared(x * 1), x.relu() ** 2)
