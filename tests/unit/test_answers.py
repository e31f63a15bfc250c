"""Text that comes in pieces, and thoughts that end at a budget."""

from __future__ import annotations

import random

import pytest

from micro import micro_model
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.generation import Request, Scheduler
from nemotron_ultra.generation.answers import Answers, Budget, Turn
from nemotron_ultra.generation.text import AnswerText, TextStream, overlap

TOKENIZER = load_tokenizer("builtin")
TAG, END = TOKENIZER.id("</think>"), TOKENIZER.id("<|im_end|>")
TEXTS = ["plain words, and more", "naïve café ☕ 漢字 🎉🎊 done", "\ufffd stays \ufffd\ufffd", "🎉"]


def pieces(ids, sizes):
    draw = random.Random(sizes)
    while ids:
        size = draw.randint(1, sizes)
        yield ids[:size]
        ids = ids[size:]


@pytest.mark.parametrize("sizes", [1, 2, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_text_and_no_character_is_halved(text, sizes):
    stream, shown = TextStream(TOKENIZER.decode), ""
    for part in pieces(TOKENIZER.encode(text), sizes):
        shown += stream.push(part)
        assert text.startswith(shown)
    assert shown + stream.finish() == text


def test_any_bytes_are_decoded_as_the_whole():
    draw = random.Random(0)
    for _ in range(20):
        ids = [draw.randrange(TOKENIZER.vocab_size) for _ in range(200)]
        stream = TextStream(TOKENIZER.decode)
        shown = "".join(stream.push(part) for part in pieces(ids, 4))
        assert shown + stream.finish() == TOKENIZER.decode(ids)


def answer(ids, sizes=2, **options):
    text = AnswerText(TOKENIZER, [END], **options)
    found = [text.push(part) for part in pieces(ids, sizes)] + [text.finish()]
    return "".join(piece.thoughts for piece in found), "".join(piece.text for piece in found)


@pytest.mark.parametrize("sizes", [1, 3, 50])
def test_thoughts_and_text(sizes):
    ids = [*TOKENIZER.encode("it is\n\nso\n"), TAG, *TOKENIZER.encode("\nyes\n"), END]
    assert answer(ids, sizes, thinking=True) == ("it is\n\nso", "yes\n")
    assert answer(ids[:3], sizes, thinking=True) == (TOKENIZER.decode(ids[:3]), "")
    assert answer(ids[:-1], sizes) == ("", "it is\n\nso\n</think>\nyes\n")


@pytest.mark.parametrize("sizes", [1, 4])
def test_a_stop_text_and_what_follows_are_left_out(sizes):
    ids = TOKENIZER.encode("one two three")
    assert answer(ids, sizes, stop_texts=["thx", "o t"]) == ("", "one tw")
    assert answer(ids, sizes, stop_texts=["three!"]) == ("", "one two three")


def test_overlap():
    assert [overlap(text, "abab") for text in ("xab", "xaba", "abab", "b", "")] == [2, 3, 2, 0, 0]


def scheduler(model, **options):
    options = {"max_slots": 2, "max_tokens": 64, "vocab_size": TOKENIZER.vocab_size} | options
    return Scheduler(model, decode=TOKENIZER.decode, **options)


def finished(answers):
    found, tokens = {}, {}
    while not answers.idle:
        for key, event in answers.step():
            tokens.setdefault(key, []).extend(event.tokens)
            if event.completion is not None:
                found[key] = event.completion
    assert all(found[key].tokens[-len(new) :] == new for key, new in tokens.items() if new)
    return found


def test_thoughts_are_closed_at_the_budget():
    model = micro_model(vocab_size=TOKENIZER.vocab_size)
    answers = Answers(scheduler(model))
    budget = Budget.of(5, TOKENIZER)
    request = Request(prompt=(5, 6, 7), max_new_tokens=12, seed=3, stop_ids=(END,))
    answers.submit(8, Turn(request, budget))
    answers.submit(9, Turn(request))
    found = finished(answers)
    cut, free = found[8], found[9]
    assert len(cut.tokens) == len(free.tokens) == len(cut.logprobs) == len(cut.model_logprobs) == 12
    assert cut.tokens[:5] == free.tokens[:5] and tuple(cut.tokens[5:7]) == budget.close
    assert cut.stats["forced_tokens"] == 2 and cut.logprobs[5:7] == [0, 0]
    after = Request(prompt=(5, 6, 7, *cut.tokens[:7]), max_new_tokens=5, seed=3 ^ 1 << 63, stop_ids=(END,))
    answers.submit(1, Turn(after))
    assert finished(answers)[1].tokens == cut.tokens[7:]


def test_a_tag_of_its_own_ends_thoughts_and_a_short_answer_has_no_second_half():
    model = micro_model(vocab_size=TOKENIZER.vocab_size)
    free = Request(prompt=(5, 6, 7), max_new_tokens=8, seed=3)
    answers = Answers(scheduler(model))
    answers.submit(0, Turn(free))
    drawn = finished(answers)[0].tokens
    answers.submit(1, Turn(free, Budget(6, (1, drawn[2]), drawn[2])))
    answers.submit(2, Turn(free, Budget(7, (1, 2), TAG)))
    answers.submit(3, Turn(free, Budget(20, (1, 2), TAG)))
    found = finished(answers)
    assert found[1].tokens[:3] == drawn[:3] and "forced_tokens" not in found[1].stats
    assert len(found[1].tokens) == 8
    assert found[2].tokens == [*drawn[:7], 1] and found[2].finish_reason == "length"
    assert found[3].tokens == drawn


def test_a_turn_is_cancelled_in_either_half():
    answers = Answers(scheduler(micro_model(vocab_size=TOKENIZER.vocab_size)))
    for rounds in (2, 6):
        answers.submit(0, Turn(Request(prompt=(5, 6), max_new_tokens=20), Budget(3, (1, TAG), TAG)))
        for _ in range(rounds):
            answers.step()
        answers.cancel([0])
        assert finished(answers)[0].finish_reason == "cancelled" and len(answers) == 0


def test_a_budget_needs_a_tag():
    class Other:
        name = "other"

        def id(self, token):
            return None

    with pytest.raises(ConfigError, match="no token </think>"):
        Budget.of(3, Other())
