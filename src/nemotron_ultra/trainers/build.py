"""From a RunConfig to the parts of a run, and from a run to its checkpoint and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.engine.base import Objective
from nemotron_ultra.engine.checkpoint import load_checkpoint, save_checkpoint
from nemotron_ultra.engine.recompute import recompute_blocks
from nemotron_ultra.engine.schedule import Schedule
from nemotron_ultra.engine.torch_engine import TorchEngine
from nemotron_ultra.errors import BackendError, CheckpointError, ConfigError, NonFiniteError
from nemotron_ultra.generation.base import Generator
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.generation.vllm_generator import VLLMGenerator, VLLMOptions
from nemotron_ultra.model.hf_folder import load_model, save_model
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.observe.console import Console
from nemotron_ultra.precision.apply import apply_policy
from nemotron_ultra.precision.grads import first_non_finite
from nemotron_ultra.rl.teachers import Teachers
from nemotron_ultra.trainers.hooks import Hook
from nemotron_ultra.trainers.run_folder import RunFolder
from nemotron_ultra.trainers.weights import check_tokenizer, weights_folder

_ONLY_FOR_FRESH_WEIGHTS = {
    *("initializer_range", "rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor"),
    "max_position_embeddings",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stream(Protocol):
    """The micro-batches of one optimizer step after another; where it stands is part of a checkpoint.

    `describe()` is what the start panel and run.json say of the data: facts by source or domain.
    """

    def __iter__(self) -> Iterator[list[TokenBatch]]: ...

    def __next__(self) -> list[TokenBatch]: ...

    def describe(self) -> dict[str, dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], *, allow_change: bool = False) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of one run, put together by a trainer. `validation` may be empty."""

    config: RunConfig
    folder: RunFolder
    console: Console
    tokenizer: Tokenizer
    stream: Stream
    engine: TorchEngine
    objective: Objective
    validation: Sequence[TokenBatch]


def choose_device(config: RunConfig) -> torch.device:
    """The device of the torch engine; also sets torch's threads. Raises BackendError if it is not here."""
    if config.engine.name != "torch":
        raise BackendError(
            f"engine={config.engine.name} needs a cluster",
            got="one machine",
            do="use engine=torch, or try recipe=pretrain",
        )
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    name = config.engine.device
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendError("engine.device=cuda, but torch sees no GPU", do="use engine.device=cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build_model(config: RunConfig, device: torch.device, resuming: bool = False) -> HybridLM:
    """A fresh model from the run's seed, or the weights of run.from. Raises ConfigError if those
    differ.

    A resumed run takes its weights from its checkpoint: it does not need that folder any more.
    """
    dtype = DTYPES[config.precision.weights]
    if config.run.from_ and not resuming:
        weights = weights_folder(config.run.from_)
        check_tokenizer(weights, load_tokenizer(config.data.tokenizer))
        model = load_model(weights, dtype=dtype, device=device)
        different = _differences(model.config, config.model)
        if different:
            raise ConfigError(
                "run.from holds another model than the configuration asks for",
                got="; ".join(different[:6]),
                do="choose the model option that those weights belong to",
            )
        return model
    model = HybridLM(config.model, device=device, dtype=dtype)
    model.init_weights(config.run.seed)
    return model


def build_engine(config: RunConfig, model: HybridLM) -> TorchEngine:
    """The torch engine with the run's schedule, on the model with the run's precision policy.

    Rows of pretraining are full. Conversations and rollouts are shorter than data.sequence_length, so there a
    step moves the schedule by the tokens it may have: warmup and decay end at the steps that the plan says.
    """
    policy = apply_policy(model, config.precision, seed=config.run.seed)
    if config.engine.recompute:
        recompute_blocks(model)
    schedule = Schedule.from_config(config.schedule, peak=config.optim.lr, run_tokens=config.total_tokens)
    return TorchEngine(
        model,
        config.optim,
        schedule,
        router_bias_rate=config.trainer.router_bias_rate,
        tokens_per_step=None if config.trainer.name == "pretrain" else config.tokens_per_step,
        policy=policy,
    )


def build_generator(config: RunConfig, model: HybridLM) -> Generator:
    """A generator with a model of its own, of the same shape; it waits for published weights.

    The Sampler has the learner's precision too. Raises BackendError without vLLM where that is asked for.
    """
    slots, drafts = config.rollout.max_slots, config.rollout.draft_tokens
    if config.rollout.generator == "vllm":
        length = config.data.sequence_length
        options = VLLMOptions(max_tokens=length, max_slots=slots, draft_tokens=drafts)
        return VLLMGenerator.of(model, options)
    weight = model.lm_head.weight
    twin = HybridLM(model.config, device=weight.device, dtype=weight.dtype).requires_grad_(False).eval()
    apply_policy(twin, config.precision)
    return Sampler(twin, max_slots=slots, draft_tokens=drafts)


def build_teachers(config: RunConfig, tokenizer: Tokenizer, device: torch.device) -> Teachers:
    """The frozen teachers of the run, from run folders or folders of weights."""
    folders = config.teachers.folders
    return Teachers(
        config.teachers,
        {name: weights_folder(path, f"teachers.folders.{name}") for name, path in folders.items()},
        tokenizer=tokenizer,
        vocab_size=config.model.vocab_size,
        device=device,
        dtype=DTYPES[config.precision.weights],
    )


def check_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the tokenizer makes ids that the model has no row for."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size is smaller than the tokenizer's vocabulary",
            got=f"{config.model.vocab_size} rows for {tokenizer.vocab_size} ids of {tokenizer.name}",
            do=f"set model.vocab_size={tokenizer.vocab_size} or more",
        )


