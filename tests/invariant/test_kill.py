"""kill -9 at any moment: the same command goes on from the last checkpoint, and the losses are the same."""

import os
import signal
import subprocess
import sys
import time

import pytest

from micro import losses, micro_corpus, micro_overrides
from nemotron_ultra import train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return micro_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    assert train.main(["recipe=pretrain", *overrides(corpus, run_dir)]) == 0
    return run_dir


def overrides(corpus, run_dir):
    return micro_overrides(corpus, run_dir, **{"trainer.steps": 12, "trainer.sample_tokens": 0})


def started(corpus, run_dir):
    command = [sys.executable, "-m", "nemotron_ultra.train", "recipe=pretrain", *overrides(corpus, run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process, path, seconds=120):
    """Until the file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.002)


@pytest.mark.parametrize(
    "moment",
    ["checkpoints/step_00000004", "checkpoints/.saving-step_00000006"],
    ids=["between checkpoints", "while saving"],
)
def test_killed_run_continues_bit_for_bit(corpus, uninterrupted, tmp_path, moment):
    process = started(corpus, tmp_path)
    wait_for(process, tmp_path / "pretrain" / moment)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 0 < len(losses(tmp_path)) < 12
    assert train.main(["recipe=pretrain", *overrides(corpus, tmp_path)]) == 0
    assert losses(tmp_path) == losses(uninterrupted)
    assert not [p for p in os.listdir(tmp_path / "pretrain" / "checkpoints") if p.startswith(".")]
