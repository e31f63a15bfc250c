"""PackStream: packed conversations -> micro-batches; step N is a function of (seed, N) alone (report 3.1).

Passes over the packs, each shuffled by (seed, pass), are laid end to end; a step takes the next
global_batch_size of them. labels_T[t] is the token after tokens_T[t] in its conversation, weight_T[t] says
whether an assistant wrote it; states and attention start anew with every conversation. Resuming is setting
one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.facts import refuse_changes
from nemotron_ultra.data.loss_mean import LossMean
from nemotron_ultra.data.manifest import NAME
from nemotron_ultra.data.order import permutation
from nemotron_ultra.data.pack_manifest import by_split, read_pack_manifest, split_files
from nemotron_ultra.data.packs import Pack, PackFiles
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import ConfigError, DataError


class PackStream:
    """Iterator over global steps: next() is the list of TokenBatch micro-batches of one step.

    where: a folder of `prep sft`, or a file, folder or pattern of files of the public form, whose tokenizer
    nobody can check. `metrics` describes the step just given. rank, world: of `world` data-parallel readers
    this one gets every world-th micro-batch. Raises DataError for packs that cannot be used, ConfigError if
    they are longer than sequence_length or the sizes of a step contradict each other.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        sequence_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        seed: int,
        tokenizer: Tokenizer,
        mean: LossMean | None = None,
        rank: int = 0,
        world: int = 1,
    ):
        self.where, self.sequence_length, self.tokenizer, self.seed = where, sequence_length, tokenizer, seed
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.mean = mean or LossMean()
        self.rank, self.world, self.step = rank, world, 0
        if global_batch_size % (micro_batch_size * world):
            raise ConfigError(
                "trainer.global_batch_size is not a multiple of micro_batch_size x data-parallel readers",
                got=f"{global_batch_size} packs, {micro_batch_size} x {world}",
            )
        self.manifest = _manifest(where, tokenizer, sequence_length)
        self.train, self.valid = _open(where, self.manifest)
        if not len(self.train):
            raise DataError("no packs to train on", got=str(where), do="prepare more conversations")
        self.metrics: dict[str, float] = {}
        self._order = lru_cache(maxsize=2)(lambda epoch: permutation(len(self.train), "packs", seed, epoch))

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        return self

    def __next__(self) -> list[TokenBatch]:
        batches = self.batches(self.step)
        self.step += 1
        self.metrics = self._measure(batches)
        return self.mean(batches, self.step - 1)

    def batches(self, step: int) -> list[TokenBatch]:
        """Micro-batches of any step, without moving the stream; weights are the mask of 0 and 1."""
        first, size = step * self.global_batch_size, self.micro_batch_size
        begins = range(first, first + self.global_batch_size, size)[self.rank :: self.world]
        return [self._batch(self.train, [self._draw(begin + i) for i in range(size)]) for begin in begins]

    def validation_batches(self, packs: int) -> list[TokenBatch]:
        """About `packs` packs, as many of each source, spaced evenly through it; the same ones every time.

        Every batch is of one source, named in stats["source"]. Empty where there is no validation split.
        """
        share = -(-packs // max(1, len(self.valid)))
        batches = []
        for name, files in self.valid.items():
            count = min(share, len(files))
            chosen = [i * len(files) // count for i in range(count)]
            for first in range(0, count, self.micro_batch_size):
                group = chosen[first : first + self.micro_batch_size]
                batches.append(self._batch(files, group, source=name))
        return batches

    def describe(self) -> dict[str, dict[str, Any]]:
        """Facts by source from the manifest; of a folder without one, what can be known of the whole."""
        folder = str(self.where)
        remarks = [] if self.valid else ["no validation packs: nothing will be validated"]
        if self.manifest is None:
            remarks.append("no manifest.json: nobody can check that these ids are of data.tokenizer")
            name = Path(self.where).stem.strip("*") or "packs"
            found = {name: {"folder": folder, "packs": len(self.train)}}
        else:
            packed = {"folder": folder, "template": self.manifest["template"].get("name")}
            found = {
                name: {"tokens": 0} | {k: v for k, v in facts.items() if isinstance(v, int | float)} | packed
                for name, facts in self.manifest["sources"].items()
            }
        for facts in list(found.values())[:1] if remarks else ():
            facts["remark"] = "; ".join(remarks)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "facts": self.facts()}

    def load_state_dict(self, state: dict[str, Any], *, allow_change: bool = False) -> None:
        """Go on at the saved step. Raises DataError if the saved run read other packs."""
        refuse_changes(state["facts"], self.facts(), allow_change)
        self.step = state["step"]

    def facts(self) -> dict[str, Any]:
        """Everything that the order of tokens depends on; JSON types only."""
        return {
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "tokenizer": self.tokenizer.hash,
            "packs": len(self.train),
            "files": _digest(self.train.files),
        }

    def _draw(self, number: int) -> int:
        """Which pack comes at a place of the endless sequence."""
        epoch, place = divmod(number, len(self.train))
        return int(self._order(epoch)[place])

    def _batch(self, files: PackFiles, indices: Sequence[int], **stats: Any) -> TokenBatch:
        packs = [files[index] for index in indices]
        places = [files.place(index) for index in indices]
        for pack, (path, row) in zip(packs, places, strict=True):
            _check_pack(pack, f"{path}: row {row}", self.sequence_length, self.tokenizer)
        return token_batch(packs, documents=[f"{path.name}:{row}" for path, row in places], **stats)

    def _measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        tokens = sum(batch.num_tokens for batch in batches)
        packs = len(batches) * self.micro_batch_size
        return {
            "packs/fill": tokens / (packs * self.sequence_length),
            "packs/trained_share": sum(float(batch.weight_T.sum()) for batch in batches) / tokens,
            "packs/conversations": float(sum(len(batch.cu_seqlens) - 1 for batch in batches)),
            "packs/epoch": self.step * self.global_batch_size / len(self.train),
        }


def token_batch(packs: Sequence[Pack], **stats: Any) -> TokenBatch:
    """Packs as one micro-batch. The last token of a conversation has no label, whatever its mask says."""
    offsets = np.cumsum([0, *(len(pack.tokens) for pack in packs)])
    pairs = zip(packs, offsets[:-1], strict=True)
    bounds = np.concatenate([*(pack.starts.astype(np.int64) + at for pack, at in pairs), offsets[-1:]])
    tokens = np.concatenate([pack.tokens for pack in packs]).astype(np.int64)
    weight = np.concatenate([pack.mask for pack in packs]).astype(np.float32)
    labels = np.append(tokens[1:], 0)
    labels[bounds[1:] - 1] = 0
    weight[bounds[1:] - 1] = 0
    return TokenBatch(
        tokens_T=torch.from_numpy(tokens),
        labels_T=torch.from_numpy(labels),
        weight_T=torch.from_numpy(weight),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        stats=stats,
    )


def _manifest(where: str | Path, tokenizer: Tokenizer, sequence_length: int) -> dict[str, Any] | None:
    folder = Path(where).expanduser()
    if not (folder / NAME).is_file():
        return None
    manifest = read_pack_manifest(folder)
    made_with = manifest["tokenizer"]
    if made_with.get("hash") != tokenizer.hash:
        raise DataError(
            f"{folder} was prepared with another tokenizer",
            got=f"{made_with.get('name')} ({made_with.get('hash')})",
            allowed=f"{tokenizer.name} ({tokenizer.hash})",
            do="set data.tokenizer to that one, or prepare the conversations again",
        )
    longest = manifest["packer"]["max_length"]
    if longest > sequence_length:
        raise ConfigError(
            "data.sequence_length is shorter than the packs",
            got=f"{sequence_length}, {folder} has packs of up to {longest} tokens",
            do=f"set data.sequence_length={longest}, or prepare again with shorter packs",
        )
    wrong = [
        name
        for name, facts in manifest["files"].items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != facts["bytes"]
    ]
    if wrong:
        raise DataError(
            f"{folder}: files are missing or not those of its {NAME}",
            got=", ".join(wrong[:8]),
            do="copy or prepare it again",
        )
    strange = sorted({path.name for path in folder.glob("*.parquet")} - manifest["files"].keys())
    if strange:
        raise DataError(
            f"{folder} holds files that its {NAME} does not know",
            got=", ".join(strange[:8]),
            do=f"move them away, or {NAME} if all of them are to be read",
        )
    return manifest


def _open(where: str | Path, manifest: dict[str, Any] | None) -> tuple[PackFiles, dict[str, PackFiles]]:
    folder = Path(where).expanduser()
    if not folder.is_dir():
        return PackFiles(where), {}
    train, valid = by_split(folder / name for name in manifest["files"]) if manifest else split_files(folder)
    found = {name: PackFiles(files) for name, files in valid.items()}
    order = list(found) if manifest is None else [*manifest["sources"], *found]
    named = {name: found[name] for name in order if name in found and len(found[name])}
    if not train:
        raise DataError(
            f"{folder} has no packs to train on",
            got=f"validation packs of {', '.join(valid)}" if valid else "no *.parquet",
            do="make some with: python -m nemotron_ultra.prep sft NAME=CHATS --out FOLDER",
        )
    return PackFiles(train), named


def _check_pack(pack: Pack, where: str, sequence_length: int, tokenizer: Tokenizer) -> None:
    if len(pack.tokens) > sequence_length:
        raise DataError(
            f"{where} is longer than a row",
            got=f"{len(pack.tokens)} tokens",
            allowed=f"data.sequence_length = {sequence_length}",
            do="raise data.sequence_length, or prepare again with shorter packs",
        )
    largest = int(pack.tokens.max())
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{where} has an id that the tokenizer does not make",
            got=largest,
            allowed=f"below {tokenizer.vocab_size} of {tokenizer.name}",
            do="set data.tokenizer to the one the packs were made with",
        )


def _digest(files: Sequence[Path]) -> str:
    """A hash of names, sizes and footers: the places and sizes of all columns."""
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(size - 8)
            footer = int.from_bytes(file.read(4), "little")
            file.seek(size - 8 - footer)
            digest.update(f"{path.name} {size} ".encode() + file.read(footer))
    return digest.hexdigest()
