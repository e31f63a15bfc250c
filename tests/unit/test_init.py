import math

import pytest
import torch

from nemotron_ultra import HybridLM
from nemotron_ultra.config.model import ModelConfig

CONFIG = ModelConfig(
    pattern="ME*-",
    vocab_size=64,
    hidden_size=96,
    head_dim=16,
    num_attention_heads=4,
    mamba_num_heads=64,
    mamba_head_dim=2,
    ssm_state_size=8,
    intermediate_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    moe_latent_size=32,
    moe_shared_expert_intermediate_size=64,
    num_nextn_predict_layers=1,
    initializer_range=0.0099,
    use_bias=True,
)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return HybridLM(CONFIG).state_dict()


OUT = ("o_proj", "out_proj", "down_proj", "fc2_latent_proj")


def test_std_of_every_matrix(state):
    skipped = ("norm", "conv1d", "A_log", "dt_bias", ".D", "bias")
    for name, tensor in state.items():
        if any(word in name for word in skipped):
            continue
        expected = 0.0099 / math.sqrt(4) if any(word in name for word in OUT) else 0.0099
        assert tensor.std().item() == pytest.approx(expected, rel=0.1), name
        assert abs(tensor.mean().item()) < 5 * expected / math.sqrt(tensor.numel()), name


def test_mamba_parameters(state):
    mixer = "backbone.layers.0.mixer."
    A = state[mixer + "A_log"].exp()
    assert A.min() >= 1 and A.max() <= 16 and A.std() > 3
    dt = torch.nn.functional.softplus(state[mixer + "dt_bias"])
    assert dt.min() >= 0.001 * 0.999 and dt.max() <= 0.1 * 1.001
    assert 0.004 < dt.log().mean().exp() < 0.025
    assert state[mixer + "conv1d.weight"].abs().max() <= 0.5 and state[mixer + "conv1d.weight"].std() > 0.25
    assert (state[mixer + "D"] == 1).all() and (state[mixer + "norm.weight"] == 1).all()
    assert (state[mixer + "in_proj.bias"] == 0).all()


def test_norms_are_one_and_correction_biases_zero(state):
    for name, tensor in state.items():
        if "norm" in name:
            assert (tensor == 1).all(), name
        if name.endswith("e_score_correction_bias"):
            assert (tensor == 0).all(), name


def test_every_tensor_is_drawn_again():
    model = HybridLM(CONFIG)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
    model.init_weights(0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_seed_changes_every_draw():
    model = HybridLM(CONFIG)
    before = {n: t.clone() for n, t in model.named_parameters() if "norm" not in n and "bias" not in n}
    model.init_weights(1)
    for name, tensor in before.items():
        assert name.endswith(".D") or not torch.equal(tensor, model.get_parameter(name)), name


def test_other_layers_do_not_change_a_draw(state):
    shorter = HybridLM(ModelConfig(**{**vars(CONFIG), "pattern": "ME"}))
    name = "backbone.layers.1.mixer.experts.up_proj"
    assert torch.equal(shorter.get_parameter(name), state[name])


def test_without_rescaling(state):
    plain = HybridLM(ModelConfig(**{**vars(CONFIG), "rescale_prenorm_residual": False}))
    name = "backbone.layers.3.mixer.down_proj.weight"
    torch.testing.assert_close(plain.get_parameter(name), 2 * state[name])
