"""Tokenizer: text <-> ids through one `tokenizer.json`, with a hash by which shards and runs are checked.

`tokenizer.json` and `tokenizer_config.json` are the files of any Hugging Face tokenizer folder. Differs from
`transformers`: text is only text (a special token spelled out in a document stays ordinary characters unless
asked for), nothing is added at the ends, and the file's truncation, padding and post-processor are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from nemotron_ultra.errors import DataError

BUILTIN = Path(__file__).resolve().parent / "builtin_tokenizer"

# Tried in this order where tokenizer_config.json does not name the end-of-document token.
_USUAL_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer:
    """A loaded tokenizer. `hash` (32 hex digits) covers what in tokenizer.json decides ids, not its layout.

    vocab_size is the largest id + 1. eos_id ends every document; bos_id and pad_id are None where the folder
    names none.
    """

    def __init__(self, name: str, text: str, config: dict[str, Any], where: Path):
        self.name = name
        self.content = _normal(json.loads(text))
        canonical = json.dumps(self.content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self.hash = hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        self._text = canonical
        self._plain = _load(canonical, where)
        self._plain.encode_special_tokens = True
        self._special: tokenizers.Tokenizer | None = None
        self.vocab_size = 1 + max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1)
        self._config = config
        self.bos_id = self._id_of(config.get("bos_token"))
        self.pad_id = self._id_of(config.get("pad_token"))
        named = config.get("eos_token")
        found = [self._id_of(token) for token in (_USUAL_EOS if named is None else [named])]
        self.eos_id = next((i for i in found if i is not None), -1)
        if self.eos_id < 0:
            raise DataError(
                f"{where}: no end-of-document token",
                got=f"eos_token {named!r} in tokenizer_config.json",
                do="name one that is in the vocabulary as eos_token in tokenizer_config.json",
            )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`, nothing added. special=True reads special tokens spelled out in the text as such."""
        return self.backend(special=special).encode(text, add_special_tokens=False).ids

    def backend(self, *, special: bool = False) -> tokenizers.Tokenizer:
        """The `tokenizers` object itself, for callers that encode in bulk."""
        if not special:
            return self._plain
        if self._special is None:
            self._special = tokenizers.Tokenizer.from_str(self._text)
        return self._special

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. special=False leaves special tokens out."""
        return self._plain.decode(list(ids), skip_special_tokens=not special)

    def token(self, id: int) -> str | None:
        """The entry of the vocabulary as it is written in tokenizer.json."""
        return self._plain.id_to_token(id)

    def id(self, token: str) -> int | None:
        """Id of a vocabulary entry, or None."""
        return self._plain.token_to_id(token)

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for, int64 [vocab_size]; 0 for special tokens and unused ids.

        Exact for byte-level BPE and for SentencePiece with byte fallback, so that the sum over a document's
        ids is its size in bytes. For other kinds it is the length of the entry's text.
        """
        added = self.content.get("added_tokens", [])
        special = {token["id"] for token in added if token.get("special")}
        plain = {token["id"] for token in added}
        byte_level = '"ByteLevel"' in self._text
        out = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._plain.get_vocab(with_added_tokens=True).items():
            if index not in special:
                out[index] = _bytes_of(token, byte_level and index not in plain)
        return out

    def named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like as tokenizer_config.json spells them, for chat templates."""
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in self._config.items()}
        return {k: v for k, v in texts.items() if k.endswith("_token") and isinstance(v, str)}

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into `folder`; it opens again with the same hash."""
        named = {"eos_token": self.token(self.eos_id)} | self._config
        (folder / "tokenizer.json").write_text(self._text, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=1), encoding="utf-8")

    def _id_of(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._plain.token_to_id(text)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Open "builtin", a Hugging Face tokenizer folder, or a tokenizer.json file. Raises DataError."""
    path = BUILTIN if name == "builtin" else Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise DataError(
            "tokenizer not found",
            got=str(name),
            allowed='"builtin", a folder with tokenizer.json, or such a file',
            do=f"fetch it first: hf download {name} --include 'tokenizer*' --local-dir FOLDER",
        )
    if not file.is_file():
        there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{path} has no tokenizer.json",
            got=f"a folder with {there}",
            do="convert it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    config: dict[str, Any] = {}
    for beside in ("special_tokens_map.json", "tokenizer_config.json"):
        if (file.parent / beside).is_file():
            config |= {k: v for k, v in _read_json(file.parent / beside).items() if v is not None}
    _read_json(file)
    return Tokenizer(str(name), file.read_text(encoding="utf-8"), config, file)


def _normal(content: dict[str, Any]) -> dict[str, Any]:
    """The content without what changes no ids here and what saving again may change."""
    # A fine-tuning run leaves its own truncation and padding; we never add what a post-processor would.
    content = content | {"truncation": None, "padding": None, "post_processor": None}
    model = content.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        # Older files spell a merge "a b", newer ones ["a", "b"].
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        content["model"] = model | {"merges": merges}
    return content


def _load(text: str, where: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise DataError(f"{where} is not a tokenizer.json that `tokenizers` can read", got=error) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON", got=error) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object", got=type(content).__name__)
    return content


def _bytes_of(token: str, byte_level: bool) -> int:
    if byte_level:
        return len(token)  # one character of the entry stands for one byte
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("\u2581", " ").encode())
