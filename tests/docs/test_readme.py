"""What README says is run: its Python in order in one folder, its commands through the front door."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nemotron_ultra.train import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def train_commands() -> list[list[str]]:
    lines = [
        line.split(" #")[0] for block in blocks("bash") for line in block.replace("\\\n", "").splitlines()
    ]
    commands = [re.search(r"python -m nemotron_ultra\.train (.*)", line) for line in lines]
    return [shlex.split(found.group(1)) for found in commands if found]


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for source in blocks("python"):
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    shown = capsys.readouterr().out
    losses = [float(line.split()[1]) for line in shown.splitlines()[:3]]
    assert losses[-1] < losses[0]
    assert (tmp_path / "my_model" / "config.json").is_file()


@pytest.mark.parametrize("arguments", train_commands(), ids=" ".join)
def test_commands_are_understood(arguments, capsys):
    """A training command is composed and planned, not run; every other one is run as it stands."""
    plain = not any(word.startswith("-") for word in arguments)
    sweep = "-m" in arguments
    arguments = [word.split(",")[0] for word in arguments if word != "-m"]
    assert main([*arguments, "--plan"] if plain or sweep else arguments) == 0
    assert capsys.readouterr().out.strip()


def test_every_file_that_readme_links_exists():
    missing = [path for path in re.findall(r"\]\((docs/[^)]+)\)", README) if not (ROOT / path).is_file()]
    assert not missing


def test_the_tree_names_files_that_exist():
    tree = README[README.index("```\nconfigs/") :]
    names = re.findall(r"^ {2,4}(\S+\.py) ", tree[: tree.index("\n```\n", 5)], re.M)
    found = {path.name for path in (ROOT / "src").rglob("*.py")}
    assert len(names) > 40 and not set(names) - found
