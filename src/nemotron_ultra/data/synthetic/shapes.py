"""The two families of the report (section 2.5): multiple choice and generative questions and answers.

Both come as one JSON object from any generator: question, answer, reasoning, and for multiple choice
wrong_answers. The right answer's place among the options is dealt here, evenly, after all checks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from nemotron_ultra.data.order import keyed, permutation
from nemotron_ultra.data.synthetic.steps import CHUNK, Drop, Row

MCQ, GENERATIVE = "mcq", "generative"
FAMILIES = (MCQ, GENERATIVE)
LETTERS = "ABCDEFGHIJ"
FEWEST = 4  # options of a question

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=20_000)]
Short = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2_000)]


class Generative(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    question: Text
    answer: Text
    reasoning: Annotated[str, StringConstraints(strip_whitespace=True, max_length=50_000)]


class Mcq(Generative):
    answer: Short
    wrong_answers: list[Short]


MODELS: dict[str, type[Generative]] = {MCQ: Mcq, GENERATIVE: Generative}


def json_schema(family: str, options: int) -> dict[str, Any]:
    """What an endpoint is asked to answer with: all fields required, no others."""
    text = {"type": "string"}
    fields: dict[str, Any] = {"question": text, "answer": text, "reasoning": text}
    if family == MCQ:
        count = options - 1
        fields["wrong_answers"] = {"type": "array", "items": text, "minItems": count, "maxItems": count}
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


class Format:
    """raw (an object, or an endpoint's text) -> sample (an object): one JSON object and nothing else."""

    name, chunk = "format", CHUNK

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        pass

    def work(self, rows: list[Row]) -> list[Row | Drop]:
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Row | Drop:
        raw = row["raw"]
        if "text" in raw:
            if raw.get("finish") == "length":
                return Drop("the answer was cut off", f"{len(raw['text'])} characters")
            raw = parse_object(raw["text"])
        if isinstance(raw, Drop):
            return raw
        try:
            json.dumps(raw, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Drop("half of a surrogate pair in the text")
        return {key: value for key, value in row.items() if key != "raw"} | {"sample": raw}


_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


def parse_object(text: str) -> dict[str, Any] | Drop:
    """The one JSON object that a text is, in a code fence or not, after thoughts in think tags or not."""
    text = _THOUGHTS.sub("", text)
    fenced = _FENCE.match(text)
    try:
        value = json.loads(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError) as error:
        return Drop("the answer is not JSON", f"{error}: {text.strip()[:80]!r}")
    return value if isinstance(value, dict) else Drop("the answer is not a JSON object", repr(value)[:80])


class Schema:
    """sample -> the same with checked types and trimmed texts, options that differ, and enough of them."""

    name, chunk = "schema", CHUNK

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        pass

    def work(self, rows: list[Row]) -> list[Row | Drop]:
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Row | Drop:
        try:
            sample = MODELS[row["family"]].model_validate(row["sample"]).model_dump()
        except ValidationError as error:
            first = error.errors()[0]
            place = first["loc"][0] if first["loc"] else "object"
            return Drop(f"schema: {place}", first["msg"])
        if row["family"] == MCQ:
            options = [sample["answer"], *sample["wrong_answers"]]
            if len({" ".join(option.casefold().split()) for option in options}) < len(options):
                return Drop("two options are the same", options[0][:80])
            if len(options) < FEWEST:
                return Drop("too few wrong answers", f"{len(options) - 1}, at least {FEWEST - 1}")
            # A question that cannot have as many options as planned has the fewest.
            count = row["options"] if len(options) >= row["options"] else FEWEST
            sample["wrong_answers"] = sample["wrong_answers"][: count - 1]
        return row | {"sample": sample}


# (what is asked, the answer, what finds the letter in it)
ASKS = (
    ("End with a line of the form: Answer: X", "<option>\nAnswer: <letter>", r"Answer:\s*([A-J])\s*\Z"),
    ("Give the letter of the right option in \\boxed{}.", "\\boxed{<letter>}", r"\\boxed\{([A-J])\}\s*\Z"),
    ("Reply with the letter of the right option alone.", "<letter>", r"\A\s*([A-J])\s*\Z"),
)
MARKS = ("{})", "{}.", "({})", "{}:")
# Sentences of rule-made problems that ask for the bare answer would contradict the ask for a letter.
_BARE = re.compile(
    r"\s*(?:(?:Give|Provide|Respond|Answer|Reply|Write)\b[^.\n]*"
    r"\b(?:only|single word|one word|separated by|final answer|weekday name)\b[^.\n]*[.)]"
    r"|\(Format your answer like:[^\n]*\))(?=\s|\Z)"
)


class Compose:
    """sample -> chat (a conversation to train on) and prompt (the same to ask in RL).

    The right option's letter goes round in blocks: of every n samples with n options each letter is right
    once, in an order drawn by the seed.
    """

    name, chunk = "compose", CHUNK

    def __init__(self, seed: int):
        self._seed = seed
        self._counts: Counter[int] = Counter()

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        self._counts = Counter(row["prompt"]["extra"]["options"] for row in kept if row["family"] == MCQ)

    def work(self, rows: list[Row]) -> list[Row | Drop]:
        return [self._mcq(row) if row["family"] == MCQ else self._generative(row) for row in rows]

    def _generative(self, row: Row) -> Row:
        sample = row["sample"]
        environment = row["environment"] or {"name": "reference_answer", "args": {}}
        return _composed(row, sample["question"], sample["answer"], sample["answer"], environment, {})

    def _mcq(self, row: Row) -> Row | Drop:
        sample = row["sample"]
        count = 1 + len(sample["wrong_answers"])
        block, place = divmod(self._counts[count], count)
        right = int(permutation(count, self._seed, "letters", count, block)[place])
        options = [*sample["wrong_answers"]]
        options.insert(right, sample["answer"])
        letter = LETTERS[right]
        ask, form, pattern = ASKS[keyed(self._seed, "ask", row["id"]) % len(ASKS)]
        mark = MARKS[keyed(self._seed, "mark", row["id"]) % len(MARKS)]
        option = f"{mark.format(letter)} {sample['answer']}"
        text = form.replace("<letter>", letter).replace("<option>", option)
        found = re.search(pattern, text)
        if found is None or options[LETTERS.index(found.group(1))] != sample["answer"]:
            return Drop("the answer's letter is not found", text[:80])
        self._counts[count] += 1
        listed = "\n".join(f"{mark.format(LETTERS[i])} {option}" for i, option in enumerate(options))
        question = f"{without_form(sample['question'])}\n\n{listed}\n\n{ask}"
        args = {"options": dict(zip(LETTERS, options, strict=False)), "pattern": pattern}
        environment = {"name": "multiple_choice", "args": args}
        return _composed(row, question, text, letter, environment, {"options": count})


def without_form(question: str) -> str:
    """The question without sentences on the form of a bare answer."""
    return _BARE.sub("", question).strip() or question


def _composed(
    row: Row, question: str, text: str, answer: str, environment: Mapping[str, Any], extra: Mapping[str, Any]
) -> Row:
    user = {"role": "user", "content": question}
    assistant = {"role": "assistant", "content": text}
    if row["sample"]["reasoning"]:
        assistant["reasoning_content"] = row["sample"]["reasoning"]
    facts = {key: row[key] for key in ("id", "domain", "family", "generator")}
    prompt = {"messages": [user], "domain": row["domain"], "environment": environment, "answer": answer}
    prompt["extra"] = {key: row[key] for key in ("id", "family", "generator")} | dict(extra)
    return facts | {"chat": {"messages": [user, assistant], **facts}, "prompt": prompt}
