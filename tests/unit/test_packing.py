import json

import numpy as np
import pytest

from nemotron_ultra.data.packing import BestFitPacker, pack_lengths
from nemotron_ultra.errors import ConfigError, DataError


def test_packs_by_hand():
    # Longest first: 9, 6 and 5 each open a pack; then 4 goes beside 6, 3 beside 5, 1 beside 9.
    packs, stats = pack_lengths([5, 9, 1, 6, 3, 4], 10)
    assert sorted(packs) == [[0, 4], [1, 2], [3, 5]]
    assert (stats.packs, stats.items, stats.tokens, stats.fill) == (3, 6, 28, 28 / 30)


def test_order_of_arrival_with_a_window_of_one():
    packer = BestFitPacker(10, window=1)
    assert packer.extend([6, 7, 3, 4], [0, 1, 2, 3]) == [[1, 2], [0, 3]]
    assert packer.finish() == []


def test_identical_prompts_part():
    assert pack_lengths([5, 5], 10)[0] == [[0, 1]]
    packs, stats = pack_lengths([5, 5], 10, prompt_ids=["a", "a"])
    assert sorted(packs) == [[0], [1]] and stats.conflicts == 1
    assert pack_lengths([5, 5], 10, prompt_ids=[None, None])[0] == [[0, 1]]
    hashes = np.array([2**64 - 1, 2**64 - 2], dtype=np.uint64)
    assert pack_lengths([5, 5], 10, prompt_ids=hashes)[0] == [[0, 1]]


def test_a_conflict_goes_to_the_next_larger_room():
    # 8 (prompt 1) and 7 (prompt 2) are open when 2 (prompt 1) comes: 8 would be tightest.
    packs, stats = pack_lengths([8, 7, 2], 10, prompt_ids=[1, 2, 1])
    assert sorted(packs) == [[0], [1, 2]] and stats.conflicts == 1


def test_a_full_pool_retires_the_fullest():
    packer = BestFitPacker(10, pool_size=2, window=1)
    assert packer.extend([6, 8, 7], [0, 1, 2]) == [[1]]
    assert packer.stats.evicted == 1
    assert packer.finish() == [[2], [0]]


def test_a_pack_below_the_tolerance_is_retired():
    packer = BestFitPacker(100, window=1, tolerance=5)
    assert packer.add(95, 0) == []
    assert packer.add(96, 1) == [[1]]


def test_overlong_are_dropped_and_counted_by_source():
    packer = BestFitPacker(10, on_overlong="drop")
    packer.extend([11, 4, 12, 3], [0, 1, 2, 3], sources=[0, 0, 1, 1])
    packer.add(30, 4, source=1)
    assert packer.finish() == [[1, 3]]
    first, second = packer.stats.sources[0], packer.stats.sources[1]
    assert (first.items, first.tokens, first.dropped, first.dropped_tokens) == (1, 4, 1, 11)
    assert (second.items, second.tokens, second.dropped, second.dropped_tokens) == (1, 3, 2, 42)
    assert packer.stats.dropped == 3


def test_overlong_can_be_an_error():
    packer = BestFitPacker(10, on_overlong="error")
    with pytest.raises(
        DataError, match=r"conversation 7 is longer than a pack; got 11 tokens; allowed: up to 10"
    ):
        packer.extend([3, 11], [6, 7])
    assert packer.finish() == [] and packer.stats.sources == {}


@pytest.mark.parametrize("lengths", [[3, 0], [3, -1], [1.5, 2.0], ["a"], [[1, 2]], [True], [None], [2**70]])
def test_bad_lengths(lengths):
    with pytest.raises(DataError, match="length"):
        pack_lengths(lengths, 10)
    with pytest.raises(DataError, match="length"):
        BestFitPacker(10).add(lengths[-1], 0)


