"""nemotron_ultra: pretrain, post-train and distil hybrid Mamba-2 / attention / LatentMoE models.

Names are looked up on first use, so that `import nemotron_ultra` and `--help` cost no torch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotron_ultra.config.compose import load_recipe
    from nemotron_ultra.config.model import ModelConfig
    from nemotron_ultra.data.batch import TokenBatch
    from nemotron_ultra.model.hf_folder import load_model, save_model
    from nemotron_ultra.model.hybrid import HybridLM
    from nemotron_ultra.trainers.loop import fit

__version__ = "0.1.0"

_HOME = {
    "HybridLM": "nemotron_ultra.model.hybrid",
    "ModelConfig": "nemotron_ultra.config.model",
    "TokenBatch": "nemotron_ultra.data.batch",
    "fit": "nemotron_ultra.trainers.loop",
    "load_model": "nemotron_ultra.model.hf_folder",
    "load_recipe": "nemotron_ultra.config.compose",
    "save_model": "nemotron_ultra.model.hf_folder",
}

__all__ = [
    "HybridLM",
    "ModelConfig",
    "TokenBatch",
    "__version__",
    "fit",
    "load_model",
    "load_recipe",
    "save_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nemotron_ultra' has no attribute {name!r}")
