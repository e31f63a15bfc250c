"""Activation recomputation from outside the model: each block keeps its input and runs again in the
backward.
"""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from nemotron_ultra.model.block import Block
from nemotron_ultra.model.hybrid import HybridLM


def recompute_blocks(model: HybridLM) -> int:
    """Make every block of `model` recompute its activations; returns how many. The results stay the same."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        # The blocks draw no random numbers, so their state need not be kept.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return len(blocks)
