"""config.json of a Hugging Face `nemotron_h` folder <-> ModelConfig, in every spelling such files come in.

Absent fields take transformers' defaults (NemotronHConfig), not ours; the layer list and the two widths that
nobody could guess must be there. Fields without influence on the numbers (rope_theta, expand and more) are
left aside, as transformers does.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemotron_ultra.config.model import BLOCK_LETTERS, ModelConfig
from nemotron_ultra.errors import CheckpointError, ConfigError

MODEL_TYPE = "nemotron_h"
BLOCK_NAMES = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
NEEDED = ("hidden_size", "vocab_size")
# transformers' default of every field that ModelConfig shares with NemotronHConfig.
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "time_step_limit": (0.0, math.inf),
    "intermediate_size": 21504,
    "mlp_bias": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "mtp_depths": 2,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "rescale_prenorm_residual": True,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "num_local_experts": "n_routed_experts",
    "layer_types": "layers_block_type",
}
ACTIVATIONS = {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish")}
# Keys that such files hold and that change nothing: known, so that a warning about them would be noise.
INERT = [
    "architectures",
    "attention_bias",
    "attention_dropout",
    "auto_map",
    "dtype",
    "expand",
    "hidden_dropout",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "model_type",
    "moe_shared_expert_overlap",
    "n_shared_experts",
    "norm_eps",
    "num_hidden_layers",
    "num_logits_to_keep",
    "output_router_logits",
    "partial_rotary_factor",
    "residual_in_fp32",
    "rope_parameters",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_mamba_kernels",
    "hybrid_override_pattern",
    "layers_block_type",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "num_key_value_heads",
    "mlp_hidden_act",
    "mamba_hidden_act",
]
# Limits at or above this mean "no limit": files spell infinity as 1e30 where JSON has no word for it.
NO_LIMIT = 1e30


def read_hf_config(path: str | Path) -> ModelConfig:
    """ModelConfig of a checkpoint folder, or of its config.json.

    Raises CheckpointError if the file is not there or is no JSON, ConfigError (one, listing every mistake) if
    its content describes no model of ours.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file}: no such file", do="give a folder that holds config.json and *.safetensors"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file}: not valid JSON ({error})", do="restore the file from its source"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object", got=type(content).__name__)
    return model_config_from_hf(content, file=str(file))


