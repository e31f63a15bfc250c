"""Which source the next conversation comes from: the k-th of source s is due at (k + 1/2) / weight_s.

Report section 3.2, step 1: with equal weights this is round-robin. With others every source keeps its share
of any stretch to within a conversation or so, and one that ends is left out from there on, the others in
proportion. Differs from Megatron's greedy deficit rule in being a closed form, so that whole blocks come out
of a sort.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from nemotron_ultra.errors import ConfigError

_BLOCK = 1 << 16
_FARTHEST = 1e15  # beyond it the times at which sources are due lose their order


def interleave(counts: Sequence[int], weights: Sequence[float] | None = None) -> Iterator[int]:
    """Source of each next conversation until all of counts[s] of every source s have come.

    weights: relative shares, above 0; None for equal ones. Of several that are due at once the first source
    comes first. Raises ConfigError.
    """
    for block in interleave_blocks(counts, weights):
        yield from block.tolist()


def interleave_blocks(
    counts: Sequence[int], weights: Sequence[float] | None = None, block: int = _BLOCK
) -> Iterator[np.ndarray]:
    """The same in arrays, int32 of about `block` each. Memory does not grow with counts."""
    shares = _checked(counts, weights)
    taken = [0] * len(counts)
    now = 0.0
    while live := [s for s, count in enumerate(counts) if taken[s] < count]:
        # Up to where the first live source may end, or a block's worth.
        until = now + max(1.0, block) / sum(shares[s] for s in live)
        dues, sources = [], []
        for s in live:
            last = min(counts[s], int(until * shares[s]) + 2)
            due = (np.arange(taken[s], max(last, taken[s])) + 0.5) / shares[s]
            due = due[due < until]
            taken[s] += len(due)
            dues.append(due)
            sources.append(np.full(len(due), s, np.int32))
        order = np.argsort(np.concatenate(dues), kind="stable")
        if len(order):
            yield np.concatenate(sources)[order]
        now = until


def _checked(counts: Sequence[int], weights: Sequence[float] | None) -> list[float]:
    if any(count < 0 for count in counts):
        raise ConfigError("a source cannot have fewer than 0 conversations", got=list(counts))
    if weights is None:
        return [1.0] * len(counts)
    if len(weights) != len(counts):
        raise ConfigError("weights and counts differ in number", got=f"{len(weights)} and {len(counts)}")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError("weights of sources", got=list(weights), allowed="numbers above 0")
    if len(weights) and min(weights) < max(weights) / _FARTHEST:
        allowed = f"none above {_FARTHEST:g} times another"
        raise ConfigError("weights of sources lie too far apart", got=list(weights), allowed=allowed)
    # Against the largest, so that the time until something is due is about one.
    return [float(weight) / max(weights) for weight in weights]
