"""kill -9 inside distillation: the same command goes on bit for bit, rollouts made ahead included."""

import signal
import subprocess
import sys
import time

import pytest

from micro import rollout_overrides, task_overrides
from nemotron_ultra import train
from nemotron_ultra.observe.metrics import read_metrics

DOMAINS = ("sums", "equations", "complex")
TIMED = (
    "seconds",
    "tokens_per_second",
    "matmul_share",
    "memory_gb",
    "replay/wait_seconds",
    "replay/buffered",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Weights that differ from the student's, so that every step moves."""
    runs = tmp_path_factory.mktemp("teacher")
    words = task_overrides(runs, **{"run.from": "null", "run.seed": 5, "trainer.global_batch_size": 8})
    assert train.main(["recipe=sft", *words]) == 0
    return runs / "sft"


def words(teacher, run_dir, max_age):
    teachers = {f"teachers.folders.{domain}": teacher for domain in DOMAINS}
    rollout = {"rollout.prompts_per_step": 8, "rollout.group_size": 1, "rollout.max_age": max_age}
    run = {"run.from": "null", "trainer.steps": 8, "trainer.checkpoint_every": 2, "optim.lr": 1e-2}
    return ["recipe=mopd", *rollout_overrides(run_dir, **teachers | rollout | run)]


def numbers(run_dir):
    """Metric rows without what a clock says."""
    rows = read_metrics(run_dir / "mopd" / "metrics.jsonl")
    return [
        {
            k: v
            for k, v in row.items()
            if k not in TIMED and not k.startswith("seconds/") and "/seconds" not in k
        }
        for row in rows
    ]


@pytest.mark.parametrize("max_age", [0, 1])
def test_killed_distillation_continues_bit_for_bit(teacher, tmp_path, max_age):
    assert train.main(words(teacher, tmp_path / "whole", max_age)) == 0
    killed = words(teacher, tmp_path / "killed", max_age)
    process = subprocess.Popen(
        [sys.executable, "-m", "nemotron_ultra.train", *killed], stdout=subprocess.DEVNULL
    )
    checkpoint, end = tmp_path / "killed" / "mopd" / "checkpoints" / "step_00000004", time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 4 <= len(numbers(tmp_path / "killed")) < 8
    assert train.main(killed) == 0
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert any(abs(row["teacher/gap_mean"]) > 1e-3 for row in numbers(tmp_path / "whole"))
