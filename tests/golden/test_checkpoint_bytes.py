"""Released sizes from the config and from a model without memory; golden checkpoints come back bit by bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from nemotron_ultra import HybridLM, load_model, load_recipe, save_model
from nemotron_ultra.config.hf import model_config_from_hf, model_config_to_hf
from nemotron_ultra.config.hf_tensors import hub_tensors
from nemotron_ultra.config.plan import count_parameters
from nemotron_ultra.model.hf_names import hub_items

# (bytes, tensors): total_size and entries of the released model.safetensors.index.json; Nano is predicted.
RELEASED = {
    "ultra": (1_121_049_257_984, 51_023),
    "super": (247_222_108_160, 42_683),
    "nano": (63_155_886_464, 6_243),
}


def model_config(name):
    return load_recipe("pretrain", [f"model={name}"]).model


@pytest.mark.parametrize("name", RELEASED)
def test_released_bytes_from_the_config(name):
    config = model_config(name)
    tensors = list(hub_tensors(config))
    assert (sum(t.stored_bytes for t in tensors), len(tensors)) == RELEASED[name]
    counted = count_parameters(config)
    assert (counted.checkpoint_bytes, counted.tensors) == RELEASED[name]


@pytest.mark.parametrize("name", RELEASED)
def test_released_bytes_from_a_model_on_meta(name):
    state = HybridLM(model_config(name), device="meta", dtype=torch.bfloat16).state_dict()
    pieces = [tensor for name, stacked in state.items() for _, tensor in hub_items(name, stacked)]
    assert (sum(t.numel() * t.element_size() for t in pieces), len(pieces)) == RELEASED[name]


def test_ultra_as_its_release_spells_it():
    """A list of blocks, no num_hidden_layers, no time_step_limit, MTP layers as a list."""
    config = model_config("ultra")
    content = model_config_to_hf(config)
    del content["num_hidden_layers"], content["mtp_depths"]
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    content["layers_block_type"] = [names[letter] for letter in content.pop("hybrid_override_pattern")]
    content["mtp_layers_block_type"] = [
        names[letter] for letter in content.pop("mtp_hybrid_override_pattern")
    ]
    assert "time_step_limit" not in content and model_config_from_hf(content) == config


def test_golden_weights_come_back_bit_by_bit(golden, tmp_path):
    for folder in sorted((golden / "model").iterdir()):
        model = load_model(folder)
        save_model(model, tmp_path / folder.name)
        before = load_file(folder / "model.safetensors")
        after = load_file(tmp_path / folder.name / "model.safetensors")
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), key
        again = load_model(tmp_path / folder.name)
        assert again.config == model.config
