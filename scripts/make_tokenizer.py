"""Make the built-in tokenizer: byte-level BPE with 4,096 entries, learned from the Python standard library.

    python scripts/make_tokenizer.py [--out FOLDER] [--vocab 4096]

The shipped files were made by this script with Python 3.11.7 and tokenizers 0.23.3. Another Python has other
sources and gives slightly other merges, and with them another tokenizer hash: shards prepared with one do not
go with the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemotron_ultra.data.stdlib_text import stdlib_files, stdlib_root

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "src" / "nemotron_ultra" / "data" / "builtin_tokenizer"

# Ids 0..15, laid out as in the tokenizer of the Nemotron 3 checkpoints where it names them.
SPECIALS = [
    "<pad>",
    "<s>",
    "</s>",
    *(f"<SPECIAL_{i}>" for i in range(3, 10)),
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]

# GPT-2's words, but one digit at a time; a run of white space keeps the newline and the indentation together.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def make(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    root = stdlib_root()
    texts = ((root / path).read_text(encoding="utf-8", errors="replace") for path in stdlib_files())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--vocab", type=int, default=4096)
    arguments = parser.parse_args()
    tokenizer = make(arguments.vocab)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 1_000_000,
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{arguments.out}: {tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
