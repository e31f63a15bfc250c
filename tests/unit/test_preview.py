import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.packs import PackWriter
from nemotron_ultra.data.preview import is_packed, pieces, preview_chats, preview_packs, show_row
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions
from nemotron_ultra.errors import DataError
from nemotron_ultra.observe.masks_page import render_masks
from nemotron_ultra.prep import main

TOKENIZER = load_tokenizer("builtin")
CHATS = [
    [("user", "What is 2 + 2?"), ("assistant", "It is 4."), ("user", "Twice?"), ("assistant", "8")],
    [("system", "Be brief."), ("user", "Say <|im_end|> & \x1b[31mred 🌧️"), ("assistant", "Nej, <b>tack</b>.")],
    [("assistant", "Nobody asked.")],
]


@pytest.fixture
def chats(tmp_path):
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in CHATS]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "{broken"]) + "\n")
    return path


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A folder as `prep sft` makes it."""
    folder = tmp_path_factory.mktemp("preview")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i} + 1?"},
                {"role": "assistant", "content": f"{i + 1}."},
            ]
        }
        for i in range(40)
    ]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--out", str(folder / "packs"), "--max-length", "64", "--workers", "1"]
    assert main(["sft", f"sums={folder / 'sums.jsonl'}", *options]) == 0
    return folder / "packs"


def text_of(row):
    return "".join(piece.text for piece in row.pieces)


def trained_of(row):
    return "".join(piece.text for piece in row.pieces if piece.trained)


def test_chats_by_hand(chats):
    shown = preview_chats(chats, load_template(TOKENIZER), MaskOptions(), count=9)
    first, second = (group.rows[0] for group in shown.groups)
    assert trained_of(first) == "It is 4.<|im_end|>8<|im_end|>"
    assert text_of(first).startswith("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert trained_of(second) == "Nej, <b>tack</b>.<|im_end|>"
    assert "🌧️" in text_of(second) and first.trained == sum(count for _, count in first.stretches)
    assert [(place, reason) for place, reason, _ in shown.dropped] == [
        ("chats.jsonl:3", "role order"),
        ("chats.jsonl:4", "not JSON"),
    ]


def test_only_true_special_tokens_look_special(chats):
    shown = preview_chats(chats, load_template(TOKENIZER), MaskOptions(), start=1, count=1)
    special = [piece.text for piece in shown.groups[0].rows[0].pieces if piece.special]
    assert special.count("<|im_end|>") == 3 and text_of(shown.groups[0].rows[0]).count("<|im_end|>") == 4


@pytest.mark.parametrize(
    "text", ["plain text", " lead", "🌧️ für 日本語 e\u0301", "a\n\n\tb", "def f(x):\n    return x"]
)
def test_pieces_are_the_text_and_the_ids(text):
    ids = TOKENIZER.encode(text)
    found = list(pieces(ids, np.ones(len(ids), np.uint8), TOKENIZER))
    assert "".join(piece.text for piece in found) == text
    assert [id for piece in found for id in piece.ids] == ids
    assert not any("\ufffd" in piece.text for piece in found)


def test_a_character_cut_by_the_mask_and_an_unknown_id():
    ids = TOKENIZER.encode("日")
    assert len(ids) > 1
    mask = np.zeros(len(ids) + 1, np.uint8)
    mask[1:] = 1
    found = list(pieces([*ids, TOKENIZER.vocab_size + 5], mask, TOKENIZER))
    assert [id for piece in found for id in piece.ids] == [*ids, TOKENIZER.vocab_size + 5]
    assert [piece.trained for piece in found][:2] == [False, True]
    assert found[-1].text == f"<{TOKENIZER.vocab_size + 5}>"


def test_the_middle_of_long_conversations_is_left_out():
    ids = np.array(TOKENIZER.encode("one two three four five six seven eight nine ten " * 20), np.int32)
    row = show_row("", ids, np.ones(len(ids), np.uint8), TOKENIZER, 30)
    assert row.tokens == len(ids) and row.left_out == len(ids) - 30
    shown = [id for piece in row.pieces for id in piece.ids]
    assert shown == [*ids[:20].tolist(), *ids[-10:].tolist()]
    assert [id for piece in row.pieces[: row.gap] for id in piece.ids] == ids[:20].tolist()


def test_packs_show_what_training_reads(packs):
    assert is_packed(packs)
    shown = preview_packs(packs, count=2)
    assert len(shown.groups) == 2 and shown.groups[0].room == 64
    for row in (row for group in shown.groups for row in group.rows):
        asked, answered = re.fullmatch(r"sums, row (\d+)", row.about), trained_of(row)
        assert answered == f"{int(asked[1]) + 1}.<|im_end|>"
        assert f"{asked[1]} + 1?" in text_of(row)
    assert dict(shown.facts)["tokenizer"] == "builtin"
    (one,) = preview_packs(packs / "train-00000.parquet", start=1, count=1).groups
    assert one == shown.groups[1]


def test_packs_of_others(tmp_path):
    ids = np.array(TOKENIZER.encode("hello there"), np.int32)
    with PackWriter(tmp_path / "a.parquet") as writer:
        writer.add([(ids, np.ones(len(ids), np.uint8))])
    with pytest.raises(DataError, match="--tokenizer"):
        preview_packs(tmp_path)
    (group,) = preview_packs(tmp_path, tokenizer="builtin").groups
    assert text_of(group.rows[0]) == "hello there" and not group.rows[0].pieces[0].trained
    with pytest.raises(DataError, match=r"has no pack 1; allowed: 0\.\.0"):
        preview_packs(tmp_path, start=1, tokenizer="builtin")


def test_terminal_with_and_without_colour(chats, capsys):
    assert main(["preview", str(chats), "--rows", "4"]) == 0
    plain = capsys.readouterr().out
    assert "<think></think>[[It is 4.<|im_end|>]]\n<|im_start|>user\nTwice?" in plain
    assert "chats.jsonl:4: not JSON" in plain and "␛[31mred" in plain and "\x1b" not in plain
    assert main(["preview", str(chats), "--color", "always"]) == 0
    assert "\x1b[1;32mIt is 4.\x1b[0m\x1b[1;32m\x1b[36m<|im_end|>\x1b[0m" in capsys.readouterr().out


def test_the_terminal_shows_a_few_conversations_of_packs(packs, capsys):
    whole = preview_packs(packs, count=1).groups[0].rows
    assert main(["preview", str(packs), "--rows", "1", "--conversations", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n--- ") == 2 and f"--- 1 of {len(whole)}," in out
    assert len(whole) == 2 and "--- 1 more conversation: --conversations N" in out
    assert main(["preview", str(packs), "--rows", "8"]) == 0  # one of each
    assert capsys.readouterr().out.count("more conversation") > 4
    assert main(["preview", str(packs), "--rows", "8", "--conversations", "999"]) == 0
    assert "more conversation" not in capsys.readouterr().out
    assert main(["preview", str(packs), "--conversations", "2", "--html", "x.html"]) == 2


def test_page(packs, chats, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["preview", str(packs), "--html", str(out)]) == 0
    page = out.read_text()
    assert not re.search(r"(src|href|url)\W+https?:", page) and page.count('<div class="lane">') == 2
    assert 'title="1: sums, row' in page and 'href="#r1-0"' in page
    page = render_masks(preview_chats(chats, load_template(TOKENIZER), MaskOptions(), count=4))
    shown = re.sub(r"<[^>]+>", "", page)
    assert "&lt;b&gt;tack&lt;/b&gt;" in shown and "not JSON" in shown
    chats.with_suffix(".html").write_text("mine")
    assert main(["preview", str(chats), "--html", str(chats.with_suffix(".html"))]) == 2
    assert chats.with_suffix(".html").read_text() == "mine" and "error: " in capsys.readouterr().err


def test_a_terminal_without_unicode(chats):
    command = [sys.executable, "-m", "nemotron_ultra.prep", "preview", str(chats), "--rows", "4"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert b"\\x" in done.stdout or b"\\u" in done.stdout


def test_errors_have_no_traceback(tmp_path, packs, capsys):
    assert main(["preview", str(tmp_path / "nothing")]) == 3
    (tmp_path / "x.parquet").write_text("no parquet")
    assert main(["preview", str(tmp_path / "x.parquet")]) == 3
    assert main(["preview", str(packs), "--start", "999"]) == 3
    (tmp_path / "t.txt").write_text("text")
    assert main(["preview", str(tmp_path / "t.txt")]) == 3
    (tmp_path / "e.jsonl").write_text("\n")
    assert main(["preview", str(tmp_path / "e.jsonl")]) == 3
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5 and all(line.startswith("error: ") for line in errors)
    assert errors[-1].endswith("e.jsonl holds no rows")
