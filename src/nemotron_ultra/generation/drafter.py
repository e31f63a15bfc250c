"""d_j = argmax head(g_j), g_j = MTP(e(d_{j-1}), g_{j-1}), g_0 = h of the last seen token (report 2.1, 3.6.1).

The module is trained as depth j over keys of depth j. Here all depths share one cache, of depth 1: entry i is
made of h_i and token i + 1, and drafts add entries of their own until they are taken back. The pairs (h, next
token) that the cache has not taken in yet wait in `behind`, so that rounds without drafts cost nothing. Only
the last ones of a prompt, and of many rounds, are taken in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.draft import Drafts, Pairs
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.ops.decode_kernels import Round

REACH = 16  # pairs of a row that wait, at most: after more of them drafts were not seen to stay oftener
TOGETHER, LEAST = 64, 4  # pairs of all rows that are taken in at once, but LEAST of each

# Called with (logits [B, V], number of the draft from 0) -> token [B].
Pick = Callable[[Tensor, int], Tensor]


def check_drafts(model: HybridLM, draft_tokens: int) -> None:
    """Raises ConfigError for a model that cannot draft so many tokens."""
    if not isinstance(draft_tokens, int) or draft_tokens < 0:
        raise ConfigError("draft_tokens: cannot be", got=draft_tokens, allowed="0 (no drafts) or more")
    if not draft_tokens:
        return
    if model.mtp is None:
        raise ConfigError(
            "draft_tokens: this model has no MTP module to draft with",
            got=draft_tokens,
            allowed=0,
            do="leave it out, or train a model with num_nextn_predict_layers=1",
        )
    config = model.config
    if config.num_nextn_predict_layers != 1:
        raise ConfigError(
            "draft_tokens: drafts come from one MTP module, applied again and again",
            got=f"num_nextn_predict_layers {config.num_nextn_predict_layers}",
            allowed=1,
            do="set draft_tokens to 0",
        )
    if "M" in config.mtp_pattern:
        raise ConfigError(
            "draft_tokens: the state of a Mamba layer cannot take drafts back",
            got=f"mtp_pattern {config.mtp_pattern!r}",
            allowed="* E -",
            do="set draft_tokens to 0",
        )


@dataclass
class _Round:
    """Hidden states of a round, the tokens after them, how many of each count, and where each live row is.

    [B, K, D] and [B, K], or [B, D] and [B] of a round of one token.
    """

    hidden: Tensor
    token: Tensor
    counts: list[int]
    rows: list[int | None]

    @property
    def hidden_BKD(self) -> Tensor:
        return self.hidden.view(len(self.counts), -1, self.hidden.shape[-1])

    @property
    def token_BK(self) -> Tensor:
        return self.token.view(len(self.counts), -1)


class Drafter:
    """The MTP module beside the live rows of a scheduler: same rows, same order, a cache of its own."""

    def __init__(self, model: HybridLM, slots: int, capacity: int, vocab_size: int):
        self.model, self.vocab_size = model, vocab_size
        self.cache = model.new_cache(slots, capacity, pattern=model.config.mtp_pattern)
        self.drafts = Drafts(model, vocab_size)
        self.behind: list[list[tuple[Tensor, Tensor]]] = []
        self.rounds: deque[_Round] = deque(maxlen=REACH)  # of all rows, later than `behind`

    def admitted(self, prompts: list[Tensor], hidden: list[Tensor], index_B: Tensor) -> None:
        """New rows: copies of prompts index_B, whose last pairs are taken in with the first draft."""
        pairs = [
            (h_TD[:-1][-REACH:].clone(), p_T[1:][-REACH:]) for h_TD, p_T in zip(hidden, prompts, strict=True)
        ]
        self.cache.admit_new(len(index_B))
        self.behind += [[pairs[row]] for row in index_B.tolist()]

    def dropped(self, gone_B: Tensor) -> Tensor:
        """-> the old row of each one that stays."""
        order_B = self.cache.drop(gone_B)
        order = order_B.tolist()
        self.behind = [self.behind[row] for row in order]
        for seen in self.rounds:
            seen.rows = [seen.rows[row] if row < len(seen.rows) else None for row in order]
        return order_B

    def saw(self, first: int, hidden: Tensor, token: Tensor, counts: list[int]) -> None:
        """Row first + b was given its first counts[b] hidden states, and tokens came next; see `_Round`."""
        seen = _Round(hidden, token, counts, [None] * first + list(range(len(counts))))
        if first == 0:
            self.rounds.append(seen)
        else:
            self._give(seen)

    def round(self, count: int, main: Cache, pending_B: Tensor, waiting: Pairs) -> Round | None:
        """`draft`, and `HybridLM.verify` with the cache of the model, in one call where that can be."""
        return self.drafts.round(self.cache, waiting, count, main, pending_B)

    def draft(self, count: int, waiting: Pairs, pick: Pick | None = None) -> Tensor:
        """`count` tokens, 1 or more, for every live row, [B, count], after what was `waiting`.

        pick: how a draft is chosen, by default the likeliest id.
        """
        if pick is None and (found := self.drafts.run(self.cache, waiting, count)) is not None:
            return found
        g_BD = self._extend(waiting)
        drafts: list[Tensor] = []
        for number in range(count):
            logits_BV = self.model.next_logits(g_BD)[:, : self.vocab_size]
            drafts.append(logits_BV.argmax(-1) if pick is None else pick(logits_BV, number))
            if number + 1 < count:
                g_B1D = self.model.mtp.extend(g_BD[:, None], self._embed(drafts[-1])[:, None], self.cache)
                self.cache.close()
                g_BD = g_B1D[:, 0]
        self.cache.cut(count - 1)
        return torch.stack(drafts, 1)

    def _give(self, seen: _Round) -> None:
        hidden_BKD, token_BK = seen.hidden_BKD, seen.token_BK
        for pairs, row in zip(self.behind, seen.rows, strict=False):
            if row is not None:
                count = seen.counts[row]
                pairs.append((hidden_BKD[row, :count], token_BK[row, :count]))

    def _sort(self) -> None:
        """`rounds` to the rows that they are of."""
        for seen in self.rounds:
            self._give(seen)
        self.rounds.clear()

    def waiting(self) -> Pairs:
        """The pairs that wait, which are then to be drafted after; each row has one."""
        last = self.rounds[-1] if len(self.rounds) == 1 and not any(self.behind) else None
        if (
            last is not None
            and last.rows == list(range(len(last.counts)))
            and len(last.rows) == self.cache.size
        ):
            self.rounds.clear()
            return Pairs.of(last.hidden_BKD, last.token_BK, last.counts)
        self._sort()
        room = max(LEAST, min(REACH, TOGETHER // len(self.behind)))
        waiting = [_latest(pairs, room) for pairs in self.behind]
        lengths = [sum(len(token_T) for _, token_T in pairs) for pairs in waiting]
        hidden_TD, token_T = (
            torch.cat([pair[side] for pairs in waiting for pair in pairs]) for side in (0, 1)
        )
        self.behind = [[] for _ in lengths]
        most, rows = max(lengths), len(lengths)
        if min(lengths) < most:
            begins = torch.tensor([0, *lengths], device=token_T.device).cumsum(0)[:-1]
            places_BK = begins[:, None] + torch.arange(most, device=token_T.device)
            places_BK.clamp_(max=len(token_T) - 1)  # what a shorter row has too many is not kept
            hidden_TD, token_T = hidden_TD[places_BK.flatten()], token_T[places_BK.flatten()]
        return Pairs.of(hidden_TD.view(rows, most, -1), token_T.view(rows, most), lengths)

    def _extend(self, pairs: Pairs) -> Tensor:
        """-> g [B, D] after the last pair of each row."""
        hidden_BKD, token_BK = pairs.hidden_BKD[:, : pairs.most], pairs.token_BK[:, : pairs.most]
        g_BKD = self.model.mtp.extend(hidden_BKD, self._embed(token_BK), self.cache)
        self.cache.commit(pairs.counts)
        if min(pairs.counts) == pairs.most:
            return g_BKD[:, -1]
        return g_BKD[self.cache.rows_B, torch.tensor(pairs.counts, device=g_BKD.device) - 1]

    def _embed(self, tokens: Tensor) -> Tensor:
        model = self.model
        return F.embedding(tokens, model.backbone.embeddings.weight).to(model.compute_dtype)


def _latest(pairs: list[tuple[Tensor, Tensor]], room: int) -> list[tuple[Tensor, Tensor]]:
    """The last `room` pairs."""
    kept = []
    for hidden_TD, token_T in reversed(pairs):
        kept.append((hidden_TD[-room:], token_T[-room:]))
        room -= len(token_T)
        if room <= 0:
            break
    return kept[::-1]
