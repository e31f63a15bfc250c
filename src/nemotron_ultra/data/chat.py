"""<|im_start|>ROLE\\nTEXT<|im_end|>\\n, with <think></think> or <think>\\n before an answer (report 3.5).

Everything is segments: markers are put in by id, text is encoded as ordinary characters, and a flag says
which segments an assistant wrote. Nothing is found again by searching a string, and no BOS is added.
Differs from the public template: texts keep the blanks at their ends, <|im_end|> is the last id an
assistant writes (not the newline after it), a system turn without text is left out unless TemplateOptions
asks for it, thoughts of earlier turns stay unless asked otherwise (so that the ids of a live conversation
only ever grow), the explanation of the tool format is our own, and `conversation(thinking=True)` opens
thoughts for an answer that has none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_ultra.data import tool_text
from nemotron_ultra.data.messages import RowDropped, normal_message, normal_tools
from nemotron_ultra.data.render import Rendered, Segment, Template, View, last_of
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import DataError

Message = Mapping[str, Any]

START, END, THINK, UNTHINK = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
_TOOL_MARKERS = (tool_text.CALL, tool_text.CALL_END, tool_text.RESPONSE, tool_text.RESPONSE_END)


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """What of the shipped template may be chosen."""

    empty_system: bool = False
    """Begin with a system turn even where there is neither a system message nor a tool (the public one
    does)."""
    effort_line: str = "{{reasoning effort: {effort}}}"
    """Asked for after a blank line at the end of the last user's turn."""
    budget_line: str = "{{thinking token budget: {budget}}}"
    """The same for a budget of thoughts in tokens; after the effort where both are asked for."""


