"""The next command that a run proposes is the one that was typed, with new values in place of old ones."""

import sys

from micro import micro_overrides
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.trainers.command import this_command


def test_typed_command_is_repeated(monkeypatch, tmp_path):
    config = load_recipe("pretrain", micro_overrides(tmp_path, tmp_path))
    words = ["recipe=pretrain", "trainer.steps=6", "data.phases.0.sources.a={path: x}"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/nemotron_ultra/train.py", *words])
    assert this_command(config, "trainer.steps=12") == (
        "python -m nemotron_ultra.train recipe=pretrain 'data.phases.0.sources.a={path: x}' trainer.steps=12"
    )


def test_a_run_from_a_notebook_names_its_folder(monkeypatch, tmp_path):
    config = load_recipe("pretrain", [f"run.dir={tmp_path}", "run.name=first"])
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "x.json"])
    assert this_command(config) == (
        f"python -m nemotron_ultra.train recipe=pretrain run.dir={tmp_path} run.name=first"
    )
