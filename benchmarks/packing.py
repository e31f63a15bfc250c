"""Packers side by side: ours in a bounded pool, TRL's pack_dataset(bfd) and offline best-fit-decreasing.

    python -m venv trl-env && trl-env/bin/pip install trl      # once; TRL wants versions of its own
    python benchmarks/packing.py [--trl trl-env/bin/python] [--sets easy hard long ...] [--count 1000000]

Every packer and set is a process of its own, so that the peak of resident memory is its own; CPU seconds are
those of packing alone, the least of --repeats (fewer when they take long). TRL gets lists of nulls, that is
lengths without payload, in batches of 1000 (its default): with ids to copy it takes about twice the time.
Ours is measured with the packs kept ("ours"), handed on as they retire ("stream"), and with a prompt's hash
to each conversation, eight conversations to a prompt ("prompts").
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SEED = 0
DRAWN = {  # mean and spread of the logarithm, pack length, share of --count
    "easy": (6.8, 1.1, 8192, 1.0),
    "hard": (8.1, 0.6, 8192, 1.0),
    "long": (8.5, 1.5, 294_912, 0.3),
}
REAL = {"text": 8192, "chats": 4096, "mixture": 8192}
SETS = [*DRAWN, *REAL]
TRL_BATCH = 1000
ENOUGH = 20  # seconds of repeats
Work = Callable[[], int]  # -> number of packs


def drawn(name: str, count: int) -> tuple[np.ndarray, int]:
    """(lengths int64, pack length) of a log-normal set, clipped to 16 and the pack."""
    mean, spread, most, share = DRAWN[name]
    logs = np.random.default_rng(SEED).normal(mean, spread, int(count * share))
    return np.clip(np.exp(logs), 16, most).astype(np.int64), most


def real(megabytes: int, chats: int) -> dict[str, np.ndarray]:
    """Tokens of the standard library's modules, classes and functions, and of reasoning-gym's chats."""
    import reasoning_gym

    from nemotron_ultra.data.chat import ChatTemplate
    from nemotron_ultra.data.stdlib_text import stdlib_files, stdlib_root
    from nemotron_ultra.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("builtin")
    texts = []
    for name in stdlib_files(megabytes * 1_000_000):
        text = (stdlib_root() / name).read_text(encoding="utf-8", errors="replace")
        lines, kinds = text.splitlines(keepends=True), (ast.FunctionDef, ast.ClassDef)
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
        texts += [text, *("".join(lines[node.lineno - 1 : node.end_lineno]) for node in found)]
    encoded = tokenizer.backend().encode_batch_fast(texts, add_special_tokens=False)
    template, lengths = ChatTemplate(tokenizer), []
    for name in ("chain_sum", "word_sorting", "knights_knaves", "family_relationships", "letter_counting"):
        for row in reasoning_gym.create_dataset(name, size=chats // 5, seed=SEED):
            pair = [("user", row["question"]), ("assistant", str(row["answer"]))]
            messages = [{"role": role, "content": content} for role, content in pair]
            lengths.append(len(template.conversation(messages).tokens))
    text_n, chat_n = np.array([len(e) for e in encoded if len(e)]), np.array(lengths)
    mixed = np.random.default_rng(SEED).permutation(np.concatenate([text_n, chat_n]))
    return {"text": text_n, "chats": chat_n, "mixture": mixed}


def ours(lengths: np.ndarray, most: int) -> Work:
    from nemotron_ultra.data.packing import pack_lengths

    return lambda: len(pack_lengths(lengths, most)[0])


def prompts(lengths: np.ndarray, most: int) -> Work:
    from nemotron_ultra.data.packing import pack_lengths

    prompt_n = np.random.default_rng(SEED).permutation(len(lengths)) // 8
    return lambda: len(pack_lengths(lengths, most, prompt_ids=prompt_n)[0])


def stream(lengths: np.ndarray, most: int) -> Work:
    from nemotron_ultra.data.packing import BestFitPacker

    def work() -> int:
        packer, packs = BestFitPacker(most), 0
        for start in range(0, len(lengths), 10_000):
            stop = min(start + 10_000, len(lengths))
            packs += len(packer.extend(lengths[start:stop], np.arange(start, stop)))
        return packs + len(packer.finish())

    return work


def offline(lengths: np.ndarray, most: int) -> Work:
    """Sorted as a whole, as many open packs as there are conversations."""
    from nemotron_ultra.data.packing import BestFitPacker

    def work() -> int:
        packer = BestFitPacker(most, pool_size=len(lengths), window=len(lengths), tolerance=0)
        return len(packer.extend(lengths, np.arange(len(lengths))) + packer.finish())

    return work


def trl(lengths: np.ndarray, most: int) -> Work:
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    lengths = lengths[lengths <= most]  # it would cut them
    chunks = []
    for start in range(0, len(lengths), TRL_BATCH):
        offsets = np.cumsum([0, *lengths[start : start + TRL_BATCH]], dtype=np.int64)
        chunks.append(pa.LargeListArray.from_arrays(pa.array(offsets), pa.nulls(int(offsets[-1]))))
    table = datasets.Dataset(pa.table({"input_ids": pa.chunked_array(chunks)}))
    return lambda: len(pack_dataset(table, most, "bfd", {"keep_in_memory": True}))


PACKERS: dict[str, Callable[[np.ndarray, int], Work]] = {
    "ours": ours,
    "stream": stream,
    "prompts": prompts,
    "trl": trl,
    "offline": offline,
}


def child(packer: str, source: str, most: int, count: int, repeats: int) -> None:
    """Measure and print one line of JSON."""
    lengths = np.load(source) if source.endswith(".npy") else drawn(source, count)[0]
    work, seconds = PACKERS[packer](lengths, most), []
    while len(seconds) < repeats and sum(seconds) < ENOUGH:
        start = time.process_time()
        packs = work()
        seconds.append(time.process_time() - start)
    fill = int(lengths[lengths <= most].sum()) / packs / most
    row = {"packs": packs, "fill": fill, "seconds": min(seconds), "items": len(lengths), "peak": peak()}
    print(json.dumps(row))


def peak() -> float:
    """Largest resident memory of this program, MB. (ru_maxrss begins with the parent's.)"""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(python: str, packer: str, source: str, most: int, arguments: argparse.Namespace) -> dict | None:
    options = ["--child", packer, source, str(most), "--count", str(arguments.count)]
    command = [python, __file__, *options, "--repeats", str(arguments.repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"  {packer:<9}failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def sources(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, int]]:
    """(set, what a child loads it by, pack length)."""
    lengths = real(arguments.megabytes, arguments.chats) if set(arguments.sets) & set(REAL) else {}
    for name in arguments.sets:
        if name in DRAWN:
            yield name, name, DRAWN[name][2]
        else:
            np.save(folder / f"{name}.npy", lengths[name])
            yield name, str(folder / f"{name}.npy"), REAL[name]


def compare(name: str, source: str, most: int, arguments: argparse.Namespace) -> None:
    lengths = np.load(source) if source.endswith(".npy") else drawn(source, arguments.count)[0]
    long = (lengths > most / 2).mean()
    about = f"mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}, {long:.1%} over half a pack"
    print(f"\n{name}: {len(lengths):,} conversations, {about}; packs of {most:,}")
    rows = {}
    for packer in PACKERS:
        python = arguments.trl if packer == "trl" else sys.executable
        row = measure(python, packer, source, most, arguments)
        if row is None:
            continue
        rows[packer] = row
        rate = row["items"] / row["seconds"]
        fill = f"fill {row['fill']:8.3%}  {row['packs']:9,} packs"
        print(f"  {packer:<9}{fill}  {rate:11,.0f} a CPU-second  {row['peak']:7,.0f} MB", flush=True)
    if {"ours", "trl"} <= rows.keys():
        mine, theirs = rows["ours"], rows["trl"]
        speed, memory = theirs["seconds"] / mine["seconds"], theirs["peak"] / mine["peak"]
        more = mine["fill"] - theirs["fill"]
        print(f"  ours / TRL: {speed:.1f} x the speed, memory 1 / {memory:.1f}, fill {more:+.3%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="Python that has TRL")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=4)
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--child", nargs=3, metavar=("PACKER", "SET", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        packer, source, most = arguments.child
        child(packer, source, int(most), arguments.count, arguments.repeats)
        return
    has_trl = subprocess.run([arguments.trl, "-c", "import trl"], capture_output=True).returncode == 0
    if not has_trl:
        PACKERS.pop("trl")
        print(f"TRL is not installed in {arguments.trl}: see the first lines of {__file__}")
    with tempfile.TemporaryDirectory() as folder:
        for name, source, most in sources(arguments, Path(folder)):
            compare(name, source, most, arguments)


if __name__ == "__main__":
    main()