class ChatTemplate:
    """Messages -> ids of one tokenizer. See data/messages.py for what a message may carry.

    An assistant's thoughts are its "reasoning_content"; they are rendered with thinking=True and replaced
    by the empty <think></think> with thinking=False. Tool markers are ids where the tokenizer has them,
    else text.
    """

    special = False

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions | None = None, name: str = "builtin"):
        self.tokenizer, self.options, self.name = tokenizer, options or TemplateOptions(), name
        markers = (START, END, THINK, UNTHINK)
        ids = {marker: tokenizer.id(marker) for marker in markers}
        missing = [marker for marker, id in ids.items() if id is None]
        if missing:
            raise DataError(
                f"tokenizer {tokenizer.name} has no token for the chat template's " + ", ".join(missing),
                do='add them as special tokens, or use data.tokenizer="builtin"',
            )
        start, self._end, think, self._unthink = ids.values()
        self._close = (self._unthink,)
        self.stop_ids = tuple(dict.fromkeys((self._end, tokenizer.eos_id)))
        newline, opening = tuple(tokenizer.encode("\n")), (start, *tokenizer.encode("assistant\n"), think)
        self._start, self._after = (start,), (newline, False)
        self._stop = {trained: ((self._end,), trained) for trained in (False, True)}
        self._turn_end, self._forced_close = (self._end, *newline), (*newline, self._unthink)
        self._opening = {False: (*opening, self._unthink), True: (*opening, *newline)}
        self._opens = {thinking: (ids, False) for thinking, ids in self._opening.items()}
        self._given, self._given_end = (self._start, False), (self._turn_end, False)
        self._tool = {text: _id_or_text(tokenizer, text) for text in _TOOL_MARKERS}
        self._cut = _spellings_read_in_text(tokenizer)
        self.hash = self._digest()

    def prompt(
        self,
        messages: Sequence[Message],
        thinking: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        budget: int | None = None,
        effort: str | None = None,
        truncate_history: bool = False,
    ) -> list[int]:
        """Ids that an answer to the last message (a user's or a tool's) is drawn after. Raises DataError."""
        if not messages or messages[-1].get("role") not in ("user", "tool"):
            raise DataError(
                "a prompt must end with a message of the user",
                got="no messages" if not messages else f"the last one's role {messages[-1].get('role')!r}",
                do="add the question, or render the whole with conversation()",
            )
        asked = {"tools": tools, "budget": budget, "effort": effort, "truncate_history": truncate_history}
        return self.conversation(messages, thinking, **asked).tokens + list(self._opening[thinking])

    def conversation(
        self,
        messages: Sequence[Message],
        thinking: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        budget: int | None = None,
        effort: str | None = None,
        truncate_history: bool = False,
    ) -> Rendered:
        """Ids and mask of whole messages.

        `prompt(messages)` followed by the ids of an answer is how `conversation` begins for the messages
        with that answer. truncate_history leaves out the thoughts of answers before the last user's message.
        budget (tokens of thoughts) and effort ("efficient") are asked for in the last user's turn.
        Raises DataError for no messages, an unknown role or a message without text.
        """
        if not messages:
            raise DataError("a conversation needs at least one message", got="none")
        try:
            read = [normal_message(message, number) for number, message in enumerate(messages)]
            defined = normal_tools(list(tools))
        except RowDropped as dropped:
            raise DataError(dropped.detail) from dropped
        view = View(
            messages=read,
            trained=range(len(read)),
            tools=defined,
            thinking=thinking,
            thoughts_from=last_of(read, "user") if truncate_history else 0,
            bare=False,
            close=True,
            budget=budget,
            effort=effort,
        )
        tokens: list[int] = []
        mask: list[int] = []
        for piece, trained in self.segments(view):
            ids = self.tokenizer.encode(piece) if isinstance(piece, str) else piece
            tokens += ids
            mask += [int(trained)] * len(ids)
        return Rendered(tokens=tokens, mask=mask)

    def text(self, tokens: Sequence[int], thinking: bool = False) -> str:
        """Text of an answer's ids without the stop id at its end; other special tokens stay readable.

        thinking=True: only what follows </think>, or nothing where the thoughts were never closed.
        """
        ids = list(tokens)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        if thinking:
            ids = ids[ids.index(self._unthink) + 1 :] if self._unthink in ids else []
        return self.tokenizer.decode(ids)

    def segments(self, view: View) -> list[Segment]:
        """The segments of a row; an assistant's turn has its flag up to and with <|im_end|>."""
        messages, asked = view.messages, last_of(view.messages, "user")
        out: list[Segment] = []
        if messages[0]["role"] != "system" and (view.tools or self.options.empty_system):
            self._system("", view, out)
        for number, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "assistant":
                self._answer(message, number, view, out)
            elif role == "tool":
                self._response(messages, number, out)
            elif role == "system":
                self._system(content, view, out)
            else:
                wishes = self._wishes(view) if number == asked else ""
                out += (self._given, (f"user\n{content}{wishes}", False), self._given_end)
        return out if self._cut is None else _apart(out, self._cut)

    def _answer(self, message: Mapping[str, Any], number: int, view: View, out: list[Segment]) -> None:
        trained, content = number in view.trained, message["content"]
        thoughts = message.get("reasoning_content", "")
        if not view.thinking or number < view.thoughts_from or (view.bare and not thoughts):
            out.append(self._opens[False])
        else:
            out.append(self._opens[True])
            if "reasoning_truncated" in message:
                # What a server forces at the budget is the newline and the tag: neither is the model's word.
                out += ((thoughts, trained), (self._forced_close, trained and view.close))
            else:
                out += ((thoughts + "\n", trained), (self._close, trained))
            content = "\n" + content
        if "tool_calls" in message:
            out += [(piece, trained) for piece in self._calls(content, message["tool_calls"])]
        elif content:
            out.append((content, trained))
        out += (self._stop[trained], self._after)

    def _calls(self, content: str, calls: Sequence[Mapping[str, Any]]) -> list[str | tuple[int, ...]]:
        pieces: list[str | tuple[int, ...]] = ["\n" if content == "\n" else content + "\n"]
        for call in calls:
            pieces += (
                self._tool[tool_text.CALL],
                tool_text.call_body(call),
                self._tool[tool_text.CALL_END],
                "\n",
            )
        return _joined(pieces)

    def _response(self, messages: Sequence[Mapping[str, Any]], number: int, out: list[Segment]) -> None:
        """A run of tool results is one user's turn, written at its first."""
        if number and messages[number - 1]["role"] == "tool":
            return
        pieces: list[str | tuple[int, ...]] = ["user\n"]
        for message in messages[number:]:
            if message["role"] != "tool":
                break
            begin, end = self._tool[tool_text.RESPONSE], self._tool[tool_text.RESPONSE_END]
            pieces += (begin, f"\n{message['content']}\n", end, "\n")
        out += [(piece, False) for piece in (self._start, *_joined(pieces), self._turn_end)]

    def _system(self, content: str, view: View, out: list[Segment]) -> None:
        pieces: list[str | tuple[int, ...]] = ["system\n" + content]
        if view.tools:
            pieces.append("\n\n" if content else "")
            pieces += [self._tool.get(piece, piece) for piece in tool_text.definitions(view.tools)]
        out += [(piece, False) for piece in (self._start, *_joined(pieces), self._turn_end)]

    def _wishes(self, view: View) -> str:
        effort = self.options.effort_line.format(effort=view.effort) if view.effort is not None else ""
        budget = self.options.budget_line.format(budget=view.budget) if view.budget is not None else ""
        return "".join(f"\n\n{line}" for line in (effort, budget) if line)

    def _digest(self) -> str:
        """Hash of how a conversation with everything in it is spelled, flags included."""
        text = hashlib.blake2b(digest_size=16)
        for messages in (_PROBE, _PROBE[1:]):
            view = View(
                messages=messages, trained=range(9), tools=_PROBE_TOOLS, thinking=True, budget=7, effort="e"
            )
            for shown in (view, View(messages=messages, trained=frozenset(), thoughts_from=9, thinking=True)):
                for piece, trained in self.segments(shown):
                    spelled = piece if isinstance(piece, str) else self.tokenizer.decode(piece)
                    text.update(f"{trained:d}{spelled}".encode())
        return text.hexdigest()


