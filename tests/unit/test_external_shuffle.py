import subprocess
import sys

import numpy as np
import pytest

from nemotron_ultra.data.external_shuffle import ExternalShuffle, shuffle_keys, shuffle_plan
from nemotron_ultra.errors import ConfigError, DataError


def records(count=3000, seed=0):
    sizes = np.random.default_rng(seed).integers(0, 4000, count)
    return [number.to_bytes(4, "little") + bytes(size) for number, size in enumerate(sizes.tolist())]


def shuffled(folder, rows, **options):
    with ExternalShuffle(folder, **{"seed": 7} | options) as shuffle:
        for row in rows:
            shuffle.add(row)
        assert len(shuffle) == len(rows)
        return list(shuffle.drain())


def test_order_is_that_of_the_keys_whatever_the_memory(tmp_path):
    rows = records()
    order = np.argsort(shuffle_keys(7, 0, len(rows)))
    wanted = [rows[i] for i in order.tolist()]
    assert shuffled(tmp_path / "a", rows) == wanted
    assert shuffled(tmp_path / "b", rows, memory=1 << 20) == wanted
    assert shuffled(tmp_path / "c", rows, seed=8) != wanted
    assert list(tmp_path.iterdir()) == []


def test_buckets_too_large_are_split_again(tmp_path):
    rows = records(250) * 64  # 32 MB in a bound of 1 MiB: a bucket alone is larger than half of it
    order = np.argsort(shuffle_keys(7, 0, len(rows)))
    with ExternalShuffle(tmp_path / "a", seed=7, memory=1 << 20) as shuffle:
        for row in rows:
            shuffle.add(row)
        drained = shuffle.drain()
        assert next(drained) == rows[order[0]]
        assert any(path.is_dir() for path in (tmp_path / "a").iterdir())
        assert [rows[order[0]], *drained] == [rows[i] for i in order.tolist()]


def test_what_was_left_behind_is_not_read(tmp_path):
    rows = records(1000)
    left = ExternalShuffle(tmp_path / "a", seed=7, memory=1 << 20)
    for row in rows:
        left.add(row)
    assert any((tmp_path / "a").iterdir())
    assert shuffled(tmp_path / "a", rows[:5]) == shuffled(tmp_path / "b", rows[:5])


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(DataError, match="not for a shuffle alone"):
        ExternalShuffle(tmp_path, seed=0)
    assert (tmp_path / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("buckets", [1, 2, 7, 64])
def test_plan_is_the_same_order(buckets):
    bucket, place = shuffle_plan(3, 5000, buckets)
    assert bucket.max() < buckets and np.bincount(bucket).min() > 5000 / buckets / 2
    order = np.lexsort((place, bucket))
    assert np.array_equal(order, np.argsort(shuffle_keys(3, 0, 5000)))
    for number in range(buckets):
        assert sorted(place[bucket == number].tolist()) == list(range((bucket == number).sum()))


def test_keys_are_frozen_and_distinct():
    assert len(np.unique(shuffle_keys(0, 0, 200_000))) == 200_000
    assert np.array_equal(shuffle_keys(0, 100, 200), shuffle_keys(0, 0, 200)[100:])
    assert shuffle_keys(0, 0, 2).tolist() == [8382956431320408347, 2526278283920654075]
    # Neighbours part and no place is favoured.
    places = np.argsort(np.argsort(shuffle_keys(1, 0, 100_000)))
    assert abs(np.corrcoef(places, np.arange(100_000))[0, 1]) < 0.02
    assert np.abs(np.diff(places)).mean() == pytest.approx(100_000 / 3, rel=0.02)


def test_memory_is_bounded(tmp_path):
    program = """
import resource, sys
from nemotron_ultra.data.external_shuffle import ExternalShuffle
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with ExternalShuffle(sys.argv[1], seed=0, memory=16 << 20) as shuffle:
    for number in range(30_000):
        shuffle.add(bytes(number % 9000))
    total = sum(map(len, shuffle.drain()))
print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "a")]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    total, grown_kib = map(int, out)
    assert total == sum(number % 9000 for number in range(30_000))  # 131 MB
    assert grown_kib < 24 << 10


def test_disk_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    shuffle = ExternalShuffle(tmp_path / "file" / "a", seed=0, memory=1 << 20)
    with pytest.raises(DataError, match="cannot write a bucket"):
        for row in records():
            shuffle.add(row)


def test_bad_options(tmp_path):
    with pytest.raises(ConfigError):
        ExternalShuffle(tmp_path, seed=0, memory=1000)
    with pytest.raises(ConfigError):
        shuffle_plan(0, 10, 0)
