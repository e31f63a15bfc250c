"""What each trainer needs of a RunConfig: the parts it uses, and what has to agree between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nemotron_ultra.config.tasks import close_to

if TYPE_CHECKING:
    from nemotron_ultra.config.run import RunConfig

PARTS = {
    "pretrain": (),
    "sft": ("tasks",),
    "grpo": ("tasks", "rollout", "loss", "advantage"),
    "mopd": ("tasks", "rollout", "loss", "advantage", "teachers"),
}
OPTIONAL = PARTS["mopd"]  # each a field of RunConfig that may be null


def stage_problems(c: RunConfig) -> Iterator[str]:
    """One line for each thing that does not fit trainer.name."""
    given = [part for part in OPTIONAL if getattr(c, part) is not None]
    yield from _part_problems(c.trainer.name, given, packs=c.data.packs is not None)
    yield from _data_problems(c)
    yield from _loss_problems(c)
    yield from _row_problems(c)
    yield from _advantage_problems(c)
    yield from _teacher_problems(c)


def part_problems_of(values: Mapping[str, Any]) -> list[str]:
    """Parts missing from a plain dict, or there without effect; known before its values are checked."""
    trainer = values.get("trainer")
    name = trainer.get("name", "pretrain") if isinstance(trainer, Mapping) else None
    given = [part for part in OPTIONAL if values.get(part) is not None]
    data = values.get("data")
    packs = isinstance(data, Mapping) and data.get("packs") is not None
    return list(_part_problems(name, given, packs)) if name in PARTS else []


def _part_problems(trainer: str, given: list[str], packs: bool) -> Iterator[str]:
    """sft on packs may do without tasks; where it has some, they are scored and not trained on."""
    for part in OPTIONAL:
        needed = part in PARTS[trainer]
        if needed and part not in given and not (trainer == "sft" and packs):
            it = "it or data.packs" if trainer == "sft" else "it"
            yield f"{part}: missing, trainer.name={trainer} needs {it}; choose an option, see --help {part}"
        if part in given and not needed:
            users = " or ".join(name for name, parts in PARTS.items() if part in parts)
            yield f"{part}: has no effect with trainer.name={trainer}; leave it out, or use {users}"


def _data_problems(c: RunConfig) -> Iterator[str]:
    name = c.trainer.name
    if name == "pretrain" and not c.data.phases:
        yield "data.phases: got []; allowed: at least one with trainer.name=pretrain"
    if name != "pretrain" and (c.data.phases or c.data.alternates):
        packs = ("tasks or packs", "data=tasks or data=packs") if name == "sft" else ("tasks", "data=tasks")
        learns, use = packs
        yield f"data.phases: has no effect with trainer.name={name}, which learns from {learns}; use {use}"
    if name != "sft" and c.data.packs is not None:
        yield f"data.packs: has no effect with trainer.name={name}; leave it out, or use sft"
    if name == "sft" and c.data.packs is not None and c.trainer.sample_tokens >= c.data.sequence_length:
        yield (
            f"trainer.sample_tokens: {c.trainer.sample_tokens} leave no room for a prompt in "
            f"data.sequence_length={c.data.sequence_length}; lower it, or set it to 0 for no answers"
        )
    if name != "sft" and c.trainer.loss_mean != "tokens":
        yield f"trainer.loss_mean: {c.trainer.loss_mean} has no effect with trainer.name={name}; leave it out"


def _loss_problems(c: RunConfig) -> Iterator[str]:
    if c.loss is None or "loss" not in PARTS[c.trainer.name]:
        return
    for key in ("mtp_loss_scale", "router_balance_coefficient"):
        value = getattr(c.trainer, key)
        if value:
            yield f"trainer.{key}: {value:g} has no effect with trainer.name={c.trainer.name}; set it to 0"
    if c.loss.kl_coefficient:
        yield (
            f"loss.kl_coefficient: got {c.loss.kl_coefficient:g}; allowed: 0, no trainer of this version has "
            "a reference policy"
        )
    if c.rollout is not None and c.rollout.temperature != 1 and not c.loss.weighted:
        yield (
            f"rollout.temperature: {c.rollout.temperature:g} draws from another policy than the one that is "
            "trained, and the loss has no weight to correct it; use 1, or set loss.tis or loss.icepop"
        )


def _row_problems(c: RunConfig) -> Iterator[str]:
    if c.rollout is None:
        return
    rows, batch = c.rollout.rollouts_per_step, c.trainer.global_batch_size
    if rows != batch:
        yield (
            f"trainer.global_batch_size: {batch} is not rollout.prompts_per_step "
            f"{c.rollout.prompts_per_step} x group_size {c.rollout.group_size} = {rows}"
        )
    if c.rollout.draft_tokens and not c.model.depths:
        yield (
            f"rollout.draft_tokens: {c.rollout.draft_tokens} needs a model with an MTP module; set it to 0, "
            "or model.num_nextn_predict_layers and depths to 1 or more"
        )
    if c.rollout.max_new_tokens >= c.data.sequence_length:
        yield (
            f"rollout.max_new_tokens: {c.rollout.max_new_tokens} leaves no room for a prompt in "
            f"data.sequence_length {c.data.sequence_length}"
        )


def _advantage_problems(c: RunConfig) -> Iterator[str]:
    if c.advantage is None:
        return
    trainer, name = c.trainer.name, c.advantage.name
    if trainer == "grpo" and name == "teacher_gap":
        yield (
            "advantage.name: teacher_gap needs teachers, which trainer.name=grpo does not have; "
            "allowed: leave_one_out, group_mean"
        )
    if trainer == "mopd" and name != "teacher_gap":
        yield f"advantage.name: got {name}; allowed with trainer.name=mopd: teacher_gap"
    if c.rollout is None:
        return
    if name != "teacher_gap" and c.rollout.group_size < 2:
        yield f"rollout.group_size: got 1; advantage.name={name} compares the rollouts of a group: 2 or more"
    if c.advantage.overlong_buffer > c.rollout.max_new_tokens:
        yield (
            f"advantage.overlong_buffer: {c.advantage.overlong_buffer} is above rollout.max_new_tokens "
            f"{c.rollout.max_new_tokens}"
        )


def _teacher_problems(c: RunConfig) -> Iterator[str]:
    if c.teachers is None or c.tasks is None:
        return
    known, teachers = list(c.tasks.domains), list(c.teachers.folders)
    for domain in c.teachers.domains:
        if domain not in known:
            yield f"teachers.domains.{domain}: no such domain in tasks{close_to(domain, known)}"
    used = {c.teachers.name_for(domain) for domain in known} | {c.teachers.default}
    used |= set(c.teachers.domains.values())
    for name in teachers:
        if name not in used:
            yield (
                f"teachers.folders.{name}: teaches no domain{close_to(name, known)}; leave it out, or set "
                f"teachers.domains.DOMAIN={name}"
            )
    for domain in c.tasks.trained:
        if c.teachers.name_for(domain) is None:
            yield (
                f"teachers.domains: no teacher for the domain '{domain}'; add {domain}=NAME with one of "
                f"{', '.join(teachers)}, or strict=false with a default"
            )
