"""The report page: self-contained, escaped, well formed, complete for any run, however young or damaged."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import yaml

from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.observe import heat, svg
from nemotron_ultra.observe.html import key_figures, render, write_report
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.observe.run_data import config_differences, curves_of, load_run
from nemotron_ultra.observe.svg import Chart, Line

EVIL = "</pre><script>alert('x')</script> & \"quoted\""
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balanced(HTMLParser):
    """Raises at the first end tag that does not fit."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def row(step, total=60):
    loss = 3.0 + 6.0 * math.exp(-step / 20)
    metrics = {"step": step, "tokens": 512.0 * step, "loss": loss, "mtp_1/loss": loss + 0.4}
    metrics |= {"mtp_2/loss": loss + 0.8, "mtp_1/accept": 0.1, "mtp_2/accept": 0.05, "balance_loss": 2.0}
    metrics |= {"grad_norm": 5.0 / step, "lr": 1e-3, "seconds": 0.5, "tokens_per_second": 1024.0}
    metrics |= {"matmul_share": 0.4, "memory_gb": 0.9, "moe/max_vio_median": 0.5, "moe/max_vio_max": 0.9}
    metrics |= {f"moe/{i}/max_vio": 0.5 + i / step for i in range(3)}
    metrics |= {f"residual/{i}": 0.1 * 2**i for i in range(4)}
    if step % 20 == 0:
        metrics |= {"val/loss": loss + 0.1, "val/bits_per_byte": loss / 2, "val/mtp_1/loss": loss + 0.5}
    return metrics


def make_run(folder, rows, config=None, facts=None, samples=()):
    log = MetricsLog(folder / "metrics.jsonl")
    for one in rows:
        log.append(one)
    log.close()
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts))
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


CONFIG = {
    "recipe": "pretrain",
    "model": {"pattern": "ME*E", "n_routed_experts": 8, "num_experts_per_tok": 2},
    "trainer": {"steps": 60},
    "optim": {"lr": 1e-3},
}
FACTS = {
    "recipe": "pretrain",
    "parameters": {
        "total": 3000,
        "active": 900,
        "blocks": {"moe": {"layers": 2, "total": 3000, "active": 900}},
    },
    "precision": [{"layers": "mamba", "asked": "bf16", "products": "fp32 (CPU)"}],
    "backends": [{"op": "scan", "chosen": "torch", "because": "mamba-ssm is not installed"}],
    "plan": ["length  60 steps"],
    "machine": {"cpu": EVIL, "cores": 2},
    "data": {"builtin": {"valid": {"xz_bits_per_byte": 1.75}}},
    "odd": [[1, 2], [3]],
}


@pytest.fixture
def run(tmp_path):
    samples = [{"step": s, "prompt": "def f(" + EVIL, "text": "x):\n  pass"} for s in range(1, 9)]
    return make_run(tmp_path / "first", map(row, range(1, 61)), CONFIG, FACTS, samples)


def check_page(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"\b(src|href)\s*=|url\(|@import", page)
    assert page.count("<script") == 1 and "alert(" not in page.replace("alert(&#x27;x&#x27;)", "")
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(picture)
    assert "nan" not in " ".join(re.findall(r'(?:d|x|y|cx|cy|width|height)="([^"]*)"', page))


def test_full_page(run):
    page = render([load_run(run)])
    check_page(page)
    for text in ("Loss", "MTP loss by depth", "Learning rate", "Gradient norm", "Tokens per second"):
        assert f"<h3>{text}" in page
    for text in (
        "Residual norm by layer",
        "MaxVio by layer",
        "Bits per byte",
        "xz: 1.750",
        "bound E/k - 1 = 3",
    ):
        assert text in page
    for text in (
        "Parameters by block",
        "Precision",
        "Backends",
        "Plan",
        "Machine",
        "Configuration",
        "Odd",
        "finished",
    ):
        assert text.lower() in page.lower()
    assert page.count('class="sample"') == 8 and "3 earlier samples" in page


def test_key_figures(run):
    figures = {what: (figure, remark) for figure, what, remark in key_figures(load_run(run))}
    assert figures["tokens seen"] == ("30.7k", "60 steps")
    assert figures["bits per byte, validation"] == ("1.649", "xz needs 1.750 on the same text")
    assert (
        figures["time in steps"][0] == "0:30" and figures["tokens a second"][1] == "40 % of the matmul limit"
    )


def test_two_runs(run, tmp_path):
    other = {**CONFIG, "optim": {"lr": 2e-3, "clip": 1.0}, "trainer": {"steps": 60}}
    second = make_run(tmp_path / "second", map(row, range(1, 31)), other, FACTS)
    page = render([load_run(run), load_run(second)])
    check_page(page)
    assert "What differs in the configuration" in page and "first: train" in page and "second: train" in page
    rows = dict(config_differences([load_run(run), load_run(second)]))
    assert rows == {"optim.lr": [1e-3, 2e-3], "optim.clip": ["absent", 1.0]}
    assert "step 30 of 60, 50 %" in page


def test_runs_of_equal_name_are_told_apart(tmp_path):
    folders = [make_run(tmp_path / x / "same", [row(1), row(2)], CONFIG) for x in ("a", "b")]
    page = render([load_run(folder) for folder in folders])
    assert str(folders[0]) in page and str(folders[1]) in page and "configurations are equal" in page


