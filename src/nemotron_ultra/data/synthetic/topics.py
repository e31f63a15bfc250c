"""What an endpoint is asked: topics, levels and kinds of question, put into a prompt by the seed's number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemotron_ultra.data.documents import open_binary
from nemotron_ultra.data.inputs import InputFile
from nemotron_ultra.data.json_rows import parse_line
from nemotron_ultra.data.order import keyed
from nemotron_ultra.data.synthetic.shapes import MCQ, json_schema
from nemotron_ultra.errors import DataError

# Fields of study and of work; a row of --topics takes their place.
TOPICS = """
algebra; number theory; geometry; probability; statistics; calculus; linear algebra; logic; graph theory
mechanics; thermodynamics; electricity and magnetism; optics; quantum physics; astronomy; geology; climate
inorganic chemistry; organic chemistry; biochemistry; genetics; cell biology; ecology; human anatomy; medicine
pharmacology; psychology; neuroscience; linguistics; world history; geography; economics; accounting; law
philosophy; political science; sociology; literature; music theory; visual art; architecture; engineering
materials science; computer architecture; operating systems; networks; databases; algorithms; cryptography
machine learning; software testing; agriculture; nutrition; public health; everyday physics; common sense
"""
LEVELS = ("secondary school", "first years of university", "advanced university", "expert practice")
KINDS = (
    "a calculation with definite numbers",
    "cause and effect",
    "a principle put to use in a new case",
    "a comparison of two similar things",
    "the mistake in a plausible claim",
    "a fact that experts know and laymen mix up",
    "several conditions that have to hold at once",
)
SYSTEM = (
    "You write exam questions that have one certain answer and need nothing but the question itself. "
    "You reply with one JSON object and nothing else."
)
PASSAGE_CHARACTERS = 8000


def built_in() -> list[dict[str, str]]:
    return [{"topic": name.strip()} for line in TOPICS.strip().splitlines() for name in line.split(";")]


def read_topics(file: InputFile) -> list[dict[str, str]]:
    """A topic a line of text, or JSONL rows {"topic"} and {"text"} (a passage to ask about), or both fields.

    Raises DataError naming the line that is neither.
    """
    topics = []
    with open_binary(file.path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            topics.append(_topic(line, file, number))
    if not topics:
        raise DataError(f"{file.path} holds no topics", do="give one topic a line")
    return topics


def _topic(line: bytes, file: InputFile, number: int) -> dict[str, str]:
    if file.kind != "jsonl":
        return {"topic": line.decode("utf-8", "replace").strip()}
    row = parse_line(line, f"{file.name}:{number}")
    texts = {key: row.value.get(key) for key in ("topic", "text")}
    found = {key: text for key, text in texts.items() if isinstance(text, str) and text.strip()}
    if not found:
        got = row.dropped or list(row.value)
        raise DataError(f"{row.place} is no topic", got=got, allowed='"topic", "text"')
    return found


def chat(row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
    """The messages that ask for the sample of a seed row."""
    count = row.get("options", 0)
    level = LEVELS[keyed(seed, "level", row["id"]) % len(LEVELS)]
    kind = KINDS[keyed(seed, "kind", row["id"]) % len(KINDS)]
    lines = [f"Topic: {row['topic']}"] if "topic" in row else []
    if "text" in row:
        lines.append(f"Source text:\n{row['text'][:PASSAGE_CHARACTERS]}\n")
        lines.append("Ask about what the source text says, without mentioning that there is such a text.")
    lines += [f"Level: {level}", f"Kind of question: {kind}", ""]
    if row["family"] == MCQ:
        lines.append(
            f"Write one multiple-choice question with {count} options. Fields: question (without the "
            f"options), answer (the text of the right option), wrong_answers ({count - 1} texts, wrong, "
            "plausible, all different and as long as the answer), reasoning (the steps to the answer)."
        )
    else:
        lines.append(
            "Write one open question. Fields: question, answer (complete and short), reasoning (the steps)."
        )
    lines.append(
        "Reply with one JSON object of this schema: " + json.dumps(json_schema(row["family"], count))
    )
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "\n".join(lines)}]
