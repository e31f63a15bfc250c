"""Bad runs through the command line: one clear error, the exit status of its kind, and nothing lost."""

import os
import resource
import shutil

import pytest
import torch

from micro import losses, micro_corpus, micro_engine, micro_overrides
from nemotron_ultra import load_model, save_model, train
from nemotron_ultra.errors import NonFiniteError
from nemotron_ultra.trainers.build import check_weights


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return micro_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def original(corpus, tmp_path_factory):
    """A run of 4 steps with checkpoints at 2 and 4; tests work on copies of it."""
    run_dir = tmp_path_factory.mktemp("original")
    assert train.main(["recipe=pretrain", *overrides(corpus, run_dir)]) == 0
    return run_dir


@pytest.fixture
def run_dir(original, tmp_path):
    shutil.copytree(original, tmp_path / "runs")
    return tmp_path / "runs"


def overrides(corpus, run_dir, **changes):
    shared = {"trainer.steps": 4, "trainer.sample_tokens": 0, "schedule.decay_tokens": 0}
    return micro_overrides(corpus, run_dir, **shared | changes)


def fails(capsys, corpus, run_dir, **changes):
    """(exit status, message) of a run that must not succeed."""
    status = train.main(["recipe=pretrain", *overrides(corpus, run_dir, **changes)])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    return status, said


def test_changed_model_on_resume(capsys, corpus, run_dir):
    before = losses(run_dir)
    status, said = fails(capsys, corpus, run_dir, **{"model.chunk_size": 32, "trainer.steps": 6})
    assert status == 2 and "model.chunk_size: 16 -> 32" in said and "allow_config_change" in said
    assert losses(run_dir) == before


def test_a_finished_run_without_its_checkpoints_is_not_begun_again(capsys, corpus, run_dir):
    before = losses(run_dir)
    shutil.rmtree(next(run_dir.glob("*/checkpoints")))
    status, said = fails(capsys, corpus, run_dir, **{"trainer.steps": 6})
    assert status == 4 and "a finished run of 4 steps" in said and "run.name" in said
    assert losses(run_dir) == before


def test_changed_model_on_resume_if_allowed(corpus, run_dir):
    changes = {"model.chunk_size": 32, "trainer.steps": 5, "run.allow_config_change": "true"}
    assert train.main(["recipe=pretrain", *overrides(corpus, run_dir, **changes)]) == 0
    assert [step for step, _ in losses(run_dir)] == [1, 2, 3, 4, 5]


def test_another_models_weights_do_not_fit_even_if_allowed(capsys, corpus, run_dir):
    changes = {"model.hidden_size": 64, "trainer.steps": 6, "run.allow_config_change": "true"}
    status, said = fails(capsys, corpus, run_dir, **changes)
    assert status == 4 and "hidden_size: 32 there, 64 asked" in said


def test_changed_data_on_resume(capsys, corpus, run_dir, tmp_path):
    other = micro_corpus(tmp_path / "other")
    status, said = fails(capsys, other, run_dir, **{"trainer.steps": 6})
    assert status == 2 and "data.phases.0.sources.text.path" in said


def test_other_shards_in_the_same_place_on_resume(capsys, tmp_path):
    """The configuration is the same, the text is not."""
    run_dir, corpus = tmp_path / "runs", micro_corpus(tmp_path / "first")
    assert train.main(["recipe=pretrain", *overrides(corpus, run_dir, **{"trainer.steps": 2})]) == 0
    other = micro_corpus(tmp_path / "second", seed=1)
    shutil.rmtree(corpus)
    other.rename(corpus)
    before = losses(run_dir)
    status, said = fails(capsys, corpus, run_dir)
    assert status == 3 and "source.text" in said and "run.allow_config_change=true" in said
    assert losses(run_dir) == before


def test_flipped_byte_in_a_checkpoint(capsys, corpus, run_dir):
    folder = run_dir / "pretrain" / "checkpoints" / "step_00000004"
    weights = folder / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    status, said = fails(capsys, corpus, run_dir, **{"trainer.steps": 6})
    assert status == 4 and "model.safetensors has changed" in said
    assert "delete that folder to go on from step_00000002" in said
    shutil.rmtree(folder)
    assert train.main(["recipe=pretrain", *overrides(corpus, run_dir, **{"trainer.steps": 6})]) == 0
    assert [step for step, _ in losses(run_dir)] == [1, 2, 3, 4, 5, 6]


def test_missing_file_in_a_checkpoint(capsys, corpus, run_dir):
    (run_dir / "pretrain" / "checkpoints" / "step_00000004" / "engine.safetensors").unlink()
    status, said = fails(capsys, corpus, run_dir, **{"trainer.steps": 6})
    assert status == 4 and "engine.safetensors is missing" in said


def test_full_disk_while_saving(capsys, corpus, run_dir):
    """Files may grow to 64 kB: metrics go on, the weights of step 6 cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        status, said = fails(capsys, corpus, run_dir, **{"trainer.steps": 6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 4 and "the disk is full" in said and "earlier checkpoints are intact" in said
    names = sorted(os.listdir(run_dir / "pretrain" / "checkpoints"))
    assert names == ["step_00000002", "step_00000004"]
    assert train.main(["recipe=pretrain", *overrides(corpus, run_dir, **{"trainer.steps": 6})]) == 0
    assert [step for step, _ in losses(run_dir)] == [1, 2, 3, 4, 5, 6]


def test_run_folder_of_something_else(capsys, corpus, tmp_path):
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "notes.txt").write_text("mine")
    status, said = fails(capsys, corpus, tmp_path)
    assert status == 2 and "notes.txt" in said
    assert (tmp_path / "pretrain" / "notes.txt").read_text() == "mine"


def test_nan_in_a_weight(capsys, corpus, original, tmp_path):
    model = load_model(original / "pretrain" / "checkpoints" / "step_00000004" / "model")
    with torch.no_grad():
        model.backbone.layers[1].mixer.fc1_latent_proj.weight[0, 0] = float("nan")
    save_model(model, tmp_path / "bad")
    status, said = fails(capsys, corpus, tmp_path, **{"run.from": tmp_path / "bad"})
    assert status == 6 and "loss of step 1" in said and "backbone.layers.1" in said and "text:train:" in said
    assert not (tmp_path / "pretrain").exists()


def test_weights_of_another_model(capsys, corpus, original, tmp_path):
    weights = original / "pretrain" / "checkpoints" / "step_00000004" / "model"
    status, said = fails(capsys, corpus, tmp_path, **{"run.from": weights, "model.moe_latent_size": 8})
    assert status == 2 and "moe_latent_size: 16 there, 8 asked" in said


def test_vocabulary_smaller_than_the_tokenizers(capsys, corpus, tmp_path):
    status, said = fails(capsys, corpus, tmp_path, **{"model.vocab_size": 512})
    assert status == 2 and "model.vocab_size=4096 or more" in said
    assert not (tmp_path / "pretrain").exists()


def test_schedule_longer_than_the_run(capsys, corpus, tmp_path):
    status, said = fails(capsys, corpus, tmp_path, **{"schedule.warmup_tokens": 1e6})
    assert status == 2 and "warmup_tokens" in said


def test_weights_that_are_not_finite_are_not_saved():
    engine = micro_engine()
    with torch.no_grad():
        engine.model.lm_head.weight[3, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"after step 0 are not finite, first in lm_head\.weight"):
        check_weights(engine)
