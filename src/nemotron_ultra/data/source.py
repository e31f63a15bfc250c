"""Source: one prepared folder as rows of tokens, and rows laid end to end as a TokenBatch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.manifest import read_manifest
from nemotron_ultra.data.shards import Shard
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import DataError

# (document, first token in it, tokens): a stretch of one document.
Stretch = tuple[int, int, int]


@dataclass(frozen=True)
class Row:
    """Tokens of one row and the segments that make it up.

    after: the label of the last token, or -1 where its document ends with the row. ends: which segments end
    their document; the others go on in another row.
    """

    source: str
    tokens: np.ndarray
    after: int
    lengths: list[int]
    ends: list[bool]
    documents: list[str]


class Source:
    """The splits of one prepared folder. DataError if it is missing, damaged or of another tokenizer."""

    def __init__(self, name: str, folder: Path, tokenizer: Tokenizer):
        self.name, self.folder = name, folder
        self.manifest = read_manifest(folder)
        theirs = self.manifest["tokenizer"]
        if theirs["hash"] != tokenizer.hash:
            raise DataError(
                f"source {name!r} ({folder}) was prepared with another tokenizer",
                got=f"shards of {theirs['name']!r} (hash {theirs['hash']}), "
                f"run with {tokenizer.name!r} (hash {tokenizer.hash})",
                do="set data.tokenizer to the shards' tokenizer, or prepare the text again with this one",
            )
        self.vocab_size = tokenizer.vocab_size
        self.train, self.valid = Shard(folder / "train"), Shard(folder / "valid")

    @property
    def digest(self) -> str:
        """Hash of the training tokens, as the manifest has it."""
        return self.manifest["files"]["train.bin"]["blake2b"]

    def row(self, stretches: list[Stretch]) -> Row:
        """A row of the training split."""
        return self._row(self.train, "train", stretches)

    def valid_rows(self, length: int) -> int:
        """Rows that the validation split makes; the last one may be short."""
        return -(-self.valid.tokens // length)

    def valid_row(self, index: int, length: int) -> Row:
        """Row `index` of the validation split in stored order."""
        starts = self.valid.starts
        at, stop = index * length, min((index + 1) * length, self.valid.tokens)
        stretches = []
        while at < stop:
            document = int(np.searchsorted(starts, at, side="right")) - 1
            take = min(stop, int(starts[document + 1])) - at
            stretches.append((document, at - int(starts[document]), take))
            at += take
        return self._row(self.valid, "valid", stretches)

    def _row(self, shard: Shard, split: str, stretches: list[Stretch]) -> Row:
        parts, ends, after = [], [], -1
        for document, first, count in stretches:
            begin = int(shard.starts[document]) + first
            parts.append(shard.slice(begin, begin + count))
            ends.append(begin + count == int(shard.starts[document + 1]))
            after = -1 if ends[-1] else int(shard.slice(begin + count, begin + count + 1)[0])
        tokens = np.concatenate(parts).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise DataError(
                f"{shard.bin_path} holds ids that the tokenizer does not make",
                got=f"{tokens.min()} to {tokens.max()} in documents {[number for number, *_ in stretches]}",
                allowed=f"0 to {self.vocab_size - 1}",
                do="its bytes have changed since it was prepared: copy it again, or prepare the data again",
            )
        return Row(
            source=self.name,
            tokens=tokens,
            after=after,
            lengths=[count for _, _, count in stretches],
            ends=ends,
            documents=[f"{self.name}:{split}:{document}" for document, _, _ in stretches],
        )


def make_batch(rows: list[Row]) -> TokenBatch:
    """Rows laid end to end; each segment of a row is one document of the batch.

    stats: "documents", the id source:split:number of each segment; "tokens", those of each source.
    """
    tokens = np.concatenate([row.tokens for row in rows])
    labels = np.concatenate([np.append(row.tokens[1:], max(row.after, 0)) for row in rows])
    bounds = np.cumsum([0, *(n for row in rows for n in row.lengths)])
    closed = bounds[1:][[end for row in rows for end in row.ends]] - 1
    weight = np.ones(len(tokens), dtype=np.float32)
    labels[closed], weight[closed] = 0, 0
    consumed: dict[str, int] = {}
    for row in rows:
        consumed[row.source] = consumed.get(row.source, 0) + len(row.tokens)
    return TokenBatch(
        tokens_T=torch.from_numpy(tokens),
        labels_T=torch.from_numpy(labels),
        weight_T=torch.from_numpy(weight),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        stats={"documents": [d for row in rows for d in row.documents], "tokens": consumed},
    )