def check_weights(engine: TorchEngine) -> None:
    """Raises NonFiniteError if a weight is NaN or infinite, so that no such checkpoint is ever written."""
    bad = first_non_finite(engine.model.state_dict())
    if bad is not None:
        raise NonFiniteError(
            f"the weights after step {engine.step} are not finite, first in {bad}",
            do="nothing was saved; lower optim.lr and go on from the checkpoint before",
        )


def save_run(run: Run, hooks: Sequence[Hook]) -> Path:
    """Write the checkpoint {run, engine, stream, hooks} of the engine's step; weights as a Hugging Face
    folder.
    """
    engine = run.engine
    check_weights(engine)
    state = engine.state_dict()
    del state["model"]  # written by save_model
    parts = {
        "run": {"recipe": run.config.recipe, "step": engine.step, "tokens": engine.tokens},
        "engine": state,
        "stream": run.stream.state_dict(),
        "hooks": {type(hook).__name__: hook.state_dict() for hook in hooks},
    }
    return save_checkpoint(
        run.folder.path,
        engine.step,
        parts,
        save_weights=lambda path: _save_weights(run, path),
        keep_last=run.config.trainer.keep_last,
        keep_every=run.config.trainer.keep_every,
    )


def _save_weights(run: Run, path: Path) -> None:
    """A folder that needs nothing else: model and tokenizer."""
    save_model(run.engine.model, path)
    run.tokenizer.save(path)


def resume_run(run: Run, hooks: Sequence[Hook]) -> int:
    """Load the newest checkpoint, if there is one; returns the step to go on from.

    Raises CheckpointError if a file of it is damaged or belongs to another model.
    """
    checkpoint = run.folder.checkpoint
    if checkpoint is None:
        return 0
    parts = load_checkpoint(checkpoint)
    saved = load_model(checkpoint / "model", dtype=DTYPES[run.config.precision.weights], verify=False)
    weights = saved.state_dict()
    if _shapes(weights) != _shapes(run.engine.model.state_dict()):
        raise CheckpointError(
            f"{checkpoint} holds another model than the configuration asks for",
            got="; ".join(_differences(saved.config, run.engine.model.config)[:6]),
            do="take the old model options, or choose another run.name",
        )
    run.engine.load_state_dict(parts["engine"] | {"model": weights})
    run.stream.load_state_dict(parts["stream"], allow_change=run.config.run.allow_config_change)
    for hook in hooks:
        hook.load_state_dict(parts["hooks"].get(type(hook).__name__, {}))
    return run.engine.step


def _differences(found: ModelConfig, wanted: ModelConfig) -> list[str]:
    """Lines for the fields that matter once weights are there."""
    names = [f.name for f in fields(wanted) if f.name not in _ONLY_FOR_FRESH_WEIGHTS]
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in names]
    return [f"{name}: {old} there, {new} asked" for name, old, new in pairs if old != new]


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
