"""Hub names <-> state dict names."""

from __future__ import annotations

import pytest
import torch

from nemotron_ultra import HybridLM, ModelConfig
from nemotron_ultra.config.hf_tensors import hub_tensors, state_tensors
from nemotron_ultra.model.hf_names import canonical_name, hub_items, state_name, stays_fp32

CONFIG = ModelConfig(
    pattern="ME*-",
    vocab_size=24,
    hidden_size=16,
    head_dim=8,
    mamba_head_dim=8,
    ssm_state_size=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    moe_shared_expert_intermediate_size=10,
    moe_latent_size=8,
    intermediate_size=12,
    num_nextn_predict_layers=2,
    use_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize(
    ("key", "canonical"),
    [
        ("model.layers.3.norm.weight", "backbone.layers.3.norm.weight"),
        ("backbone.embedding.weight", "backbone.embeddings.weight"),
        ("model.embeddings.weight", "backbone.embeddings.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.weight"),
    ],
)
def test_other_prefixes(key, canonical):
    assert canonical_name(key) == canonical


def test_experts_one_by_one_and_stacked():
    stem = "backbone.layers.1.mixer.experts"
    assert state_name(f"{stem}.13.up_proj.weight") == (f"{stem}.up_proj", 13)
    assert state_name("model.layers.1.mixer.experts.0.down_proj.weight") == (f"{stem}.down_proj", 0)
    assert state_name(f"{stem}.up_proj") == (f"{stem}.up_proj", None)
    shared = "backbone.layers.1.mixer.shared_experts.up_proj.weight"
    assert state_name(shared) == (shared, None)


def test_hub_items_are_views():
    stacked = torch.arange(24.0).view(3, 4, 2)
    items = dict(hub_items("backbone.layers.1.mixer.experts.up_proj", stacked))
    assert list(items) == [f"backbone.layers.1.mixer.experts.{e}.up_proj.weight" for e in range(3)]
    assert items["backbone.layers.1.mixer.experts.2.up_proj.weight"].data_ptr() == stacked[2].data_ptr()
    assert list(hub_items("lm_head.weight", stacked)) == [("lm_head.weight", stacked)]


def test_names_and_shapes_of_the_config_are_those_of_the_model():
    state = HybridLM(CONFIG, device="meta").state_dict()
    expected = {spec.name: spec for spec in state_tensors(CONFIG)}
    assert {name: tuple(t.shape) for name, t in state.items()} == {n: s.shape for n, s in expected.items()}
    written = [(key, tuple(t.shape)) for name, tensor in state.items() for key, t in hub_items(name, tensor)]
    assert sorted(written) == sorted((spec.name, spec.shape) for spec in hub_tensors(CONFIG))
    for spec in hub_tensors(CONFIG):
        assert state_name(spec.name)[0] in expected
        assert stays_fp32(spec.name) == spec.fp32


def test_float32_only_for_the_selection_bias():
    state = HybridLM(CONFIG, device="meta", dtype=torch.bfloat16).state_dict()
    for name, tensor in state.items():
        assert tensor.dtype == (torch.float32 if stays_fp32(name) else torch.bfloat16), name
