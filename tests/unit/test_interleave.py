from itertools import islice

import numpy as np
import pytest

from nemotron_ultra.data.interleave import interleave, interleave_blocks
from nemotron_ultra.errors import ConfigError


def test_round_robin_and_sources_that_end():
    assert list(interleave([3, 1, 2])) == [0, 1, 2, 0, 2, 0]
    assert list(interleave([0, 2])) == [1, 1]
    assert list(interleave([])) == [] and list(interleave([0, 0])) == []


def test_weights_by_hand():
    # Source 0 is due at 1/6, 3/6, 5/6 ..., source 1 at 1/2, 3/2 ...; of equal ones 0 comes first.
    assert list(interleave([6, 2], [3, 1])) == [0, 0, 1, 0, 0, 0, 1, 0]
    assert list(interleave([6, 2], [0.75, 0.25])) == [0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("weights", [[5, 3, 2], [1, 1, 1], [100, 1, 0.5], [0.3, 0.3, 0.4]])
def test_shares_hold_everywhere(weights):
    first = np.array(list(islice(interleave([10**9] * 3, weights), 20_000)))
    shares = np.array(weights) / sum(weights)
    for source in range(3):
        drawn = np.cumsum(first == source)
        assert np.abs(drawn - shares[source] * np.arange(1, 20_001)).max() < 1.6


def test_all_come_and_the_rest_keep_their_shares():
    order = np.array(list(interleave([1000, 4000, 9000], [4, 2, 1])))
    assert np.bincount(order).tolist() == [1000, 4000, 9000]
    after = order[np.flatnonzero(order == 0)[-1] + 1 :][:900]
    assert (after == 1).sum() == pytest.approx(600, abs=2)


@pytest.mark.parametrize("weights", [None, [0.2, 5, 1, 1]])
def test_blocks_of_any_size_are_one_order(weights):
    counts = [40, 700, 0, 333]
    whole = np.concatenate(list(interleave_blocks(counts, weights)))
    for block in (1, 7, 100):
        assert np.array_equal(np.concatenate(list(interleave_blocks(counts, weights, block))), whole)


@pytest.mark.parametrize(
    ("counts", "weights"),
    [
        ([1, -1], None),
        ([1, 2], [1]),
        ([1, 2], [1, 0]),
        ([1], [-1]),
        ([1], [float("nan")]),
        ([5, 5], [1, 1e-320]),
    ],
)
def test_bad_input(counts, weights):
    with pytest.raises(ConfigError):
        list(interleave(counts, weights))