def model_config_from_hf(content: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """ModelConfig of the content of a config.json; `file` is named in warnings and in the ConfigError."""
    problems: list[str] = []
    given = _rename_aliases({k: v for k, v in content.items() if v is not None}, problems)
    problems += _check_kind(given)
    values: dict[str, Any] = {name: given.get(name, default) for name, default in DEFAULTS.items()}
    for name in NEEDED:
        if name in given:
            values[name] = given[name]
        else:
            problems.append(f"{name}: missing{_nearest_key(name, given)}")
    values["num_key_value_heads"] = given.get("num_key_value_heads", 8)
    if content.get("num_key_value_heads", 8) is None:  # null, unlike absent, means one per query head
        values["num_key_value_heads"] = values["num_attention_heads"]
    values["time_step_limit"] = _read_limit(values["time_step_limit"], problems)
    values["pattern"] = _read_pattern(given, "layers_block_type", "hybrid_override_pattern", None, problems)
    values["mtp_pattern"] = _read_pattern(
        given, "mtp_layers_block_type", "mtp_hybrid_override_pattern", "*E", problems
    )
    if not problems:
        return _build(values, given, file)
    raise ConfigError(f"{file}: " + " | ".join(problems))


def model_config_to_hf(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Content of a config.json that transformers and `model_config_from_hf` read; strict JSON (no Infinity).

    `mtp_depths` is a key of ours: how often the stored MTP module is applied in training.
    """
    own = {"pattern", "mtp_pattern", "time_step_limit", "moe_latent_size"}
    content: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": MODEL_TYPE,
        "torch_dtype": dtype,
        "hybrid_override_pattern": config.pattern,
        "num_hidden_layers": config.num_layers,
        "mtp_hybrid_override_pattern": config.mtp_pattern,
        "moe_latent_size": config.moe_latent_size or None,
        "n_shared_experts": 1,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "mamba_proj_bias": config.use_bias,
        "norm_eps": config.layer_norm_epsilon,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    fields = ModelConfig.__dataclass_fields__
    content |= {name: getattr(config, name) for name in fields if name not in own}
    low, high = config.time_step_limit
    if (low, high) != DEFAULTS["time_step_limit"]:
        content["time_step_limit"] = [low, NO_LIMIT if math.isinf(high) else high]
    return dict(sorted(content.items()))


def _rename_aliases(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    for old, new in ALIASES.items():
        if old not in given:
            continue
        value = given.pop(old)
        if new in given and given[new] != value:
            problems.append(f"{old}: {value} contradicts {new}: {given[new]}, of which it is an old name")
        given[new] = value
    return given


def _check_kind(given: Mapping[str, Any]) -> list[str]:
    problems = []
    kind = given.get("model_type")
    architectures = given.get("architectures") or []
    if kind != MODEL_TYPE and not (kind is None and "NemotronHForCausalLM" in architectures):
        problems.append(f"model_type: got {kind!r}, allowed: {MODEL_TYPE!r}")
    for name, allowed in ACTIVATIONS.items():
        if given.get(name, allowed[0]) not in allowed:
            problems.append(f"{name}: got {given[name]!r}, allowed: {' '.join(allowed)}")
    return problems


def _nearest_key(name: str, given: Mapping[str, Any]) -> str:
    strangers = [key for key in given if key not in DEFAULTS and key not in INERT]
    close = get_close_matches(name, strangers, 1, 0.75)
    return f" (the file has {close[0]!r}: rename it to {name!r})" if close else ""


def _read_limit(value: Any, problems: list[str]) -> tuple[float, float]:
    """Two numbers; infinity as a float, a huge float, "Infinity", or {"__float__": "Infinity"}."""
    try:
        low, high = (float(v["__float__"] if isinstance(v, dict) else v) for v in value)
    except (TypeError, ValueError, KeyError):
        problems.append(f"time_step_limit: got {value!r}, allowed: two numbers, the second may be Infinity")
        return DEFAULTS["time_step_limit"]
    return low, math.inf if high >= NO_LIMIT else high


def _read_pattern(
    given: Mapping[str, Any], listed: str, lettered: str, default: str | None, problems: list[str]
):
    """One letter per layer, from the list of block names if there is one (it wins), else from the string."""
    if listed in given:
        return _letters_of_names(listed, given[listed], problems)
    if lettered in given:
        _check_letters(lettered, given[lettered], problems)
        return given[lettered]
    if default is None:
        nearest = _nearest_key(lettered, given) or _nearest_key(listed, given)
        problems.append(f"{lettered}: missing, and no {listed} either{nearest}")
    return default


def _letters_of_names(key: str, names: Any, problems: list[str]) -> str:
    if not isinstance(names, list) or not names:
        problems.append(f"{key}: got {names!r}, allowed: a list of {' '.join(BLOCK_NAMES)}")
        return ""
    unknown = dict.fromkeys(str(name) for name in names if name not in BLOCK_NAMES)
    for name in unknown:
        close = get_close_matches(name, BLOCK_NAMES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        problems.append(f"{key}: unknown block {name!r}, allowed: {' '.join(BLOCK_NAMES)}{hint}")
    return "".join(BLOCK_NAMES.get(name, "") for name in names)


def _check_letters(key: str, pattern: Any, problems: list[str]) -> None:
    if not isinstance(pattern, str) or not pattern:
        problems.append(f"{key}: got {pattern!r}, allowed: a string of {' '.join(BLOCK_LETTERS)}")
        return
    unknown = sorted(set(pattern) - set(BLOCK_LETTERS))
    separators = [letter for letter in unknown if letter in "|/"]
    if separators:
        problems.append(
            f"{key}: {' '.join(map(repr, separators))} separates stages or MTP modules in Megatron launch "
            f"scripts; write the layers alone, and MTP layers as mtp_hybrid_override_pattern"
        )
    strange = [letter for letter in unknown if letter not in "|/"]
    if strange:
        problems.append(
            f"{key}: unknown letter {' '.join(map(repr, strange))} in {pattern!r}, "
            f"allowed: {' '.join(BLOCK_LETTERS)}"
        )


def _build(values: dict[str, Any], given: Mapping[str, Any], file: str) -> ModelConfig:
    layers = given.get("num_hidden_layers", len(values["pattern"]))
    if layers != len(values["pattern"]):
        warnings.warn(
            f"{file}: num_hidden_layers {layers} differs from the layer list, which has "
            f"{len(values['pattern'])} layers and counts",
            stacklevel=4,
        )
    known = set(DEFAULTS) | set(INERT) | set(NEEDED)
    for key in given:
        close = get_close_matches(key, [name for name in DEFAULTS if name not in given], 1, 0.88)
        if key not in known and close:
            warnings.warn(f"{file}: unknown key {key!r} is ignored; did you mean {close[0]!r}?", stacklevel=4)
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, e['loc'])) or 'model'}: {e['msg'].removeprefix('Value error, ')}"
            + (f", got {e['input']!r}" if e["loc"] else "")
            for e in error.errors()
        ]
        raise ConfigError(f"{file}: " + " | ".join(found)) from error
