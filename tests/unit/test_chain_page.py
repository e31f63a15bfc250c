"""The chain's page and table: from files alone, escaped, well formed, complete for an unfinished chain."""

import json
from html.parser import HTMLParser

import pytest
import yaml

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.observe.chain_page import StageView, percent, score_lines, stage_cost, write_chain_page
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.observe.run_data import load_run

EVIL = "</pre><script>alert('x')</script> & \"quoted\""
VOID = {"meta", "br", "hr", "img", "input", "link"}
SETTINGS = {"problems": 100, "max_new_tokens": 16, "temperature": 1.0}


class Balanced(HTMLParser):
    """Raises at the first end tag that does not fit; counts scripts."""

    def __init__(self):
        super().__init__()
        self.open, self.scripts = [], 0

    def handle_starttag(self, tag, attrs):
        self.open += [] if tag in VOID else [tag]
        self.scripts += tag == "script"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def entry(name, recipe, scores=None, domain=None, finished=True):
    found = {"name": name, "recipe": recipe, "from": None, "domain": domain, "steps": 3, "finished": finished}
    if scores is not None:
        found |= {"step": 3, "scores": scores, "mean": sum(scores.values()) / 2, "settings": SETTINGS}
    return found


def chain_summary():
    return {
        "chain": "tiny",
        "seed": 7,
        "domains": ["sums", "words"],
        "finished": False,
        "stages": [
            entry("pretrain", "pretrain"),
            entry("student", "grpo", {"sums": 0.5, "words": 0.4}),
            entry("teacher_sums", "grpo", {"sums": 0.9, "words": 0.3}, domain="sums"),
            entry("mopd", "mopd", {"sums": 0.8, "words": 0.7}),
            entry("later", "mopd", finished=False),
        ],
        "recovery": {
            "domains": {"sums": 0.75, "words": None},
            "mean": 0.75,
            "student": {"sums": 0.5, "words": 0.4},
            "teacher": {"sums": 0.9, "words": 0.4},
            "mopd": {"sums": 0.8, "words": 0.7},
        },
    }


def make_stage(folder, reinforced, samples=()):
    log = MetricsLog(folder / "metrics.jsonl")
    for step in range(1, 4):
        row = {"step": step, "tokens": 100.0 * step, "seconds": 2.0, "loss": 3.0 / step}
        if reinforced:
            row |= {"reward/mean": 0.1 * step, "seconds/rollouts": 1.5, "teacher/gap_mean": -0.2}
            row |= {"val/sums/score": 0.2 * step} if step == 3 else {}
        log.append(row)
    log.close()
    facts = {"created": "2026-01-01T10:00:00+0000", "finished": "2026-01-01T10:01:05+0000", "started": [1, 2]}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"steps": 3}}))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


@pytest.fixture
def folder(tmp_path):
    rows = [
        {
            "step": 1,
            "domain": domain,
            "prompt": EVIL,
            "text": f"answer {n}",
            "reward": 0.5,
            "finish_reason": "length",
        }
        for n, domain in enumerate(["sums", "words"] * 3)
    ]
    make_stage(tmp_path / "pretrain", False, [{"step": 3, "prompt": "Once", "text": " upon"}])
    make_stage(tmp_path / "student", True, rows)
    make_stage(tmp_path / "mopd", True, rows)
    return tmp_path


def test_page_is_self_contained_and_escaped(folder):
    page = write_chain_page(folder, chain_summary()).read_text()
    found = Balanced()
    found.feed(page)
    assert not found.open and found.scripts == 1
    assert "src=" not in page and 'href="http' not in page and "<script>alert" not in page


def test_page_shows_scores_recovery_curves_samples_and_costs(folder):
    page = write_chain_page(folder, chain_summary()).read_text()
    for text in ("4 of 5 stages", "90.0*", "75 %", "Mean reward of the rollouts", "Held-out score: sums"):
        assert text in page, text
    for text in ("log p of the teacher", "cut at the limit", "reward 0.500", "1:05, continued 1 times"):
        assert text in page, text


def test_page_of_a_chain_that_has_not_begun(tmp_path):
    bare = chain_summary() | {"recovery": None}
    bare["stages"] = [entry("pretrain", "pretrain", finished=False)]
    page = write_chain_page(tmp_path, bare).read_text()
    assert "0 of 1 stages" in page and "Scores after" not in page


def test_a_file_that_is_no_page_of_ours_stays(folder):
    (folder / "report.html").write_text("mine")
    with pytest.raises(ConfigError, match="is not a report page"):
        write_chain_page(folder, chain_summary())
    assert (folder / "report.html").read_text() == "mine"


def test_table_on_the_screen():
    assert score_lines(chain_summary()) == [
        "score in %    sums   words   mean",
        "student       50.0    40.0   45.0",
        "teacher_sums  90.0*   30.0   60.0",
        "mopd          80.0    70.0   75.0",
        "recovery        75       -     75",
    ]


def test_percent():
    assert [percent(0.4372), percent(1), percent(None), percent(float("nan")), percent(0.756, 0)] == [
        "43.7",
        "100.0",
        "-",
        "-",
        "76",
    ]


def test_costs_of_a_stage(folder):
    view = StageView(entry={"name": "student", "scoring_seconds": 4.0}, run=load_run(folder / "student"))
    assert stage_cost(view) == [300.0, 6.0, 4.5, 4.0]
