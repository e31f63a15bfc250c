"""recipe=sft, grpo and mopd through the command line, one from the other, shrunk to seconds."""

import pytest

from micro import rollout_overrides, task_overrides
from nemotron_ultra import load_model, train
from nemotron_ultra.observe.catalog import undocumented
from nemotron_ultra.observe.metrics import read_metrics

DOMAINS = ("sums", "equations", "complex")


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


def test_all_answers_cut_and_filtered_teach_nothing(runs):
    """Loss and gradient are 0 and a metric warns; the run goes on."""
    words = {"run.name": "cut", "advantage.overlong": "filter", "rollout.max_new_tokens": 1}
    assert train.main(["recipe=grpo", *rollout_overrides(runs, **words)]) == 0
    rows = read_metrics(runs / "cut" / "metrics.jsonl")
    filtered = [row for row in rows if row["rollout/truncated"] == 1]
    assert filtered and all(row["pg/all_masked"] == 1 and row["loss"] == 0 for row in filtered)
    assert all(row["grad_norm"] == 0 and row["advantage/kept_share"] == 0 for row in filtered)


def test_equal_rewards_teach_nothing(runs):
    rows = read_metrics(runs / "grpo" / "metrics.jsonl")
    equal = [row for row in rows if row["reward/zero_std_share"] == 1]
    assert equal and all(row["grad_norm"] == 0 and row["loss"] == 0 for row in equal)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss=grpoo"], "no option 'grpoo' (did you mean 'grpo'?)"),
        (["loss.clip=[0.3,0.1]"], "loss.clip: got [0.3, 0.1]"),
        (["loss.icepop=[5,0.5]", "loss.tis=null"], "loss.icepop: got [5, 0.5]"),
        (["tasks.only=[sum]"], "no domain 'sum' (did you mean 'sums'?)"),
        (["tasks.domains.sums.environment=gym"], "tasks.domains.sums.environment"),
        (["tasks.domains.sums.name=chain_sun"], "'chain_sun' (did you mean chain_sum"),
        (["tasks.domains.sums.args.min_term=2"], "tasks.domains.sums.args: basic_arithmetic cannot"),
        (["rollout.group_size=1", "rollout.prompts_per_step=8"], "rollout.group_size: got 1"),
        (["data.sequence_length=32"], "the prompt is longer than the limit"),
        (["run.from=/nowhere"], "run.from: no such folder"),
        (["run.from=/nowhere/runs/sft"], "train it first (python -m nemotron_ultra.train recipe=sft), or"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_bad_input_of_grpo(runs, words, message, capsys):
    code = train.main(["recipe=grpo", *rollout_overrides(runs, **{"run.name": "bad"}), *words])
    assert code in (2, 3, 4, 5) and message in capsys.readouterr().err
    assert not (runs / "bad").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["~teachers.folders.sums"], "no teacher for the domain 'sums'"),
        (["teachers.strict=false"], "teachers.default"),
        (["teachers.strict=false", "teachers.default=sumz"], "no teacher 'sumz'"),
        (["teachers.folders.sums=/nowhere"], "teachers.folders.sums"),
        (["advantage=leave_one_out"], "advantage.name: got leave_one_out"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_bad_input_of_mopd(runs, words, message, capsys):
    code = train.main(["recipe=mopd", *mopd_words(runs, **{"run.name": "bad"}), *words])
    assert code in (2, 3, 4, 5) and message in capsys.readouterr().err
    assert not (runs / "bad").exists()


def test_a_teacher_of_another_vocabulary_is_named(runs, capsys):
    other = task_overrides(runs, **{"run.name": "wide", "run.from": "null", "model.vocab_size": 4224})
    assert train.main(["recipe=sft", *other, "trainer.global_batch_size=8", "trainer.steps=1"]) == 0
    words = {"run.name": "bad", "teachers.folders.complex": runs / "wide"}
    assert train.main(["recipe=mopd", *mopd_words(runs, **words)]) == 2
    said = capsys.readouterr().err
    assert "teachers.folders.complex: this teacher has another vocabulary" in said and "4224" in said
