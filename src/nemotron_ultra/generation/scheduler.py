"""Continuous batching: requests wait in a queue, take a slot of the cache, and leave it when finished.

A round reads at most `prefill_chunk` tokens of waiting prompts, equal ones once, and then gives every live
row its next tokens. What a request gets does not depend on the others, but for rounding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nemotron_ultra.generation.base import Completion, Event, Request
from nemotron_ultra.generation.draw import Uniforms
from nemotron_ultra.generation.request import check_count, check_request, check_room, check_vocab_size
from nemotron_ultra.generation.sampling import RowOptions, sample
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.hybrid import HybridLM

TAIL_TOKENS_PER_CHARACTER = 4  # a token has a byte or more, a character of UTF-8 up to four
TAIL_TOKENS = 8  # besides: ids that have no text


@dataclass(eq=False)
class Live:
    """A request on its way. `uniforms` are its numbers for drawing; times are of time.perf_counter."""

    id: int
    request: Request
    submitted: float
    uniforms: Uniforms
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    first: float = 0.0
    cancelled: bool = False
    stop_text: str | None = None


@dataclass(frozen=True)
class Run:
    """Tokens that one row got in a round, one or more, with their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    model_logprobs: list[float]


@dataclass
class Rows:
    """The live rows of the cache: their requests, the hidden state after what each row has seen, and how they
    are drawn. `finish(runs)` of the scheduler may drop rows in the middle of a round.
    """

    cache: Cache
    live: list[Live]
    hidden_BD: Tensor
    options: RowOptions | None = None

    def drop(self, gone_B: Tensor) -> Tensor:
        """-> the old row of each one that stays."""
        order_B = self.cache.drop(gone_B)
        self.live = [self.live[row] for row in order_B.tolist()]
        self.hidden_BD, self.options = self.hidden_BD[order_B], None
        return order_B


class Decoder(Protocol):
    """How live rows get their next tokens. `slack`: tokens that a slot must hold beyond the request's own.

    wants_hidden: whether `admitted` is to get the hidden states of whole prompts.
    """

    slack: int
    wants_hidden: bool

    def admitted(self, prompts: list[Tensor], hidden: list[Tensor] | None, index_B: Tensor) -> None:
        """New rows at the end of `Rows`: copies of prompts index_B, [tokens] and [tokens, D] each."""

    def dropped(self, gone_B: Tensor) -> None:
        """Rows left, the last ones took their places, as in `Cache.drop`."""

    def round(self, rows: Rows, finish: Callable[[list[Run]], Tensor]) -> None:
        """Give every row a run. finish(runs) takes them in and drops rows that are finished; afterwards
        rows.cache must have seen all tokens of the rows that stay, and rows.hidden_BD be theirs. finish
        returns the old row of each one that stays.
        """


