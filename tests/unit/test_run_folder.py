"""Run folders: who may write, what continues, and that nothing is mixed or overwritten."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from micro import micro_overrides
from nemotron_ultra.config.compose import load_recipe, read_config
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.trainers.run_folder import RunFolder, changed_keys, flat


def config_of(tmp_path: Path, *overrides: str, **changes: object):
    return load_recipe("pretrain", [*micro_overrides(tmp_path / "corpus", tmp_path, **changes), *overrides])


def begin(config):
    """Start a run and leave a step's row in it."""
    with RunFolder.open(config) as folder:
        (folder.path / "metrics.jsonl").write_text('{"step": 1, "loss": 8.0}\n')


def test_new_run_writes_its_configuration(tmp_path):
    config = config_of(tmp_path)
    with RunFolder.open(config) as folder:
        assert folder.checkpoint is None and folder.finished_steps == 0
        folder.record(parameters={"total": 5})
    assert read_config(tmp_path / "pretrain" / "config.yaml") == config
    facts = json.loads((tmp_path / "pretrain" / "run.json").read_text())
    assert facts["recipe"] == "pretrain" and facts["parameters"]["total"] == 5 and len(facts["started"]) == 1


def test_the_same_again_continues(tmp_path):
    begin(config_of(tmp_path))
    with RunFolder.open(config_of(tmp_path)) as folder:
        folder.record(finished_steps=6)
        assert len(folder.facts["started"]) == 2
    with RunFolder.open(config_of(tmp_path)) as folder:
        assert folder.finished_steps == 6


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model.chunk_size": 32}, "model.chunk_size: 16 -> 32"),
        ({"data.sequence_length": 64}, "data.sequence_length: 48 -> 64"),
        ({"optim.lr": 1e-4}, "optim.lr"),
        ({"run.seed": 5}, "run.seed: 1234 -> 5"),
        ({"trainer.global_batch_size": 8}, "trainer.global_batch_size: 4 -> 8"),
    ],
)
def test_changed_configuration_is_refused_with_the_keys(tmp_path, change, line):
    begin(config_of(tmp_path))
    with pytest.raises(ConfigError, match="another configuration") as caught:
        RunFolder.open(config_of(tmp_path, **change))
    assert line in str(caught.value) and "run.allow_config_change=true" in str(caught.value)


def test_a_folder_that_cannot_be_made_is_a_mistake_in_the_configuration(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ({"run.dir": tmp_path / "file" / "runs"}, {"run.name": "x" * 300}):
        with pytest.raises(ConfigError, match=r"cannot be used; got .*choose another run\.dir or run\.name"):
            RunFolder.open(config_of(tmp_path, **place))


def test_a_disk_without_room_for_the_first_file_names_the_folder(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nemotron_ultra.trainers.run_folder._write", full)
        with pytest.raises(ConfigError, match=r"pretrain cannot be used; got No space left on device"):
            RunFolder.open(config_of(tmp_path))
    RunFolder.open(config_of(tmp_path)).close()


def test_changed_source_is_named(tmp_path):
    begin(config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.phases\.0\.sources\.text\.path"):
        RunFolder.open(config_of(tmp_path / "elsewhere", **{"run.dir": tmp_path}))


def test_allowed_change_keeps_the_earlier_configuration(tmp_path):
    first = config_of(tmp_path)
    begin(first)
    second = config_of(tmp_path, **{"optim.lr": 1e-4, "run.allow_config_change": "true"})
    begin(second)
    begin(second)
    assert read_config(tmp_path / "pretrain" / "config.1.yaml") == first
    assert read_config(tmp_path / "pretrain" / "config.yaml") == second
    assert not (tmp_path / "pretrain" / "config.2.yaml").exists()


def test_more_steps_and_other_logging_are_no_change(tmp_path):
    begin(config_of(tmp_path))
    begin(config_of(tmp_path, **{"trainer.steps": 20, "log.every": 5, "trainer.micro_batch_size": 4}))
    assert (tmp_path / "pretrain" / "config.1.yaml").exists()


def test_keys_newer_than_the_run_have_their_defaults(tmp_path):
    begin(config_of(tmp_path))
    path = tmp_path / "pretrain" / "config.yaml"
    kept = [line for line in path.read_text().splitlines(keepends=True) if "layer_norm_epsilon" not in line]
    path.write_text("".join(kept))
    with RunFolder.open(config_of(tmp_path)) as folder:
        assert folder.changes == []


def test_configuration_of_another_version_is_refused(tmp_path):
    begin(config_of(tmp_path))
    path = tmp_path / "pretrain" / "config.yaml"
    path.write_text(path.read_text().replace("hidden_size:", "width:"))
    with pytest.raises(ConfigError, match=r"config\.yaml does not fit this version"):
        RunFolder.open(config_of(tmp_path))


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ConfigError, match=r"not a run folder.*thesis\.tex"):
        RunFolder.open(config_of(tmp_path))
    assert [p.name for p in (tmp_path / "pretrain").iterdir()] == ["thesis.tex"]


def test_foreign_run_json_is_refused(tmp_path):
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "run.json").write_text('{"job": 1}')
    with pytest.raises(ConfigError, match="not written by a run"):
        RunFolder.open(config_of(tmp_path))


def test_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "pretrain").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.open(config_of(tmp_path))


