import importlib
import importlib.util
import struct
import sys
import types

import numpy as np
import pytest
import torch

from nemotron_ultra.data.shards import Shard, ShardWriter, token_dtype
from nemotron_ultra.errors import DataError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 2]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    writer = ShardWriter(prefix, np.dtype(dtype))
    for document in documents:
        writer.add(np.array(document))
    writer.close()
    return prefix


def test_bytes_by_hand(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2], [770]])
    assert (tmp_path / "a.bin").read_bytes() == b"\x01\x00\x02\x00\x02\x03"
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + b"\x08" + struct.pack("<QQ", 2, 3)
    index += struct.pack("<ii", 2, 1) + struct.pack("<qq", 0, 4) + struct.pack("<qqq", 0, 1, 2)
    assert prefix.with_suffix(".idx").read_bytes() == index
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_dtype_rule():
    assert {v: token_dtype(v).name for v in (2, 65499)} == {2: "uint16", 65499: "uint16"}
    assert {v: token_dtype(v).name for v in (65500, 131072)} == {65500: "int32", 131072: "int32"}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_round_trip(tmp_path, dtype):
    shard = Shard(write(tmp_path / "a", dtype=dtype))
    assert [shard.document(i).tolist() for i in range(shard.documents)] == DOCUMENTS
    assert shard.tokens == 9 and shard.starts.tolist() == [0, 3, 4, 9]
    assert shard.slice(2, 5).tolist() == [7, 8, 9]


def test_many_documents_at_once_are_the_same_bytes(tmp_path):
    write(tmp_path / "a")
    writer = ShardWriter(tmp_path / "b", np.dtype(np.uint16))
    flat = np.concatenate([np.array(d) for d in DOCUMENTS])
    writer.add_many(flat, np.array([3, 1, 5]))
    writer.add_many(np.zeros(0), np.zeros(0, int))
    writer.close()
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_no_documents(tmp_path):
    shard = Shard(write(tmp_path / "a", []))
    assert (shard.documents, shard.tokens, len(shard.slice(0, 5))) == (0, 0, 0)


def test_names_appear_only_when_whole(tmp_path):
    writer = ShardWriter(tmp_path / "a", np.dtype(np.uint16))
    writer.add(np.array([1, 2]))
    assert not (tmp_path / "a.bin").exists() and not (tmp_path / "a.idx").exists()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def patch(path, at, new):
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)


DAMAGE = {
    "wrong magic": ("a.idx", lambda p: patch(p, 0, b"MMIDIDY")),
    "unknown version": ("a.idx", lambda p: patch(p, 9, b"\x02")),
    "wrong dtype code": ("a.idx", lambda p: patch(p, 17, b"\x09")),
    "integers": ("a.idx", lambda p: patch(p, 17, b"\x06")),
    "wrong size": ("a.idx", lambda p: p.write_bytes(p.read_bytes()[:-1])),
    "is truncated; got 20": ("a.idx", lambda p: p.write_bytes(p.read_bytes()[:20])),
    "contradicts itself": ("a.idx", lambda p: patch(p, 34, b"\x09")),
    "truncated": ("a.bin", lambda p: p.write_bytes(p.read_bytes()[:-2])),
    "longer than its index": ("a.bin", lambda p: p.write_bytes(p.read_bytes() + b"\0\0")),
    "missing": ("a.bin", lambda p: p.unlink()),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_refused_and_named(tmp_path, message):
    prefix = write(tmp_path / "a")
    name, damage = DAMAGE[message]
    damage(tmp_path / name)
    with pytest.raises(DataError, match=message) as caught:
        Shard(prefix)
    assert str(tmp_path / name) in str(caught.value)


@pytest.fixture(scope="module")
def megatron():
    """megatron-core's own reader and writer. Where triton is missing, the package's __init__ is left out."""
    spec = importlib.util.find_spec("megatron")
    if spec is None:
        pytest.skip("megatron-core is not installed")
    if importlib.util.find_spec("triton") is None:
        for name in ("core", "core.datasets"):
            module = types.ModuleType(f"megatron.{name}")
            module.__path__ = [f"{spec.submodule_search_locations[0]}/{name.replace('.', '/')}"]
            sys.modules[module.__name__] = module
        importlib.import_module("megatron.core.parallel_state")
    yield importlib.import_module("megatron.core.datasets.indexed_dataset")
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


@pytest.mark.megatron
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_ours_and_writes_the_same_bytes(tmp_path, megatron, dtype):
    ours, theirs = write(tmp_path / "ours", dtype=dtype), tmp_path / "theirs"
    dataset = megatron.IndexedDataset(str(ours))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    builder = megatron.IndexedDatasetBuilder(f"{theirs}.bin", dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{theirs}.idx")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.megatron
def test_we_read_megatrons_documents_of_several_sequences(tmp_path, megatron):
    dtype = megatron.DType.optimal_dtype(131072)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=dtype)
    builder.add_document(torch.tensor([1, 2, 3, 4]), [3, 1])
    builder.add_document(torch.tensor([70000]), [1])
    builder.finalize(str(tmp_path / "t.idx"))
    shard = Shard(tmp_path / "t")
    assert shard.dtype == token_dtype(131072)
    assert [shard.document(i).tolist() for i in range(shard.documents)] == [[1, 2, 3, 4], [70000]]
