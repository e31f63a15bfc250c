"""Checkpoints: written whole or not at all, checked when read, kept to the last few."""

import json
import os
import resource

import pytest
import torch

from nemotron_ultra.engine.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from nemotron_ultra.errors import CheckpointError

PARTS = {
    "run": {"step": 3, "tokens": 0.1 + 0.2, "name": "a", "done": None},
    "engine": {"moments": {"w": {"exp_avg": torch.arange(6.0).view(2, 3)}}, "rng": torch.get_rng_state()},
    "stream": {"cursor": [1, {"depth": torch.tensor(2**40)}]},
    "hooks": {},
}


def save(run_dir, step, **options):
    return save_checkpoint(run_dir, step, PARTS, **options)


def test_round_trip_is_exact(tmp_path):
    found = load_checkpoint(save(tmp_path, 3))
    assert found["run"] == PARTS["run"] and found["hooks"] == {}
    assert torch.equal(found["engine"]["moments"]["w"]["exp_avg"], PARTS["engine"]["moments"]["w"]["exp_avg"])
    assert torch.equal(found["engine"]["rng"], PARTS["engine"]["rng"])
    assert found["stream"]["cursor"][1]["depth"].item() == 2**40


def test_latest_ignores_interrupted_saves_and_keep_last_removes_old_ones(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step, keep_last=2)
    interrupted = tmp_path / "checkpoints" / ".saving-step_00000011"
    interrupted.mkdir()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 10]
    assert latest_checkpoint(tmp_path).name == "step_00000010"
    save(tmp_path, 12, keep_last=2)
    assert not interrupted.exists()


def test_keep_every_keeps_for_good(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, keep_last=1, keep_every=3)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3, 6, 7]


def test_no_run_has_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "nothing") is None


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: flip(folder / "engine.safetensors"), "engine.safetensors has changed"),
        (lambda folder: (folder / "stream.safetensors").unlink(), "stream.safetensors is missing"),
        (lambda folder: os.truncate(folder / "run.json", 5), "run.json has 5 bytes"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not readable"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 1}'), "does not list its files"),
    ],
)
def test_damage_is_named_with_the_way_out(tmp_path, harm, words):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    harm(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(folder)
    assert "delete that folder to go on from step_00000001" in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_later_format_is_refused(tmp_path):
    manifest = save(tmp_path, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(CheckpointError, match="got 9; allowed: 1"):
        load_checkpoint(manifest.parent)


def test_full_disk_leaves_earlier_checkpoints(tmp_path):
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # files over 100 bytes cannot be written
    try:
        with pytest.raises(CheckpointError, match="disk is full") as caught:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "earlier checkpoints are intact" in str(caught.value)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert load_checkpoint(latest_checkpoint(tmp_path))["run"] == PARTS["run"]


def test_full_disk_while_weights_are_written(tmp_path):
    def save_weights(folder):
        folder.mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="the disk is full"):
        save(tmp_path, 2, save_weights=save_weights)
    assert latest_checkpoint(tmp_path) is None


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1)
    folder = save_checkpoint(tmp_path, 1, {"run": {"step": 1}})
    assert load_checkpoint(folder) == {"run": {"step": 1}}


def test_nothing_is_pickled(tmp_path):
    folder = save(tmp_path, 1)
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}
    assert json.loads((folder / "manifest.json").read_text())["parts"] == ["engine", "hooks", "run", "stream"]
    with pytest.raises(AssertionError, match="cannot save"):
        save_checkpoint(tmp_path, 2, {"run": {"thing": object()}})
