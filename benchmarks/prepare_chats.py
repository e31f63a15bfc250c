"""Tokens per CPU-second: chats to packs (read, render, mask, encode, spool, pack, write) beside `tokenizers`.

    python benchmarks/prepare_chats.py [--tokenizer builtin] [--megabytes 6] [--repeats 5] [--max-length 4096]

The chats ask for the standard library's functions and classes and answer with their sources. Both sides work
in this process on one thread, in turn: the library encodes the texts of the messages alone, ours goes from
JSONL to finished parquet. The median CPU time of the repeats counts. Then the whole command runs once with
two workers, start included.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.sft_parts import ChatOptions
from nemotron_ultra.data.sft_plan import PackOptions
from nemotron_ultra.data.sft_prepare import ChatJob, prepare_chats
from nemotron_ultra.data.sft_sources import SourceSpec, open_sources
from nemotron_ultra.data.stdlib_text import stdlib_files, stdlib_root
from nemotron_ultra.data.tokenizer import load_tokenizer

Messages = list[dict[str, str]]


class Quiet:
    """No progress."""

    def spooled(self, *_: Any) -> None: ...
    def planned(self, *_: Any) -> None: ...
    def wrote(self, *_: Any) -> None: ...
    def note(self, *_: Any) -> None: ...


def chats(size: int, seed: int = 0) -> Iterator[Messages]:
    """Conversations of one to three turns about the standard library's definitions, `size` bytes in all."""
    draw, turns = random.Random(seed), []
    for name in stdlib_files(4 * size):
        source = (stdlib_root() / name).read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            about = ast.get_docstring(node) or f"what its name says, as in {name}"
            answer = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            turns.append((f"Write {node.name} of {name}: {about}", answer))
    draw.shuffle(turns)
    while turns and size > 0:
        messages = []
        for _ in range(min(draw.randint(1, 3), len(turns))):
            question, answer = turns.pop()
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            size -= len(question) + len(answer)
        yield messages


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(path: Path, conversations: list[Messages], arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.tokenizer)
    template = load_template(tokenizer)
    texts = [message["content"] for messages in conversations for message in messages]
    tokens = sum(map(len, tokenizer.backend().encode_batch_fast(texts, add_special_tokens=False)))
    packed = 0

    def library() -> None:
        # In batches as large as ours, so that neither pays for holding everything.
        for first in range(0, len(texts), 1024):
            tokenizer.backend().encode_batch_fast(texts[first : first + 1024], add_special_tokens=False)

    def ours() -> None:
        nonlocal packed
        with tempfile.TemporaryDirectory() as folder:
            out, options = Path(folder), ChatOptions()
            spec = SourceSpec(name="chats", paths=(str(path),))
            job = ChatJob(
                out=out,
                template=template,
                template_name="builtin",
                sources=open_sources([spec], out, {"chats": options.columns}),
                options={"chats": options},
                packs=PackOptions(max_length=arguments.max_length),
            )
            manifest, _ = prepare_chats(job, workers=1, progress=Quiet())
            packed = manifest["sources"]["chats"]["read"]["tokens"]

    times = [(cpu_seconds(library), cpu_seconds(ours)) for _ in range(arguments.repeats)]
    theirs, mine = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    print(
        f"{len(conversations):,} chats, {path.stat().st_size / 1e6:.1f} MB, tokenizer {arguments.tokenizer}"
    )
    print(f"tokenizers encode_batch_fast   {tokens / theirs:10,.0f} tokens per CPU-second")
    rate = f"{tokens / mine:10,.0f} tokens per CPU-second"
    print(f"chats to packs, the same text  {rate}   ratio {ratio:.3f}")
    print(f"with the template's own tokens {packed / mine:10,.0f} tokens per CPU-second")


def whole_command(path: Path, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "nemotron_ultra.prep", "sft", f"chats={path}", "--out", out]
        options = ["--tokenizer", arguments.tokenizer, "--max-length", str(arguments.max_length)]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([*command, *options, "--workers", "2"], check=True, capture_output=True)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    memory = after.ru_maxrss / 1024  # of the largest process
    print(
        f"the whole command, 2 workers   {cpu:10.2f} CPU-seconds, {wall:.2f} s of wall time, {memory:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="builtin")
    parser.add_argument("--megabytes", type=float, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-length", type=int, default=4096)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chats.jsonl")
        conversations = list(chats(int(arguments.megabytes * 1e6)))
        with path.open("w", encoding="utf-8") as file:
            for messages in conversations:
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        compare(path, conversations, arguments)
        whole_command(path, arguments)


if __name__ == "__main__":
    main()
