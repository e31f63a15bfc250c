"""A run that stopped and went on has the losses, weights and optimizer state of one that did not."""

import pytest
import torch

from micro import losses, micro_corpus, micro_overrides
from nemotron_ultra import train
from nemotron_ultra.engine.checkpoint import load_checkpoint
from nemotron_ultra.model.hf_folder import load_model
from nemotron_ultra.observe.metrics import read_metrics


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return micro_corpus(tmp_path_factory.mktemp("corpus"))


def pretrain(corpus, run_dir, **changes):
    return train.main(["recipe=pretrain", *micro_overrides(corpus, run_dir, **changes)])


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    assert pretrain(corpus, run_dir) == 0
    return run_dir


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resumed_equals_uninterrupted_bit_for_bit(corpus, tmp_path, dtype):
    """A schedule of fixed length, so that stopping early does not change it."""
    shared = {"schedule.total_tokens": 6 * 192, "precision": dtype}
    assert pretrain(corpus, tmp_path / "whole", **shared) == 0
    assert pretrain(corpus, tmp_path / "parts", **shared, **{"trainer.steps": 3}) == 0
    assert pretrain(corpus, tmp_path / "parts", **shared) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    folders = [tmp_path / name / "pretrain" / "checkpoints" / "step_00000006" for name in ("whole", "parts")]
    one, other = (load_model(folder / "model").state_dict() for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (load_checkpoint(folder)["engine"]["optimizer"]["exp_avg_sq"] for folder in folders)
    assert first and all(torch.equal(first[name], second[name]) for name in first)


def test_validation_and_checkpoints_change_no_number(corpus, uninterrupted, tmp_path):
    quiet = {"trainer.validate_every": 0, "trainer.checkpoint_every": 0, "trainer.sample_tokens": 0}
    assert pretrain(corpus, tmp_path, **quiet) == 0
    assert losses(tmp_path) == losses(uninterrupted)


def test_a_lost_checkpoint_goes_back_further(corpus, uninterrupted, tmp_path):
    """Rows after the checkpoint that is left are written again, not twice."""
    import json
    import shutil

    shutil.copytree(uninterrupted, tmp_path / "copy")
    run = tmp_path / "copy" / "pretrain"
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    facts = json.loads((run / "run.json").read_text())
    facts.pop("finished_steps")
    (run / "run.json").write_text(json.dumps(facts))
    assert pretrain(corpus, tmp_path / "copy") == 0
    assert losses(tmp_path / "copy") == losses(uninterrupted)
    assert [row["step"] for row in read_metrics(run / "samples.jsonl")] == [6]


def test_a_finished_run_is_left_alone(corpus, uninterrupted, capsys):
    before = (uninterrupted / "pretrain" / "metrics.jsonl").read_bytes()
    assert pretrain(corpus, uninterrupted) == 0
    said = capsys.readouterr().out
    assert "finished: 6 of 6 steps" in said and "nemotron_ultra.report" in said
    assert (uninterrupted / "pretrain" / "metrics.jsonl").read_bytes() == before


def test_any_checkpoint_opens_with_load_model(uninterrupted):
    for folder in (uninterrupted / "pretrain" / "checkpoints").iterdir():
        tokens_T = torch.arange(20)
        assert torch.isfinite(load_model(folder / "model")(tokens_T).logits_TV).all()
