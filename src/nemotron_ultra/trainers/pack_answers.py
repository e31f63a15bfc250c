"""Answers to a few validation prompts of a run on packs, for people to read beside the ones that were packed.

A prompt is what stands before the first trained token of a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.generation.base import Generator
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.trainers.build import Run
from nemotron_ultra.trainers.hooks import Every, Hook, Rows

SAMPLES = 6


@dataclass(frozen=True)
class Question:
    """Ids before the first trained token of a validation conversation, and the trained ids after it."""

    source: str
    prompt: list[int]
    answer: list[int]


def questions(batches: Sequence[TokenBatch], count: int, longest: int) -> list[Question]:
    """Up to `count` conversations with a prompt of at most `longest` tokens, as many of each source."""
    by_source: dict[str, list[Question]] = {}
    for batch in batches:
        found = by_source.setdefault(batch.stats["source"], [])
        found += [q for q in _questions(batch) if len(q.prompt) <= longest]
    chosen = []
    kept = [found for found in by_source.values() if found]
    for number, found in enumerate(kept):
        share = count // len(kept) + (number < count % len(kept))
        share = min(share, len(found))
        chosen += [found[i * len(found) // share] for i in range(share)]
    return chosen


def pack_answers(run: Run, generator: Generator) -> list[Hook]:
    """Rows of samples.jsonl at every validation: likeliest answers of at most trainer.sample_tokens."""
    trainer = run.config.trainer
    room = run.config.data.sequence_length - trainer.sample_tokens
    asked = questions(run.validation, SAMPLES, room) if trainer.sample_tokens else []
    if not asked:
        return []

    def rows() -> list[dict[str, Any]]:
        found = generator.generate(
            [question.prompt for question in asked],
            max_new_tokens=trainer.sample_tokens,
            temperature=0.0,
            stop_ids=stop_ids(run.tokenizer),
            seeds=list(range(len(asked))),
        )
        decode = run.tokenizer.decode
        return [
            {
                "domain": question.source,
                "prompt": decode(question.prompt),
                "text": decode(completion.tokens),
                "packed": decode(question.answer[: trainer.sample_tokens]),
                "finish_reason": completion.finish_reason,
            }
            for question, completion in zip(asked, found, strict=True)
        ]

    log = MetricsLog(run.folder.path / "samples.jsonl")
    return [Rows(run.engine, log, rows, Every(trainer.validate_every, trainer.steps))]


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids after which an answer has ended: of the document, and of a turn where the tokenizer has one."""
    turn = tokenizer.id("<|im_end|>")
    return tuple(dict.fromkeys(id for id in (turn, tokenizer.eos_id) if id is not None))


def _questions(batch: TokenBatch) -> list[Question]:
    found = []
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        trained = batch.weight_T[begin:end].nonzero()[:, 0]
        if not len(trained):
            continue
        first = begin + int(trained[0])
        run_ends = (batch.weight_T[first:end] == 0).nonzero()[:, 0]
        stop = first + int(run_ends[0]) if len(run_ends) else end
        prompt, answer = batch.tokens_T[begin : first + 1], batch.labels_T[first:stop]
        found.append(Question(batch.stats["source"], prompt.tolist(), answer.tolist()))
    return found
