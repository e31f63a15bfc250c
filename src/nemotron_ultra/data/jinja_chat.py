"""Any tokenizer's own chat template, a Jinja source, with masks from renders that grow.

An answer is what render(messages up to it) has after render(messages before it, generation prompt): each
must begin the next, and all the render of the whole, else the row is dropped. Texts of messages that spell
an added token of the tokenizer are parted by a guard character that occurs nowhere in the conversation; the
render is cut at the guards before it is encoded, so that only what the template itself writes becomes such
a token. Nothing is added to what the template writes; a second BOS is an error of the template. Differs
from `transformers`: that, and strftime_now gives one fixed day.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from nemotron_ultra.data.chat import Message
from nemotron_ultra.data.messages import RowDropped, normal_message, normal_tools
from nemotron_ultra.data.render import Rendered, Segment, View
from nemotron_ultra.data.tokenizer import BUILTIN, Tokenizer
from nemotron_ultra.errors import DataError

# Private-use characters: no text needs them, and one is taken that the conversation does not hold.
_GUARDS = range(0x10FFFD, 0x10F000, -1)
# What strftime_now knows as now: a row must not depend on the day on which it is made.
_TODAY = datetime.datetime(2026, 1, 1)


class JinjaTemplate:
    """Messages -> ids of one tokenizer by a Jinja source. `where` names the source in errors.

    thinking is handed to the template as enable_thinking, budget as reasoning_budget, effort as
    reasoning_effort, and truncate_history as truncate_history_thinking; a template that knows none of them
    ignores them. Whether it shows reasoning_content, and of which turns, is its own matter.
    """

    special = True  # what the template writes is read with its special tokens

    def __init__(self, tokenizer: Tokenizer, source: str, *, name: str, where: str):
        self.tokenizer, self.source, self.name, self._where = tokenizer, source, name, where
        self._named = tokenizer.named_tokens()
        decides = json.dumps([source, self._named], sort_keys=True)
        self.hash = hashlib.blake2b(decides.encode(), digest_size=16).hexdigest()
        self._spelled = _spellings(tokenizer, source)
        self._places_matter = _places_matter(tokenizer)
        self._template = _compiled(source, where)
        self.stop_ids = tuple(dict.fromkeys((*self._answers_end(), tokenizer.eos_id)))

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
        """Ids that an answer to the last message is drawn after. Raises DataError."""
        view = self._view(messages, thinking, tools, budget, effort, truncate_history)
        guarded = _Guarded(self, view)
        try:
            text = guarded.render(len(view.messages), answer_next=True)
        except RowDropped as dropped:
            raise DataError(dropped.detail) from dropped
        return self._encode(self._placed(_cut_at([(text, False)], guarded.guard)))[0]

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
        """Ids and mask of whole messages. Raises DataError, also where renders do not grow."""
        view = self._view(messages, thinking, tools, budget, effort, truncate_history)
        try:
            segments = self.segments(view)
        except RowDropped as dropped:
            raise DataError(dropped.detail) from dropped
        tokens, mask = self._encode(segments)
        return Rendered(tokens=tokens, mask=mask)

    def text(self, tokens: Sequence[int], thinking: bool = False) -> str:
        """Text of an answer's ids without the stop id at its end; thinking=True: what follows </think>."""
        ids = list(tokens)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        text = self.tokenizer.decode(ids)
        return text.partition("</think>")[2] if thinking else text

    def segments(self, view: View) -> list[Segment]:
        """Text of the whole render cut where answers begin and end. Raises RowDropped."""
        guarded = _Guarded(self, view)
        whole = guarded.render(len(view.messages))
        out: list[Segment] = []
        at = 0
        for number in sorted(i for i in view.trained if view.messages[i]["role"] == "assistant"):
            start, end = guarded.answer(number, whole, at)
            out.append((whole[at:start], False))
            out += guarded.flagged(whole[start:end], number)
            at = end
        out.append((whole[at:], False))
        return self._placed(_cut_at(out, guarded.guard))

    def render(self, messages: Sequence[Mapping[str, Any]], view: View, answer_next: bool = False) -> str:
        """The template's text. Raises RowDropped("template failed") with its message."""
        wishes = {"reasoning_budget": view.budget, "reasoning_effort": view.effort}
        try:
            text = self._template.render(
                messages=messages,
                tools=[dict(tool) for tool in view.tools] or None,
                documents=None,
                add_generation_prompt=answer_next,
                enable_thinking=view.thinking,
                truncate_history_thinking=view.thoughts_from > 0,
                **{key: value for key, value in wishes.items() if value is not None},
                **self._named,
            )
        # A template is a program of its own: whatever it raises is about this conversation.
        except Exception as error:
            raise RowDropped("template failed", f"{self._where}: {type(error).__name__}: {error}") from error
        bos = self._named.get("bos_token")
        if bos and text.startswith(bos + bos):
            raise RowDropped("template failed", f"{self._where} begins with two {bos}")
        return text

    def answer_end(self, text: str) -> int:
        """Where an answer ends in what is written for it: after its last token's spelling, if blanks
        follow."""
        found = list(self._spelled.finditer(text))[-1:] if self._spelled is not None else []
        return next((match.end() for match in found if not text[match.end() :].strip()), len(text))

    def _answers_end(self) -> list[int]:
        """Id of the token that the template writes after an answer, if it writes one."""
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        try:
            text = self.render(chat, View(messages=chat, trained=frozenset())).rstrip()
        except RowDropped:  # the template wants another kind of conversation
            return []
        found = list(self._spelled.finditer(text))[-1:] if self._spelled is not None else []
        ids = [self.tokenizer.id(match.group()) for match in found if match.end() == len(text)]
        return [id for id in ids if id is not None]

    def _view(self, messages, thinking, tools, budget, effort, truncate_history) -> View:
        if not messages:
            raise DataError("a conversation needs at least one message", got="none")
        try:
            read = [normal_message(message, number) for number, message in enumerate(messages)]
            defined = normal_tools(list(tools))
        except RowDropped as dropped:
            raise DataError(dropped.detail) from dropped
        return View(
            messages=read,
            trained=range(len(read)),
            tools=defined,
            thinking=thinking,
            thoughts_from=int(truncate_history),
            close=True,
            budget=budget,
            effort=effort,
        )

    def _placed(self, pieces: list[Segment]) -> list[Segment]:
        """The pieces as ids where a tokenizer reads them otherwise by themselves than inside their text."""
        if not self._places_matter:
            return pieces
        out: list[Segment] = []
        before = ""
        for text, trained in pieces:
            written = list(self._spelled.finditer(before))[-1:] if self._spelled is not None else []
            token = next((match.group() for match in written if match.end() == len(before)), "\n")
            lead = self.tokenizer.encode(token, special=True) if before else []
            ids = self.tokenizer.encode(token + text, special=True) if before else []
            begun = lead and ids[: len(lead)] == lead
            ids = ids[len(lead) :] if begun else self.tokenizer.encode(text, special=True)
            out.append((tuple(ids), trained))
            before = text
        return out

    def _encode(self, segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        mask: list[int] = []
        for piece, trained in segments:
            ids = self.tokenizer.encode(piece, special=True) if isinstance(piece, str) else piece
            tokens += ids
            mask += [int(trained)] * len(ids)
        return tokens, mask


class _Guarded:
    """A view's messages with guards in them, and renders of their beginnings."""

    def __init__(self, template: JinjaTemplate, view: View):
        self.template, self.view = template, view
        held = json.dumps([*view.messages, *view.tools], ensure_ascii=False)
        self.guard = next(chr(code) for code in _GUARDS if chr(code) not in held)
        spelled = template._spelled
        change = _Change(spelled, self.guard) if spelled is not None and spelled.search(held) else None
        self.messages = [self._shaped(message, change) for message in view.messages]
        if change is not None:
            tools = tuple(_changed(tool, change) for tool in view.tools)
            names = ("messages", "trained", "thinking", "thoughts_from", "bare", "close", "budget", "effort")
            self.view = View(tools=tools, **{name: getattr(view, name) for name in names})

    def render(self, count: int, answer_next: bool = False) -> str:
        return self.template.render(self.messages[:count], self.view, answer_next)

    def answer(self, number: int, whole: str, at: int) -> tuple[int, int]:
        """Where the answer `number` begins and ends in the whole render. Raises RowDropped."""
        before = self.render(number, answer_next=True)
        until = self.render(number + 1) if number + 1 < len(self.messages) else whole
        if not until.startswith(before) or not whole.startswith(until) or len(before) < at:
            raise RowDropped(
                "renders are no prefixes",
                f"message {number}: the template writes what comes before it otherwise once it follows; "
                'train one row per user\'s turn (expand="always") or the last answer (train="last")',
            )
        return len(before), len(before) + self.template.answer_end(until[len(before) :])

    def flagged(self, answer: str, number: int) -> list[Segment]:
        """The answer's segments: the tag that closes cut thoughts is not trained."""
        if self.view.close or not self.messages[number].get("reasoning_truncated"):
            return [(answer, True)]
        found = re.search(re.escape(self.guard) + r"\s*</think>", answer)
        if found is None:
            if self.guard not in answer:
                return [(answer, True)]  # the template shows no thoughts
            raise RowDropped("template failed", f"message {number}: cut thoughts are not closed by </think>")
        start, end = found.span()
        return [(answer[:start], True), (answer[start:end], False), (answer[end:], True)]

    def _shaped(self, message: Mapping[str, Any], change: Callable[[str], str] | None) -> dict[str, Any]:
        """A message as templates expect it, guards put in."""
        out = dict(message) if change is None else _changed(message, change)
        out["role"] = message["role"]
        if message.get("reasoning_truncated"):
            out["reasoning_content"] += self.guard
        if "tool_calls" in out:
            out["tool_calls"] = [
                {k: v for k, v in call.items() if k == "id"}
                | {"type": "function", "function": {k: call[k] for k in ("name", "arguments")}}
                for call in out["tool_calls"]
            ]
        return out


class _Change:
    """text -> text with a guard inside every spelling of an added token."""

    def __init__(self, spelled: re.Pattern[str], guard: str):
        self.spelled, self.guard = spelled, guard

    def __call__(self, text: str) -> str:
        return self.spelled.sub(lambda found: found.group()[0] + self.guard + found.group()[1:], text)


def load_jinja(tokenizer: Tokenizer, name: str) -> JinjaTemplate:
    """ "tokenizer": the tokenizer folder's own template; else the path of a .jinja file. Raises DataError."""
    if name == "tokenizer":
        source, where = _own(tokenizer)
        return JinjaTemplate(tokenizer, source, name=name, where=where)
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            "chat template not found", got=name, allowed='"builtin", "tokenizer" or the path of a .jinja file'
        )
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"chat template {path} is not UTF-8", got=error) from error
    return JinjaTemplate(tokenizer, source, name=name, where=str(path))


