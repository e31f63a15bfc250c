"""x_t ~ softmax(W h_t / temperature), h_t from the cached state: the reference generator.

Requests run in waves of at most `max_slots`: their prompts are read in one packed forward, equal ones once,
then every step draws one token for all unfinished requests together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemotron_ultra.errors import CheckpointError, ConfigError, DataError
from nemotron_ultra.generation.base import Completion
from nemotron_ultra.generation.draw import draw, uniforms
from nemotron_ultra.model.hybrid import HybridLM, apply_head


def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    draft_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    max_slots: int = 256,
    seeds: Sequence[int] | None = None,
    vocab_size: int | None = None,
) -> list[Completion]:
    """One completion per prompt, in order, from the model as it is; the likeliest tokens by default.

    `seeds` has one number per request; without it request i of the list gets a number of its own from `seed`.
    `vocab_size` bounds the ids drawn, as in `Sampler`. Raises ConfigError and DataError before any work.
    """
    if draft_tokens:
        raise ConfigError(
            "draft_tokens: this version drafts no tokens", got=draft_tokens, allowed=0, do="leave it out"
        )
    if seeds is None:
        seeds = [seed * 1_000_003 + number for number in range(len(prompts))]
    sampler = Sampler(model, max_slots=max_slots, vocab_size=vocab_size)
    return sampler.generate(
        prompts, max_new_tokens=max_new_tokens, temperature=temperature, stop_ids=stop_ids, seeds=seeds
    )


class Sampler:
    """A `Generator` on a model of its own, or on one that nobody trains meanwhile.

    Only ids below `vocab_size` (default: all rows of the head) are drawn, and log-probabilities are of the
    distribution over those. A learner's are over all rows: where a tokenizer has fewer ids than the head has
    rows the two differ by the log of the mass on the unused rows. `stats` describes the latest `generate`.
    """

    def __init__(self, model: HybridLM, *, max_slots: int = 256, vocab_size: int | None = None):
        rows = model.config.vocab_size
        if max_slots < 1:
            raise ConfigError("max_slots: too few", got=max_slots, allowed="1 or more")
        if vocab_size is not None and not 1 <= vocab_size <= rows:
            raise ConfigError("vocab_size: not ids of the model", got=vocab_size, allowed=f"1 to {rows}")
        self.model, self.max_slots = model, max_slots
        self.vocab_size = rows if vocab_size is None else vocab_size
        self.version = 0
        self.stats: dict[str, float] = {}
        self._lock = threading.Lock()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every tensor of the state dict into the model; waits for a running `generate`.

        Raises CheckpointError, with the model as it was, if names or shapes differ.
        """
        new = dict(weights)
        with self._lock, torch.no_grad():
            own = self.model.state_dict()
            wrong = sorted(set(own) ^ set(new))
            wrong += [name for name in own if name in new and own[name].shape != new[name].shape]
            if wrong:
                raise CheckpointError(
                    "weights that do not fit the generator's model: missing, unknown or of another shape",
                    got=f"{', '.join(wrong[:8])}{' ...' if len(wrong) > 8 else ''}",
                    do="publish the weights of a model with the same configuration",
                )
            for name, tensor in own.items():
                tensor.copy_(new[name])
            self.version = version

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_ids: Sequence[int] = (),
        seeds: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. Without `seeds` request i has seed i.

        Raises ConfigError for an option and DataError for a prompt that cannot be, before any work.
        """
        seeds = range(len(prompts)) if seeds is None else seeds
        rows = self.model.config.vocab_size
        _check_options(len(prompts), max_new_tokens, temperature, seeds)
        _check_ids(prompts, stop_ids, rows)
        options = _Options(max_new_tokens, float(temperature), tuple(stop_ids), self.vocab_size)
        with self._lock:
            begin, completions = time.perf_counter(), []
            self.stats = dict.fromkeys(("waves", "steps", "prefill_tokens", "new_tokens"), 0)
            for first in range(0, len(prompts), self.max_slots):
                part = slice(first, first + self.max_slots)
                wave = _Wave(self.model, options, prompts[part], seeds[part], self.stats)
                completions += wave.run(self.version)
            self.stats["seconds"] = time.perf_counter() - begin
        return completions


@dataclass(frozen=True)
class _Options:
    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    vocab_size: int


class _Wave:
    """Requests that run together. request_B [live rows] is the request of each row of the cache."""

    def __init__(
        self,
        model: HybridLM,
        options: _Options,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        stats: dict[str, float],
    ):
        self.model, self.options, self.prompts, self.stats = model, options, prompts, stats
        self.device = model.lm_head.weight.device
        count, places = len(prompts), options.max_new_tokens
        self.uniform_BM = uniforms(seeds, places).to(self.device)
        self.token_BM = torch.zeros(count, places, dtype=torch.int64, device=self.device)
        self.logprob_BM = torch.zeros(count, places, dtype=torch.float64, device=self.device)
        self.length_B = torch.full((count,), places, device=self.device)
        self.stopped_B = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.request_B = torch.arange(count, device=self.device)
        self.stop_S = torch.tensor(options.stop_ids, dtype=torch.int64, device=self.device)

    def run(self, version: int) -> list[Completion]:
        hidden_BD = self._prefill()
        for place in range(self.options.max_new_tokens):
            token_B = self._draw(hidden_BD, place)
            if not self.cache.size or place + 1 == self.options.max_new_tokens:
                break
            hidden_BD = self.model.step(token_B, self.cache)
            self.stats["steps"] += 1
        self.stats["waves"] += 1
        return self._completions(version)

    def _prefill(self) -> Tensor:
        """Hidden state after each prompt, [B, D]; `cache` has a row for every request."""
        places: dict[tuple[int, ...], int] = {}
        index_B = torch.tensor(
            [places.setdefault(tuple(p), len(places)) for p in self.prompts], device=self.device
        )
        tokens_T = torch.tensor([token for prompt in places for token in prompt], device=self.device)
        bounds = torch.tensor([0, *map(len, places)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        capacity = max(map(len, places)) + self.options.max_new_tokens - 1
        hidden_UD, cache = self.model.prefill(tokens_T, bounds, capacity)
        self.cache = cache if len(places) == len(index_B) else cache.select(index_B, self.model.config)
        self.stats["prefill_tokens"] += len(tokens_T)
        return hidden_UD[index_B]

    def _draw(self, hidden_BD: Tensor, place: int) -> Tensor:
        """One token for every live row; finished rows leave. Returns the tokens of the rows that stay."""
        options, request_B = self.options, self.request_B
        logits_BV = apply_head(hidden_BD, self.model.lm_head.weight)[:, : options.vocab_size]
        token_B, logprob_B = draw(logits_BV, options.temperature, self.uniform_BM[request_B, place])
        self.token_BM[request_B, place] = token_B
        self.logprob_BM[request_B, place] = logprob_B.double()
        self.stats["new_tokens"] += len(token_B)
        stop_B = torch.isin(token_B, self.stop_S)
        if not options.stop_ids or not bool(stop_B.any()):
            return token_B
        self.length_B[request_B[stop_B]] = place + 1
        self.stopped_B[request_B[stop_B]] = True
        order_B = self.cache.drop(stop_B)
        self.request_B = request_B[order_B]
        return token_B[order_B]

    def _completions(self, version: int) -> list[Completion]:
        tokens, logprobs = self.token_BM.tolist(), self.logprob_BM.tolist()
        return [
            Completion(
                tokens=tokens[row][:length],
                logprobs=logprobs[row][:length],
                finish_reason="stop" if stopped else "length",
                versions=[version] * length,
                stats={"prompt_tokens": len(self.prompts[row])},
            )
            for row, (length, stopped) in enumerate(
                zip(self.length_B.tolist(), self.stopped_B.tolist(), strict=True)
            )
        ]


def _check_options(requests: int, max_new_tokens: int, temperature: Any, seeds: Sequence[int]) -> None:
    if max_new_tokens < 1:
        raise ConfigError("max_new_tokens: too few", got=max_new_tokens, allowed="1 or more")
    if not 0 <= temperature < float("inf"):
        raise ConfigError("temperature: cannot be", got=temperature, allowed="0 (the likeliest id) or more")
    if len(seeds) != requests:
        raise ConfigError("seeds: not one per prompt", got=len(seeds), allowed=f"{requests}, one per prompt")


def _check_ids(prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], rows: int) -> None:
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(
                f"prompt {number} is empty", do="begin it with at least one token, for instance the BOS id"
            )
        if not 0 <= min(prompt) <= max(prompt) < rows:
            wrong = next(token for token in prompt if not 0 <= token < rows)
            raise DataError(
                f"prompt {number}: a token id the model does not have",
                got=wrong,
                allowed=f"0 to {rows - 1}",
                do="encode the text with the tokenizer that the model was trained with",
            )
    for stop in stop_ids:
        if not 0 <= stop < rows:
            raise ConfigError("stop_ids: an id the model does not have", got=stop, allowed=f"0 to {rows - 1}")