def test_another_recipes_run_is_refused(tmp_path):
    config = config_of(tmp_path)
    begin(config)
    with pytest.raises(ConfigError, match="belongs to recipe=pretrain"):
        RunFolder.open(dataclasses.replace(config, recipe="sft"))


def test_resume_never_and_must(tmp_path):
    with pytest.raises(ConfigError, match="resume=must"):
        RunFolder.open(config_of(tmp_path, "run.resume=must"))
    assert not (tmp_path / "pretrain").exists()
    begin(config_of(tmp_path, "run.resume=never"))
    with pytest.raises(ConfigError, match="resume=never"):
        RunFolder.open(config_of(tmp_path, "run.resume=never"))
    begin(config_of(tmp_path, "run.resume=must"))


def test_start_that_was_killed_at_once_begins_again(tmp_path):
    config = config_of(tmp_path)
    RunFolder.open(config).close()
    (tmp_path / "pretrain" / "run.json").unlink()
    begin(config)
    assert (tmp_path / "pretrain" / "run.json").exists()


def test_a_run_without_a_step_binds_nobody(tmp_path):
    RunFolder.open(config_of(tmp_path)).close()
    changed = config_of(tmp_path, **{"optim.lr": 1e-4})
    RunFolder.open(changed).close()
    assert read_config(tmp_path / "pretrain" / "config.yaml") == changed


def test_an_error_before_the_first_step_leaves_no_folder(tmp_path):
    with RunFolder.open(config_of(tmp_path)) as folder:
        folder.leave_no_trace()
    assert not (tmp_path / "pretrain").exists()
    begin(config_of(tmp_path))
    with RunFolder.open(config_of(tmp_path)) as folder:
        folder.leave_no_trace()
    assert (tmp_path / "pretrain" / "metrics.jsonl").exists()


def test_two_processes_cannot_write_one_run(tmp_path):
    config = config_of(tmp_path)
    with RunFolder.open(config) as folder:
        script = (
            f"import fcntl; fcntl.flock(open({str(folder.path / '.lock')!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        )
        assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 1
        with pytest.raises(ConfigError, match=r"another process; got process \d+"):
            RunFolder.open(config)
    begin(config)


def test_flat_and_changed_keys():
    assert flat({"a": {"b": [1, 2]}, "c": [{"d": 1}]}) == {"a.b": [1, 2], "c.0.d": 1}
    assert changed_keys({"model": {"x": 1}}, {"model": {"x": 1, "y": 2}}) == ["model.y: absent -> 2"]
    assert changed_keys({"data": {"cache_dir": None}}, {"data": {"cache_dir": "x"}}) == []


def test_a_longer_run_may_move_its_schedule(tmp_path):
    """The shipped schedules are shares of the run's length."""
    begin(config_of(tmp_path))
    with RunFolder.open(config_of(tmp_path, **{"trainer.steps": 12, "schedule.decay_tokens": 800})) as folder:
        assert folder.changes == ["schedule.decay_tokens: 400.0 -> 800.0", "trainer.steps: 6 -> 12"]
