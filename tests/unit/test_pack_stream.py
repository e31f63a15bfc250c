"""PackStream: labels inside conversations, an order that is a function of (seed, step), no changed data."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from micro_packs import LENGTH, SOURCES, micro_packs
from nemotron_ultra.data.pack_stream import PackStream
from nemotron_ultra.data.packs import PackFiles, PackWriter, read_pack_manifest, write_pack_manifest
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import ConfigError, DataError

TOKENIZER = load_tokenizer("builtin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return micro_packs(tmp_path_factory.mktemp("packs") / "sft")


def stream_of(where, **changes):
    options = dict(
        sequence_length=LENGTH, micro_batch_size=2, global_batch_size=4, seed=1, tokenizer=TOKENIZER
    )
    return PackStream(where, **options | changes)


def drawn(stream, steps):
    return [
        name for step in range(steps) for batch in stream.batches(step) for name in batch.stats["documents"]
    ]


def test_labels_and_weights_stay_inside_conversations(folder):
    stream = stream_of(folder)
    batch = next(stream)[0]
    files = PackFiles([folder / "train-00000.parquet", folder / "train-00001.parquet"])
    places = {f"{path.name}:{row}": i for i in range(len(files)) for path, row in [files.place(i)]}
    rows = [row for name in batch.stats["documents"] for row in files[places[name]].conversations]
    assert batch.cu_seqlens.diff().tolist() == [len(tokens) for tokens, _ in rows]
    assert batch.tokens_T.tolist() == [t for tokens, _ in rows for t in tokens]
    assert batch.labels_T.tolist() == [t for tokens, _ in rows for t in [*tokens[1:], 0]]
    assert batch.weight_T.tolist() == [m for _, mask in rows for m in [*mask[1:], 0]]
    assert (batch.tokens_T.dtype, batch.weight_T.dtype) == (torch.int64, torch.float32)


def test_every_pass_reads_every_pack_once_in_an_order_of_its_own(folder):
    stream = stream_of(folder, micro_batch_size=1, global_batch_size=1)
    count = len(stream.train)
    passes = [drawn(stream, 2 * count)[i * count : (i + 1) * count] for i in range(2)]
    assert len(set(passes[0])) == len(set(passes[1])) == count and passes[0] != passes[1]
    again = stream_of(folder, micro_batch_size=1, global_batch_size=1)
    assert drawn(again, count) == passes[0] != drawn(stream_of(folder, seed=2), count)[:count]


def test_steps_may_be_longer_than_a_pass(folder):
    count = len(stream_of(folder).train)
    names = drawn(stream_of(folder, global_batch_size=2 * count, micro_batch_size=count), 1)
    assert sorted(names[:count]) == sorted(names[count:])


def test_readers_share_a_step(folder):
    whole = stream_of(folder, micro_batch_size=1).batches(3)
    parts = [stream_of(folder, micro_batch_size=1, rank=r, world=2).batches(3) for r in (0, 1)]
    mixed = [batch for pair in zip(*parts, strict=True) for batch in pair]
    assert [b.tokens_T.tolist() for b in mixed] == [b.tokens_T.tolist() for b in whole]
    with pytest.raises(ConfigError, match="4 packs, 2 x 3"):
        stream_of(folder, world=3)


def test_a_resumed_stream_goes_on(folder):
    whole, resumed = stream_of(folder), stream_of(folder)
    for _ in range(3):
        next(whole)
    resumed.load_state_dict(whole.state_dict())
    assert [b.tokens_T.tolist() for b in next(resumed)] == [b.tokens_T.tolist() for b in next(whole)]
    assert resumed.metrics == whole.metrics


def test_changed_packs_are_refused(folder, tmp_path):
    state = stream_of(folder).state_dict()
    with pytest.raises(DataError, match="seed: 1 then, 2 now"):
        stream_of(folder, seed=2).load_state_dict(state)
    other = stream_of(micro_packs(tmp_path / "other", seed=5))
    with pytest.raises(DataError, match=r"not what this run was started with; got files: \w+ then, \w+ now"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_change=True)
    stream_of(shutil.copytree(folder, tmp_path / "copy")).load_state_dict(state)


def test_metrics_count_what_was_given(folder):
    stream = stream_of(folder)
    batches = next(stream)
    tokens = sum(batch.num_tokens for batch in batches)
    assert stream.metrics["packs/fill"] == pytest.approx(tokens / (4 * LENGTH)) and tokens < 4 * LENGTH
    trained = sum(float(batch.weight_T.sum()) for batch in batches)
    assert stream.metrics["packs/trained_share"] == pytest.approx(trained / tokens)
    assert stream.metrics["packs/conversations"] == sum(len(b.cu_seqlens) - 1 for b in batches)
    assert stream.metrics["packs/epoch"] == 4 / len(stream.train)


def test_validation_is_of_each_source_and_of_no_seed(folder):
    one, two = (stream_of(folder, seed=seed).validation_batches(4) for seed in (1, 2))
    assert [b.tokens_T.tolist() for b in one] == [b.tokens_T.tolist() for b in two]
    assert [b.stats["source"] for b in one] == list(SOURCES)
    words = {b.stats["source"]: TOKENIZER.decode(b.tokens_T.tolist()) for b in one}
    assert "red" in words["colours"] and "red" not in words["numbers"]


def test_facts_by_source(folder):
    found = stream_of(folder).describe()
    assert list(found) == list(SOURCES) and found["colours"]["conversations"] == 40
    assert found["numbers"]["folder"] == str(folder) and found["numbers"]["template"] == "builtin"


def test_another_tokenizer_or_shorter_rows_are_refused(folder, tmp_path):
    with pytest.raises(
        ConfigError, match=f"has packs of up to {LENGTH} tokens; set data.sequence_length={LENGTH}"
    ):
        stream_of(folder, sequence_length=LENGTH - 1)
    copy = shutil.copytree(folder, tmp_path / "copy")
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace(TOKENIZER.hash, "0" * 32))
    with pytest.raises(DataError, match=r"prepared with another tokenizer; got builtin \(0+\)"):
        stream_of(copy)


def test_a_file_that_is_not_the_manifests_is_named(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "train-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"not those of its manifest.json; got train-00001.parquet"):
        stream_of(copy)


def foreign(path, rows):
    """Packs of the public form: one list of ids a pack, everything trained."""
    table = {
        "input_ids": pa.array(rows, pa.list_(pa.int64())),
        "loss_mask": pa.array([[1] * len(row) for row in rows], pa.list_(pa.int8())),
        "seq_start_id": pa.array([[0, 3]] * len(rows), pa.list_(pa.int32())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path)


def test_the_public_form_without_manifest(tmp_path):
    foreign(
        tmp_path / "splits" / "train" / "shard_000000.parquet", [list(range(5, 5 + n)) for n in range(6, 12)]
    )
    foreign(tmp_path / "splits" / "valid" / "shard_000001.parquet", [[7] * 8])
    stream = stream_of(tmp_path)
    batch = stream.batches(0)[0]
    bounds = batch.cu_seqlens.tolist()
    assert bounds[1] == 3 and batch.weight_T.sum() == batch.num_tokens - 4
    assert all(batch.weight_T[end - 1] == 0 for end in bounds[1:])
    assert [b.stats["source"] for b in stream.validation_batches(3)] == ["valid"]
    (facts,) = stream.describe().values()
    assert facts["packs"] == 6 and "nobody can check" in facts["remark"]
    alone = stream_of(tmp_path / "splits" / "train" / "*.parquet")
    assert len(alone.train) == 6 and alone.validation_batches(3) == []


def test_rows_that_do_not_fit_are_named(tmp_path):
    foreign(tmp_path / "long.parquet", [[1] * (LENGTH + 1)])
    with pytest.raises(
        DataError, match=rf"long.parquet: row 0 is longer than a row; got {LENGTH + 1} tokens"
    ):
        next(stream_of(tmp_path))
    foreign(tmp_path / "long.parquet", [[1, 2, 3, TOKENIZER.vocab_size]])
    with pytest.raises(DataError, match=r"row 0 has an id that the tokenizer does not make"):
        next(stream_of(tmp_path))


def test_folders_without_packs_to_train_on(tmp_path):
    with pytest.raises(DataError, match=r"no packs to train on; got no \*.parquet"):
        stream_of(tmp_path)
    with PackWriter(tmp_path / "valid-chat-00000.parquet") as writer:
        writer.add([(np.array([1, 2], np.int32), np.array([0, 1], np.uint8))])
    with pytest.raises(DataError, match="got validation packs of chat"):
        stream_of(tmp_path)
    PackWriter(tmp_path / "train-00000.parquet").close()
    with pytest.raises(DataError, match="no packs to train on"):
        stream_of(tmp_path)
    with pytest.raises(DataError, match="no packed parquet files"):
        stream_of(tmp_path / "nowhere")


def test_packs_without_validation_are_remarked(tmp_path):
    folder = micro_packs(tmp_path / "packs")
    assert not any("remark" in facts for facts in stream_of(folder).describe().values())
    content = read_pack_manifest(folder)
    for path in folder.glob("valid-*"):
        path.unlink()
        del content["files"][path.name]
    write_pack_manifest(folder, content)
    facts = stream_of(folder).describe()
    assert [row.get("remark", "").count("no validation packs") for row in facts.values()] == [1, 0]


def test_a_file_that_the_manifest_does_not_know_is_not_trained_on(tmp_path):
    folder = micro_packs(tmp_path / "packs")
    shutil.copy(folder / "train-00000.parquet", folder / "train-00009.parquet")
    with pytest.raises(DataError, match=r"its manifest.json does not know; got train-00009.parquet"):
        stream_of(folder)
    (folder / "train-00009.parquet").unlink()
    (folder / "train").mkdir()  # the public preparation's folder would be read if there were no manifest
    assert len(stream_of(folder).train) > 0
