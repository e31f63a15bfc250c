"""teacher_T = log p(labels_T) under the frozen model that teaches the document's domain (report 3.3.1).

One teacher a document, none averaged. Every folder of weights is loaded once, however many names it has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nemotron_ultra.config.hf import read_hf_config
from nemotron_ultra.config.tasks import close_to
from nemotron_ultra.config.teachers import TeachersConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.errors import CheckpointError, ConfigError
from nemotron_ultra.model.hf_folder import load_model
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.score import score


@dataclass
class _Work:
    tokens: int = 0
    seconds: float = 0.0


class Teachers:
    """The teachers of `config`, their weights read from `folders` (name -> a folder of weights).

    vocab_size: rows of the student's head; teachers must have as many, and where a tokenizer.json lies beside
    their weights it must be the run's. Raises ConfigError or CheckpointError naming the teacher.
    """

    def __init__(
        self,
        config: TeachersConfig,
        folders: Mapping[str, Path],
        *,
        tokenizer: Tokenizer,
        vocab_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        assert folders.keys() == config.folders.keys(), "a folder for every name"
        self.config = config
        places = {name: Path(folder).resolve() for name, folder in folders.items()}
        for name, place in places.items():
            _check(name, place, tokenizer, vocab_size)
        loaded = {
            place: load_model(place, dtype=dtype, device=device).requires_grad_(False).eval()
            for place in dict.fromkeys(places.values())
        }
        self.device = torch.device(device)
        self.models: dict[str, HybridLM] = {name: loaded[place] for name, place in places.items()}
        self._work = {name: _Work() for name in places}

    def for_domain(self, domain: str) -> str:
        """Name of the teacher of a domain. Raises ConfigError where it has none."""
        name = self.config.name_for(domain)
        if name is None:
            raise ConfigError(
                f"domain '{domain}' has no teacher{close_to(domain, list(self.models))}",
                do=f"set teachers.domains.{domain}=NAME, or teachers.strict=false and teachers.default=NAME",
            )
        return name

    def score(self, batch: TokenBatch, domains: Sequence[str]) -> Tensor:
        """Log-probability of each of the batch's labels, [T] float32, at temperature 1.

        `domains` has one name per document. Each teacher reads all of its documents in one pack.
        """
        bounds = batch.cu_seqlens.tolist()
        assert len(domains) == len(bounds) - 1, "one domain per document"
        documents: dict[str, list[int]] = {}
        for number, domain in enumerate(domains):
            documents.setdefault(self.for_domain(domain), []).append(number)
        teacher_T = torch.zeros(batch.num_tokens, dtype=torch.float32, device=batch.tokens_T.device)
        for name, numbers in documents.items():
            begin = time.perf_counter()
            spans = [torch.arange(bounds[i], bounds[i + 1]) for i in numbers]
            place_T = torch.cat(spans).to(batch.tokens_T.device)
            ends = torch.tensor([0, *(len(span) for span in spans)]).cumsum(0).to(torch.int32)
            found_T = score(
                self.models[name],
                batch.tokens_T[place_T].to(self.device),
                batch.labels_T[place_T].to(self.device),
                ends.to(self.device),
            )
            teacher_T[place_T] = found_T.to(teacher_T)
            self._work[name].tokens += len(place_T)
            self._work[name].seconds += time.perf_counter() - begin
        return teacher_T

    def metrics(self) -> dict[str, float]:
        """teacher/NAME/tokens and teacher/NAME/seconds since the last call, of every teacher."""
        found = {}
        for name, work in self._work.items():
            found[f"teacher/{name}/tokens"] = float(work.tokens)
            found[f"teacher/{name}/seconds"] = work.seconds
        self._work = {name: _Work() for name in self._work}
        return found


def _check(name: str, folder: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises before any weights are read."""
    key = f"teachers.folders.{name}"
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{key}: no weights there",
            got=f"{folder}, " + ("which has no config.json" if folder.is_dir() else "which is not a folder"),
            do="name a run that has a checkpoint, or a folder of weights",
        )
    rows = read_hf_config(folder).vocab_size
    if rows != vocab_size:
        raise ConfigError(
            f"{key}: this teacher has another vocabulary than the student",
            got=f"{rows} rows in {folder}",
            allowed=vocab_size,
            do="teachers must share the student's tokenizer and model.vocab_size",
        )
    if not (folder / "tokenizer.json").is_file():
        return
    theirs = load_tokenizer(folder)
    if theirs.hash != tokenizer.hash:
        raise ConfigError(
            f"{key}: this teacher was trained with another tokenizer than the student",
            got=f"hash {theirs.hash[:8]} ({theirs.vocab_size} ids) in {folder}",
            allowed=f"hash {tokenizer.hash[:8]} ({tokenizer.vocab_size} ids) of {tokenizer.name}",
            do="the same ids must mean the same text; choose another teacher",
        )
