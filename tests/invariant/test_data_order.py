"""The order of tokens is a function of (seed, step): not of where a run was resumed, nor of who reads."""

import json
import random

import pytest

from nemotron_ultra import prep
from nemotron_ultra.config.data import AlternateConfig, DataConfig, PhaseConfig, SourceConfig
from nemotron_ultra.data.blend import BlendStream
from nemotron_ultra.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("builtin")
STEPS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    sources = {}
    for number, name in enumerate(("web", "code", "math")):
        draw = random.Random(number)
        counts = [draw.randrange(1, 90) for _ in range(30)]
        texts = [" ".join(str(draw.randrange(99)) for _ in range(count)) for count in counts]
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        assert prep.main([str(path), "--out", str(root / name), "--valid-fraction", "0"]) == 0
        sources[name] = SourceConfig(path=str(root / name), weight=number + 1)
    first = PhaseConfig(until_tokens=1500, sources={n: sources[n] for n in ("web", "code")})
    other = AlternateConfig(sequence_length=8, share=0.2, sources={"math": sources["math"]})
    return DataConfig(sequence_length=16, phases=[first, PhaseConfig(sources=sources)], alternates=[other])


def stream_of(data, micro=2, **more):
    sizes = {"micro_batch_size": micro, "global_batch_size": 8, "seed": 3}
    return BlendStream(data, **sizes, tokenizer=TOKENIZER, **more)


def tokens_of(step):
    kept = ("tokens_T", "labels_T", "weight_T", "cu_seqlens")
    return [[getattr(b, k).tolist() for k in kept] + [b.stats["documents"]] for b in step]


def test_resumed_is_uninterrupted(data):
    whole = stream_of(data)
    steps = [tokens_of(next(whole)) for _ in range(STEPS)]
    for step in (0, 1, 7, 12, 23):
        assert tokens_of(next(stream_of(data, start_step=step))) == steps[step]
    half = stream_of(data)
    for _ in range(9):
        next(half)
    resumed = stream_of(data)
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    assert [tokens_of(next(resumed)) for _ in range(STEPS - 9)] == steps[9:]


@pytest.mark.parametrize("world", [2, 4])
def test_many_readers_read_what_one_reads(data, world):
    one, many = stream_of(data), [stream_of(data, rank=rank, world=world) for rank in range(world)]
    for _ in range(STEPS):
        shares = [next(reader) for reader in many]
        merged = [batch for group in zip(*shares, strict=True) for batch in group]
        assert tokens_of(merged) == tokens_of(next(one))


def test_micro_batches_only_cut_the_step(data):
    large, small = stream_of(data, micro=8), stream_of(data, micro=1)
    for _ in range(STEPS):
        (whole,), parts = next(large), next(small)
        assert whole.tokens_T.tolist() == [t for part in parts for t in part.tokens_T.tolist()]
        assert whole.weight_T.sum() == sum(part.weight_T.sum() for part in parts)
        assert whole.stats["documents"] == [d for part in parts for d in part.stats["documents"]]


def test_another_seed_is_another_order(data):
    one = tokens_of(next(stream_of(data)))
    other = BlendStream(data, micro_batch_size=2, global_batch_size=8, seed=4, tokenizer=TOKENIZER)
    assert tokens_of(next(other)) != one
