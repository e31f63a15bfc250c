"""The Python of docs/generation.md runs, on a micro model and a server of it."""

import re
from pathlib import Path

import pytest

from micro import micro_model
from nemotron_ultra.model.hf_folder import save_model
from serving import TOKENIZER, serving

PAGE = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
API, CLIENT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_api(tmp_path, monkeypatch, capsys):
    folder = tmp_path / re.search(r'folder = "(.*)"', API).group(1)
    save_model(micro_model(vocab_size=TOKENIZER.vocab_size), folder)
    TOKENIZER.save(folder)
    monkeypatch.chdir(tmp_path)
    exec(API, {})
    assert capsys.readouterr().out.endswith("True\n")


def test_the_client(capsys):
    with serving() as running:
        exec(CLIENT.replace("http://localhost:8000", running.url).replace('"sft"', '"micro"'), {})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\[\d.*\] \[-.*\] \[-.*\]", lines[-1])


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[a-z-]+)", PAGE))))
def test_flags_exist(flag):
    from nemotron_ultra.generate.options import make_parser

    assert flag in make_parser().format_help()
