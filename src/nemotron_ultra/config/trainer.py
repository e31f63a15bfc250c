"""TrainerConfig: which trainer, length, batch, loss scales, validation, checkpoints and samples."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from nemotron_ultra.config.base import NonNegative, NonNegativeReal, Positive, config


@config
class TrainerConfig:
    name: Literal["pretrain", "sft", "grpo", "mopd"] = "pretrain"
    """pretrain: next token of texts; sft: answers, of tasks or in data.packs; grpo: rewards; mopd: teachers
    by domain."""
    steps: Positive
    """Optimizer steps of the whole run."""
    global_batch_size: Positive
    """Rows (of data.sequence_length tokens) per optimizer step; a row is a pack with data.packs, a rollout in
    GRPO and MOPD."""
    micro_batch_size: Positive
    """Rows per forward and backward; global_batch_size is a multiple of it."""
    mtp_loss_scale: NonNegativeReal = 0.1
    """Weight of the MTP losses together; each depth gets scale / depths (report 2.4)."""
    loss_mean: Literal["tokens", "conversations"] = "tokens"
    """Mean that sft's loss is: over all trained tokens, or inside each conversation first (Super)."""
    loss_mean_after: NonNegative = 0
    """Steps by the mean over tokens before loss_mean=conversations begins: Super's two stages in one run."""
    router_balance_coefficient: NonNegativeReal = 1e-4
    """Weight of the sequence-level load-balancing loss."""
    router_bias_rate: NonNegativeReal = 1e-3
    """Step of the router's selection bias per global batch."""
    validate_every: NonNegative = 0
    """Steps between validations; 0 means only at the end."""
    validate_rows: Positive = 32
    """Rows of the validation split per validation, with data.packs as many of each source; with tasks,
    tasks.validation_problems counts."""
    checkpoint_every: NonNegative = 0
    """Steps between checkpoints; 0 means only at the end."""
    keep_last: Positive = 2
    """Checkpoints kept."""
    keep_every: NonNegative = 0
    """Keep for good each checkpoint whose step is a multiple of this; 0 keeps only the last ones."""
    weight_hash_every: NonNegative = 0
    """Steps between comparisons of weight hashes across data-parallel ranks; 0 means never."""
    sample_every: NonNegative = 0
    """Steps between text samples, or between rollouts that are kept to read; 0 means only at the end."""
    sample_tokens: NonNegative = 48
    """Tokens per text sample of a pretraining, and per answer to a validation prompt of data.packs; 0 turns
    samples off."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        problems = []
        if self.global_batch_size % self.micro_batch_size:
            problems.append(
                f"global_batch_size: {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        if self.keep_every and (not self.checkpoint_every or self.keep_every % self.checkpoint_every):
            problems.append(
                f"keep_every: {self.keep_every} is not a multiple of checkpoint_every {self.checkpoint_every}"
            )
        if self.loss_mean_after and self.loss_mean == "tokens":
            problems.append(
                f"loss_mean_after: {self.loss_mean_after} has no effect with loss_mean=tokens; "
                "set loss_mean=conversations, or leave it out"
            )
        if self.loss_mean_after >= self.steps:
            problems.append(
                f"loss_mean_after: {self.loss_mean_after} leaves no step of {self.steps} to the mean by "
                "conversations; lower it, or set loss_mean=tokens"
            )
        if problems:
            raise ValueError(" | ".join(problems))
        return self
