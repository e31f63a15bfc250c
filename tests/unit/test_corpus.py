import subprocess
import sys

import pytest

from nemotron_ultra.data import corpus
from nemotron_ultra.data.corpus import cache_root, ensure_builtin
from nemotron_ultra.data.manifest import damaged_files, read_manifest
from nemotron_ultra.data.shards import Shard
from nemotron_ultra.data.stdlib_text import SKIPPED, stdlib_files, stdlib_root
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import DataError

TOKENIZER = load_tokenizer("builtin")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(corpus, "TEXT_BYTES", 400_000)
    monkeypatch.setattr(corpus, "VALID_FRACTION", 0.2)


def test_files_are_sources_of_the_library():
    files = stdlib_files()
    assert files == sorted(files) and len(files) > 200
    assert not any(SKIPPED & set(file.parts) for file in files)
    some = stdlib_files(500_000)
    assert set(some) < set(files) and some == stdlib_files(500_000)
    assert sum((stdlib_root() / file).stat().st_size for file in some) <= 500_000


def test_no_sources_is_said(tmp_path):
    with pytest.raises(DataError, match=r"needs the sources of the standard library.*nemotron_ultra.prep"):
        stdlib_files(root=tmp_path)


def test_made_once_and_found_again(tmp_path, small):
    folder = ensure_builtin(tmp_path, TOKENIZER)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure_builtin(tmp_path, TOKENIZER) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    manifest = read_manifest(folder)
    assert manifest["splits"]["valid"]["documents"] and manifest["xz_bits_per_byte"] > 0.5
    lengths = TOKENIZER.byte_lengths()
    for split in ("train", "valid"):
        shard = Shard(folder / split)
        assert lengths[shard.slice(0, shard.tokens)].sum() == manifest["splits"][split]["bytes"]


@pytest.mark.parametrize("name", ["train.bin", "valid.idx", "manifest.json"])
def test_damage_is_found_and_mended(tmp_path, small, name):
    folder = ensure_builtin(tmp_path, TOKENIZER)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-3] + b"abc")
    assert ensure_builtin(tmp_path, TOKENIZER) == folder
    assert damaged_files(folder, read_manifest(folder)) == [] and (folder / name).read_bytes() == whole


def test_two_processes_at_once(tmp_path):
    code = (
        "import sys; from nemotron_ultra.data import corpus, tokenizer; corpus.TEXT_BYTES = 200_000; "
        "print(corpus.ensure_builtin(sys.argv[1], tokenizer.load_tokenizer('builtin')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    (folder,) = folders
    assert Shard(f"{folder}/train").tokens > 10_000
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_place_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMOTRON_ULTRA_CACHE", str(tmp_path / "env"))
    assert cache_root() == tmp_path / "env" and cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("NEMOTRON_ULTRA_CACHE")
    assert cache_root().name == "nemotron_ultra"


def test_a_cache_that_cannot_be_written_is_named(tmp_path, small):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot prepare builtin:python in .*file.*NEMOTRON_ULTRA_CACHE"):
        ensure_builtin(tmp_path / "file", TOKENIZER)