class Scheduler:
    """submit requests, then call step() until idle.

    max_slots: requests that run together; max_tokens: the most tokens that prompt and answer may have;
    prefill_chunk: prompt tokens read in a round; vocab_size: only ids below are drawn; decode: ids -> text,
    for stop texts; make_decoder: how rows get their tokens, by default one at a time. `version` is noted for
    each token. Raises ConfigError for options that cannot be, and where the machine has not the memory.
    """

    def __init__(
        self,
        model: HybridLM,
        *,
        max_slots: int = 64,
        max_tokens: int = 4096,
        prefill_chunk: int = 2048,
        vocab_size: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        ssm_format: str = "fp32",
        make_decoder: Callable[[Scheduler], Decoder] | None = None,
        version: int = 0,
    ):
        counts = {"max_slots": max_slots, "max_tokens": max_tokens, "prefill_chunk": prefill_chunk}
        for name, count in counts.items():
            check_count(name, count)
        self.model, self.max_slots, self.max_tokens = model, max_slots, max_tokens
        self.prefill_chunk, self.decode, self.version = prefill_chunk, decode, version
        self.vocab_size = check_vocab_size(vocab_size, model.config.vocab_size)
        self.device = model.lm_head.weight.device
        self.stats = dict.fromkeys(("prefills", "steps", "prefill_tokens", "new_tokens"), 0)
        self.decoder = (make_decoder or OneToken)(self)
        cache = model.new_cache(max_slots, max(1, max_tokens - 1 + self.decoder.slack), ssm_format)
        hidden_BD = torch.empty(0, model.config.hidden_size, dtype=model.compute_dtype, device=self.device)
        self.rows = Rows(cache, [], hidden_BD)
        self._queue: deque[Live] = deque()
        self._part: _Part | None = None
        self._events: list[Event] = []
        self._next_id = 0

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is to be reported."""
        return not (self._queue or self._part or self.rows.live or self._events)

    def submit(self, request: Request) -> int:
        """Queue a request -> its id. Raises DataError and ConfigError for one that cannot be."""
        check_request(request, self.model.config.vocab_size, decodes=self.decode is not None)
        check_room(request, self.max_tokens)
        live = Live(self._next_id, request, time.perf_counter(), Uniforms(request.seed))
        self._next_id += 1
        self._queue.append(live)
        return live.id

    def cancel(self, id: int) -> None:
        """End a request where it is; its slot is free at once. An id that has finished is let be."""
        running = [live.id == id for live in self.rows.live]
        waiting = [*self._queue, *(self._part.requests() if self._part else ())]
        for live in [live for live in [*self.rows.live, *waiting] if live.id == id and not live.cancelled]:
            live.cancelled = True
            self._events.append(Event(id, [], [], [], self._completion(live, "cancelled")))
        self._queue = deque(live for live in self._queue if live.id != id)
        if any(running):
            self._drop(running)

    @torch.no_grad()
    def step(self) -> list[Event]:
        """One round -> what each request got, those cancelled since the last round among them."""
        self._prefill()
        if self.rows.live:
            if self.rows.options is None:
                self.rows.options = RowOptions.of([live.request for live in self.rows.live], self.device)
            self.decoder.round(self.rows, self._finish)
        events, self._events = self._events, []
        return events

    def _finish(self, runs: list[Run]) -> Tensor:
        """Append each row's run, report it, drop the rows that are finished."""
        gone = []
        for live, run in zip(self.rows.live, runs, strict=True):
            if not live.tokens:
                live.first = time.perf_counter()
            reason, count = self._append(live, run)
            completion = self._completion(live, reason) if reason else None
            cut = slice(0, count)
            self._events.append(
                Event(live.id, run.tokens[cut], run.logprobs[cut], run.model_logprobs[cut], completion)
            )
            self.stats["new_tokens"] += count
            gone.append(reason is not None)
        return self._drop(gone)

    def _append(self, live: Live, run: Run) -> tuple[str | None, int]:
        """-> the reason to finish, if there is one, and how many tokens of the run count."""
        request = live.request
        for number, token in enumerate(run.tokens, 1):
            live.tokens.append(token)
            live.logprobs.append(run.logprobs[number - 1])
            live.model_logprobs.append(run.model_logprobs[number - 1])
            live.versions.append(self.version)
            if token in request.stop_ids or self._completes_text(live):
                return "stop", number
            if len(live.tokens) == request.max_new_tokens:
                return "length", number
        return None, len(run.tokens)

    def _completes_text(self, live: Live) -> bool:
        texts = live.request.stop_texts
        if not texts:
            return False
        longest = max(map(len, texts))
        tail = self.decode(live.tokens[-(TAIL_TOKENS_PER_CHARACTER * longest + TAIL_TOKENS) :])
        found = [text for text in texts if text in tail]
        live.stop_text = min(found, key=tail.index, default=None)
        return bool(found)

    def _drop(self, gone: list[bool]) -> Tensor:
        if not any(gone):
            return self.rows.cache.rows_B
        gone_B = torch.tensor(gone, device=self.device)
        order_B = self.rows.drop(gone_B)
        self.decoder.dropped(gone_B)
        return order_B

    def _completion(self, live: Live, reason: str) -> Completion:
        now = time.perf_counter()
        stats = {"prompt_tokens": len(live.request.prompt), "seconds": now - live.submitted}
        if live.tokens:
            stats["first_token_seconds"] = live.first - live.submitted
        if live.stop_text is not None:
            stats["stop_text"] = live.stop_text
        return Completion(
            tokens=live.tokens,
            logprobs=live.logprobs,
            model_logprobs=live.model_logprobs,
            finish_reason=reason,
            versions=live.versions,
            stats=stats,
        )

    def _prefill(self) -> None:
        """Read a chunk of the waiting prompts; those that are read whole become live rows."""
        if self._part is not None and all(live.cancelled for live in self._part.requests()):
            self._part = None
        if self._part is None:
            self._part = self._next_part()
        part = self._part
        if part is None or not part.read(self.model, self.prefill_chunk, self.decoder.wants_hidden):
            self._count_prefill(part)
            return
        self._count_prefill(part)
        self._part = None
        admitted = [(row, live) for row, (_, group) in enumerate(part.groups) for live in group]
        admitted = [(row, live) for row, live in admitted if not live.cancelled]
        if not admitted:
            return
        index_B = torch.tensor([row for row, _ in admitted], device=self.device)
        self.rows.cache.admit(part.cache, index_B)
        self.rows.live += [live for _, live in admitted]
        self.rows.hidden_BD = torch.cat([self.rows.hidden_BD, part.last_BD[index_B]])
        self.rows.options = None
        self.decoder.admitted([prompt for prompt, _ in part.groups], part.hidden(), index_B)

    def _count_prefill(self, part: _Part | None) -> None:
        if part is not None:
            self.stats["prefills"] += 1
            self.stats["prefill_tokens"] += part.latest

    def _next_part(self) -> _Part | None:
        """The next prompts of the queue that fit the free slots and one chunk, or one longer prompt."""
        groups: dict[tuple[int, ...], list[Live]] = {}
        total, free = 0, self.rows.cache.free
        while self._queue and free:
            prompt = self._queue[0].request.prompt
            if prompt not in groups and groups and total + len(prompt) > self.prefill_chunk:
                break
            total += 0 if prompt in groups else len(prompt)
            groups.setdefault(prompt, []).append(self._queue.popleft())
            free -= 1
        pairs = [(torch.tensor(prompt, device=self.device), group) for prompt, group in groups.items()]
        return _Part(pairs) if pairs else None