def load_template(tokenizer: Tokenizer, name: str = "builtin") -> Template:
    """ "builtin", "tokenizer" (its own chat template) or the path of a .jinja file. Raises DataError."""
    if name == "builtin":
        return ChatTemplate(tokenizer)
    from nemotron_ultra.data.jinja_chat import load_jinja  # jinja2 is loaded only where it is asked for

    return load_jinja(tokenizer, name)


def _id_or_text(tokenizer: Tokenizer, text: str) -> str | tuple[int, ...]:
    id = tokenizer.id(text)
    return text if id is None else (id,)


def _spellings_read_in_text(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Markers that are tokens but not special: the library reads them in any text, so it is cut inside."""
    special = {
        token["content"] for token in tokenizer.content.get("added_tokens", []) if token.get("special")
    }
    markers = (START, END, THINK, UNTHINK, *_TOOL_MARKERS)
    texts = [text for text in markers if text not in special and tokenizer.id(text) is not None]
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _apart(segments: list[Segment], cut: re.Pattern[str]) -> list[Segment]:
    out: list[Segment] = []
    for piece, trained in segments:
        start = 0
        for found in cut.finditer(piece) if isinstance(piece, str) else ():
            out.append((piece[start : found.start() + 1], trained))
            start = found.start() + 1
        out.append((piece[start:], trained))
    return out


def _joined(pieces: Sequence[str | tuple[int, ...]]) -> list[str | tuple[int, ...]]:
    """Neighbouring texts as one, so that they are encoded as they are read."""
    out: list[str | tuple[int, ...]] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        elif piece:
            out.append(piece)
    return out


_PROBE: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [{"name": "f", "arguments": {"x": 1, "y": "z"}}],
    },
    {"role": "tool", "content": "t"},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "b", "reasoning_content": "q", "reasoning_truncated": True},
    {"role": "user", "content": "v"},
    {"role": "assistant", "content": "c"},
)
_PROBE_TOOLS = normal_tools(
    [{"name": "f", "description": "d", "parameters": {"properties": {"x": {"type": "integer"}}}}]
)
