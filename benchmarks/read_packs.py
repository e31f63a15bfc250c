"""Milliseconds to read one random pack of parquet: row groups sized by tokens, and groups of 1,000 packs.

    python benchmarks/read_packs.py [--packs 4096] [--length 4096] [--reads 200]

Packs hold four conversations of ids with the frequencies of words. Medians of wall and CPU time over random
packs of the whole file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from nemotron_ultra.data.packs import GROUP_TOKENS, PackFiles, PackWriter


def write(path: Path, packs: int, length: int, group_tokens: int) -> float:
    """Tokens written per CPU-second."""
    draw = np.random.default_rng(0)
    ids = (draw.zipf(1.2, 1 << 22) % 32_000).astype(np.int32)
    mask = np.repeat(draw.integers(0, 2, (1 << 22) // 64), 64).astype(np.uint8)
    begun = time.process_time()
    with PackWriter(path, group_tokens=group_tokens) as writer:
        for _ in range(packs):
            at = int(draw.integers(0, (1 << 22) - length))
            cuts = at + np.sort(draw.choice(np.arange(1, length), 3, replace=False))
            bounds = [at, *cuts, at + length]
            rows = [(ids[a:b], mask[a:b]) for a, b in pairwise(bounds)]
            writer.add(rows, [0] * 4, [0] * 4)
    return packs * length / (time.process_time() - begun)


def read(path: Path, reads: int) -> tuple[float, float]:
    """Median milliseconds of a random read: wall, CPU."""
    files, wall, cpu = PackFiles(path), [], []
    for index in np.random.default_rng(1).permutation(len(files))[:reads]:
        before = time.perf_counter(), time.process_time()
        files[int(index)]
        wall.append(time.perf_counter() - before[0])
        cpu.append(time.process_time() - before[1])
    return 1e3 * statistics.median(wall), 1e3 * statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=int, default=4096)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--reads", type=int, default=200)
    arguments = parser.parse_args()
    groups = {f"{n:,} tokens": n for n in (32_768, GROUP_TOKENS, 131_072, 262_144)}
    groups |= {"1,000 packs": 1000 * arguments.length}
    print(f"{arguments.packs} packs of {arguments.length} tokens, medians of {arguments.reads} random reads")
    print(f"{'row group':>16}{'wall ms':>10}{'CPU ms':>10}{'MB':>8}{'M tokens/CPU-s written':>25}")
    with tempfile.TemporaryDirectory() as folder:
        for name, tokens in groups.items():
            path = Path(folder) / f"{tokens}.parquet"
            rate = write(path, arguments.packs, arguments.length, tokens)
            reads = arguments.reads if tokens <= 262_144 else max(1, arguments.reads // 10)
            wall, cpu = read(path, reads)
            size = path.stat().st_size / 1e6
            mark = " (default)" if tokens == GROUP_TOKENS else ""
            print(f"{name:>16}{wall:>10.2f}{cpu:>10.2f}{size:>8.1f}{rate / 1e6:>25.1f}{mark}")


if __name__ == "__main__":
    main()
