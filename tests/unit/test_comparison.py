"""Runs over each other: gaps in pairs of steps, the table, the sections of the page."""

from html.parser import HTMLParser

import pytest

from nemotron_ultra.observe.chain_page import StageView, render_chain, stage_cost
from nemotron_ultra.observe.comparison import compare, comparison_lines, gap_curve, running_mean
from nemotron_ultra.observe.run_data import RunData
from nemotron_ultra.precision.accumulation import accumulation_rows

STEPS = list(range(1, 41))
EVIL = "<b>nvfp4</b>"


def run(path, name, factor, **config):
    """A run whose loss is `factor` times 4 / step, with some validations."""
    curves = {
        "loss": (STEPS, [factor * 4 / step for step in STEPS]),
        "val/loss": ([20, 40], [factor * 0.3, factor * 0.2]),
        "seconds": (STEPS, [2.0] * 40),
        "tokens": (STEPS, [10.0 * step for step in STEPS]),
    }
    return RunData(path=path / name, name=name, curves=curves, config={"run": {"name": name}} | config)


@pytest.fixture
def runs(tmp_path):
    low = run(tmp_path, EVIL, 1.01, precision={"name": "nvfp4"})
    return [run(tmp_path, "bf16", 1.0, precision={"name": "bf16"}), low]


def compared(runs, metrics=("loss", "val/loss")):
    return compare(
        {r.name: r for r in runs}, baseline="bf16", metrics=metrics, level=0.004, level_name="the bound"
    )


def test_gaps_are_of_the_same_steps(runs):
    base, low = runs
    cut = RunData(path=low.path, name="cut", curves={"loss": ([2, 3, 99], [2.2, float("nan"), 1.0])})
    assert gap_curve(low, base, "loss")[1] == pytest.approx([0.01] * 40)
    steps, gaps = gap_curve(cut, base, "loss")
    assert steps == [2] and gaps == pytest.approx([0.1])
    assert gap_curve(cut, base, "val/loss") == ([], [])


def test_running_mean():
    assert running_mean([1, 2, 6, 3], 3) == [1.5, 3, pytest.approx(11 / 3), 4.5]
    assert running_mean([1, 2, 6], 1) == [1, 2, 6] and running_mean([], 4) == []
    assert running_mean([1, 2, 6, 3], 2) == [1.5, 4, 4.5, 3]


def test_figures_of_a_comparison(runs):
    base, low = compared(runs)["rows"]
    assert base["metrics"]["loss"]["gap"] is None
    assert base["metrics"]["loss"]["end"] == pytest.approx(sum(4 / s for s in (37, 38, 39, 40)) / 4)
    assert low["metrics"]["loss"]["gap"] == pytest.approx(0.01)
    assert low["metrics"]["val/loss"] == pytest.approx({"end": 0.202, "gap": 0.01, "gap_half": 0.01})


def test_table_on_the_screen(runs):
    lines = comparison_lines(compared(runs, ["loss", "mtp_2/loss"]))
    assert lines[0].split() == ["run", "loss", "gap", "%", "mtp_2/loss", "gap", "%"]
    assert lines[2].split()[1:] == ["0.1050", "+1.000", "-", "-"]
    assert "relative distance to bf16" in lines[3] and lines[3].endswith("the bound: 0.4 %")


def summary(runs, **changes):
    entries = [{"name": r.name, "recipe": "pretrain", "finished": True} for r in runs]
    found = {"chain": "gap", "seed": 1, "domains": [], "stages": entries, "recovery": None}
    return found | {"comparison": compared(runs), "accumulation": None} | changes


def page(runs, **changes):
    found = summary(runs, **changes)
    views = [StageView(entry=e, run=r) for e, r in zip(found["stages"], runs, strict=True)]
    return render_chain(found, views)


def test_page_shows_curves_gaps_and_differences(runs):
    runs[0].config["precision"]["rules"], runs[1].config["precision"]["rules"] = [], [{"match": "mtp.*"}]
    text = page(runs)
    assert text.index("precision.name") < text.index("Rules of the policies") < text.index("mtp.*")
    for part in (
        "Compared with bf16",
        "loss: gap to bf16 in %",
        "the bound: 0.4 %",
        "+1.000",
        "precision.name",
    ):
        assert part in text, part
    assert "run.name" not in text and EVIL not in text and "&lt;b&gt;nvfp4" in text
    assert "Scores after every stage" not in text and "Gradient buffers" not in text


def test_page_before_the_first_run():
    found = summary([])
    assert "Compared with" not in render_chain(found, [])


def test_page_shows_what_buffers_keep(runs):
    rows = accumulation_rows(micro_batches=8, elements=64)
    text = page(runs, accumulation={"rows": rows, "settings": {"mtp_scale": 0.05, "micro_batches": 8}})
    parser = HTMLParser()
    parser.feed(text)
    for part in (
        "Gradient buffers",
        "Share of the MTP gradient that is kept",
        "bf16 noop",
        "noisy gradients",
    ):
        assert part in text, part


def test_a_branch_costs_only_its_own_steps(runs):
    entry = {"name": "bf16", "branch": {"from": "nvfp4", "step": 30}}
    assert stage_cost(StageView(entry=entry, run=runs[0])) == [100.0, 20.0, 0, 0]
