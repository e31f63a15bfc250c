"""x_t ~ softmax(W h_t / temperature), h_t from the cached state: the reference generator.

At most `max_slots` requests run together; one that is finished makes room for the next (`scheduler.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from nemotron_ultra.errors import CheckpointError, ConfigError
from nemotron_ultra.generation.base import Completion, Extras, Request
from nemotron_ultra.generation.request import (
    check_count,
    check_options,
    check_prompt,
    check_request,
    check_seed,
    check_stops,
    check_vocab_size,
)
from nemotron_ultra.generation.scheduler import Scheduler
from nemotron_ultra.generation.speculative import Drafting, draft_metrics
from nemotron_ultra.model.draft import forget_copies
from nemotron_ultra.model.hybrid import HybridLM


def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    draft_tokens: int | Drafting = 0,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    max_slots: int = 256,
    seeds: Sequence[int] | None = None,
    vocab_size: int | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    **extras: Unpack[Extras],
) -> list[Completion]:
    """One completion per prompt, in order, from the model as it is; the likeliest tokens by default.

    `seeds` has one number per request; without it request i of the list gets a number of its own from `seed`.
    draft_tokens: tokens that the MTP module drafts in a round, or a `Drafting`; the result is the same.
    `vocab_size` bounds the ids drawn, as in `Sampler`; top_p, top_k, min_p and stop_texts as in `Request`.
    Raises ConfigError and DataError before any work.
    """
    check_seed(seed)
    if seeds is None:
        seeds = [seed * 1_000_003 + number for number in range(len(prompts))]
    sampler = Sampler(
        model, max_slots=max_slots, vocab_size=vocab_size, decode=decode, draft_tokens=draft_tokens
    )
    return sampler.generate(
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_ids=stop_ids,
        seeds=seeds,
        **extras,
    )


class Sampler:
    """A `Generator` on a model of its own, or on one that nobody trains meanwhile.

    Only ids below `vocab_size` (default: all rows of the head) are drawn, and log-probabilities are of the
    distribution over those. A learner's are over all rows: where a tokenizer has fewer ids than the head has
    rows the two differ by the log of the mass on the unused rows. `decode` (ids -> text) is needed for stop
    texts alone. `draft_tokens`: as in `generate`. `stats` describes the latest `generate`.
    """

    prefill_chunk = 8192  # tokens; nobody waits for single answers here

    def __init__(
        self,
        model: HybridLM,
        *,
        max_slots: int = 256,
        vocab_size: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        draft_tokens: int | Drafting = 0,
    ):
        check_count("max_slots", max_slots)
        self.model, self.max_slots, self.decode = model, max_slots, decode
        self.make_decoder = Drafting.of(draft_tokens).decoder(model)
        self.vocab_size = check_vocab_size(vocab_size, model.config.vocab_size)
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
            forget_copies(self.model)
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
        **extras: Unpack[Extras],
    ) -> list[Completion]:
        """One completion per prompt, in order. Without `seeds` request i has seed i. `extras`: see `Request`.

        Raises ConfigError for an option and DataError for a prompt that cannot be, before any work.
        """
        seeds = range(len(prompts)) if seeds is None else seeds
        if len(seeds) != len(prompts):
            raise ConfigError(
                "seeds: not one per prompt", got=len(seeds), allowed=f"{len(prompts)}, one per prompt"
            )
        rows, decodes = self.model.config.vocab_size, self.decode is not None
        check_options(max_new_tokens, temperature)
        check_stops(stop_ids, extras.get("stop_texts", ()), rows, decodes)
        extras["stop_texts"] = tuple(extras.get("stop_texts", ()))
        requests = []
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            check_prompt(prompt, rows, f"prompt {number}")
            request = Request(
                prompt=tuple(prompt),
                max_new_tokens=max_new_tokens,
                temperature=float(temperature),
                stop_ids=tuple(stop_ids),
                seed=seed,
                **extras,
            )
            requests.append(request)
        for request in requests[:1]:
            check_request(request, rows, decodes=decodes)
        with self._lock:
            begin = time.perf_counter()
            completions = self._run(requests) if requests else []
            self.stats["seconds"] = time.perf_counter() - begin
        return completions

    def _run(self, requests: list[Request]) -> list[Completion]:
        scheduler = Scheduler(
            self.model,
            max_slots=min(self.max_slots, len(requests)),
            max_tokens=max(len(r.prompt) + r.max_new_tokens for r in requests),
            prefill_chunk=self.prefill_chunk,
            vocab_size=self.vocab_size,
            decode=self.decode,
            make_decoder=self.make_decoder,
            version=self.version,
        )
        places = {scheduler.submit(request): place for place, request in enumerate(requests)}
        completions: list[Completion | None] = [None] * len(requests)
        while not scheduler.idle:
            for event in scheduler.step():
                if event.completion is not None:
                    completions[places[event.id]] = event.completion
        self.stats = scheduler.stats | draft_metrics(scheduler.stats)
        return completions