def test_numbers_that_do_not_match():
    with pytest.raises(DataError, match="prompts and lengths differ in number; got 1 and 2"):
        pack_lengths([3, 4], 10, prompt_ids=[1])
    with pytest.raises(DataError, match="must be a number or text; got unhashable type"):
        BestFitPacker(10).add(3, 1, prompt=[1, 2])
    with pytest.raises(DataError, match="items and lengths"):
        BestFitPacker(10).extend([3, 4], [1])
    with pytest.raises(DataError, match="sources and lengths"):
        BestFitPacker(10).extend([3], [1], sources=[1, 2])


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 0},
        {"max_length": 8.5},
        {"max_length": 8192, "pool_size": 0},
        {"max_length": 8192, "window": 0},
        {"max_length": 8192, "pool_size": 1024, "window": 8192},
        {"max_length": 8192, "tolerance": -1},
        {"max_length": 8192, "tolerance": 4096},
    ],
)
def test_bad_options(options):
    with pytest.raises(ConfigError):
        pack_lengths([3], **options)


def test_unknown_on_overlong():
    with pytest.raises(ConfigError, match="allowed: drop, error"):
        BestFitPacker(10, on_overlong="truncate")


def test_defaults_follow_small_pools_and_packs():
    assert BestFitPacker(8192).settings()["tolerance"] == 64
    assert BestFitPacker(256).settings()["tolerance"] == 2
    assert BestFitPacker(16).settings()["tolerance"] == 0
    assert BestFitPacker(8192, pool_size=256).settings()["window"] == 256
    assert BestFitPacker(8192, pool_size=4096, window=8192).settings()["window"] == 8192


@pytest.mark.parametrize("max_length", [1, 2, 16, 256])
def test_small_packs_are_full(max_length):
    lengths = np.random.default_rng(0).integers(1, max(2, max_length // 3), 5000)
    packs, stats = pack_lengths(lengths, max_length)
    assert sorted(i for pack in packs for i in pack) == list(range(5000))
    assert stats.fill > 0.995


def test_nothing_to_pack():
    packs, stats = pack_lengths([], 10)
    assert packs == [] and stats.fill == 0.0
    packs, stats = pack_lengths(np.array([11, 12]), 10)
    assert packs == [] and stats.dropped == 2


def test_seed_orders_packs_and_nothing_else():
    lengths = np.random.default_rng(1).integers(1, 90, 2000)
    (one, _), (same, _), (other, _) = (pack_lengths(lengths, 100, seed=seed) for seed in (0, 0, 1))
    assert one == same and one != other and sorted(one) == sorted(other)


def test_state_is_json_and_refuses_other_settings():
    packer = BestFitPacker(100)
    packer.extend([50, 60, 70], [1, 2, 3], ["a", None, "b"])
    state = json.loads(json.dumps(packer.state_dict()))
    again = BestFitPacker(100)
    again.load_state_dict(state)
    assert again.finish() == packer.finish()
    with pytest.raises(DataError, match="max_length: 100 then, 101 now"):
        BestFitPacker(101).load_state_dict(state)


def test_fill_of_both_benchmark_mixtures():
    for mean, spread, least in ((6.8, 1.1, 0.999), (8.1, 0.6, 0.993)):
        drawn = np.exp(np.random.default_rng(0).normal(mean, spread, 100_000))
        _, stats = pack_lengths(np.clip(drawn, 16, 8192).astype(np.int64), 8192)
        assert stats.fill > least, stats


def test_prompts_compare_by_value_whatever_holds_them():
    torch = pytest.importorskip("torch")
    same = [
        torch.ones(4, dtype=torch.int64),
        list(torch.ones(4, dtype=torch.int64)),
        [1, np.int64(1), np.uint64(1), 1],
        [np.array(1)] * 4,
        [2**200] * 4,
    ]
    for prompts in same:
        packs, stats = pack_lengths(torch.tensor([2, 2, 2, 2]), 10, prompt_ids=prompts)
        assert sorted(packs) == [[0], [1], [2], [3]] and stats["conflicts"] == 3


def test_what_is_no_row_of_numbers():
    for lengths in (5, None, "555", np.array([2**64 - 1], dtype=np.uint64)):
        with pytest.raises(DataError, match="lengths must be"):
            pack_lengths(lengths, 10)
    with pytest.raises(DataError, match="sources must be"):
        BestFitPacker(10).add(3, 1, source="chat")


def test_numpy_sizes_leave_plain_state():
    packer = BestFitPacker(np.int64(100), pool_size=np.int32(4))
    packer.add(np.int64(5), np.int64(1), prompt=np.uint64(7), source=np.int8(2))
    assert json.loads(json.dumps(packer.state_dict())) == packer.state_dict()