def _own(tokenizer: Tokenizer) -> tuple[str, str]:
    """(source, where it is from) of the template in a tokenizer's folder."""
    path = BUILTIN if tokenizer.name == "builtin" else Path(tokenizer.name).expanduser()
    folder = path if path.is_dir() else path.parent
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8"), str(file)
    config = folder / "tokenizer_config.json"
    given = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, Mapping)}
        given = named.get("default")
        if given is None:
            raise DataError(
                f"{config}: no chat template is named default",
                got=", ".join(map(str, named)) or "none",
                do="save the one you want as a .jinja file and give its path",
            )
    if not isinstance(given, str):
        raise DataError(
            f"tokenizer {tokenizer.name} comes without a chat template",
            got=f"neither {file.name} nor chat_template in {config.name}",
            do='use template "builtin" or the path of a .jinja file',
        )
    return given, f"chat_template of {config}"


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} as what stands inside; masks come from renders."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


def _spellings(tokenizer: Tokenizer, source: str) -> re.Pattern[str] | None:
    """Tokens that a message must not be able to write: special ones, and others that the template writes."""
    added = tokenizer.content.get("added_tokens", [])
    texts = {token["content"] for token in added if token.get("special") or token["content"] in source}
    ordered = sorted((text for text in texts if len(text.strip()) > 1), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _places_matter(tokenizer: Tokenizer) -> bool:
    """Whether it begins every text with a blank of its own, or has tokens that take the blanks beside
    them."""
    added = tokenizer.content.get("added_tokens", [])
    inside = tokenizer.encode("\na")[len(tokenizer.encode("\n")) :]
    return tokenizer.encode("a") != inside or any(token.get("rstrip") for token in added)


def _compiled(source: str, where: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"{where}, line {error.lineno}: the chat template is no Jinja source", got=error.message
        ) from error


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys=False) -> str:
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(k, change): _changed(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(v, change) for v in value]
    return value


def _cut_at(segments: Sequence[Segment], guard: str) -> list[Segment]:
    return [(part, trained) for text, trained in segments for part in text.split(guard) if part]
