"""config.json in all its spellings, what it refuses, and that transformers reads what we write."""

from __future__ import annotations

import json
import math

import pytest

from nemotron_ultra.config.hf import DEFAULTS, model_config_from_hf, model_config_to_hf, read_hf_config
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.errors import CheckpointError, ConfigError

BASE = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "vocab_size": 96,
    "hybrid_override_pattern": "ME*-",
    "moe_latent_size": 16,
}


def read(drop=(), **changes):
    return model_config_from_hf({k: v for k, v in {**BASE, **changes}.items() if k not in drop})


def refusal(drop=(), **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(drop, **changes)
    return str(caught.value)


def test_every_golden_config_loads_and_survives_a_round_trip(golden):
    folders = sorted((golden / "model").iterdir())
    assert len(folders) >= 5
    for folder in folders:
        config = read_hf_config(folder)
        assert config == read_hf_config(folder / "config.json")
        written = json.loads(json.dumps(model_config_to_hf(config), allow_nan=False))
        assert model_config_from_hf(written) == config


@pytest.mark.parametrize(
    "names",
    [["mamba", "moe", "attention", "mlp"], ["linear_attention", "moe", "full_attention", "mlp"]],
)
@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_layer_lists_and_string_agree(names, key):
    assert read(drop=["hybrid_override_pattern"], **{key: names}) == read()


def test_list_wins_over_string():
    assert read(layers_block_type=["moe", "mamba"]).pattern == "EM"


def test_mtp_layers_as_list_or_string():
    assert read().mtp_pattern == "*E"
    assert read(mtp_hybrid_override_pattern="*-E").mtp_pattern == "*-E"
    listed = read(mtp_layers_block_type=["full_attention", "moe", "moe"], mtp_hybrid_override_pattern="*E")
    assert listed.mtp_pattern == "*EE"
    assert read(num_nextn_predict_layers=1).depths == 2
    assert read(num_nextn_predict_layers=1, mtp_depths=3).depths == 3


@pytest.mark.parametrize(
    "text",
    [
        "[0.0, Infinity]",
        "[0.0, 1e30]",
        "[0, 1e400]",
        '[0.0, {"__float__": "Infinity"}]',
        '[0.0, "inf"]',
        "null",
    ],
)
def test_spellings_of_no_limit(text, tmp_path):
    content = json.dumps(BASE)[:-1] + f', "time_step_limit": {text}}}'
    (tmp_path / "config.json").write_text(content)
    assert read_hf_config(tmp_path).time_step_limit == (0.0, math.inf)
    assert read().time_step_limit == (0.0, math.inf)


def test_finite_limits_stay():
    assert read(time_step_limit=[0.03, 0.4]).time_step_limit == (0.03, 0.4)
    half_open = ModelConfig(pattern="M", vocab_size=8, hidden_size=8, time_step_limit=(0.1, math.inf))
    assert model_config_to_hf(half_open)["time_step_limit"] == [0.1, 1e30]


def test_old_names_are_read():
    old = {
        "mamba_n_groups": 4,
        "mamba_d_conv": 3,
        "mamba_expand": 2,
        "mamba_dt_min": 0.01,
        "mamba_dt_max": 0.2,
        "mamba_dt_limit": [0.0, 1.0],
        "mamba_dt_init_floor": 0.001,
        "mamba_conv_bias": False,
        "mamba_chunk_size": 64,
        "num_local_experts": 12,
    }
    c = read(**old)
    assert (c.n_groups, c.conv_kernel, c.chunk_size, c.n_routed_experts, c.use_conv_bias) == (
        4,
        3,
        64,
        12,
        False,
    )
    assert (c.time_step_min, c.time_step_max, c.time_step_floor) == (0.01, 0.2, 0.001)
    assert c.time_step_limit == (0.0, 1.0)
    assert "mamba_d_conv: 3 contradicts conv_kernel: 4" in refusal(mamba_d_conv=3, conv_kernel=4)


def test_null_and_absent_fields():
    assert read(moe_latent_size=None).moe_latent_size == 0
    assert read(num_attention_heads=6, num_key_value_heads=None).num_key_value_heads == 6
    assert read().num_key_value_heads == 8
    assert read(pad_token_id=None, eos_token_id=[2, 11]).eos_token_id == (2, 11)
    # One stored shared expert of the stated width, whatever n_shared_experts counts.
    assert (
        read(n_shared_experts=2, moe_shared_expert_intermediate_size=48).moe_shared_expert_intermediate_size
        == 48
    )


def test_defaults_are_those_of_transformers():
    nemotron_h = pytest.importorskip("transformers.models.nemotron_h.configuration_nemotron_h")
    theirs = nemotron_h.NemotronHConfig()
    for name, value in DEFAULTS.items():
        if name not in ("mtp_depths", "moe_latent_size"):
            assert getattr(theirs, name) == value, name
    assert theirs.moe_latent_size is None and theirs.num_key_value_heads == read().num_key_value_heads


def test_transformers_reads_what_we_write_and_we_read_what_it_writes(golden, tmp_path):
    nemotron_h = pytest.importorskip("transformers.models.nemotron_h.configuration_nemotron_h")
    for folder in sorted((golden / "model").iterdir()):
        ours = read_hf_config(folder)
        (tmp_path / "config.json").write_text(json.dumps(model_config_to_hf(ours)))
        theirs = nemotron_h.NemotronHConfig.from_pretrained(tmp_path)
        for name in set(DEFAULTS) - {"moe_latent_size", "time_step_limit", "mtp_depths"}:
            assert getattr(theirs, name) == getattr(ours, name), name
        assert theirs.hybrid_override_pattern == ours.pattern
        theirs.save_pretrained(tmp_path)
        assert read_hf_config(tmp_path) == ours


def test_differing_layer_count_warns():
    with pytest.warns(UserWarning, match="num_hidden_layers 7 differs from the layer list, which has 4"):
        read(num_hidden_layers=7)


def test_misspelt_optional_key_warns():
    with pytest.warns(
        UserWarning, match="'routed_scaling_facter' is ignored; did you mean 'routed_scaling_factor'"
    ):
        read(routed_scaling_facter=5.0)


@pytest.mark.parametrize(
    ("drop", "changes", "parts"),
    [
        ([], {"model_type": "mamba2"}, ["model_type: got 'mamba2'", "'nemotron_h'"]),
        (["hidden_size"], {"hiden_size": 32}, ["hidden_size: missing", "'hiden_size'"]),
        (["hybrid_override_pattern"], {}, ["hybrid_override_pattern: missing"]),
        ([], {"hybrid_override_pattern": "MEX*"}, ["hybrid_override_pattern: unknown letter 'X'", "M E * -"]),
        ([], {"hybrid_override_pattern": "ME|M*/*E"}, ["'/' '|'", "mtp_hybrid_override_pattern"]),
        ([], {"mtp_hybrid_override_pattern": "*E/*E"}, ["mtp_hybrid_override_pattern: '/'"]),
        ([], {"layers_block_type": ["mamba", "atention"]}, ["'atention'", "did you mean 'attention'"]),
        ([], {"layers_block_type": "mamba"}, ["layers_block_type: got 'mamba'"]),
        ([], {"hidden_size": "wide"}, ["hidden_size", "'wide'"]),
        ([], {"num_experts_per_tok": 9}, ["num_experts_per_tok: 9 is above n_routed_experts 8"]),
        ([], {"mlp_hidden_act": "gelu"}, ["mlp_hidden_act: got 'gelu', allowed: relu2"]),
        ([], {"time_step_limit": [0.0]}, ["time_step_limit: got [0.0]"]),
        (["vocab_size"], {"model_type": "x"}, ["model_type: got 'x'", "vocab_size: missing"]),
    ],
)
def test_refusals_name_file_key_and_mend(drop, changes, parts):
    message = refusal(drop, **changes)
    assert message.startswith("config.json: ")
    for part in parts:
        assert part in message


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_hf_config(tmp_path)
