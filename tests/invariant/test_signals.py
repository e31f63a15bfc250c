"""SIGTERM and SIGUSR1: the step is finished, saved, and the process says by its status that it can go on."""

import signal
import subprocess
import sys

import pytest

from micro import losses, micro_corpus, micro_overrides
from nemotron_ultra import train


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signal_saves_and_the_same_command_finishes(tmp_path, name):
    corpus = micro_corpus(tmp_path)
    options = {"trainer.steps": 400, "trainer.checkpoint_every": 0, "trainer.sample_tokens": 0}
    arguments = ["recipe=pretrain", *micro_overrides(corpus, tmp_path, **options)]
    command = [sys.executable, "-u", "-m", "nemotron_ultra.train", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.strip().startswith("3/400"):
            process.send_signal(getattr(signal, name))
    assert process.wait() == 75, "".join(seen)
    said = "".join(seen)
    assert f"{name} received" in said and "the same command continues" in said
    reached = losses(tmp_path)[-1][0]
    assert (tmp_path / "pretrain" / "checkpoints" / f"step_{reached:08d}").is_dir()
    assert 3 <= reached < 400

    shorter = micro_overrides(corpus, tmp_path, **options | {"trainer.steps": reached + 2})
    assert train.main(["recipe=pretrain", *shorter]) == 0
    assert [step for step, _ in losses(tmp_path)] == list(range(1, reached + 3))
