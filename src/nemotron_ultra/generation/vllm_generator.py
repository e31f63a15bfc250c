"""The Generator protocol on vLLM: the same requests and completions, drawn by its engine (report 3.2, 3.6.1).

Token ids in, token ids out; weights arrive in the Hugging Face layout and replace the engine's in place.
What differs from `Sampler`: a seed gives other tokens (vLLM has a random generator of its own), and the same
ones in any company only as far as its kernels round alike in any company.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from nemotron_ultra.config.hf import read_hf_config
from nemotron_ultra.config.hf_tensors import state_tensors
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.errors import BackendError, CheckpointError, ConfigError, DataError
from nemotron_ultra.generation.base import Completion, Extras, Request
from nemotron_ultra.generation.request import check_request
from nemotron_ultra.generation.vllm_options import VLLMOptions, check_model, engine_arguments
from nemotron_ultra.model.hf_folder import save_model
from nemotron_ultra.model.hf_match import SINGLE
from nemotron_ultra.model.hf_names import hub_items
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.safetensors_stream import write_file

COLDEST = 0.01  # vLLM draws at this temperature where it is asked for a smaller one above 0
COUNTERS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


class Refit:
    """Methods that vLLM's workers get (`worker_extension_cls`); `self` is the worker."""

    def refit(self, weights: list[tuple[str, Tensor]] | None = None, folder: str | None = None) -> None:
        """Replace the weights of the model and of its drafter by `weights`, or by those of a folder."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        self.reload_weights(weights_iterator=weights, weights_path=folder)
        drafter = self.model_runner.get_draft_model()
        if drafter is not None:  # vLLM reloads the main model alone and drops the mtp tensors
            with set_current_vllm_config(self.vllm_config):
                reload_weights(self.vllm_config, drafter, weights, folder, is_checkpoint_format=True)


WORKER = f"{Refit.__module__}.{Refit.__qualname__}"


class VLLMGenerator:
    """A `Generator` on a vLLM engine that is started from a folder written by `save_model`.

    Only ids below `vocab_size` (default: all rows of the head) are drawn. `stats` describes the latest
    `generate`. Raises BackendError without vLLM or if its engine does not start, ConfigError for a model or
    an option that vLLM would run wrongly, CheckpointError for a folder that is none.
    """

    def __init__(
        self, folder: str | Path, options: VLLMOptions | None = None, *, vocab_size: int | None = None
    ):
        options = options or VLLMOptions()
        self.config = config = read_hf_config(folder)
        if vocab_size is not None and not 1 <= vocab_size <= config.vocab_size:
            allowed = f"1 to {config.vocab_size}"
            raise ConfigError("vocab_size: not ids of the model", got=vocab_size, allowed=allowed)
        self.vocab_size = config.vocab_size if vocab_size is None else vocab_size
        self.version = 0
        self.stats: dict[str, float] = {}
        self._lock = threading.Lock()
        check_model(config, options)
        make_engine, self._sampling_params = _vllm()
        self.options = options = _fit_platform(config, options)
        self._llm = _start(make_engine, Path(folder), config, options)

    @classmethod
    def of(cls, model: HybridLM, options: VLLMOptions | None = None, **named: Any) -> VLLMGenerator:
        """The same from a model in memory; its weights are version 0."""
        with tempfile.TemporaryDirectory(dir=options.exchange if options else None) as scratch:
            save_model(model, Path(scratch) / "model")
            return cls(Path(scratch) / "model", options, **named)

    def close(self) -> None:
        """End the engine and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight by those of the state dict; waits for a running `generate`.

        Cached prefixes are dropped. Raises CheckpointError, with the weights as they were, if names or shapes
        differ.
        """
        new = dict(weights)
        shapes = {spec.name: spec.shape for spec in state_tensors(self.config)}
        wrong = sorted(set(shapes) ^ set(new))
        wrong += [name for name, shape in shapes.items() if name in new and tuple(new[name].shape) != shape]
        if wrong:
            raise CheckpointError(
                "weights that do not fit the generator's model: missing, unknown or of another shape",
                got=f"{', '.join(wrong[:8])}{' ...' if len(wrong) > 8 else ''}",
                do="publish the weights of a model with the same configuration",
            )
        items = [item for name, tensor in new.items() for item in hub_items(name, tensor.detach())]
        with self._lock:
            self._refit(items)
            self._llm.reset_prefix_cache()
            self.version = version

    def _refit(self, items: list[tuple[str, Tensor]]) -> None:
        if not self.options.own_process:
            self._llm.collective_rpc("refit", kwargs={"weights": items})
            return
        with tempfile.TemporaryDirectory(dir=self.options.exchange) as folder:
            write_file(Path(folder) / SINGLE, [(name, tensor.dtype, tensor) for name, tensor in items])
            self._llm.collective_rpc("refit", kwargs={"folder": folder})

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_ids: Sequence[int] = (),
        seeds: Sequence[int] | None = None,
        **extras: Unpack[Extras],
    ) -> list[Completion]:
        """One completion per prompt, in order. Without `seeds` request i has seed i.

        Raises ConfigError for an option and DataError for a prompt that cannot be, before any work.
        """
        seeds = range(len(prompts)) if seeds is None else seeds
        if len(seeds) != len(prompts):
            raise ConfigError(
                "seeds: not one per prompt", got=len(seeds), allowed=f"{len(prompts)}, one per prompt"
            )
        requests = [
            Request(
                prompt=tuple(map(int, prompt)),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop_ids=tuple(stop_ids),
                seed=int(seed),
                **extras,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        for number, request in enumerate(requests):
            self._check(request, f"prompt {number}")
        with self._lock, _random_states_kept(self.options.own_process):
            return self._run(requests) if requests else []

    def _check(self, request: Request, name: str) -> None:
        check_request(request, self.config.vocab_size, decodes=False, name=name)
        if 0 < request.temperature < COLDEST:
            raise ConfigError(
                "temperature: vLLM draws at no such temperature",
                got=request.temperature,
                allowed=f"0 (the likeliest id), or {COLDEST} and more",
            )
        if request.min_p and self.options.draft_tokens:
            raise ConfigError("min_p: vLLM cannot apply it to drafts", got=request.min_p, allowed=0)
        if len(request.prompt) + request.max_new_tokens > self.options.max_tokens:
            raise DataError(
                f"{name}: longer than the engine's limit with the tokens asked for",
                got=f"{len(request.prompt)} prompt tokens, max_new_tokens {request.max_new_tokens}",
                allowed=f"max_tokens {self.options.max_tokens} together",
                do="shorten the prompt, ask for fewer tokens, or start the engine with a larger max_tokens",
            )

    def _run(self, requests: list[Request]) -> list[Completion]:
        begin, before = time.perf_counter(), self._counters()
        outputs = self._draw([r.prompt for r in requests], [self._parameters(r) for r in requests])
        found = [output.outputs[0] for output in outputs]
        logprobs = [
            [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)]
            for one in found
        ]
        same = self.vocab_size == self.config.vocab_size and all(map(_unmodified, requests))
        sequences = [(*r.prompt, *one.token_ids) for r, one in zip(requests, found, strict=True)]
        unmodified = logprobs if same else self._score(sequences, [len(r.prompt) for r in requests])
        self.stats = {name: value - before[name] for name, value in self._counters().items()}
        self.stats |= {
            "prefill_tokens": sum(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs),
            "new_tokens": sum(len(one.token_ids) for one in found),
            "seconds": time.perf_counter() - begin,
        }
        return [
            Completion(
                tokens=list(one.token_ids),
                logprobs=drawn,
                model_logprobs=plain,
                finish_reason=_finish(one.finish_reason),
                versions=[self.version] * len(one.token_ids),
                stats={"prompt_tokens": len(request.prompt)},
            )
            for request, one, drawn, plain in zip(requests, found, logprobs, unmodified, strict=True)
        ]

    def _parameters(self, request: Request) -> Any:
        """Log-probs are asked for without alternatives: of the drawn token alone."""
        some = list(range(self.vocab_size)) if self.vocab_size < self.config.vocab_size else None
        return self._sampling_params(
            max_tokens=request.max_new_tokens,
            temperature=float(request.temperature),
            top_p=float(request.top_p),
            top_k=int(request.top_k),
            min_p=float(request.min_p),
            stop_token_ids=list(request.stop_ids),
            seed=_mixed(request.seed) if request.temperature else None,
            allowed_token_ids=some,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )

    def _draw(self, prompts: Sequence[Sequence[int]], parameters: list[Any]) -> list[Any]:
        """Prompts are salted with the version, so that no cached state of other weights is found."""
        salt = f"version {self.version}"
        inputs = [{"prompt_token_ids": list(prompt), "cache_salt": salt} for prompt in prompts]
        return self._llm.generate(inputs, parameters, use_tqdm=False)

    def _score(self, sequences: list[tuple[int, ...]], begins: list[int]) -> list[list[float]]:
        """Log-probs under the unmodified model of each sequence from its begin on: a prefill each."""
        parameters = self._sampling_params(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False
        )
        outputs = self._draw(sequences, [parameters] * len(sequences))
        return [
            [output.prompt_logprobs[i][tokens[i]].logprob for i in range(begin, len(tokens))]
            for output, tokens, begin in zip(outputs, sequences, begins, strict=True)
        ]

    def _counters(self) -> dict[str, float]:
        """Tokens drafted and accepted since the start, where there are drafts."""
        if not self.options.draft_tokens:
            return {}
        found = dict.fromkeys(COUNTERS.values(), 0.0)
        for metric in self._llm.get_metrics():
            if metric.name in COUNTERS:
                found[COUNTERS[metric.name]] += metric.value
        return found


def _mixed(seed: int) -> int:
    """63 bits of any integer: torch's CPU generator looks at 32 bits alone, and vLLM takes -1 for none."""
    digest = hashlib.blake2b((seed % 2**64).to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _unmodified(request: Request) -> bool:
    """Whether the distribution drawn from is the model's own (for temperature 0: reported as that)."""
    uncut = request.top_p == 1 and not request.top_k and not request.min_p
    return request.temperature == 0 or (request.temperature == 1 and uncut)


def _finish(reason: str | None) -> str:
    if reason not in ("stop", "length"):
        raise BackendError("vLLM gave up a request", got=reason, do="see its log above")
    return reason


def _vllm() -> tuple[type, type]:
    """(LLM, SamplingParams)."""
    try:
        from vllm import LLM, SamplingParams
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch build
        raise BackendError(
            "vLLM cannot be imported",
            got=f"{type(error).__name__}: {error}",
            do="pip install 'nemotron-ultra[vllm]' (docs/vllm.md says how without a GPU), or use the Sampler",
        ) from error
    return LLM, SamplingParams


def _fit_platform(config: ModelConfig, options: VLLMOptions) -> VLLMOptions:
    """Options with prefix_caching decided, and refused where vLLM's CPU kernels would fail later."""
    from vllm.platforms import current_platform

    mamba = "M" in config.pattern
    if not current_platform.is_cpu():
        cached = mamba if options.prefix_caching is None else options.prefix_caching
        return replace(options, prefix_caching=cached)
    if mamba and options.draft_tokens:
        raise BackendError(
            "draft_tokens: vLLM's CPU build does not roll Mamba states back after a rejected draft",
            got=f"draft_tokens {options.draft_tokens}, Mamba layers in {config.pattern!r}",
            do="set draft_tokens to 0, or draft with the Sampler",
        )
    if mamba and options.prefix_caching:
        raise BackendError(
            "prefix_caching: vLLM's CPU build keeps no Mamba states of prefixes",
            got=f"Mamba layers in {config.pattern!r}",
            do="leave prefix_caching out",
        )
    whole = options.max_tokens + 1
    if options.max_batched_tokens is not None and options.max_batched_tokens < whole:
        raise BackendError(
            "max_batched_tokens: vLLM's CPU build cannot read the prompt of a request with a seed in pieces",
            got=options.max_batched_tokens,
            allowed=f"{whole} (max_tokens + 1) or more",
        )
    batched = max(options.max_batched_tokens or 4096, whole)
    engine = {"enable_chunked_prefill": False, **options.engine}
    return replace(options, prefix_caching=False, max_batched_tokens=batched, engine=engine)


def _start(make_engine: type, folder: Path, config: ModelConfig, options: VLLMOptions) -> Any:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    arguments = engine_arguments(folder, config, options) | {"worker_extension_cls": WORKER}
    try:
        with _surroundings(options.own_process):
            return make_engine(**arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BackendError(
            f"vLLM did not start on {folder}",
            got=f"{type(error).__name__}: {error}",
            do="see its log above and the options in docs/vllm.md",
        ) from error


@contextmanager
def _surroundings(own_process: bool) -> Iterator[None]:
    """Where the engine is to run."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    old = os.environ.get(name)
    os.environ[name] = str(int(own_process))
    try:
        with _random_states_kept(own_process):
            yield
    finally:
        os.environ.pop(name)
        if old is not None:
            os.environ[name] = old


@contextmanager
def _random_states_kept(own_process: bool) -> Iterator[None]:
    """An engine in this process seeds the process's random generators and draws from them beside its own."""
    if own_process:
        yield
        return
    numpy_state, state = np.random.get_state(), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(state)
