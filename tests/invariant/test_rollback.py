"""Thousands of tokens, kept and rolled back at random, leave a cache that equals a fresh prefill of the rest.

For the backbone's cache, in float64 with torch's functions and in float32 with the compiled ones, and for the
MTP module's, whose drafts are all taken back.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafting import agreeing_model
from micro import micro_model
from nemotron_ultra.generation.drafter import Drafter
from nemotron_ultra.model.cache import Cache, KeyValues
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.ops.segments import Segments

ROWS, LONGEST, MOST = 5, 70, 8


def packed(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(rows), torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def distance(cache: Cache, fresh: Cache) -> float:
    """Largest difference of what two caches remember of the same rows."""
    assert cache.lengths == fresh.lengths == cache.length_B.tolist()
    gaps = [0.0]
    for one, other in zip(cache.layers, fresh.layers, strict=True):
        for row, length in enumerate(cache.lengths):
            for a, b in zip(*(layer.tensors() if layer else () for layer in (one, other)), strict=True):
                cut = (row, slice(None), slice(length)) if isinstance(one, KeyValues) else row
                gaps.append(float((a[cut] - b[cut]).abs().max()))
    return max(gaps)


def admitted(model: HybridLM, cache: Cache, rows: list[Tensor], draw: torch.Generator) -> list[Tensor]:
    """Fill free slots with new prompts."""
    count = cache.free
    if not count:
        return rows
    lengths = torch.randint(1, 12, (count,), generator=draw).tolist()
    new = [torch.randint(64, (length,), generator=draw) for length in lengths]
    _, prompts = model.prefill(*packed(new), 12)
    cache.admit(prompts, torch.arange(count))
    return rows + new


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("changes", [{}, {"pattern": "MM", "conv_kernel": 3}])
def test_the_cache_is_as_if_rejected_tokens_had_never_been(changes, dtype, bound):
    model, draw = micro_model(dtype, **changes), torch.Generator().manual_seed(5)
    cache, rows, kept_tokens, rolled_back = model.new_cache(ROWS, LONGEST + MOST), [], 0, 0
    for number in range(220):
        rows = admitted(model, cache, rows, draw)
        count = int(torch.randint(1, MOST + 1, (1,), generator=draw))
        new_BK = torch.randint(64, (ROWS, count), generator=draw)
        if count == 1 and number % 2:
            model.step(new_BK[:, 0], cache)
            keep = [1] * ROWS
        else:
            model.extend(new_BK, cache)
            keep = torch.randint(count + 1, (ROWS,), generator=draw).tolist()
            cache.commit(keep)
        rows = [torch.cat([row, new_BK[b, : keep[b]]]) for b, row in enumerate(rows)]
        kept_tokens, rolled_back = kept_tokens + sum(keep), rolled_back + ROWS * count - sum(keep)
        if number % 16 == 15:
            assert distance(cache, model.prefill(*packed(rows), LONGEST + MOST)[1]) < bound
        order_B = cache.drop(torch.tensor([len(row) > LONGEST - MOST for row in rows]))
        rows = [rows[row] for row in order_B.tolist()]
    assert kept_tokens > 2000 and rolled_back > 2000


@torch.no_grad()
def test_a_cache_that_is_off_by_a_token_is_seen():
    model, rows = micro_model(torch.float64), [torch.arange(3, 12), torch.arange(20, 24)]
    _, cache = model.prefill(*packed(rows), LONGEST)
    model.extend(torch.tensor([[5, 6], [7, 8]]), cache)
    cache.commit([1, 2])
    wrong = [torch.cat([rows[0], torch.tensor([6])]), torch.cat([rows[1], torch.tensor([7, 8])])]
    assert distance(cache, model.prefill(*packed(wrong), LONGEST)[1]) > 1e-4


def likeliest(logits_BV: Tensor, number: int) -> Tensor:
    return logits_BV.argmax(-1)


def fresh_mtp(model: HybridLM, pairs: list[tuple[Tensor, Tensor]]) -> Cache:
    hidden_TD, (token_T, bounds) = torch.cat([h for h, _ in pairs]), packed([t for _, t in pairs])
    cache = model.new_cache(len(pairs), 400, pattern=model.config.mtp_pattern)
    cache.admit_new(len(pairs))
    embedded_TD = model.backbone.embeddings.weight[token_T]
    model.mtp.prefill(hidden_TD, embedded_TD, Segments(len(token_T), bounds), cache)
    return cache


@torch.no_grad()
def test_the_drafter_s_cache_holds_what_was_seen_and_no_draft():
    """Rows see 1 to 4 pairs a round; in two rounds of three they draft."""
    model, draw = agreeing_model(), torch.Generator().manual_seed(6)
    drafter, pairs = Drafter(model, 3, 400, 64), []
    prompts = [torch.randint(64, (length,), generator=draw) for length in (1, 5, 12)]
    hidden = [torch.randn(len(p), 32, generator=draw, dtype=torch.float64) for p in prompts]
    drafter.admitted(prompts, hidden, torch.tensor([2, 0, 1]))
    pairs = [(hidden[row][:-1], prompts[row][1:]) for row in (2, 0, 1)]
    for number in range(60):
        hidden_BKD = torch.randn(3, 4, 32, generator=draw, dtype=torch.float64)
        token_BK = torch.randint(64, (3, 4), generator=draw)
        counts = torch.randint(1, 5, (3,), generator=draw).tolist()
        drafter.saw(0, hidden_BKD, token_BK, counts)
        pairs = [
            (torch.cat([h, hidden_BKD[b, : counts[b]]]), torch.cat([t, token_BK[b, : counts[b]]]))
            for b, (h, t) in enumerate(pairs)
        ]
        if number % 3 < 2:
            assert drafter.draft(1 + number % 7, drafter.waiting(), likeliest).shape == (3, 1 + number % 7)
            assert distance(drafter.cache, fresh_mtp(model, pairs)) < 1e-10
    drafter.dropped(torch.tensor([True, False, False]))
    drafter.saw(0, hidden_BKD, token_BK, [1, 1])
    drafter.draft(2, drafter.waiting(), likeliest)
    assert len(drafter.cache.lengths) == 2
