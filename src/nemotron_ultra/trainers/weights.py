"""Where a run's first weights come from: a run folder (its newest checkpoint) or a folder of weights."""

from __future__ import annotations

from pathlib import Path

from nemotron_ultra.config.compose import recipes
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.engine.checkpoint import latest_checkpoint
from nemotron_ultra.errors import CheckpointError, ConfigError


def weights_folder(path: str | Path, key: str = "run.from") -> Path:
    """The folder with config.json and safetensors that `path` means; `key` is what an error names."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{key}: no such folder", got=folder, do=_remedy(folder, key))
    newest = latest_checkpoint(folder)
    if newest is not None:
        return newest / "model"
    if (folder / "run.json").is_file():
        raise CheckpointError(
            f"{key}: the run has no checkpoint yet", got=folder, do="let it reach one, or name another run"
        )
    return folder


def _remedy(folder: Path, key: str) -> str:
    do = "name a run (runs/NAME) or a folder of weights"
    if folder.parent.name == "runs" and folder.name in recipes():
        do = f"train it first (python -m nemotron_ultra.train recipe={folder.name}), or {do}"
    return f"{do}, or begin with random weights (run.from=null)" if key == "run.from" else do


def check_tokenizer(weights: Path, tokenizer: Tokenizer, key: str = "run.from") -> None:
    """Raises ConfigError if the weights were trained with another tokenizer than the run's.

    Known where tokenizer.json lies in the folder, as every checkpoint of ours has it.
    """
    if not (weights / "tokenizer.json").is_file():
        return
    theirs = load_tokenizer(weights)
    if theirs.hash != tokenizer.hash:
        raise ConfigError(
            f"{key}: these weights were trained with another tokenizer",
            got=f"{weights} ({theirs.vocab_size} ids, hash {theirs.hash[:8]}); "
            f"the run has {tokenizer.name} ({tokenizer.vocab_size} ids, hash {tokenizer.hash[:8]})",
            do=f"set data.tokenizer={weights}",
        )
