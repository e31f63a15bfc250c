"""recipe=sft, grpo and mopd through the command line, one from the other, shrunk to seconds."""

import pytest

from micro import rollout_overrides, task_overrides
from nemotron_ultra import load_model, train
from nemotron_ultra.observe.catalog import undocumented
from nemotron_ultra.observe.metrics import read_metrics

DOMAINS = ("chain_sum", "spell_backward", "letter_counting")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """sft from fresh weights, grpo from it, and mopd with it as every domain's teacher."""
    runs = tmp_path_factory.mktemp("runs")
    sft = task_overrides(runs, **{"run.from": "null", "trainer.global_batch_size": 8})
    assert train.main(["recipe=sft", *sft]) == 0
    assert train.main(["recipe=grpo", *rollout_overrides(runs)]) == 0
    assert train.main(["recipe=mopd", *mopd_words(runs)]) == 0
    return runs


def mopd_words(runs, **changes):
    teachers = {f"teachers.folders.{domain}": runs / "sft" for domain in DOMAINS}
    one = {"rollout.prompts_per_step": 8, "rollout.group_size": 1}
    return rollout_overrides(runs, **teachers | one | changes)


@pytest.mark.parametrize("recipe", ["sft", "grpo", "mopd"])
def test_every_metric_is_documented(runs, recipe):
    rows = read_metrics(runs / recipe / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert undocumented(key for row in rows for key in row) == []
    assert all(0 <= rows[-1][f"val/{domain}/score"] <= 1 for domain in DOMAINS)


def test_rollouts_are_fresh_and_the_ratio_is_one(runs):
    for row in read_metrics(runs / "grpo" / "metrics.jsonl"):
        assert row["replay/age_max"] == 0
        assert row["pg/ratio/min"] == pytest.approx(1, abs=1e-5)
        assert abs(row["pg/behavior_kl/k1"]) < 1e-4
        assert row["pg/masked"] == 0


def test_checkpoints_open_with_their_tokenizer(runs):
    folder = runs / "grpo" / "checkpoints" / "step_00000003" / "model"
    assert load_model(folder).config.hidden_size == 32
    assert (folder / "tokenizer.json").is_file()


def test_samples_are_rollouts_with_rewards(runs):
    rows = read_metrics(runs / "grpo" / "samples.jsonl")
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert rows[0].keys() == {"step", "domain", "prompt", "text", "reward", "finish_reason"}
