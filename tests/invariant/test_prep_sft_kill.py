"""kill -9 of prep sft at any moment: the same command gives the files of an uninterrupted run."""

import json
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from nemotron_ultra import prep

pytest.importorskip("pyarrow", reason="pyarrow (extra `data`) is not installed")
RECEIPTS = 20  # of parts and files, about


def write_chats(path, count, seed):
    draw = random.Random(seed)
    words = ["alpha", "beta", "größe", "x = 1", "therefore", "\n", "no"]

    def text(most):
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(draw.randint(1, 3)):
                messages.append({"role": "user", "content": "Say " + text(9)})
                thoughts = {"reasoning_content": text(20)} if draw.random() < 0.3 else {}
                messages.append({"role": "assistant", "content": "I say " + text(30)} | thoughts)
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    return [
        f"a={write_chats(folder / 'a.jsonl', 250, 0)}",
        f"b={write_chats(folder / 'b.jsonl', 150, 1)}:weight=2",
    ]


def command(sources, out, workers):
    options = [
        "--max-length",
        "256",
        "--valid-fraction",
        "0.1",
        "--part-bytes",
        "12000",
        "--shard-tokens",
        "8000",
    ]
    return [
        "sft",
        *sources,
        "--out",
        str(out),
        *options,
        "--truncate-share",
        "0.5",
        "--workers",
        str(workers),
    ]


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    assert prep.main(command(sources, out, 1)) == 0
    return outputs(out)


def outputs(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


def started(sources, out, workers=2):
    line = [sys.executable, "-m", "nemotron_ultra.prep", *command(sources, out, workers)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(out):
    """Receipts of parts and files, and the manifest: what a kill may leave."""
    return len(list(out.glob(".parts/*/**/*.json"))) + (out / "manifest.json").exists()


def test_the_run_has_parts_and_files_enough(whole):
    assert sum(name.startswith("train-") for name in whole) >= 6
    assert {"manifest.json", "valid-a-00000.parquet", "valid-b-00000.parquet"} <= set(whole)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_gives_the_same_files(sources, whole, tmp_path, seed):
    draw, out = random.Random(seed), tmp_path / "out"
    for _ in range(2):
        process = started(sources, out)
        moment = done(out) + draw.randint(0, RECEIPTS - done(out) % RECEIPTS)
        end = time.monotonic() + 120
        while process.poll() is None and done(out) < moment and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert prep.main(command(sources, out, 1)) == 0
    assert outputs(out) == whole


def is_worker(child: psutil.Process) -> bool:
    """Whether it is one of the pool's; a child that has just ended is none."""
    try:
        return "spawn_main" in " ".join(child.cmdline())
    except psutil.Error:
        return False


def test_a_killed_worker_is_replaced_and_its_part_done_again(sources, whole, tmp_path, capfd):
    out = tmp_path / "out"
    process = started(sources, out)
    victim = None
    while victim is None:
        assert process.poll() is None, process.stderr.read()
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if is_worker(child)]
        victim = workers[0] if workers and done(out) else None
        time.sleep(0.001)
    victim.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "a worker process was killed; its part is done again" in errors
    assert outputs(out) == whole
