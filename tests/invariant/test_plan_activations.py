"""The plan's estimate of kept activations against what autograd really keeps."""

from __future__ import annotations

import pytest
import torch

from nemotron_ultra import HybridLM, ModelConfig
from nemotron_ultra.config.plan import activation_bytes

TOKENS = 256


def config(pattern: str, mtp: int = 0) -> ModelConfig:
    return ModelConfig(
        pattern=pattern, vocab_size=64, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=32, n_groups=2, chunk_size=64,
        intermediate_size=256, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=128,
        moe_shared_expert_intermediate_size=256, moe_latent_size=64, num_nextn_predict_layers=mtp,
    )  # fmt: skip


def kept(config: ModelConfig) -> int:
    """Bytes of all storages that a training forward saves, but for the weights."""
    model = HybridLM(config).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.arange(TOKENS) % config.vocab_size)
    assert output.hidden_TD.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("letter", ["M", "E", "*", "-"])
def test_one_more_layer(letter):
    """The difference of two depths, so that what is kept once per model drops out."""
    found = kept(config(3 * letter)) - kept(config(letter))
    estimate = activation_bytes(config(3 * letter), TOKENS) - activation_bytes(config(letter), TOKENS)
    assert estimate == pytest.approx(found, rel=0.3)


def test_whole_model_with_mtp():
    model = config("ME*-ME", mtp=1)
    assert activation_bytes(model, TOKENS) == pytest.approx(kept(model), rel=0.25)
