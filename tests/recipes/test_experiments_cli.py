"""The two experiments on precision from one command each: micro sizes, two to four steps a stage."""

import json
import shutil

import pytest

from micro import MODEL, micro_corpus
from nemotron_ultra import pipeline
from nemotron_ultra.config.compose import read_config
from nemotron_ultra.observe.metrics import read_metrics
from nemotron_ultra.trainers.chain import load_chain

SWITCHES = {
    "no_hadamard": ("hadamard", "none"),
    "no_stochastic_rounding": ("stochastic_rounding", "none"),
    "weights_1x16": ("weight_block", "1x16"),
}
SIZES = MODEL | {"pattern": "ME*E", "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return micro_corpus(tmp_path_factory.mktemp("text"))


def words(chain, corpus, runs, steps):
    return [
        f"chain={chain}",
        f"run.dir={runs}",
        *(f"model.{name}={value}" for name, value in SIZES.items()),
        f"data.phases=[{{sources: {{text: {{path: {corpus}}}}}}}]",
        *("data.sequence_length=48", f"trainer.steps={steps}", "trainer.global_batch_size=4"),
        *("trainer.micro_batch_size=2", "trainer.validate_rows=2", "trainer.validate_every=0"),
        *("schedule.warmup_tokens=0", "schedule.decay_tokens=100", "engine.device=cpu", "log.every=1"),
    ]


@pytest.fixture(scope="module")
def gap(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("gap")
    assert pipeline.main(words("nvfp4_gap", corpus, runs, 4)) == 0
    return runs / "nvfp4_gap"


def losses(folder):
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_shipped_chains_compare_what_their_names_say():
    chain = load_chain("nvfp4_gap")
    stages = {stage.name: stage.config for stage in chain.stages}
    assert chain.comparison.baseline == "bf16" and stages["bf16"].precision.name == "bf16"
    for name, (key, value) in SWITCHES.items():
        assert getattr(stages[name].precision.nvfp4, key) == value
        assert getattr(stages["bare"].precision.nvfp4, key) == value
    assert stages["no_last_layers"].precision.last_layers == stages["bare"].precision.last_layers == 0
    alike = {(c.run.seed, c.trainer.steps, c.optim.lr, str(c.data)) for c in stages.values()}
    assert len(alike) == 1


def test_shipped_chain_of_gradient_buffers():
    chain = load_chain("bf16_gradients")
    high, low, few = (stage.config for stage in chain.stages)
    assert high.precision.gradient_format("lm_head.weight") == "fp32"
    assert {c.precision.gradient_format("lm_head.weight") for c in (low, few)} == {"bf16"}
    assert (
        high.trainer.global_batch_size == few.trainer.global_batch_size == 1024
        and low.trainer.micro_batch_size == 1
    )
    assert high.trainer.mtp_loss_scale / high.model.depths == chain.accumulation.mtp_scale


def test_gap_leaves_a_page_and_a_table(gap):
    found = json.loads((gap / "scores.json").read_text())
    assert found["finished"] and len(found["comparison"]["rows"]) == 9
    page = (gap / "report.html").read_text()
    assert "Compared with bf16" in page and "precision.nvfp4.hadamard" in page
    every = {
        name: losses(gap / name) for name in [*SWITCHES, "bf16", "fp32", "nvfp4", "bare", "no_last_layers"]
    }
    for name in ("no_hadamard", "no_stochastic_rounding"):  # both are of the backward alone
        assert every[name][0] == every["nvfp4"][0]
    assert len({every[name][0] for name in ("bf16", "nvfp4", "weights_1x16", "no_last_layers")}) == 4
    assert len({tuple(curve) for curve in every.values()}) == len(every)


def test_a_branch_is_the_run_it_leaves_up_to_its_step(gap):
    left, branch = losses(gap / "nvfp4"), losses(gap / "bf16_at_the_end")
    assert len(branch) == 4 and branch[:3] == left[:3] and branch[3] != left[3]
    facts = json.loads((gap / "bf16_at_the_end" / "run.json").read_text())
    assert facts["branch"] == {"from": "nvfp4", "step": 3} and len(facts["started"]) == 1
    assert read_config(gap / "bf16_at_the_end" / "config.yaml").precision.name == "bf16"


def test_the_same_command_again_changes_nothing(gap, corpus, capsys):
    before = {path: path.stat().st_mtime_ns for path in gap.glob("*/*.json*")}
    assert pipeline.main(words("nvfp4_gap", corpus, gap.parent, 4)) == 0
    assert {path: path.stat().st_mtime_ns for path in gap.glob("*/*.json*")} == before
    shown = capsys.readouterr().out
    assert shown.count(" is finished\n") == 9 and "relative distance to bf16" in shown


def test_gradient_buffers_from_the_arithmetic_to_the_page(corpus, tmp_path, capsys):
    assert pipeline.main(words("bf16_gradients", corpus, tmp_path, 3)) == 0
    folder = tmp_path / "bf16_gradients"
    kept = {
        (row["gradients"], row["buffer"], row["n"]): row["kept"]
        for row in json.loads((folder / "accumulation.json").read_text())["rows"]
    }
    assert kept["coherent", "bf16", 512] < 0.15 and abs(kept["coherent", "fp32", 512] - 1) < 1e-3
    page = (folder / "report.html").read_text()
    assert "Gradient buffers" in page and "val/mtp_2/loss: gap to fp32_gradients in %" in page
    high, low = losses(folder / "fp32_gradients"), losses(folder / "bf16_gradients")
    assert high[0] == low[0] and high[2] != low[2]  # Adam's first update has only the signs
    assert "gradients fp32 but bf16 for lm_head, backbone.embeddings" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_branch_whose_checkpoint_is_gone(gap, corpus, tmp_path, capsys):

    copy = tmp_path / "nvfp4_gap"
    shutil.copytree(gap, copy)
    shutil.rmtree(copy / "bf16_at_the_end")
    shutil.rmtree(copy / "nvfp4" / "checkpoints" / "step_00000003")
    assert pipeline.main(words("nvfp4_gap", corpus, tmp_path, 4)) == 4
    assert "step_00000003, which is not there" in capsys.readouterr().err
    assert not (copy / "bf16_at_the_end").exists()


def test_a_branch_whose_copy_was_interrupted_is_made_again(gap, corpus, tmp_path):

    copy = tmp_path / "nvfp4_gap"
    shutil.copytree(gap, copy)
    (copy / "bf16_at_the_end").rename(copy / ".bf16_at_the_end.branching")
    (copy / ".bf16_at_the_end.branching" / "run.json").write_text("{")
    assert pipeline.main(words("nvfp4_gap", corpus, tmp_path, 4)) == 0
    assert losses(copy / "bf16_at_the_end") == losses(gap / "bf16_at_the_end")
    assert not (copy / ".bf16_at_the_end.branching").exists()
