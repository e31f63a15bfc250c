"""A chain on its files: what is skipped, run, refused; the table and the recovery rates. No training here."""

import functools
import json
import shutil
import sys

import pytest
from filelock import FileLock

from nemotron_ultra.config.compose import to_yaml
from nemotron_ultra.errors import BackendError, CheckpointError, ConfigError
from nemotron_ultra.observe.console import Console
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.trainers.chain import load_chain
from nemotron_ultra.trainers.chain_run import recovery, run_chain, summary, table_lines

SCORES = {
    "sft": (0.4, 0.4, 0.4),
    "student": (0.5, 0.5, 0.6),
    "teacher_sums": (0.9, 0.2, 0.6),
    "teacher_equations": (0.3, 0.8, 0.6),
    "teacher_complex": (0.3, 0.2, 0.5),
    "mopd": (0.7, 0.8, 0.6),
}


@functools.cache
def loaded(*overrides):
    return load_chain("tiny", overrides)


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """The shipped chain, in runs/tiny of an empty folder."""
    monkeypatch.chdir(tmp_path)
    return loaded()


def finish(chain, stage, step=None):
    """Leave behind what a stage that came to its end has, but for its checkpoints."""
    steps = stage.config.trainer.steps
    stage.folder.mkdir(parents=True)
    (stage.folder / "config.yaml").write_text(to_yaml(stage.config))
    (stage.folder / "run.json").write_text(json.dumps({"recipe": stage.recipe, "finished_steps": steps}))
    log = MetricsLog(stage.folder / "metrics.jsonl")
    log.append({"step": steps, "loss": 1.0})
    log.close()
    if stage.config.tasks is None:
        return
    tasks, scores = stage.config.tasks, dict(zip(chain.domains, SCORES[stage.name], strict=True))
    settings = {
        "domains": list(tasks.domains),
        "problems": tasks.validation_problems,
        "temperature": tasks.validation_temperature,
        "max_new_tokens": chain.max_new_tokens,
        "seed": stage.config.run.seed,
    }
    found = {"step": step or steps, "scores": scores, "mean": sum(scores.values()) / 3, "settings": settings}
    (stage.folder / "scores.json").write_text(json.dumps(found | {"seconds": 1.0}))


def finish_all(chain, *but):
    for stage in chain.stages:
        if stage.name not in but:
            finish(chain, stage)


def refuse(words):
    raise AssertionError(f"nothing was to run, but {words} did")


def test_finished_stages_are_neither_run_nor_scored_again(chain):
    finish_all(chain)
    assert run_chain(chain, refuse, Console(7)) == 0
    found = json.loads((chain.folder / "scores.json").read_text())
    assert found == summary(chain) and found["finished"]
    assert (chain.folder / "report.html").is_file()


def test_what_is_not_finished_runs_with_its_own_words(chain, capsys):
    finish_all(chain, "mopd")
    ran = []

    def train(words):
        ran.append(words)
        finish(chain, chain.mopd)
        return 0

    assert run_chain(chain, train, Console(7)) == 0
    assert ran == [chain.mopd.words] and "stage 7 of 7: mopd (mopd, from student, " in capsys.readouterr().out


@pytest.mark.parametrize("code", [75, 4])
def test_a_stage_that_stops_stops_the_chain(chain, code):
    ran = []

    def train(words):
        ran.append(words)
        return code

    assert run_chain(chain, train, Console(7)) == code
    assert ran == [chain.stages[0].words]


def test_table_and_recovery(chain):
    finish_all(chain)
    found = summary(chain)
    assert found["recovery"]["domains"] == pytest.approx({"sums": 0.5, "equations": 1.0, "complex": None})
    assert found["recovery"]["mean"] == pytest.approx(0.75)
    lines = table_lines(found)
    assert lines[0].split() == ["score", "in", "%", *chain.domains, "mean"]
    assert lines[3].split() == ["teacher_sums", "90.0*", "20.0", "60.0", "56.7"]
    assert lines[-2].split() == ["recovery", "50", "100", "-", "75"]


