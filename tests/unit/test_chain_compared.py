"""Chains of runs side by side: branches, the baseline, arithmetic without training, and their mistakes."""

import json

import pytest
import yaml

from nemotron_ultra.config.compose import to_yaml
from nemotron_ultra.errors import CheckpointError, ConfigError
from nemotron_ultra.observe.console import Console
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.trainers import chain_run
from nemotron_ultra.trainers.branch import begin_branch
from nemotron_ultra.trainers.chain import load_chain, plan_lines

STAGES = [
    {"name": "high", "recipe": "pretrain", "overrides": ["precision=bf16"]},
    {"name": "low", "recipe": "pretrain", "overrides": ["precision=nvfp4"]},
    {"name": "late", "recipe": "pretrain", "branch": {"from": "low", "share": 0.75}},
]
COMPARISON = {"baseline": "high", "metrics": ["loss"], "level": 0.004}


def mine(tmp_path, *overrides, **changes):
    content = {"common": ["trainer.steps=20"], "stages": STAGES, "comparison": COMPARISON} | changes
    (tmp_path / "chains").mkdir(exist_ok=True)
    (tmp_path / "chains" / "mine.yaml").write_text(yaml.safe_dump(content))
    return load_chain("mine", [f"run.dir={tmp_path}", *overrides], tmp_path)


def changed(number, **changes):
    return [stage | changes if i == number else stage for i, stage in enumerate(STAGES)]


def finish(stage, factor):
    """What a stage that came to its end has: here a loss that falls from step to step."""
    steps = stage.config.trainer.steps
    stage.folder.mkdir(parents=True)
    (stage.folder / "config.yaml").write_text(to_yaml(stage.config))
    (stage.folder / "run.json").write_text(json.dumps({"recipe": stage.recipe, "finished_steps": steps}))
    log = MetricsLog(stage.folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        log.append({"step": step, "loss": factor * 5 / step})
    log.close()


def test_a_branch_leaves_where_its_source_keeps_a_checkpoint(tmp_path):
    low, late = mine(tmp_path).stages[1:]
    assert late.branch.step == 15 and late.sources == ["low"] and late.config.run.from_ is None
    assert (low.config.trainer.checkpoint_every, low.config.trainer.keep_every) == (15, 15)
    assert "trainer.keep_every=15" in low.words and low.words[-1].startswith("--config-dir")
    assert "3. late  (pretrain, low continued after step 15, 20 steps of 8 rows)" in plan_lines(
        mine(tmp_path)
    )


def test_a_denser_row_of_checkpoints_stays(tmp_path):
    low = mine(tmp_path, "trainer.checkpoint_every=5").stage("low")
    assert (low.config.trainer.checkpoint_every, low.config.trainer.keep_every) == (5, 15)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"comparison": COMPARISON | {"baseline": "hihg"}}, "'hihg' is no stage .*'high'"),
        ({"comparison": COMPARISON | {"metrics": []}}, "comparison.metrics: .*allowed: at least one"),
        ({"stages": changed(2, branch={"from": "lwo", "share": 0.5})}, "late: from 'lwo' is no stage.*'low'"),
        (
            {"stages": changed(0, branch={"from": "low", "share": 0.5})},
            "high: starts from low, which comes later",
        ),
        ({"stages": changed(2, **{"from": "high"})}, "late: has from and branch"),
        ({"stages": changed(2, branch={"from": "low", "share": 0})}, "share: got 0"),
        ({"common": ["trainer.steps=1"]}, "late: cannot leave low after step 1.*low has 1 steps"),
        (
            {"stages": [*STAGES, STAGES[2] | {"name": "later", "branch": {"from": "low", "share": 0.9}}]},
            "later: cannot leave low after step 18.*another branch leaves after 15",
        ),
        ({"accumulation": {"micro_batches": 0}}, "accumulation.micro_batches: got 0"),
    ],
)
def test_mistakes_in_the_file(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        mine(tmp_path, **changes)


def test_the_table_compares_what_has_begun(tmp_path):
    chain = mine(tmp_path)
    for stage, factor in zip(chain.stages[:2], (1.0, 1.02), strict=True):
        finish(stage, factor)
    found = chain_run.summary(chain)
    assert [row["name"] for row in found["comparison"]["rows"]] == ["high", "low"] and not found["finished"]
    assert found["comparison"]["rows"][1]["metrics"]["loss"]["gap"] == pytest.approx(0.02)
    lines = chain_run.table_lines(found)
    assert lines[2].split() == ["low", "0.2617", "+2.000"] and "score in %" not in lines[0]


def test_arithmetic_is_measured_once(tmp_path, monkeypatch):
    chain = mine(tmp_path, accumulation={"micro_batches": 4})
    chain.folder.mkdir()
    chain_run.measure_accumulation(chain, Console(3))
    kept = chain_run.accumulation(chain)
    assert len(kept["rows"]) == 12 and "Gradient buffers" in (chain.folder / "report.html").read_text()
    monkeypatch.setattr(chain_run, "accumulation_rows", None)  # a second measurement would fail
    chain_run.measure_accumulation(chain, Console(3))
    assert chain_run.accumulation(mine(tmp_path, accumulation={"micro_batches": 8})) is None


def test_a_branch_has_the_curves_up_to_its_step(tmp_path):
    chain = mine(tmp_path)
    low, late = chain.stages[1:]
    finish(low, 1.0)
    (low.folder / "checkpoints" / "step_00000015" / "model").mkdir(parents=True)
    begin_branch(chain, late)
    assert (late.folder / "checkpoints" / "step_00000015" / "model").is_dir()
    rows = (late.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 16))
    assert json.loads((late.folder / "run.json").read_text())["branch"] == {"from": "low", "step": 15}
    (late.folder / "metrics.jsonl").write_text("")
    begin_branch(chain, late)  # it is there
    assert (late.folder / "metrics.jsonl").read_text() == ""


def test_a_branch_off_nothing_is_refused(tmp_path):
    chain = mine(tmp_path)
    finish(chain.stage("low"), 1.0)
    with pytest.raises(CheckpointError, match=r"late goes on from .*step_00000015, which is not there"):
        begin_branch(chain, chain.stage("late"))
    assert not chain.stage("late").folder.exists()
