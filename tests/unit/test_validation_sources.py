"""Validation by source, and the questions that a run on packs answers for people to read."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from micro import micro_batches, micro_engine, objective
from micro_packs import LENGTH, SOURCES, micro_packs
from nemotron_ultra.data.pack_stream import PackStream
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.trainers.hooks import Every, Validation
from nemotron_ultra.trainers.pack_answers import questions, stop_ids

TOKENIZER = load_tokenizer("builtin")


def validated(engine, batches):
    metrics = {}
    Validation(engine, objective(), batches, np.ones(64, np.int64), Every(1, 1)).after_step(1, metrics)
    return metrics


def test_all_sources_together_are_the_whole():
    engine, batches = micro_engine(), micro_batches(5)
    batches[1] = replace(batches[1], weight_T=torch.zeros_like(batches[1].weight_T))
    named = [replace(b, stats={"source": "ab"[n % 2]}) for n, b in enumerate(batches)]
    whole, parts = validated(engine, batches), validated(engine, named)
    own = {name: parts.pop(f"val/{name}/loss") for name in "ab"}
    assert parts == pytest.approx(whole, rel=1e-6) and own["a"] != own["b"]
    for name in "ab":
        alone = engine.evaluate([b for b in named if b.stats["source"] == name], objective())
        assert own[name] == alone["loss"]


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder = micro_packs(tmp_path_factory.mktemp("packs") / "sft")
    sizes = dict(sequence_length=LENGTH, micro_batch_size=2, global_batch_size=2)
    return PackStream(folder, **sizes, seed=1, tokenizer=TOKENIZER).validation_batches(8)


def test_a_question_ends_before_the_first_trained_token(batches):
    found = questions(batches, 6, 60)
    assert [q.source for q in found] == [SOURCES[0]] * 3 + [SOURCES[1]] * 3
    assert len({tuple(q.prompt) for q in found}) > 4
    for question in found:
        assert TOKENIZER.decode(question.prompt).endswith("<|im_start|>assistant\n<think></think>")
        answer = TOKENIZER.decode(question.answer).removesuffix("<|im_end|>")
        assert answer in ("red", "green", "blue", "one", "two", "three")


def test_long_prompts_and_untrained_conversations_are_left_out(batches):
    shortest = min(len(q.prompt) for q in questions(batches, 1000, 1000))
    assert all(len(q.prompt) == shortest for q in questions(batches, 9, shortest))
    assert questions(batches, 9, shortest - 1) == []
    silent = [replace(b, weight_T=torch.zeros_like(b.weight_T)) for b in batches]
    assert questions(silent, 9, 1000) == []


def test_an_answer_ends_at_the_turn_or_the_document():
    assert [TOKENIZER.token(i) for i in stop_ids(TOKENIZER)] == ["<|im_end|>", "</s>"]