def test_one_row_and_nothing_else(tmp_path):
    run = make_run(tmp_path / "young", [row(1)])
    page = render([load_run(run)])
    check_page(page)
    assert "run.json is not there" in page and "<circle" in page


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "\\ud800"'])
def test_damaged_side_files_are_named(run, content):
    for name in ("run.json", "config.yaml", "samples.jsonl"):
        (run / name).write_text(content + "\n")
    page = render([load_run(run)])
    check_page(page)
    assert "run.json cannot be read" in page


def test_torn_lines_of_a_run_in_progress(run):
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"step": 61, "lo')
    data = load_run(run)
    assert data.last_step == 60 and len(data.samples) == 8 and data.problems == []


def test_not_finite_and_huge_values(tmp_path):
    rows = [row(step) for step in range(1, 41)]
    rows[4]["loss"], rows[5]["loss"], rows[6]["grad_norm"], rows[7]["residual/1"] = (
        math.nan,
        math.inf,
        1e300,
        0.0,
    )
    rows[8] = {key: math.nan for key in rows[8]} | {"step": 9}
    page = render([load_run(make_run(tmp_path / "wild", rows, CONFIG))])
    check_page(page)
    assert "train is not finite at step 5" in page


def test_all_values_nan_draw_nothing(tmp_path):
    page = render(
        [load_run(make_run(tmp_path / "nan", [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.nan}]))]
    )
    check_page(page)
    assert "<h3>Loss" not in page


def test_metrics_of_other_trainers_are_shown(tmp_path):
    rows = [{"step": s, "reward": s / 10, "<b>odd": 1.0, "text": "a"} for s in range(1, 5)]
    page = render([load_run(make_run(tmp_path / "rl", rows))])
    check_page(page)
    assert "<h3>reward" in page and "<h3>&lt;b&gt;odd" in page


def test_resumed_steps_count_as_they_were_last():
    rows = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.5},
        {"step": 2, "loss": 2.0},
        {"step": 2, "val/loss": 2.2},
    ]
    assert curves_of(rows) == {"loss": ([1, 2], [3.0, 2.0]), "val/loss": ([2], [2.2])}


def test_page_replaces_only_pages(run, tmp_path):
    out = tmp_path / "page.html"
    write_report([run], out)
    write_report([run], out)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="not a report page"):
        write_report([run], run / "metrics.jsonl")
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([run], tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        write_report([run], tmp_path / "no" / "page.html")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_failed_page_leaves_the_old_one(run, tmp_path):
    out = write_report([run], tmp_path / "page.html")
    before = out.read_bytes()
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no step"):
        write_report([run], out)
    assert out.read_bytes() == before


def test_long_run_makes_a_small_page(tmp_path):
    rows = [
        {"step": s, "loss": 3 + math.sin(s), "residual/0": 1.0, "residual/1": 2.0 + s} for s in range(1, 5001)
    ]
    rows[2500]["loss"] = 50.0
    page = render([load_run(make_run(tmp_path / "long", rows))])
    check_page(page)
    assert len(page) < 200_000


def test_thin_keeps_spikes():
    ys = [1.0] * 10_000
    ys[5000], ys[7000] = 9.0, math.nan
    xs, kept = svg.thin(range(10_000), ys)
    assert len(xs) <= 2 * svg.POINTS and 9.0 in kept and xs == sorted(xs)


def test_smooth_follows_a_slope_and_skips_nan():
    values = [float(i) for i in range(100)]
    values[50] = math.nan
    smoothed = svg.smooth(values)
    assert smoothed[30] == pytest.approx(30.0, abs=0.05) and smoothed[50] == pytest.approx(50.0, abs=0.05)
    assert svg.smooth([math.nan]) == [pytest.approx(math.nan, nan_ok=True)]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.3, 9.7), (-5, 5), (1e-9, 2e-9), (0, 3e12)])
def test_ticks_are_round_and_inside(low, high):
    found = svg.ticks(low, high)
    assert 3 <= len(found) <= 11 and all(low - 1e-12 <= tick <= high * (1 + 1e-9) for tick in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.05"),
        (2e-4, "2e-4"),
        (8000, "8000"),
        (1e4, "10k"),
        (1e6, "1M"),
        (1.5e6, "1.5M"),
        (1e-10, "1e-10"),
    ],
)
def test_tick_labels(value, text):
    assert svg._tick(value) == text


def test_constant_curve_and_log_scale():
    assert "<path" in svg.draw(Chart("flat", [Line("a", [1, 2], [0.0, 0.0])]))
    picture = svg.draw(Chart("log", [Line("a", [1, 2, 3], [1e-3, 0.0, 1e3])], log_y=True))
    assert 'data-log="1"' in picture and svg.draw(Chart("none", [])) == ""


def test_heat_merges_equal_neighbours():
    strip = heat.draw(heat.Heat("h", ["0", "1"], [1, 2, 3], [[1.0, 1.0, 1.0], [1.0, 5.0, math.nan]]))
    assert strip.count("<rect") == 3 and "0, step 1-3: 1.000" in strip
    assert heat.draw(heat.Heat("h", ["0"], [1], [[0.0]], log=True)) == ""
