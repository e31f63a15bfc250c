"""recipe=pretrain through the command line, shrunk to seconds: its screen, its folder, and what follows."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from micro import losses, micro_corpus, micro_overrides
from nemotron_ultra import load_model, train
from nemotron_ultra.config.compose import read_config
from nemotron_ultra.observe.metrics import read_metrics

KEYS = [
    *(
        "step",
        "tokens",
        "loss",
        "mtp_1/loss",
        "mtp_1/accept",
        "mtp_2/loss",
        "balance_loss",
        "grad_norm",
        "lr",
    ),
    *("seconds", "tokens_per_second", "matmul_share", "memory_gb", "residual/0"),
    *("moe/0/max_load", "moe/0/max_vio", "moe/max_vio_median", "moe/max_vio_max"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return micro_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run as a person starts it, and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "nemotron_ultra.train", "recipe=pretrain"]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [*command, *micro_overrides(corpus, run_dir)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def test_screen(finished):
    run_dir, said = finished
    for words in (
        "ME*-E",
        "parameters",
        "gradients, masters and moments fp32",
        "6 steps x 192 tokens",
        "xz needs",
    ):
        assert words in said
    assert len(re.findall(r"^[1-6]/6 +\d+%  loss", said, re.M)) == 6
    last = said.splitlines()[-4:]
    assert last[0].split() == ["run", str(run_dir / "pretrain")]
    assert "nemotron_ultra.report" in last[-2] and "trainer.steps=12" in last[-1]


def test_metrics_have_every_key(finished):
    rows = read_metrics(finished[0] / "pretrain" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(key in row for row in rows for key in KEYS)
    validated = [row["step"] for row in rows if "val/loss" in row]
    assert validated == [3, 6] and {"val/bits_per_byte", "val/mtp_2/loss"} <= rows[5].keys()
    assert rows[-1]["tokens"] == 6 * 192 and rows[-1]["loss"] < rows[0]["loss"] - 0.3


def test_folder_describes_the_run(finished):
    run = finished[0] / "pretrain"
    facts = json.loads((run / "run.json").read_text())
    assert facts["finished_steps"] == 6 and facts["parameters"]["blocks"]["mtp"]["layers"] == 1
    assert {row["gradients"] for row in facts["precision"]} == {"fp32"}
    assert facts["data"]["text"]["xz_bits_per_byte"] > 0 and facts["tokenizer"]["hash"]
    assert facts["backends"] and facts["machine"]["torch"] and facts["plan"]
    assert read_config(run / "config.yaml").trainer.steps == 6
    assert read_metrics(run / "samples.jsonl")[0]["step"] == 6
    assert "<svg" in (run / "report.html").read_text()
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step_00000004", "step_00000006"]


def test_checkpoint_opens_as_a_model(finished):
    model = load_model(finished[0] / "pretrain" / "checkpoints" / "step_00000006" / "model")
    assert torch.isfinite(model(torch.arange(30)).logits_TV).all()


def test_proposed_command_trains_further_with_the_shipped_schedule(corpus, tmp_path, capsys):
    def arguments(steps):
        words = micro_overrides(corpus, tmp_path, **{"trainer.steps": steps, "trainer.sample_tokens": 0})
        return ["recipe=pretrain", *(word for word in words if not word.startswith("schedule."))]

    assert train.main(arguments(3)) == 0 and train.main(arguments(6)) == 0
    said = capsys.readouterr().out
    assert "going on from step_00000003" in said and "trainer.steps: 3 -> 6" in said
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_more_steps_go_on(finished, corpus, tmp_path):
    import shutil

    shutil.copytree(finished[0], tmp_path / "runs")
    more = micro_overrides(corpus, tmp_path / "runs", **{"trainer.steps": 8})
    assert train.main(["recipe=pretrain", *more]) == 0
    assert losses(tmp_path / "runs")[:6] == losses(finished[0])
    assert [step for step, _ in losses(tmp_path / "runs")] == list(range(1, 9))


def test_recompute_and_starting_weights_agree_with_the_plain_run(finished, corpus, tmp_path):
    weights = finished[0] / "pretrain" / "checkpoints" / "step_00000006" / "model"
    options = {"run.from": weights, "trainer.steps": 2, "schedule.decay_tokens": 0}
    for name, recompute in (("plain", "false"), ("again", "true")):
        changes = options | {"run.name": name, "engine.recompute": recompute}
        assert train.main(["recipe=pretrain", *micro_overrides(corpus, tmp_path, **changes)]) == 0
    assert losses(tmp_path, "plain") == losses(tmp_path, "again")
    assert losses(tmp_path, "plain")[0][1] < losses(finished[0])[0][1] - 0.3


def test_resumed_run_does_not_need_the_folder_it_began_from(finished, corpus, tmp_path):
    import shutil

    began = shutil.copytree(
        finished[0] / "pretrain" / "checkpoints" / "step_00000006" / "model", tmp_path / "w"
    )
    options = {"run.from": began, "schedule.decay_tokens": 0}
    runs = tmp_path / "runs"
    assert (
        train.main(["recipe=pretrain", *micro_overrides(corpus, runs, **options, **{"trainer.steps": 2})])
        == 0
    )
    shutil.rmtree(began)
    assert (
        train.main(["recipe=pretrain", *micro_overrides(corpus, runs, **options, **{"trainer.steps": 4})])
        == 0
    )
    assert [step for step, _ in losses(runs)] == [1, 2, 3, 4]


def test_remark_where_the_tokenizer_ends_documents_with_another_id(corpus, tmp_path, capsys):
    changes = {"trainer.steps": 1, "model.eos_token_id": 11, "schedule.decay_tokens": 0}
    assert train.main(["recipe=pretrain", *micro_overrides(corpus, tmp_path, **changes)]) == 0
    assert "set model.eos_token_id=2" in " ".join(capsys.readouterr().out.split())
