"""Tokens per CPU-second: preparation (read, encode, hash, write) beside the `tokenizers` library alone.

    python benchmarks/prepare_text.py [--tokenizer builtin] [--megabytes 6] [--repeats 5]

The text is the standard library's, one document a file. Both work in this process on one thread, in turn; the
least CPU time of the repeats counts. Then the whole command runs once, start included.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from nemotron_ultra.data.inputs import find_files, make_parts
from nemotron_ultra.data.parts import Options, process_part
from nemotron_ultra.data.stdlib_text import stdlib_files, stdlib_root
from nemotron_ultra.data.tokenizer import load_tokenizer


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(texts: Path, tokenizer_name: str, repeats: int) -> None:
    tokenizer = load_tokenizer(tokenizer_name)
    files = find_files([str(texts)], texts / "out")
    documents = [Path(file.path).read_text(encoding="utf-8", errors="replace") for file in files]
    (part,) = make_parts(files, part_bytes=1 << 40)
    encodings = tokenizer.backend().encode_batch_fast(documents, add_special_tokens=False)
    tokens = sum(map(len, encodings))
    del encodings

    def library() -> None:
        tokenizer.backend().encode_batch_fast(documents, add_special_tokens=False)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            process_part(part, Path(folder), Options(valid_fraction=0.01), tokenizer)

    times = [(cpu_seconds(library), cpu_seconds(ours)) for _ in range(repeats)]
    theirs, mine = (min(column) for column in zip(*times, strict=True))
    print(f"{len(files)} documents, {part.size / 1e6:.1f} MB, {tokens:,} tokens, tokenizer {tokenizer_name}")
    print(f"tokenizers encode_batch_fast   {tokens / theirs:10,.0f} tokens per CPU-second")
    rate = f"{tokens / mine:10,.0f} tokens per CPU-second"
    print(f"preparation of the same text   {rate}   ratio {theirs / mine:.3f}")


def whole_command(texts: Path, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "nemotron_ultra.prep", str(texts), "--out", out]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(
            [*command, "--tokenizer", tokenizer, "--workers", "1"], check=True, capture_output=True
        )
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"the whole command              {cpu:10.2f} CPU-seconds, {wall:.2f} s of wall time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="builtin")
    parser.add_argument("--megabytes", type=float, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in stdlib_files(int(arguments.megabytes * 1e6)):
            target = Path(folder, "text", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((stdlib_root() / name).read_bytes())
        compare(Path(folder, "text"), arguments.tokenizer, arguments.repeats)
        whole_command(Path(folder, "text"), arguments.tokenizer)


if __name__ == "__main__":
    main()
