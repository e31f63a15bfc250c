"""Shuffle in bounded memory: record n comes out in the order of key(seed, n), a 64-bit number."""

from __future__ import annotations

import numpy as np

from nemotron_ultra.data.order import STEP, keyed


def shuffle_keys(seed: int, start: int, stop: int) -> np.ndarray:
    """Keys of the records start..stop-1, uint64, no two equal; the shuffled order is that of the keys.

    A counter times an odd number, plus the seed's bits, through the finaliser of splitmix64: each step is one
    to one, so keys never tie, and the same on every machine.
    """
    key = np.arange(start, stop, dtype=np.uint64) * np.uint64(STEP) + np.uint64(keyed("shuffle", seed))
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))
