"""kill -9 of a run in NVFP4: stochastic rounding goes on where the checkpoint left it, bit for bit."""

import json
import signal
import subprocess
import sys
import time

import pytest

from micro import losses, micro_corpus, micro_overrides
from nemotron_ultra import train

SIZES = {
    "precision": "nvfp4",
    "model.hidden_size": 64,
    "model.moe_intermediate_size": 32,
    "model.moe_shared_expert_intermediate_size": 32,
    "trainer.steps": 8,
    "trainer.sample_tokens": 0,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return micro_corpus(tmp_path_factory.mktemp("corpus"))


def arguments(corpus, run_dir, **changes):
    return ["recipe=pretrain", *micro_overrides(corpus, run_dir, **SIZES | changes)]


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    assert train.main(arguments(corpus, run_dir)) == 0
    return run_dir


def killed(arguments, checkpoint, seconds=120):
    """Start the command in a process of its own and kill it once the checkpoint is there."""
    command = [sys.executable, "-m", "nemotron_ultra.train", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + seconds
    while not checkpoint.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"{checkpoint} did not appear"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_killed_run_continues_bit_for_bit(corpus, uninterrupted, tmp_path):
    killed(arguments(corpus, tmp_path), tmp_path / "pretrain" / "checkpoints" / "step_00000004")
    assert 0 < len(losses(tmp_path)) < 8
    assert train.main(arguments(corpus, tmp_path)) == 0
    assert losses(tmp_path) == losses(uninterrupted)


def test_without_stochastic_rounding_only_the_first_loss_is_the_same(corpus, uninterrupted, tmp_path):
    changes = {"precision.nvfp4.stochastic_rounding": "none"}
    assert train.main(arguments(corpus, tmp_path, **changes)) == 0
    first, others = losses(tmp_path)[0], losses(tmp_path)[1:]
    assert first == losses(uninterrupted)[0] and others != losses(uninterrupted)[1:]


def test_run_says_what_is_emulated(uninterrupted):
    facts = json.loads((uninterrupted / "pretrain" / "run.json").read_text())["precision"]
    assert {row["format"] for row in facts} == {"nvfp4", "mxfp8", "bf16", "fp32"}
    ways = {row["modules"]: row["computed"] for row in facts if row["format"] in ("nvfp4", "mxfp8")}
    assert set(ways.values()) == {"emulated: operands exact, products in fp32"}
    assert set(ways) == {"Mamba in_proj", "Mamba out_proj", "routed experts", "shared experts"}
    assert "share of GEMM FLOPs" in (uninterrupted / "pretrain" / "report.html").read_text()
