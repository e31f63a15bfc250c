"""Speculative decoding: the MTP module drafts k tokens, one backbone pass verifies them (report 3.6.1).

A round: drafts from the hidden state of the last seen token, `extend` with the pending token and the drafts,
`verify`, and `commit` of what stays; what does not is rolled back there. A row's run is its accepted drafts
and the token after them, which is pending then: known, reported, and not yet seen by the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.generation.draft_length import DraftLength, FixedLength, adaptive_length
from nemotron_ultra.generation.drafter import REACH, Drafter, check_drafts
from nemotron_ultra.generation.draw import Uniforms
from nemotron_ultra.generation.sampling import RowOptions, sample
from nemotron_ultra.generation.scheduler import Decoder, Rows, Run, Scheduler, next_numbers
from nemotron_ultra.generation.verify import (
    Verdict,
    by_match,
    by_rejection,
    draft_token,
    likeliest_run,
    repeated,
)
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.ops.decode_kernels import Round, Verified

SIDE = 2  # numbers that a place takes besides the one it is drawn with: for its draft, and to accept it


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """tokens: drafts of a round, with `adaptive` at most.

    adaptive: as many as measured acceptance and times say, which may be none.
    sampled: drafts are drawn and verified by rejection. By default they are the draft's likeliest ids and
    verified by match: a request then gets the very tokens that it gets without drafts (but for rounding), for
    any draft length and company. With `sampled` only their distribution is the same, and they depend on the
    seed and on the draft lengths: with `adaptive` they are not repeatable.
    """

    tokens: int
    adaptive: bool = False
    sampled: bool = False

    @classmethod
    def of(cls, draft_tokens: int | Drafting) -> Drafting:
        return draft_tokens if isinstance(draft_tokens, Drafting) else cls(tokens=draft_tokens)

    def decoder(self, model: HybridLM) -> Callable[[Scheduler], Decoder] | None:
        """What a Scheduler takes as make_decoder. Raises ConfigError for a model that cannot draft."""
        check_drafts(model, self.tokens)
        if not self.tokens:
            return None
        length = adaptive_length(model, self.tokens) if self.adaptive else FixedLength(self.tokens)
        return lambda scheduler: Speculative(scheduler, length, sampled=self.sampled)


class Speculative:
    """A `Decoder`. `stats` of the scheduler gets the counts that `draft_metrics` reads."""

    wants_hidden = True

    def __init__(self, scheduler: Scheduler, length: DraftLength, *, sampled: bool = False):
        self.model, self.vocab_size, self.stats = scheduler.model, scheduler.vocab_size, scheduler.stats
        self.length, self.sampled = length, sampled
        self.slack = length.most + 1  # a new row that wants one token drafts in its company's round
        capacity = scheduler.max_tokens + length.most + REACH
        self.drafter = Drafter(self.model, scheduler.max_slots, capacity, self.vocab_size)
        self.stats.update(dict.fromkeys(("rounds", "drafted", "accepted"), 0))
        for place in range(1, length.most + 1):
            self.stats.update({f"drafted_{place}": 0, f"accepted_{place}": 0})
        self.pending_B = torch.empty(0, dtype=torch.int64, device=scheduler.device)
        self.side: list[Uniforms] = []
        self._repeated: tuple[RowOptions, int, RowOptions] | None = None

    def admitted(self, prompts: list[Tensor], hidden: list[Tensor] | None, index_B: Tensor) -> None:
        self.drafter.admitted(prompts, hidden, index_B)

    def dropped(self, gone_B: Tensor) -> None:
        order_B = self.drafter.dropped(gone_B)
        self.pending_B = self.pending_B[order_B]
        if self.sampled:
            self.side = [self.side[row] for row in order_B.tolist()]

    def round(self, rows: Rows, finish: Callable[[list[Run]], Tensor]) -> None:
        begin, size = time.perf_counter(), len(rows.live)
        old, first = len(self.pending_B), self._begin(rows)
        left = [
            live.request.max_new_tokens - len(live.tokens) - (row >= old)
            for row, live in enumerate(rows.live)
        ]
        if max(left) <= 0:  # all rows are new
            finish(first)
            return
        count = self.length.choose(size)
        if not self.sampled:  # else a row's tokens would depend on how long its company stays
            count = min(count, max(left) - 1)
        runs = self._verify(rows, count) if count else self._plain(rows)
        accepted = [len(run.tokens) - 1 for run in runs]
        for run, begun in zip(runs[old:], first, strict=True):
            run.tokens[:0], run.logprobs[:0] = begun.tokens, begun.logprobs
            run.model_logprobs[:0] = begun.model_logprobs
        self.stats["steps"] += 1
        self._count(size, count, time.perf_counter() - begin, accepted, left)
        finish(runs)

    def _begin(self, rows: Rows) -> list[Run]:
        """Draw the first token of new rows, which are the last ones -> their runs."""
        old = len(self.pending_B)
        new = rows.live[old:]
        if not new:
            return []
        hidden_BD = rows.hidden_BD[old:]
        options = RowOptions.of([live.request for live in new], hidden_BD.device)
        drawn = sample(self.model, hidden_BD, self.vocab_size, options, lambda: next_numbers(new))
        self.pending_B = torch.cat([self.pending_B, drawn[0]])
        self.drafter.saw(old, hidden_BD, drawn[0], [1] * len(new))
        self.side += [Uniforms(live.request.seed, 1) for live in new] if self.sampled else []
        return _single(drawn)

    def _plain(self, rows: Rows) -> list[Run]:
        """A round without drafts."""
        found = self._whole(rows, self.pending_B[:, None])
        if found is None:
            hidden_BD = self.model.step(self.pending_B, rows.cache)
            live = rows.live
            drawn = sample(self.model, hidden_BD, self.vocab_size, rows.options, lambda: next_numbers(live))
        else:
            hidden_BD, drawn = found.hidden_MD, (found.token_M, found.logprob_M, found.model_logprob_M)
        rows.hidden_BD, self.pending_B = hidden_BD, drawn[0]
        ones = [1] * len(rows.live)
        self.drafter.saw(0, hidden_BD, drawn[0], ones)
        if self.sampled:
            self._skip_side(ones)
        return _single(drawn)

    def _skip_side(self, counts: list[int]) -> None:
        for uniforms, count in zip(self.side, counts, strict=True):
            uniforms.skip(len(uniforms.peek(SIDE * count)))

    def _verify(self, rows: Rows, count: int) -> list[Run]:
        """Draft, extend, verify and commit; rows.hidden_BD is then that of the last token that stayed."""
        waiting = self.drafter.waiting()
        if rows.options.all_greedy:
            found = self.drafter.round(count, rows.cache, self.pending_B, waiting)
            if found is not None:
                return self._round(rows, count, found)
        side, q = [], []

        def pick(logits_BV: Tensor, number: int) -> Tensor:
            numbers = _column([place[SIDE * number] for place in side], logits_BV)
            token_B, q_BV = draft_token(logits_BV, rows.options, numbers)
            q.append(q_BV)
            return token_B

        if self.sampled:
            side = [uniforms.peek(SIDE * count) for uniforms in self.side]
        rejects = self.sampled and not rows.options.all_greedy
        draft_BJ = self.drafter.draft(count, waiting, pick if rejects else None)
        tokens_BK = torch.cat([self.pending_B[:, None], draft_BJ], 1)
        found = self._whole(rows, tokens_BK)
        if found is None:
            hidden_BKD = self.model.extend(tokens_BK, rows.cache)
            verdict = self._verdict(rows, hidden_BKD, draft_BJ, q, side)
            kept = [number + 1 for number in verdict.accepted_B.tolist()]
            rows.cache.commit(kept)
        else:
            hidden_BKD, verdict = found.hidden_MD.view(*tokens_BK.shape, -1), likeliest_run(found, tokens_BK)
            kept = found.keep_B.tolist()
        self._take(rows, hidden_BKD, verdict, kept)
        columns = (verdict.token_BK, verdict.logprob_BK, verdict.model_logprob_BK)
        lists = [values_BK.tolist() for values_BK in columns]
        return [Run(*(values[:count] for values in row)) for count, *row in zip(kept, *lists, strict=True)]

    def _round(self, rows: Rows, count: int, found: Round) -> list[Run]:
        """Take in what one call did."""
        rows.hidden_BD, self.pending_B = found.last_BD, found.next_B
        self.drafter.saw(0, found.hidden_MD, found.token_M, found.keep)
        if self.sampled:
            self._skip_side(found.keep)
        spans = [(row * (count + 1), keep) for row, keep in enumerate(found.keep)]
        lists = (found.found, found.logprobs, found.model_logprobs)
        return [Run(*(values[at : at + keep] for values in lists)) for at, keep in spans]

    def _whole(self, rows: Rows, tokens_BK: Tensor) -> Verified | None:
        """What follows greedily, drafts verified and committed, in one call where that can be."""
        if not rows.options.all_greedy:
            return None
        return self.model.verify(tokens_BK, rows.cache, self.vocab_size)

    def _verdict(
        self, rows: Rows, hidden_BKD: Tensor, draft_BJ: Tensor, q: list[Tensor], side: list[list[float]]
    ) -> Verdict:
        """q, side: distributions that the drafts were drawn from, and the numbers beside them, or nothing."""
        places = hidden_BKD.shape[1]
        options = self._options(rows.options, places)

        def ahead() -> list[list[float]]:
            return [live.uniforms.peek(places) for live in rows.live]

        if not q:
            drawn = sample(self.model, hidden_BKD.flatten(0, 1), self.vocab_size, options, ahead)
            return by_match(drawn, draft_BJ)
        logits_BKV = self.model.next_logits(hidden_BKD.flatten(0, 1)).unflatten(0, hidden_BKD.shape[:2])
        numbers = (_column([place[1::SIDE] for place in side], logits_BKV), _column(ahead(), logits_BKV))
        return by_rejection(logits_BKV, draft_BJ, torch.stack(q, 1), self.vocab_size, options, numbers)

    def _take(self, rows: Rows, hidden_BKD: Tensor, verdict: Verdict, kept: list[int]) -> None:
        places = hidden_BKD.shape[1]
        last_B = torch.tensor([row * places + count - 1 for row, count in enumerate(kept)])
        last_B = last_B.to(hidden_BKD.device)
        rows.hidden_BD = hidden_BKD.flatten(0, 1).index_select(0, last_B)
        self.pending_B = verdict.token_BK.flatten().index_select(0, last_B)
        self.drafter.saw(0, hidden_BKD, verdict.token_BK, kept)
        for live, count in zip(rows.live, kept, strict=True):
            live.uniforms.skip(count)
        if self.sampled:
            self._skip_side(kept)

    def _options(self, options: RowOptions, count: int) -> RowOptions:
        if self._repeated is None or self._repeated[0] is not options or self._repeated[1] != count:
            self._repeated = (options, count, repeated(options, count) if count > 1 else options)
        return self._repeated[2]

    def _count(self, size: int, count: int, seconds: float, accepted: list[int], left: list[int]) -> None:
        """Drafts beyond a request's last token are no drafts."""
        self.stats["rounds"] += size
        if not count:
            self.length.note(size, 0, seconds, [], [])
            return
        drafted = [max(0, min(count, most - 1)) for most in left]
        accepted = [min(kept, most) for kept, most in zip(accepted, drafted, strict=True)]
        kept = [sum(a >= place for a in accepted) for place in range(1, count + 1)]
        within = [sum(d >= place for d in drafted) for place in range(1, count + 1)]
        tried = [
            sum(d >= place and a >= place - 1 for a, d in zip(accepted, drafted, strict=True))
            for place in range(1, count + 1)
        ]
        self.length.note(size, count, seconds, tried, kept)
        self.stats["drafted"] += sum(drafted)
        self.stats["accepted"] += sum(accepted)
        for place in range(1, count + 1):
            self.stats[f"drafted_{place}"] += within[place - 1]
            self.stats[f"accepted_{place}"] += kept[place - 1]


def draft_metrics(stats: dict[str, float]) -> dict[str, float]:
    """acceptance_length = 1 + accepted / rounds (of a row), acceptance_rate = accepted / drafted, and
    acceptance_rate_j = share of the drafts at place j that stayed, for places with drafts. Empty
    without rounds.
    """
    if not stats.get("rounds"):
        return {}
    found = {"acceptance_length": 1 + stats["accepted"] / stats["rounds"]}
    if stats["drafted"]:
        found["acceptance_rate"] = stats["accepted"] / stats["drafted"]
    place = 1
    while stats.get(f"drafted_{place}"):
        found[f"acceptance_rate_{place}"] = stats[f"accepted_{place}"] / stats[f"drafted_{place}"]
        place += 1
    return found


def _single(drawn: tuple[Tensor, Tensor, Tensor]) -> list[Run]:
    """A run of one token for each row that was drawn."""
    return [Run([t], [lp], [own]) for t, lp, own in zip(*(x_B.tolist() for x_B in drawn), strict=True)]


def _column(numbers: list, like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device)
