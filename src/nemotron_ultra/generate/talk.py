"""One prompt, or a conversation, streamed to the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any, TextIO

from nemotron_ultra.data.render import Template
from nemotron_ultra.errors import DataError
from nemotron_ultra.generate.asking import (
    CONTEXT,
    MAX_TOKENS,
    Speed,
    check_fits,
    check_turn,
    drawing,
    run_turn,
    text_prompt,
    turn_of,
)
from nemotron_ultra.generate.load import Loaded
from nemotron_ultra.generation.answers import MODES, Answers
from nemotron_ultra.generation.dialog import continued
from nemotron_ultra.generation.text import AnswerText, Piece

HELP = "/reset begins anew, /thinking off|regular|medium, /budget N (0: none), /quit or Ctrl-D ends"
FAINT, PLAIN = "\033[2m", "\033[0m"


def answer_one(loaded: Loaded, asked: argparse.Namespace) -> int:
    """Print the answer to --prompt."""
    prompt = text_prompt(loaded, asked.prompt, asked.thinking, asked.budget, asked.system)
    most = asked.max_tokens or MAX_TOKENS
    turn = turn_of(loaded, prompt, drawing(asked), max_new_tokens=most, seed=asked.seed, budget=asked.budget)
    room = check_turn(loaded, turn, asked.context)
    _say_kind(loaded)
    answers = Answers(loaded.scheduler(1, room))
    writer = Writer(sys.stdout)
    text = AnswerText(loaded.tokenizer, loaded.stop_ids, asked.stop, MODES[asked.thinking].thinking)
    with Speed(answers) as speed:
        for event in run_turn(answers, turn):
            writer.write(text.push(event.tokens))
    writer.write(text.finish())
    writer.end()
    speed.say()
    return 0


def talk(loaded: Loaded, asked: argparse.Namespace) -> int:
    """Questions of standard input, a line each, until its end or /quit."""
    context = asked.context or CONTEXT
    answers = Answers(loaded.scheduler(1, context))
    speed = Speed(answers)
    dialog = Dialog(loaded.asking(), asked.system) if loaded.chat else None
    _say_kind(loaded)
    terminal = sys.stdin.isatty()
    if terminal:
        print(HELP, file=sys.stderr)
    number = 0
    while (line := _read_line(terminal)) is not None:
        if not line.strip():
            continue
        if line.startswith("/"):
            if _command(line, asked, dialog):
                break
            continue
        try:
            _answer(loaded, asked, answers, speed, dialog, line, asked.seed + number)
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
        number += 1
    speed.say()
    return 0


class Dialog:
    """The ids of a conversation with one template."""

    def __init__(self, template: Template, system: str | None):
        self.template, self.system = template, system
        self.ids: list[int] = []

    def asked(self, text: str, thinking: str, budget: int | None) -> list[int]:
        """Ids of all so far, the new question and the opening of its answer."""
        mode = MODES[thinking]
        question = {"role": "user", "content": text}
        if self.ids:
            return continued(self.template, self.ids, [question], mode, budget=budget)
        system = [{"role": "system", "content": self.system}] if self.system else []
        wishes = {"budget": budget if mode.thinking else None, "effort": mode.effort}
        return self.template.prompt([*system, question], mode.thinking, **wishes)

    def answered(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self.ids = [*prompt, *tokens]


class Writer:
    """Pieces to a stream, at once; thoughts are faint on a terminal and in tags elsewhere."""

    def __init__(self, out: TextIO):
        self.out, self.colour = out, out.isatty()
        self._thinks = False

    def write(self, piece: Piece) -> None:
        if piece.thoughts:
            if not self._thinks:
                self.out.write(FAINT if self.colour else "<think>\n")
                self._thinks = True
            self.out.write(piece.thoughts)
        if piece.text:
            self._close()
            self.out.write(piece.text)
        self.out.flush()

    def end(self) -> None:
        self._close()
        self.out.write("\n")
        self.out.flush()

    def _close(self) -> None:
        if self._thinks:
            self.out.write(f"{PLAIN}\n\n" if self.colour else "\n</think>\n")
            self._thinks = False


class Interrupt:
    """Ctrl-C is only noted, so that no round is left half done; the second one is an interrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def _answer(
    loaded: Loaded,
    asked: argparse.Namespace,
    answers: Answers,
    speed: Speed,
    dialog: Dialog | None,
    line: str,
    seed: int,
) -> None:
    """Stream one answer; Ctrl-C ends it where it is, and what was drawn stays part of the conversation."""
    if dialog:
        prompt = dialog.asked(line, asked.thinking, asked.budget)
    else:
        prompt = text_prompt(loaded, line, asked.thinking, asked.budget, asked.system)
    do = "begin anew with /reset" if dialog and dialog.ids else "shorten it, or raise --context"
    room = check_fits(prompt, answers.scheduler.max_tokens, do)
    most = min(room, asked.max_tokens or MAX_TOKENS)
    thinking = MODES[asked.thinking].thinking
    budget = asked.budget if thinking else None
    turn = turn_of(loaded, prompt, drawing(asked), max_new_tokens=most, seed=seed, budget=budget)
    turn.check(loaded.rows, answers.scheduler.max_tokens, decodes=True)
    writer, tokens = Writer(sys.stdout), []
    text = AnswerText(loaded.tokenizer, loaded.stop_ids, asked.stop, thinking)
    with speed, Interrupt() as stop, closing(run_turn(answers, turn)) as events:
        for event in events:
            tokens += event.tokens
            writer.write(text.push(event.tokens))
            if stop.asked:
                break
    writer.write(text.finish())
    writer.end()
    if dialog:
        dialog.answered(prompt, tokens)


def _read_line(terminal: bool) -> str | None:
    """None at the end."""
    try:
        line = input("> ") if terminal else sys.stdin.readline()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
    return line.rstrip("\n") if line or terminal else None


def _command(line: str, asked: argparse.Namespace, dialog: Dialog | None) -> bool:
    """Do what a line with / says -> whether to end."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word in ("/quit", "/exit"):
        return True
    if word == "/reset" and dialog:
        dialog.ids = []
        _note("a new conversation")
    elif word == "/thinking" and rest in MODES and dialog:
        asked.thinking = rest
        _note(f"thinking {rest}")
    elif word == "/budget" and rest.isdecimal() and dialog:
        asked.budget = int(rest) or None
        thinks = "" if MODES[asked.thinking].thinking else ", of use after /thinking regular"
        _note(f"budget {asked.budget} tokens of thoughts{thinks}" if asked.budget else "no budget")
    else:
        print(HELP, file=sys.stderr)
    return False


def _note(text: str) -> None:
    print(f"{FAINT}{text}{PLAIN}" if sys.stderr.isatty() else text, file=sys.stderr)


def _say_kind(loaded: Loaded) -> None:
    how = (
        "asked by the chat template (--raw: continued)"
        if loaded.chat
        else "continued (--chat: a conversation)"
    )
    print(f"{loaded.folder}: texts are {how}", file=sys.stderr)
