"""What is said about a vLLM engine before there is one; the engine itself is tested in tests/with_vllm."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from generator_contract import contract_model
from nemotron_ultra import save_model
from nemotron_ultra.errors import BackendError, CheckpointError, ConfigError
from nemotron_ultra.generation.vllm_generator import VLLMGenerator
from nemotron_ultra.generation.vllm_options import VLLMOptions, check_model, engine_arguments

INSTALLED = getattr(find_spec("vllm"), "origin", None)  # the folder of its tests has the same name, no origin


@pytest.mark.skipif(INSTALLED is not None, reason="vLLM is installed here")
def test_without_the_extra_the_error_names_it():
    with pytest.raises(BackendError, match=r"vLLM cannot be imported.*pip install 'nemotron-ultra\[vllm\]'"):
        VLLMGenerator.of(contract_model())


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        VLLMGenerator(tmp_path)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({"time_step_limit": (0.001, 0.1)}, {}, r"time_step_limit.*got \[0.001, 0.1\]"),
        ({"mlp_bias": True}, {}, "mlp_bias"),
        ({"num_nextn_predict_layers": 0}, {"draft_tokens": 2}, "draft_tokens.*got 0 in the model"),
        ({"mtp_pattern": "*-"}, {"draft_tokens": 2}, r"mtp_pattern.*got \*-"),
        ({"pattern": "*E"}, {"prefix_caching": True}, r"prefix_caching.*got \*E"),
        ({}, {"max_slots": 0}, "max_slots.*got 0.*1 or more"),
        ({}, {"draft_tokens": -1}, "draft_tokens.*got -1.*0 or more"),
    ],
)
def test_what_vllm_would_run_wrongly_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        check_model(contract_model(**model).config, VLLMOptions(**options))


def test_arguments_of_the_engine(tmp_path):
    """Those of the report's rollouts: prefixes cached, Mamba states aligned, 5 drafts a step."""
    model = contract_model()
    save_model(model, tmp_path / "model")
    options = VLLMOptions(
        draft_tokens=5, max_batched_tokens=8480, prefix_caching=True, max_tokens=4096, engine={"seed": 3}
    )
    found = engine_arguments(tmp_path / "model", model.config, options)
    assert found["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 5}
    assert found["max_num_batched_tokens"] == 8480 and found["mamba_cache_mode"] == "align"
    assert found["dtype"] == "float32" and found["logprobs_mode"] == "processed_logprobs"
    assert found["skip_tokenizer_init"] and found["seed"] == 3


def test_plain_experts_have_no_shared_one(tmp_path):
    model = contract_model(moe_shared_expert_intermediate_size=0)
    save_model(model, tmp_path / "model")
    found = engine_arguments(tmp_path / "model", model.config, VLLMOptions())
    assert found["hf_overrides"] == {"n_shared_experts": 0} and "speculative_config" not in found