@dataclass
class _Part:
    """Prompts that are read together, each with its requests, in a cache of just their length. One that is
    longer than a chunk is alone and read in pieces. latest: tokens of the last piece.
    """

    groups: list[tuple[Tensor, list[Live]]]
    cache: Cache | None = None
    last_BD: Tensor | None = None
    done: int = 0
    latest: int = 0
    pieces: list[Tensor] = field(default_factory=list)

    def requests(self) -> list[Live]:
        return [live for _, group in self.groups for live in group]

    def read(self, model: HybridLM, chunk: int, wants_hidden: bool) -> bool:
        """Read the next piece -> whether that was the last."""
        lengths = [len(prompt) for prompt, _ in self.groups]
        tokens_T = torch.cat([prompt for prompt, _ in self.groups])
        if len(self.groups) == 1:
            tokens_T = tokens_T[self.done : self.done + chunk]
        piece = lengths if len(lengths) > 1 else [len(tokens_T)]
        room = max(lengths) if self.cache is None else self.cache
        hidden, self.cache = model.read(tokens_T, piece, room, every=wants_hidden)
        ends_B = torch.tensor(piece, device=hidden.device).cumsum(0) - 1
        self.last_BD = hidden[ends_B] if wants_hidden else hidden
        self.pieces += [hidden] if wants_hidden else []
        self.latest = len(tokens_T)
        self.done += self.latest
        return self.done == sum(lengths)

    def hidden(self) -> list[Tensor] | None:
        """[tokens, D] of each prompt, where they were asked for."""
        if not self.pieces:
            return None
        return list(torch.cat(self.pieces).split([len(prompt) for prompt, _ in self.groups]))


def next_numbers(live: Sequence[Live]) -> list[float]:
    """The next uniform number of each request."""
    return [one.uniforms.next() for one in live]


class OneToken:
    """The plain `Decoder`: draw a token for every row, then step."""

    slack = 0
    wants_hidden = False

    def __init__(self, scheduler: Scheduler):
        self.model, self.vocab_size = scheduler.model, scheduler.vocab_size
        self.stats = scheduler.stats

    def admitted(self, prompts: list[Tensor], hidden: list[Tensor] | None, index_B: Tensor) -> None:
        """It needs nothing but `Rows`."""

    def dropped(self, gone_B: Tensor) -> None:
        """It needs nothing but `Rows`."""

    def round(self, rows: Rows, finish: Callable[[list[Run]], Tensor]) -> None:
        token_B, *logprobs = sample(
            self.model, rows.hidden_BD, self.vocab_size, rows.options, lambda: next_numbers(rows.live)
        )
        drawn = zip(token_B.tolist(), *(logprob_B.tolist() for logprob_B in logprobs), strict=True)
        order_B = finish([Run([token], [logprob], [own]) for token, logprob, own in drawn])
        if rows.live:
            token_B = token_B if len(order_B) == len(token_B) else token_B[order_B]
            rows.hidden_BD = self.model.step(token_B, rows.cache)
            self.stats["steps"] += 1
