"""How a vLLM engine is set up for a model of ours; what its nemotron_h would run wrongly is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron_ultra.config.hf import DEFAULTS
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.model.hf_folder import CONFIG


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """How the engine is set up. Nothing here but `draft_tokens` and the dtypes touches the numbers drawn."""

    max_tokens: int = 8192
    """Longest prompt with its completion."""
    max_slots: int = 256
    """Requests that run at once."""
    max_batched_tokens: int | None = None
    """Tokens of one forward; longer prompts are read in pieces. None: vLLM's choice (report: 8480)."""
    dtype: str | None = None
    """float32, bfloat16 or float16; None: what the folder was saved in."""
    ssm_dtype: str = "float32"
    """Format of the Mamba states in the cache."""
    prefix_caching: bool | None = None
    """Read a beginning that several prompts share once, with Mamba states kept at block ends (mode `align`).
    None: where vLLM can, that is for models with Mamba layers and not on a CPU."""
    draft_tokens: int = 0
    """Tokens that the MTP module drafts in each step (report: 5 in rollouts); 0: none."""
    tensor_parallel: int = 1
    """GPUs that share the model."""
    memory_share: float = 0.9
    """Part of the device's memory that the engine may take."""
    cache_bytes: int | None = None
    """Memory of the caches; None: what memory_share leaves."""
    own_process: bool = False
    """Run the engine in a process of its own: weights then travel as a file in `exchange`."""
    exchange: str | None = None
    """Folder for weights on their way there, on a RAM disk for instance; None: the temporary folder."""
    eager: bool = False
    """No compilation and no graphs: starts faster, draws slower."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM, which win over the ones above."""


def check_model(config: ModelConfig, options: VLLMOptions) -> None:
    """What vLLM's nemotron_h would leave out in silence is refused."""
    for name, least in (("max_tokens", 2), ("max_slots", 1), ("draft_tokens", 0), ("tensor_parallel", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"{name}: too few", got=getattr(options, name), allowed=f"{least} or more")
    low, high = config.time_step_limit
    if "M" in config.pattern and (low, high) != DEFAULTS["time_step_limit"]:
        raise ConfigError(
            "time_step_limit: vLLM's Mamba layers clamp no dt", got=[low, high], do="use the Sampler"
        )
    if config.mlp_bias and "E" in config.pattern and config.moe_shared_expert_intermediate_size:
        raise ConfigError("mlp_bias: vLLM's shared experts have no bias", got=True, do="use the Sampler")
    if options.prefix_caching and "M" not in config.pattern:
        raise ConfigError(
            "prefix_caching: vLLM's nemotron_h has it with Mamba layers only",
            got=config.pattern,
            do="leave prefix_caching out",
        )
    if not options.draft_tokens:
        return
    if config.num_nextn_predict_layers != 1:
        raise ConfigError(
            "draft_tokens: vLLM drafts with exactly one MTP module",
            got=f"{config.num_nextn_predict_layers} in the model",
            do="set draft_tokens to 0",
        )
    if set(config.mtp_pattern) - set("*E"):
        raise ConfigError(
            "mtp_pattern: vLLM drafts with * and E alone", got=config.mtp_pattern, allowed="* E"
        )


def engine_arguments(folder: Path, config: ModelConfig, options: VLLMOptions) -> dict[str, Any]:
    """Arguments of vllm.LLM. One token more than max_tokens: scoring a full sequence draws one."""
    given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    named: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": options.dtype or given.get("dtype") or given.get("torch_dtype") or "auto",
        "max_model_len": options.max_tokens + 1,
        "max_num_seqs": options.max_slots,
        "max_num_batched_tokens": options.max_batched_tokens,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": options.prefix_caching,
        "mamba_cache_mode": "align" if options.prefix_caching else "none",
        "mamba_ssm_cache_dtype": options.ssm_dtype,
        "tensor_parallel_size": options.tensor_parallel,
        "gpu_memory_utilization": options.memory_share,
        "kv_cache_memory_bytes": options.cache_bytes,
        "enforce_eager": options.eager,
        "disable_log_stats": not options.draft_tokens,
    }
    if not config.moe_shared_expert_intermediate_size:
        named["hf_overrides"] = {"n_shared_experts": 0}
    if options.draft_tokens:
        named["speculative_config"] = {"method": "mtp", "num_speculative_tokens": options.draft_tokens}
    return named | dict(options.engine)
