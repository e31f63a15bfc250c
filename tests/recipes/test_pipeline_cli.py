"""python -m nemotron_ultra.pipeline from nothing to the table: micro sizes, then the shipped chain."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys

import pytest
import yaml

from micro import MODEL, micro_corpus
from nemotron_ultra import pipeline
from nemotron_ultra.observe.metrics import read_metrics
from nemotron_ultra.trainers.chain import load_chain

STAGES = [
    "pretrain",
    "sft",
    "student",
    "teacher_sums",
    "teacher_equations",
    "teacher_complex",
    "mopd",
]


def micro_chain(folder, corpus):
    """A --config-dir with the chain `micro`: the shipped stages on the smallest model, 2 steps each.

    SFT is longer, on one domain, so that some answers are right and rewards move the weights.
    """
    shipped = yaml.safe_load(pipeline.chains()["tiny"].read_text())
    for stage in shipped["stages"]:
        stage["overrides"] = [text for text in stage.get("overrides", []) if text.startswith("tasks.only")]
    shipped["stages"][0]["overrides"] = [
        f"data.phases=[{{sources: {{text: {{path: {corpus}}}}}}}]",
        "schedule.warmup_tokens=0",
        "schedule.decay_tokens=100",
    ]
    shipped["common"] = [
        *(f"model.{name}={value}" for name, value in MODEL.items()),
        *("data.sequence_length=96", "trainer.steps=2", "trainer.micro_batch_size=2"),
        *("trainer.validate_every=0", "trainer.sample_every=1", "engine.device=cpu", "engine.threads=1"),
        *("rollout.prompts_per_step=3", "rollout.group_size=4", "rollout.max_new_tokens=4"),
        "tasks.validation_problems=8",
        "optim.lr=1e-2",
    ]
    shipped["evaluation"] = {"max_new_tokens": 4}
    shipped["stages"][-1]["overrides"] = ["rollout.group_size=1", "trainer.micro_batch_size=3"]
    sft = ["tasks.only=[complex]", "trainer.steps=24", "trainer.sample_every=0"]
    shipped["stages"][1]["overrides"] = [*sft, "trainer.global_batch_size=8", "trainer.micro_batch_size=8"]
    shipped["stages"][0]["overrides"].append("trainer.global_batch_size=4")
    (folder / "chains").mkdir(parents=True)
    (folder / "chains" / "micro.yaml").write_text(yaml.safe_dump(shipped))
    return [f"--config-dir={folder}", "chain=micro"]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("micro")
    return micro_chain(folder / "own", micro_corpus(folder))


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The folder of a chain that ran without a break."""
    runs = tmp_path_factory.mktemp("whole")
    assert pipeline.main([*command, f"run.dir={runs}"]) == 0
    return runs / "micro"


def table(folder):
    """Scores by stage and the recovery rates: what must not depend on interruptions."""
    found = json.loads((folder / "scores.json").read_text())
    assert found["finished"]
    return {entry["name"]: entry.get("scores") for entry in found["stages"]}, found["recovery"]


def digest(folder, stage):
    weights = folder / stage / "checkpoints" / f"step_{24 if stage == 'sft' else 2:08d}" / "model"
    return hashlib.blake2b((weights / "model.safetensors").read_bytes()).hexdigest()


def test_every_stage_leaves_a_run_and_scores(whole):
    scores, recovery = table(whole)
    assert list(scores) == STAGES and scores["pretrain"] is None
    assert all(set(of) == {"sums", "equations", "complex"} for of in list(scores.values())[1:])
    assert set(recovery["domains"]) == {"sums", "equations", "complex"}
    for name in STAGES:
        steps = [row["step"] for row in read_metrics(whole / name / "metrics.jsonl")]
        assert steps == list(range(1, 25 if name == "sft" else 3))
        assert (whole / name / "report.html").is_file()
    page = (whole / "report.html").read_text()
    assert "Scores after every stage" in page and "teacher_sums: " in page


def test_the_same_command_again_does_nothing(whole, command, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*/*.json*")}
    assert pipeline.main([*command, f"run.dir={whole.parent}"]) == 0
    assert {path: path.stat().st_mtime_ns for path in whole.glob("*/*.json*")} == before
    assert capsys.readouterr().out.count(" is finished\n") == len(STAGES)


def test_a_chain_stopped_twice_ends_with_the_same_table(whole, command, tmp_path, monkeypatch):
    words = [*command, f"run.dir={tmp_path}"]

    def stop_at(name):
        def train(line):
            return 75 if f"run.name={name}" in line else pipeline.train.main(line)

        return train

    for name in ("student", "mopd"):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "_train", stop_at(name))
            assert pipeline.main(words) == 75
    assert pipeline.main(words) == 0
    assert table(tmp_path / "micro") == table(whole)
    for name in ("student", "teacher_complex", "mopd"):  # rewards and gaps moved them, equally
        assert digest(tmp_path / "micro", name) == digest(whole, name) != digest(whole, "sft")


def test_a_stage_with_a_mistake_stops_the_chain_with_its_error(whole, command, capsys):
    words = [*command, f"run.dir={whole.parent}", "optim.lr=0.5"]
    assert pipeline.main(words) == 2
    assert "is finished, with another configuration than the chain asks for now" in capsys.readouterr().err


def test_a_signal_between_two_stages_is_status_75(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "_train", lambda words: os.kill(os.getpid(), signal.SIGTERM))
    assert pipeline.main([*command, f"run.dir={tmp_path}"]) == 75
    assert "SIGTERM: stopped between two steps; continue with" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_table(whole, command, tmp_path):
    words = [*command, f"run.dir={tmp_path}", "trainer.checkpoint_every=1"]
    draw, code, kills = random.Random(1), -9, 0
    while code == -9:
        child = subprocess.Popen([sys.executable, "-m", "nemotron_ultra.pipeline", *words])
        try:
            code = child.wait(timeout=draw.uniform(6, 14))
        except subprocess.TimeoutExpired:
            child.kill()
            code, kills = child.wait(), kills + 1
    assert code == 0 and kills > 0
    assert table(tmp_path / "micro") == table(whole)
    assert digest(tmp_path / "micro", "mopd") == digest(whole, "mopd")


@pytest.mark.slow
def test_shipped_chain_teaches(tmp_path):
    assert pipeline.main(["chain=tiny", f"run.dir={tmp_path}"]) == 0
    scores, recovery = table(tmp_path / "tiny")
    before, after = scores["student"], scores["mopd"]
    assert sum(before.values()) > sum(scores["sft"].values())
    for domain, name in load_chain("tiny").mopd.teachers.items():
        assert scores[name][domain] >= before[domain] + 0.15
    assert sum(after.values()) > sum(before.values()) and recovery["mean"] >= 0.6
