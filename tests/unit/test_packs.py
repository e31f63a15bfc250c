"""Packed parquet: the exact schema, both ways between us and the public form, and every bad row named."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemotron_ultra.data.pack_manifest import split_files, train_file, valid_file
from nemotron_ultra.data.packs import PackFiles, PackWriter, read_pack_manifest, schema, write_pack_manifest
from nemotron_ultra.errors import DataError

PLAIN = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("seq_start_id", pa.list_(pa.int32())),
    ]
)


def random_packs(count, seed=0, longest=200):
    """Lists of (tokens, mask) with masks of either kind at every place."""
    draw = np.random.default_rng(seed)
    return [
        [
            (
                draw.integers(0, 130_000, n, dtype=np.int32),
                np.r_[0, draw.integers(0, 2, n - 1)].astype(np.uint8),
            )
            for n in draw.integers(1, longest, draw.integers(1, 6))
        ]
        for _ in range(count)
    ]


def write(path, packs, **options):
    with PackWriter(path, **options) as writer:
        for number, pack in enumerate(packs):
            writer.add(pack, source_ids=[1] * len(pack), row_ids=[2**40 + number] * len(pack))
    return path


def write_theirs(path, packs, types=("int32", "uint8", "int32"), rows=1000, columns=None):
    """As the public preparation writes: plain pyarrow, three columns, groups of rows."""
    flat = {
        "input_ids": [np.concatenate([t for t, _ in pack]) for pack in packs],
        "loss_mask": [np.concatenate([np.append(m[1:], 0) for _, m in pack]) for pack in packs],
        "seq_start_id": [np.cumsum([0, *(len(t) for t, _ in pack[:-1])]) for pack in packs],
    } | (columns or {})
    arrays = {
        n: pa.array(v, pa.list_(getattr(pa, t)())) for (n, v), t in zip(flat.items(), types, strict=True)
    }
    pq.write_table(pa.table(arrays), path, row_group_size=rows, compression="zstd")
    return path


def same(found, pack):
    assert len(found.conversations) == len(pack)
    for (tokens, mask), (expected, wanted) in zip(found.conversations, pack, strict=True):
        assert np.array_equal(tokens, expected) and np.array_equal(mask, wanted)


def test_ours_has_exactly_the_columns_that_megatron_reads(tmp_path):
    packs = random_packs(40)
    with PackWriter(tmp_path / "plain.parquet", metadata={"tokenizer": "abc"}) as writer:
        for pack in packs:
            writer.add(pack)
    found = pq.read_table(tmp_path / "plain.parquet")
    assert found.schema.remove_metadata().equals(PLAIN) and found.schema.metadata[b"tokenizer"] == b"abc"
    row = found.slice(7, 1).to_pydict()
    assert row["input_ids"][0] == np.concatenate([t for t, _ in packs[7]]).tolist()
    assert row["loss_mask"][0] == np.concatenate([[*m[1:], 0] for _, m in packs[7]]).tolist()
    assert row["seq_start_id"][0] == np.cumsum([0, *(len(t) for t, _ in packs[7][:-1])]).tolist()
    full = pq.read_schema(write(tmp_path / "full.parquet", packs))
    assert full.equals(schema()) and full.names[:3] == PLAIN.names
    assert full.field("source_id").type == pa.list_(pa.int16())
    assert full.field("row_id").type == pa.list_(pa.int64())


def test_ours_come_back_in_any_order(tmp_path):
    packs = random_packs(60)
    write(tmp_path / train_file(0), packs[:25], group_tokens=900)
    write(tmp_path / train_file(1), packs[25:], group_tokens=900)
    files = PackFiles(tmp_path)
    assert len(files) == 60 and pq.ParquetFile(files.files[0]).num_row_groups > 5
    for index in np.random.default_rng(1).permutation(60):
        same(files[index], packs[index])
        assert files[index].sources.tolist() == [1] * len(packs[index])
        assert files[index].rows[0] == 2**40 + (index if index < 25 else index - 25)
    assert files.place(26) == (tmp_path / train_file(1), 1)


@pytest.mark.parametrize(
    "types", [("int32", "uint8", "int32"), ("int64", "int64", "int64"), ("uint16", "int8", "uint32")]
)
def test_theirs_are_read_with_any_integer_types(tmp_path, types):
    packs = random_packs(30)
    if types[0] == "uint16":
        packs = [[(tokens % 60_000, mask) for tokens, mask in pack] for pack in packs]
    write_theirs(tmp_path / "shard_000000.parquet", packs[:17], types)
    write_theirs(tmp_path / "shard_000001.parquet", packs[17:], types, rows=3)
    for where in (tmp_path, str(tmp_path / "shard_*.parquet")):
        files = PackFiles(where)
        for index, pack in enumerate(packs):
            same(files[index], pack)
        assert files[4].tokens.dtype == np.int32 and files[4].sources is None


def test_large_lists_and_more_columns_are_read(tmp_path):
    pack = random_packs(1)[0]
    path = write_theirs(tmp_path / "a.parquet", [pack])
    table = pq.read_table(path)
    wide = table.set_column(0, "input_ids", table["input_ids"].cast(pa.large_list(pa.int64())))
    pq.write_table(wide.append_column("note", pa.array(["x"])), path)
    same(PackFiles(path)[0], pack)


BAD = {
    "loss_mask is not as long as input_ids": {"loss_mask": [[0, 1, 0, 0], [0, 1, 1]]},
    "the first seq_start_id is not 0": {"seq_start_id": [[0, 2], [1, 2]]},
    "seq_start_id must rise and stay below": {"seq_start_id": [[0, 2], [0, 2, 2]]},
    "seq_start_id must rise and stay below the": {"seq_start_id": [[0, 2], [0, 4]]},
    "is empty": {"seq_start_id": [[0, 2], []]},
    "loss_mask; got 0 to 2": {"loss_mask": [[0, 1, 0, 0], [0, 2, 1, 1]]},
    "a token id is out of range; got -1": {"input_ids": [[1, 2, 3, 4], [1, -1, 2, 3]]},
}


@pytest.mark.parametrize("message", BAD)
def test_a_row_that_is_no_pack_is_named(tmp_path, message):
    good = {
        "input_ids": [[5, 6, 7, 8]] * 2,
        "loss_mask": [[0, 1, 0, 0], [1, 0, 1, 0]],
        "seq_start_id": [[0, 2]] * 2,
    }
    path = write_theirs(tmp_path / "shard.parquet", [], columns=good | BAD[message])
    files = PackFiles(path)
    assert len(files[0].tokens) == 4
    with pytest.raises(DataError, match=f"shard.parquet: row 1:? ?{re.escape(message)}"):
        files[1]


def test_files_that_cannot_be_packs(tmp_path):
    with pytest.raises(DataError, match="no packed parquet files"):
        PackFiles(tmp_path / "*.parquet")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(DataError, match=r"cannot open .*text.parquet"):
        PackFiles(tmp_path)
    pq.write_table(pa.table({"input_ids": pa.array([[1]]), "text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match="column loss_mask, seq_start_id is missing"):
        PackFiles(tmp_path)
    columns = {"input_ids": [[1]], "loss_mask": [[0]], "seq_start_id": [0]}
    pq.write_table(pa.table(columns), tmp_path / "text.parquet")
    with pytest.raises(DataError, match="seq_start_id; got int64; allowed: lists of whole numbers"):
        PackFiles(tmp_path)


def test_a_damaged_row_group_is_an_error(tmp_path):
    path = write(tmp_path / "a.parquet", random_packs(20))
    content = bytearray(path.read_bytes())
    content[200:600] = b"\xff" * 400
    path.write_bytes(content)
    with pytest.raises(DataError, match="row group 0 cannot be read"):
        PackFiles(path)[0]


def test_a_shard_is_absent_until_it_is_whole(tmp_path):
    path, packs = tmp_path / "a.parquet", random_packs(5)
    writer = PackWriter(path)
    writer.add(packs[0])
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet.tmp"]
    writer.abort()
    assert not list(tmp_path.iterdir())
    write(path, packs)
    before = path.read_bytes()
    with pytest.raises(KeyError), PackWriter(path) as writer:
        writer.add(packs[0])
        raise KeyError
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert write(tmp_path / "b.parquet", packs).read_bytes() == before


def test_a_shard_without_packs_and_a_folder_that_is_not_there(tmp_path):
    PackWriter(tmp_path / "empty.parquet").close()
    assert len(PackFiles(tmp_path)) == 0
    with pytest.raises(DataError, match="cannot write"):
        PackWriter(tmp_path / "nowhere" / "a.parquet")


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.parquet"
    writer = PackWriter(path, group_tokens=100)
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(DataError, match=r"cannot write .*a.parquet; got No space left.*free space"):
        for pack in random_packs(50):
            writer.add(pack)
        writer.close()
    assert not list(tmp_path.iterdir())


def test_manifest_round_trip_and_mistakes(tmp_path):
    with pytest.raises(DataError, match="not a finished folder of packs"):
        read_pack_manifest(tmp_path)
    keys = ("tokenizer", "template", "packer", "sources", "splits", "dropped", "files")
    content = {key: {} for key in keys} | {"packer": {"max_length": 8}}
    write_pack_manifest(tmp_path, content)
    assert read_pack_manifest(tmp_path)["kind"] == "packs"
    (tmp_path / "manifest.json").write_text('{"format": 1, "tokenizer": {}}')
    with pytest.raises(DataError, match="not a manifest of packs; got token shards"):
        read_pack_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 9, "kind": "packs"}')
    with pytest.raises(DataError, match="missing tokenizer, template"):
        read_pack_manifest(tmp_path)


def test_splits_by_the_names_of_files(tmp_path):
    for name in (train_file(0), train_file(1), valid_file("chat-a", 0), valid_file("math", 0)):
        PackWriter(tmp_path / name).close()
    train, valid = split_files(tmp_path)
    assert [p.name for p in train] == ["train-00000.parquet", "train-00001.parquet"]
    assert {name: len(paths) for name, paths in valid.items()} == {"chat-a": 1, "math": 1}
    (tmp_path / "splits" / "train").mkdir(parents=True)
    assert split_files(tmp_path) == ([], {})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tokenizer": None}, "tokenizer: None"),
        ({"sources": ["a"]}, "sources: \\['a'\\]"),
        ({"sources": {"a": 1}}, "sources.a: 1"),
        ({"packer": {}}, "packer.max_length: None"),
        ({"packer": {"max_length": "8"}}, "packer.max_length: '8'"),
        ({"files": {"train-00000.parquet": {}}}, "files.train-00000.parquet.bytes: None"),
        ({"identity": []}, "identity: \\[\\]"),
    ],
)
def test_a_manifest_of_wrong_values_is_refused_by_key(tmp_path, changes, said):
    keys = ("tokenizer", "template", "sources", "splits", "dropped", "files")
    write_pack_manifest(tmp_path, {key: {} for key in keys} | {"packer": {"max_length": 8}} | changes)
    with pytest.raises(DataError, match=f"values that no manifest of packs has; got {said}"):
        read_pack_manifest(tmp_path)