def test_recovery_of_one_domain():
    assert recovery(0.5, 0.9, 0.7) == pytest.approx(0.5)
    assert recovery(0.5, 0.9, 0.4) == pytest.approx(-0.25) and recovery(0.5, 0.9, 1.0) == pytest.approx(1.25)
    assert recovery(0.5, 0.5, 0.7) is None and recovery(0.5, 0.4, 0.7) is None
    assert recovery(0.5, 0.50003, 0.6) is None  # a lead that is noise


def test_scores_of_other_weights_or_other_settings_do_not_count(chain):
    finish_all(chain, "sft")
    finish(chain, chain.stage("sft"), step=3)
    entries = {entry["name"]: entry for entry in summary(chain)["stages"]}
    assert "scores" in entries["mopd"] and "scores" not in entries["sft"] and not entries["sft"]["finished"]
    more = loaded("tasks.validation_problems=7")
    assert all("scores" not in entry for entry in summary(more)["stages"])


@pytest.mark.parametrize("override", ["optim.lr=2e-3", "student:trainer.steps=3"])
def test_a_finished_stage_of_another_configuration_is_refused(chain, override):
    finish_all(chain)
    other = loaded(override)
    with pytest.raises(
        ConfigError, match=r"is finished, with another configuration.*->.*allow_config_change"
    ):
        run_chain(other, refuse, Console(7))


@pytest.mark.parametrize("override", ["log.every=9", "engine.threads=1"])
def test_what_changes_no_number_may_change(chain, override):
    finish_all(chain)
    other = loaded(override)
    assert run_chain(other, refuse, Console(7)) == 0


def test_another_configuration_can_be_allowed(chain):
    finish_all(chain)
    other = loaded("optim.lr=2e-3", "run.allow_config_change=true")
    assert run_chain(other, refuse, Console(7)) == 0


def test_a_stage_made_from_earlier_weights_is_told(chain, capsys):
    finish_all(chain)
    other = loaded("student:trainer.steps=99", "run.allow_config_change=true")

    def train(words):
        student = other.stage("student")
        shutil.rmtree(student.folder)
        finish(other, student)
        return 0

    assert run_chain(other, train, Console(7)) == 0
    assert "mopd is finished, made from earlier weights of student" in capsys.readouterr().out


def test_a_moved_chain_is_the_same_chain(chain, tmp_path):
    finish_all(chain)
    chain.folder.rename(tmp_path / "moved")
    other = loaded(f"run.dir={tmp_path}", "run.name=moved")
    assert run_chain(other, refuse, Console(7)) == 0


def test_a_stage_made_from_one_that_is_gone_is_refused(chain):
    finish_all(chain, "student")
    with pytest.raises(CheckpointError, match="is finished, but student, which it was made from, is not"):
        run_chain(chain, refuse, Console(7))


def test_a_folder_of_something_else_is_refused(chain):
    chain.folder.mkdir(parents=True)
    (chain.folder / "scores.json").write_text('{"chain": "mine"}')
    with pytest.raises(ConfigError, match="belongs to chain=mine"):
        run_chain(chain, refuse, Console(7))
    (chain.folder / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a run, not a chain"):
        run_chain(chain, refuse, Console(7))


def test_one_chain_at_a_time(chain):
    chain.folder.mkdir(parents=True)
    with FileLock(chain.folder / ".lock"), pytest.raises(ConfigError, match="written by another chain"):
        run_chain(chain, refuse, Console(7))


def test_a_folder_that_cannot_be_made(chain):
    chain.folder.parent.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used"):
        run_chain(chain, refuse, Console(7))


def test_tasks_are_tried_before_the_first_stage(chain, monkeypatch):
    """Without the library the chain ends before its pretraining."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(BackendError, match=r"pip install 'nemotron-ultra\[rl\]'"):
        run_chain(chain, lambda words: pytest.fail("trained"), Console(1))
