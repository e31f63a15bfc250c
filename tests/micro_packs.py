"""A small prepared folder of packs: chats of two sources in the builtin tokenizer, with its manifest."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.manifest import file_facts
from nemotron_ultra.data.pack_manifest import train_file, valid_file
from nemotron_ultra.data.packs import PackWriter, write_pack_manifest
from nemotron_ultra.data.tokenizer import load_tokenizer

SOURCES = ("colours", "numbers")
LENGTH = 96
Row = tuple[np.ndarray, np.ndarray]


def chats(count: int, source: int, seed: int = 0) -> list[Row]:
    """(tokens, mask) of short conversations of one to three turns."""
    draw, template = random.Random(f"{seed} {source}"), ChatTemplate(load_tokenizer("builtin"))
    words = (("red", "green", "blue"), ("one", "two", "three"))[source]
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": " ".join(draw.choices(words, k=draw.randint(1, 4)))})
            messages.append({"role": "assistant", "content": draw.choice(words)})
        row = template.conversation(messages)
        rows.append((np.array(row.tokens, np.int32), np.array(row.mask, np.uint8)))
    return rows


def in_order(rows: list[Row], length: int = LENGTH) -> list[list[Row]]:
    """Packs of whole conversations, one after another."""
    packs: list[list[Row]] = [[]]
    for row in rows:
        if sum(len(tokens) for tokens, _ in packs[-1]) + len(row[0]) > length:
            packs.append([])
        packs[-1].append(row)
    return packs


def micro_packs(folder: Path, conversations: int = 40, seed: int = 0) -> Path:
    """Two training shards, validation of both sources, and the manifest."""
    folder.mkdir(parents=True)
    rows = [row for source in (0, 1) for row in chats(conversations, source, seed)]
    random.Random(seed).shuffle(rows)
    packs = in_order(rows)
    half = len(packs) // 2
    shards = {train_file(0): packs[:half], train_file(1): packs[half:]}
    shards |= {valid_file(n, 0): in_order(chats(8, i, seed + 1)) for i, n in enumerate(SOURCES)}
    for name, content in shards.items():
        with PackWriter(folder / name, group_tokens=256) as writer:
            for pack in content:
                writer.add(pack)
    tokenizer = load_tokenizer("builtin")
    write_pack_manifest(
        folder,
        {
            "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash},
            "template": {"name": "builtin", "hash": ""},
            "packer": {"max_length": LENGTH},
            "sources": {name: {"conversations": conversations, "tokens": 1000} for name in SOURCES},
            "splits": {},
            "dropped": {},
            "files": {name: file_facts(folder / name) for name in shards},
        },
    )
    return folder
