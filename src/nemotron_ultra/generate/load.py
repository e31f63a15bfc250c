"""What a person names -> model, tokenizer, chat template, and whether its texts are continued or answered."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from nemotron_ultra.config.compose import read_config
from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.render import Template
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.errors import BackendError, ConfigError, DataError
from nemotron_ultra.generation.scheduler import Scheduler
from nemotron_ultra.generation.speculative import Drafting
from nemotron_ultra.model.hf_folder import load_model
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.trainers.weights import weights_folder

MOST_DRAFTS = 7  # of --draft auto
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """template: None where the tokenizer has none and none is needed. chat: texts are asked by it.

    digest: of the weights' files, by which answers on disk are known to be of these weights.
    """

    name: str
    folder: Path
    model: HybridLM
    tokenizer: Tokenizer
    template: Template | None
    chat: bool
    drafting: Drafting
    ssm_format: str
    digest: str

    @property
    def rows(self) -> int:
        return self.model.config.vocab_size

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ends of an answer if texts are asked by the template, else of a document."""
        ids = self.template.stop_ids if self.chat else (self.tokenizer.eos_id,)
        return tuple(id for id in ids if id < self.rows)

    def asking(self) -> Template:
        """The template. Raises ConfigError where there is none."""
        if self.template is None:
            raise ConfigError(
                f"tokenizer {self.tokenizer.name} has no chat template",
                do="give --template FILE.jinja, or continue texts with --raw",
            )
        return self.template

    def scheduler(self, slots: int, tokens: int) -> Scheduler:
        """Raises ConfigError where the machine has not the memory."""
        return Scheduler(
            self.model,
            max_slots=slots,
            max_tokens=tokens,
            vocab_size=min(self.tokenizer.vocab_size, self.rows),
            decode=self.tokenizer.decode,
            ssm_format=self.ssm_format,
            make_decoder=self.drafting.decoder(self.model),
        )


def load(asked: argparse.Namespace) -> Loaded:
    weights = weights_folder(asked.folder, "RUN")
    trainer, recorded = _run_of(asked.folder)
    tokenizer = _tokenizer(asked, weights, recorded)
    own = _has_template(weights)
    template = _template(asked.template, tokenizer, own, needed=asked.chat)
    chat = asked.chat or (not asked.raw and template is not None and _answers(trainer, own))
    device = _device(asked.device)
    narrow = device.type == "cuda" and asked.dtype == "auto"
    dtype = torch.bfloat16 if narrow else DTYPES.get(asked.dtype, torch.float32)
    model = load_model(weights, dtype=dtype, device=device).requires_grad_(False).eval()
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            "the tokenizer has ids that the model has not",
            got=f"{tokenizer.name}: {tokenizer.vocab_size} ids",
            allowed=f"{model.config.vocab_size}",
            do="name the tokenizer that the model was trained with: --tokenizer FOLDER",
        )
    return Loaded(
        name=asked.name or asked.folder.resolve().name,
        folder=weights,
        model=model,
        tokenizer=tokenizer,
        template=template,
        chat=chat,
        drafting=_drafting(asked.draft, model),
        ssm_format=asked.ssm_format,
        digest=_digest(weights),
    )


def _run_of(folder: Path) -> tuple[str | None, str | None]:
    """(trainer, tokenizer) of the run that a folder is, or lies in as a checkpoint."""
    for place in (folder, *folder.resolve().parents[:3]):
        if (place / "config.yaml").is_file() and (place / "run.json").is_file():
            config = read_config(place / "config.yaml")
            return config.trainer.name, config.data.tokenizer
    return None, None


def _answers(trainer: str | None, own_template: bool) -> bool:
    return own_template if trainer is None else trainer != "pretrain"


def _tokenizer(asked: argparse.Namespace, weights: Path, recorded: str | None) -> Tokenizer:
    beside = weights if (weights / "tokenizer.json").is_file() else None
    name = asked.tokenizer or beside or recorded
    if name is None:
        raise DataError(
            f"{weights} has no tokenizer.json", do='name the tokenizer: --tokenizer FOLDER, or "builtin"'
        )
    return load_tokenizer(name)


def _template(name: str | None, tokenizer: Tokenizer, own: bool, *, needed: bool) -> Template | None:
    """The one named; else the folder's own; else the built-in one, where the tokenizer has its markers."""
    try:
        return load_template(tokenizer, name or ("tokenizer" if own else "builtin"))
    except DataError:
        if needed or name:
            raise
        return None


def _has_template(weights: Path) -> bool:
    config = weights / "tokenizer_config.json"
    if (weights / "chat_template.jinja").is_file():
        return True
    return config.is_file() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendError("--device cuda, but torch sees no GPU", do="use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _drafting(draft: int | str, model: HybridLM) -> Drafting:
    """Raises ConfigError for drafts of a model without an MTP module; "auto" takes none then."""
    if draft == "auto":
        return Drafting(tokens=MOST_DRAFTS if model.mtp is not None else 0, adaptive=True)
    drafting = Drafting(tokens=draft)
    drafting.decoder(model)
    return drafting


def _digest(weights: Path) -> str:
    """Of checksums.json where there is one, else of names, sizes and times of the files."""
    listed = weights / "checksums.json"
    if listed.is_file():
        facts = listed.read_bytes()
    else:
        files = sorted([*weights.glob("*.safetensors"), weights / "config.json"])
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        facts = json.dumps(stats).encode()
    return hashlib.blake2b(facts, digest_size=8).hexdigest()
