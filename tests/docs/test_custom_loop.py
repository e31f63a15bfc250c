"""The loop shown in the README trains, without `fit`."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

from micro import micro_batches, micro_corpus, micro_engine, micro_overrides, objective

SCRIPT = Path(__file__).parent / "custom_loop.py"


def test_custom_loop_learns(tmp_path):
    overrides = micro_overrides(micro_corpus(tmp_path), tmp_path, **{"trainer.steps": 5})
    done = subprocess.run([sys.executable, SCRIPT, *overrides], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.3
    assert (tmp_path / "custom" / "model.safetensors").is_file()


def test_custom_loop_is_short_and_does_not_use_fit():
    text = SCRIPT.read_text()
    code = [line for line in text.split('"""', 2)[2].splitlines() if line.strip()]
    assert len(code) <= 30 and "fit(" not in text


def test_hook_of_the_training_page(capsys):
    page = (SCRIPT.parents[2] / "docs" / "training.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    batches = micro_batches(1)
    names = {"engine": micro_engine(), "stream": itertools.repeat(batches), "objective": objective()}
    exec(code.replace("steps=100", "steps=12"), names)
    assert names["engine"].step == 12 and "under 3 at step" in capsys.readouterr().out
