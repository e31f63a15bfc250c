"""Documents of a pack: bounds, positions, rolls inside a document, and bounds that do not fit."""

from __future__ import annotations

import pytest
import torch

from nemotron_ultra.errors import DataError
from nemotron_ultra.ops.segments import Segments, pad_rows


def test_positions_and_rests():
    segments = Segments(6, torch.tensor([0, 1, 4, 6]))
    assert segments.lengths == [1, 3, 2] and segments.uniform_length is None
    assert segments.index_T.tolist() == [0, 1, 1, 1, 2, 2]
    assert segments.position_T.tolist() == [0, 0, 1, 2, 0, 1]
    assert segments.remaining_T.tolist() == [0, 2, 1, 0, 1, 0]


def test_roll_stays_inside_the_document():
    segments = Segments(6, torch.tensor([0, 1, 4, 6]))
    values_T = torch.tensor([10, 20, 21, 22, 30, 31])
    assert segments.roll_left(values_T, 1).tolist() == [0, 21, 22, 0, 31, 0]
    assert segments.roll_left(values_T, 2, fill=-1).tolist() == [-1, 22, -1, -1, -1, -1]


def test_one_document_by_default():
    assert Segments(5).uniform_length == 5


@pytest.mark.parametrize("bounds", [[1, 5], [0, 4], [0, 3, 3, 5], [0, 4, 2, 5], [5]])
def test_bounds_that_do_not_fit(bounds):
    with pytest.raises(DataError, match="pack of 5 tokens"):
        Segments(5, torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("lengths", [[3], [2, 2], [1, 4, 2], [5, 1]])
def test_rows_are_padded_to_the_longest(lengths):
    values_TC = torch.arange(1.0, 1 + 2 * sum(lengths)).view(-1, 2)
    padded_BKC, places_T = pad_rows(values_TC, lengths)
    assert padded_BKC.shape == (len(lengths), max(lengths), 2)
    for row, part_TC in zip(padded_BKC, values_TC.split(lengths), strict=True):
        assert torch.equal(row[: len(part_TC)], part_TC) and not row[len(part_TC) :].any()
    assert torch.equal(padded_BKC.flatten(0, 1)[places_T], values_TC)
