"""recipe=sft data=packs by the command line: metrics by source, answers to read, exact resume, mistakes."""

import hashlib
import json
import re
import shutil

import pytest

from micro import MODEL
from micro_packs import LENGTH, SOURCES, micro_packs
from nemotron_ultra import train
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.observe.catalog import undocumented
from nemotron_ultra.observe.metrics import read_metrics


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return micro_packs(tmp_path_factory.mktemp("packs") / "sft")


def words(packs, runs, **changes):
    values = {
        "recipe": "sft",
        "data": "packs",
        "trainer": "packs",
        "schedule": "constant",
        "schedule.warmup_tokens": 0,
        "schedule.min_lr": 0,
        "data.packs": packs,
        "data.sequence_length": LENGTH,
        "run.dir": runs,
        "run.from": "null",
        **{f"model.{name}": value for name, value in MODEL.items()},
        **{"trainer.steps": 4, "trainer.global_batch_size": 4, "trainer.micro_batch_size": 2},
        **{"trainer.validate_every": 2, "trainer.validate_rows": 4, "trainer.checkpoint_every": 2},
        **{"trainer.sample_tokens": 4, "engine.device": "cpu", "engine.threads": 1},
    }
    return [f"{key}={value}" for key, value in (values | changes).items()]


def digest(folder, step):
    weights = folder / "checkpoints" / f"step_{step:08d}" / "model" / "model.safetensors"
    return hashlib.blake2b(weights.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def run(packs, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert train.main([*words(packs, runs), "~tasks"]) == 0
    return runs / "sft"


def test_every_metric_is_documented_and_sources_are_validated(run):
    rows = read_metrics(run / "metrics.jsonl")
    assert undocumented(key for row in rows for key in row) == []
    assert all(0.5 < row["packs/fill"] <= 1 and 0 < row["packs/trained_share"] < 1 for row in rows)
    own = [rows[-1][f"val/{source}/loss"] for source in SOURCES]
    assert min(own) < rows[-1]["val/loss"] < max(own) and "val/loss" not in rows[0]
    assert rows[-1]["val/mtp_1/loss"] > 0 and rows[-1]["tokens"] < 16 * LENGTH


def test_answers_to_validation_prompts_are_kept_to_read(run):
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {(row["step"], row["domain"]) for row in rows} == {(s, n) for s in (2, 4) for n in SOURCES}
    for row in rows:
        assert row["prompt"].endswith("<|im_start|>assistant\n<think></think>")
        assert row["packed"].endswith("<|im_end|>") and "<|im_start|>" not in row["packed"]
    page = (run / "report.html").read_text()
    assert "packed: " in page and "val/colours/loss" in page
    facts = json.loads((run / "run.json").read_text())
    assert facts["data"]["numbers"]["conversations"] == 40


def test_a_resumed_run_is_the_uninterrupted_one(packs, run, tmp_path):
    for steps in (2, 4):
        assert train.main([*words(packs, tmp_path, **{"trainer.steps": steps}), "~tasks"]) == 0
    one, other = (read_metrics(folder / "metrics.jsonl") for folder in (run, tmp_path / "sft"))
    assert [row["loss"] for row in one] == [row["loss"] for row in other]
    assert one[3]["val/colours/loss"] == other[3]["val/colours/loss"]
    assert digest(run, 4) == digest(tmp_path / "sft", 4)


def test_the_second_mean_begins_at_its_step(packs, run, tmp_path):
    options = {"trainer.loss_mean": "conversations", "trainer.loss_mean_after": 2, "trainer.steps": 3}
    assert train.main([*words(packs, tmp_path, **options), "~tasks"]) == 0
    before, now = (read_metrics(f / "metrics.jsonl") for f in (run, tmp_path / "sft"))
    assert [r["loss"] for r in now[:2]] == [r["loss"] for r in before[:2]]
    assert now[2]["loss"] != before[2]["loss"]


def test_tasks_beside_packs_are_scored(packs, tmp_path, capsys):
    few = {"tasks.validation_problems": 2, "trainer.steps": 1, "trainer.sample_tokens": 0}
    assert train.main(words(packs, tmp_path, **few)) == 0
    (row,) = read_metrics(tmp_path / "sft" / "metrics.jsonl")
    assert undocumented(row) == [] and 0 <= row["val/sums/exact"] <= row["val/sums/score"] <= 1
    assert row["packs/conversations"] > 0 and row["val/colours/loss"] > 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"mtp \d\.\d\d/\d\.\d\d loss by source: colours \d\.\d\d, numbers \d\.\d\d", shown)


def test_packs_changed_between_two_starts_are_refused(packs, tmp_path, capsys):
    copy = shutil.copytree(packs, tmp_path / "copy")
    assert train.main([*words(copy, tmp_path, **{"trainer.steps": 1}), "~tasks"]) == 0
    shutil.rmtree(copy)
    micro_packs(copy, seed=3)
    again = [*words(copy, tmp_path, **{"trainer.steps": 2}), "~tasks"]
    assert train.main([*again, "trainer.loss_mean=conversations"]) == 2
    assert "trainer.loss_mean: tokens -> conversations" in capsys.readouterr().err
    assert train.main(again) == 3
    assert "the data is not what this run was started with; got files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"data.sequence_length": 64}, 2, "data.sequence_length is shorter than the packs; got 64"),
        ({"data.packs": "nowhere"}, 3, "no packed parquet files; got nowhere"),
    ],
)
def test_packs_that_do_not_fit_leave_no_folder(packs, tmp_path, capsys, changes, status, message):
    assert train.main([*words(packs, tmp_path, **changes), "~tasks"]) == status
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "sft").exists()


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("sft", ["~tasks"], "tasks: missing, trainer.name=sft needs it or data.packs; choose an option"),
        ("pretrain", ["data.packs=x"], "data.packs: has no effect with trainer.name=pretrain; leave it out"),
        ("grpo", ["data.packs=x"], "data.packs: has no effect with trainer.name=grpo"),
        ("sft", ["data=builtin", "data.packs=x"], "data.phases: has no effect with trainer.name=sft"),
        ("sft", ["trainer.loss_mean=conversation"], "(did you mean 'conversations'?)"),
        ("sft", ["trainer.loss_mean_after=5"], "loss_mean_after: 5 has no effect with loss_mean=tokens"),
        (
            "sft",
            ["trainer.loss_mean=conversations", "trainer.loss_mean_after=600"],
            "loss_mean_after: 600 leaves no step of",
        ),
        ("pretrain", ["trainer.loss_mean=conversations"], "trainer.loss_mean: conversations has no effect"),
        (
            "sft",
            ["data=packs", "trainer.sample_tokens=1024"],
            "trainer.sample_tokens: 1024 leave no room for a prompt in data.sequence_length=1024",
        ),
    ],
)
def test_mistakes_of_the_configuration(recipe, overrides, expected):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    assert expected in str(caught.value)
