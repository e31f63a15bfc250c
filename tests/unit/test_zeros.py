"""Zeros that take memory when they are written."""

from __future__ import annotations

import psutil
import pytest
import torch

from nemotron_ultra.ops.zeros import ALIGNED, late_zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 7, 4), (0, 4), (1,)])
def test_are_zeros_that_can_be_written(shape, dtype):
    found = late_zeros(shape, dtype, "cpu")
    assert torch.equal(found, torch.zeros(shape, dtype=dtype)) and found.dtype == dtype
    assert found.is_contiguous() and found.data_ptr() % ALIGNED == 0
    found += 1
    assert torch.equal(found, torch.ones(shape, dtype=dtype))
    assert not late_zeros(shape, dtype, "cpu").any()


def test_take_no_memory_before():
    process, size = psutil.Process(), 1 << 29
    before = process.memory_info().rss
    found = late_zeros((size,), torch.int8, torch.device("cpu"))
    assert process.memory_info().rss - before < size // 8
    found[: size // 2] = 1
    assert process.memory_info().rss - before > size // 4


def test_other_devices_have_their_own():
    assert late_zeros((2, 3), torch.float32, "meta").is_meta
