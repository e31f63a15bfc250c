"""docs/posttraining.md shows the trainers as they are, its example runs; docs/walk.md names real things."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "posttraining.md").read_text()
WALK = (ROOT / "docs" / "walk.md").read_text()
SRC = ROOT / "src" / "nemotron_ultra"
SECTIONS = re.findall(r"^## \w+: `(trainers/\w+\.py)`.*?\n(.*?)(?=^## )", PAGE, re.S | re.M)


def bare(code):
    """Without what a formatter moves: spaces, line ends and commas."""
    return re.sub(r"[\s,]", "", code)


@pytest.mark.parametrize(("file", "section"), SECTIONS, ids=[file for file, _ in SECTIONS])
def test_the_code_shown_is_the_code(file, section):
    shown = re.findall(r"```python\n(.*?)```", section, re.S)
    assert shown
    for block in shown:
        assert bare(block) in bare((SRC / file).read_text())


def test_all_three_trainers_are_shown():
    assert [file for file, _ in SECTIONS] == ["trainers/sft.py", "trainers/grpo.py", "trainers/mopd.py"]


def test_the_example_runs(capsys):
    block = next(b for b in re.findall(r"```python\n(.*?)```", PAGE, re.S) if b.startswith("import torch"))
    exec(compile(block, "posttraining.md", "exec"), {"__name__": "page"})
    loss, masked = map(float, capsys.readouterr().out.split())
    assert loss == pytest.approx(-2 / 3) and masked == pytest.approx(1 / 3)


def test_every_hop_of_the_walk_names_functions_that_exist():
    found = re.findall(r"`(\w+/\w+\.py)`((?: `[\w.]+`,?)*)", WALK)
    assert len(found) > 20
    for file, names in found:
        text = (SRC / file).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            last = name.split(".")[-1]
            assert re.search(rf"(def|class) {last}\b", text), f"{file} has no {name}"
