"""TrainerConfig: length of the run, batch, loss scales, validation, checkpoints and samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nemotron_ultra.config.base import config

Count = Annotated[int, Field(ge=0)]


@config
class TrainerConfig:
    steps: Annotated[int, Field(gt=0)]
    """Optimizer steps of the whole run."""
    global_batch_size: Annotated[int, Field(gt=0)]
    """Rows (of data.sequence_length tokens) per optimizer step."""
    micro_batch_size: Annotated[int, Field(gt=0)]
    """Rows per forward and backward; global_batch_size is a multiple of it."""
    mtp_loss_scale: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the MTP losses together; each depth gets scale / depths (report 2.4)."""
    router_balance_coefficient: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the sequence-level load-balancing loss."""
    router_bias_rate: Annotated[float, Field(ge=0)] = 1e-3
    """Step of the router's selection bias per global batch."""
    validate_every: Count = 0
    """Steps between validations; 0 means only at the end."""
    validate_rows: Annotated[int, Field(gt=0)] = 32
    """Rows of the validation split per validation."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 means only at the end."""
    keep_last: Annotated[int, Field(gt=0)] = 2
    """Checkpoints kept."""
    sample_every: Count = 0
    """Steps between text samples; 0 means only at the end."""
    sample_tokens: Count = 48
    """Tokens per text sample; 0 turns samples off."""
