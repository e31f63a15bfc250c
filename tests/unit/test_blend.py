import json
import random
from collections import Counter

import numpy as np
import pytest

from nemotron_ultra import prep
from nemotron_ultra.config.data import AlternateConfig, DataConfig, PhaseConfig, SourceConfig
from nemotron_ultra.data.blend import BlendStream
from nemotron_ultra.data.order import Draws, SourceOrder, floor_sum, permutation
from nemotron_ultra.data.shards import Shard
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import ConfigError, DataError

TOKENIZER = load_tokenizer("builtin")


def make_source(folder, documents=40, seed=0, valid=0.2, longest=200):
    draw = random.Random(seed)
    counts = [draw.randrange(1, longest) for _ in range(documents)]
    texts = [" ".join(str(draw.randrange(999)) for _ in range(count)) for count in counts]
    path = folder.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert prep.main([str(path), "--out", str(folder), "--valid-fraction", str(valid)]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {name: make_source(root / name, seed=i) for i, name in enumerate(("a", "b", "c"))}


def blend(folders, until=None, **weights):
    sources = {name: SourceConfig(path=folders[name], weight=weight) for name, weight in weights.items()}
    return PhaseConfig(until_tokens=until, sources=sources)


def stream_of(*phases, length=32, micro=2, batch=4, seed=7, **more):
    keys = {k: more.pop(k) for k in ("start_step", "rank", "world") if k in more}
    data = DataConfig(sequence_length=length, phases=list(phases), **more)
    sizes = {"micro_batch_size": micro, "global_batch_size": batch}
    return BlendStream(data, **sizes, seed=seed, tokenizer=TOKENIZER, **keys)


def test_rows_are_stretches_of_documents(folders):
    stream = stream_of(blend(folders, a=1))
    shard = Shard(f"{folders['a']}/train")
    for batch in next(stream) + next(stream):
        bounds = batch.cu_seqlens.tolist()
        assert batch.num_tokens == 64 and 32 in bounds and len(batch.stats["documents"]) == len(bounds) - 1
        for document, start, stop in zip(batch.stats["documents"], bounds, bounds[1:], strict=False):
            whole = [*shard.document(int(document.split(":")[2])).tolist(), None]
            tokens, labels = batch.tokens_T[start:stop].tolist(), batch.labels_T[start:stop].tolist()
            at = next(i for i in range(len(whole)) if whole[i : i + len(tokens)] == tokens)
            wanted = whole[at + 1 : at + 1 + len(tokens)]
            assert labels == [0 if label is None else label for label in wanted]
            assert batch.weight_T[start:stop].tolist() == [float(label is not None) for label in wanted]


def test_the_end_of_a_document_has_no_weight(folders):
    for batch in next(stream_of(blend(folders, a=1), batch=64)):
        at_end = batch.tokens_T == TOKENIZER.eos_id
        assert (batch.weight_T == 0).equal(at_end) and (batch.labels_T[at_end] == 0).all()


@pytest.mark.parametrize("length", [8, 13, 100])
def test_passes_lose_and_repeat_nothing(length):
    lengths = np.array([3, 1, 50, 7, 0, 20, 64])
    order = SourceOrder("a", lengths, length, seed=1)
    seen = Counter()
    draws = -(-3 * 145 // length)
    places = sorted(order.place(draw) for draw in range(draws))
    assert places == [i * length for i in range(draws)]
    for place in places:
        for document, first, count in order.stretches(place, length):
            seen.update((document, token) for token in range(first, first + count))
    whole = {(document, token) for document in range(7) for token in range(lengths[document])}
    assert set(seen) == whole and sum(seen.values()) == draws * length
    assert set(seen.values()) <= {3, 4}


def test_passes_differ_and_depend_on_the_seed():
    lengths = np.full(50, 10)
    first, second = (SourceOrder("a", lengths, 10, seed=1).epoch(n).documents.tolist() for n in (0, 1))
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert first != SourceOrder("a", lengths, 10, seed=2).epoch(0).documents.tolist()
    assert first != SourceOrder("b", lengths, 10, seed=1).epoch(0).documents.tolist()


def test_floor_sum():
    draw = random.Random(0)
    for _ in range(50):
        n, m, a, b = draw.randrange(40), draw.randrange(1, 99), draw.randrange(999), draw.randrange(999)
        assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


def test_draws_follow_the_weights_at_every_row():
    weights = [22.4, 14.0, 0.0, 0.6, 3.0, 0.0]
    draws, counts = Draws(weights, 5, "a"), [0] * 6
    for row in range(4000):
        if row % 7 == 0:
            assert [draws.drawn(s, row) for s in range(6)] == counts
        counts[draws.source(row)] += 1
        assert all(abs(c - w / 40 * (row + 1)) < 6 for c, w in zip(counts, weights, strict=True))
    assert counts[2] == counts[5] == 0
    assert sum(draws.drawn(s, 10**12) for s in range(6)) == 10**12


def test_order_is_the_same_on_every_machine():
    assert permutation(10, "documents", 1234, "a", 0).tolist() == [5, 7, 9, 4, 6, 0, 2, 1, 3, 8]
    draws = Draws([1, 2, 3], 1234, "0")
    assert [draws.source(row) for row in range(12)] == [1, 2, 2, 1, 2, 1, 0, 2, 1, 2, 2, 0]


def test_phases_carry_cursors_on(folders):
    phases = [blend(folders, 4 * 32 * 10 - 1, a=3, b=1), blend(folders, a=1, c=1)]
    stream = stream_of(*phases)
    batches = [next(stream) for _ in range(20)]
    used = [{name for batch in step for name in batch.stats["tokens"]} for step in batches]
    assert all("c" not in names for names in used[:10]) and all("b" not in names for names in used[10:])
    counted = Counter()
    for step in batches:
        for batch in step:
            counted.update(batch.stats["tokens"])
    assert {n: row["tokens"] for n, row in stream.ledger().items()} == dict(counted)
    assert counted["a"] in range(32 * 48, 32 * 52)
    draws = [row for step in range(20) for row in stream.lanes[0].step_rows(step)]
    assert len(set(draws)) == 80


def test_steps_of_another_row_length(folders):
    other = AlternateConfig(sequence_length=8, share=0.25, sources={"c": SourceConfig(path=folders["c"])})
    stream = stream_of(blend(folders, a=1), alternates=[other])
    steps = [next(stream) for _ in range(40)]
    kinds = [{n for batch in step for n in batch.stats["tokens"]} for step in steps]
    assert all(len(names) == 1 for names in kinds) and 8 <= kinds.count({"c"}) <= 12
    assert {sum(batch.num_tokens for batch in step) for step in steps} == {128}
    short = steps[kinds.index({"c"})][0]
    assert short.num_tokens == 64 and set(range(0, 65, 8)) <= set(short.cu_seqlens.tolist())
    assert stream.ledger()["c"]["tokens"] == 128 * kinds.count({"c"})


def test_state_is_one_number_and_a_fingerprint(folders):
    stream = stream_of(blend(folders, a=1, b=1))
    for _ in range(3):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    other = stream_of(blend(folders, a=1, b=1), micro=1)
    other.load_state_dict(state)
    assert other.step == 3 and other.fingerprint() == stream.fingerprint()


@pytest.mark.parametrize(
    "change, key",
    [
        ({"length": 16}, "sequence_length: 32 then, 16 now"),
        ({"seed": 8}, "seed: 7 then, 8 now"),
        ({"batch": 8}, "global_batch_size: 4 then, 8 now"),
    ],
)
def test_other_data_is_refused_unless_said_so(folders, change, key):
    state = stream_of(blend(folders, a=1)).state_dict() | {"step": 5}
    other = stream_of(blend(folders, a=1), **change)
    with pytest.raises(DataError, match=f"started with; got {key}.*allow_config_change"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_change=True)
    assert other.step == 5


def test_changed_weights_and_text_are_named(folders, tmp_path):
    state = stream_of(blend(folders, a=1, b=1)).state_dict()
    with pytest.raises(DataError, match=r"phases.0.weights: .*'b': 1.0.* then, .*'b': 2.0"):
        stream_of(blend(folders, a=1, b=2)).load_state_dict(state)
    moved = folders | {"a": make_source(tmp_path / "a", seed=9)}
    with pytest.raises(DataError, match=r"source\.a"):
        stream_of(blend(moved, a=1, b=1)).load_state_dict(state)


def test_validation_rows_are_fixed_and_spread(folders):
    one, two = (stream_of(blend(folders, a=3, b=1), seed=seed).validation_batches(16) for seed in (1, 2))
    assert [b.tokens_T.tolist() for b in one] == [b.tokens_T.tolist() for b in two]
    ids = [document.split(":") for batch in one for document in batch.stats["documents"]]
    names = Counter(name for name, _, _ in ids)
    assert names["a"] > names["b"] > 0 and {split for _, split, _ in ids} == {"valid"}
    every = stream_of(blend(folders, a=1)).validation_batches(10_000)
    stored = Shard(f"{folders['a']}/valid")
    assert [t for b in every for t in b.tokens_T.tolist()] == stored.slice(0, stored.tokens).tolist()


def test_no_validation_text_is_said(tmp_path):
    path = make_source(tmp_path / "a", valid=0)
    with pytest.raises(DataError, match=r"no validation text; got 0 tokens in the valid split of a.*--valid"):
        stream_of(blend({"a": path}, a=1)).validation_batches(4)


def test_shards_of_another_tokenizer_are_refused(folders, tmp_path):
    manifest = json.loads((tmp_path / "..").joinpath(folders["a"], "manifest.json").read_text())
    copy = tmp_path / "copy"
    copy.mkdir()
    manifest["tokenizer"] = {"name": "other", "hash": "0" * 32, "vocab_size": 9}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=f"another tokenizer.*'other' .hash 0000.*{TOKENIZER.hash}"):
        stream_of(blend({"a": str(copy)}, a=1))


def test_what_cannot_be_read_is_named(folders, tmp_path):
    with pytest.raises(
        DataError, match=r"missing does not exist; make it with: python -m nemotron_ultra.prep"
    ):
        stream_of(blend({"a": str(tmp_path / "missing")}, a=1))
    with pytest.raises(DataError, match=r"has no manifest.json"):
        stream_of(blend({"a": str(tmp_path)}, a=1))
    with pytest.raises(DataError, match=r"fewer tokens than one row; got \d+ tokens in train, seq"):
        stream_of(blend(folders, a=1), length=99999)
    with pytest.raises(DataError, match=r"unknown built-in source; got builtin:ruby; allowed: builtin"):
        stream_of(blend({"a": "builtin:ruby"}, a=1))


def test_truncated_shards_are_refused(tmp_path):
    path = make_source(tmp_path / "a")
    (tmp_path / "a" / "train.bin").write_bytes((tmp_path / "a" / "train.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train.bin is truncated"):
        stream_of(blend({"a": path}, a=1))


def test_changed_bytes_are_named_before_they_reach_the_model(tmp_path):
    path = make_source(tmp_path / "a")
    whole = (tmp_path / "a" / "train.bin").read_bytes()
    (tmp_path / "a" / "train.bin").write_bytes(b"\xff" * len(whole))
    with pytest.raises(DataError, match=r"train.bin holds ids that .* got 65535 to 65535 in documents \["):
        next(stream_of(blend({"a": path}, a=1)))


def test_sizes_that_do_not_fit_are_refused(folders):
    with pytest.raises(ConfigError, match="not a multiple of micro_batch_size x data-parallel readers"):
        stream_of(blend(folders, a=1), micro=3)
    with pytest.raises(ConfigError, match="a phase is shorter than one step"):
        stream_of(blend(folders, 1000, a=1), blend(folders, 1001, b=1), blend(folders, c=1))
    with pytest.raises(ConfigError, match="source 'a' has two paths"):
        stream_of(blend(folders, 1000, a=1), blend(folders | {"a": folders["b"]}, a=1))
