"""What follows from a config without building anything: parameters, FLOPs, memory, steps (`--plan`).

Sizes that the report states come out of it: Ultra 560.5 B parameters with the MTP module, 55.0 B active
(report 2.1, Table 1, which counts one embedding matrix).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nemotron_ultra.config.hf_tensors import TensorSpec, layer_tensors, mtp_tensors
from nemotron_ultra.config.model import BLOCK_LETTERS, ModelConfig
from nemotron_ultra.config.policy import PolicyTable, config_modules, plan_policy
from nemotron_ultra.config.run import RunConfig


@dataclass(frozen=True)
class BlockCount:
    """Parameters of one kind of block: `layers` of them, `total` and `active` (per token) over all layers."""

    name: str
    layers: int
    total: int
    active: int


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by block kind. `active` leaves MTP out and counts one embedding matrix, as the report."""

    blocks: tuple[BlockCount, ...]
    total: int
    without_mtp: int
    active: int
    tensors: int
    checkpoint_bytes: int
    trainable: int

    def block(self, name: str) -> BlockCount:
        return next(block for block in self.blocks if block.name == name)


@dataclass(frozen=True)
class Milestone:
    """A point of the run: the first step that begins at or after `tokens` consumed tokens is `step`."""

    name: str
    tokens: float
    step: int


@dataclass(frozen=True)
class Plan:
    """Everything `--plan` prints. Bytes are of one replica of the model and of one micro-batch."""

    model: ModelConfig
    parameters: ParameterCount
    precision: PolicyTable
    sequence_length: int
    flops_by_block: dict[str, float]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    steps: int
    tokens_per_step: int
    task_rows: str | None
    copies: int
    milestones: tuple[Milestone, ...]

    @property
    def tensors(self) -> int:
        return self.parameters.tensors

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the weights on disk in the release's formats (bf16; fp32 selection biases)."""
        return self.parameters.checkpoint_bytes

    @property
    def flops_per_token(self) -> float:
        """Forward; a training step costs three times that."""
        return sum(self.flops_by_block.values())

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def training_flops(self) -> float:
        return 3.0 * self.flops_per_token * self.tokens

    @property
    def copy_bytes(self) -> int:
        """Weights that are only read: those that write rollouts, and the teachers'."""
        return self.copies * self.weight_bytes

    @property
    def training_bytes(self) -> int:
        state = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.activation_bytes + self.copy_bytes

    def lines(self) -> list[str]:
        """Readable rows, one string each."""
        return [
            *_model_lines(self),
            *_precision_lines(self),
            *_memory_lines(self),
            *_schedule_lines(self),
        ]


def make_plan(run: RunConfig) -> Plan:
    """The plan of a run. Costs a few milliseconds whatever the size of the model."""
    parameters = count_parameters(run.model)
    tokens_per_step = run.trainer.global_batch_size * run.data.sequence_length
    stored = 4 if run.precision.weights == "fp32" else 2
    master = 0 if stored == 4 else 4  # fp32 weights are their own master copy
    return Plan(
        model=run.model,
        parameters=parameters,
        precision=plan_policy(config_modules(run.model), run.precision, run.model),
        sequence_length=run.data.sequence_length,
        flops_by_block=flops_by_block(run.model, run.data.sequence_length),
        weight_bytes=stored * parameters.total,
        gradient_bytes=4 * parameters.trainable,
        optimizer_bytes=(8 + master) * parameters.trainable,
        activation_bytes=activation_bytes(
            run.model,
            tokens=run.trainer.micro_batch_size * run.data.sequence_length,
            element_bytes=4 if run.precision.default == "fp32" else 2,
            recompute=run.engine.recompute,
        ),
        steps=run.trainer.steps,
        tokens_per_step=tokens_per_step,
        task_rows=_task_rows(run),
        copies=(run.rollout is not None) + (len(run.teachers.folders) if run.teachers else 0),
        milestones=tuple(_milestones(run, tokens_per_step)),
    )


def count_parameters(c: ModelConfig) -> ParameterCount:
    """Parameters, tensors and bytes of the checkpoint by block kind, from the shapes of `hf_tensors`."""
    matrix = [TensorSpec("weight", (c.vocab_size, c.hidden_size))]
    groups = [("embedding", 1, matrix)]
    groups += [(name, c.pattern.count(x), layer_tensors(c, x)) for x, name in BLOCK_LETTERS.items()]
    groups += [("final_norm", 1, [TensorSpec("weight", (c.hidden_size,))]), ("head", 1, matrix)]
    groups += [("mtp", c.num_nextn_predict_layers, list(mtp_tensors(c)))]
    groups = [group for group in groups if group[1]]
    blocks = tuple(
        BlockCount(name, layers, layers * sum(s.numel for s in specs), layers * _active(c, specs))
        for name, layers, specs in groups
    )
    total = sum(block.total for block in blocks)
    mtp = sum(block.total for block in blocks if block.name == "mtp")
    return ParameterCount(
        blocks=blocks,
        total=total,
        without_mtp=total - mtp,
        active=sum(block.active for block in blocks if block.name not in ("embedding", "mtp")),
        tensors=sum(layers * s.stored_tensors for _, layers, specs in groups for s in specs),
        checkpoint_bytes=sum(layers * s.stored_bytes for _, layers, specs in groups for s in specs),
        trainable=total - sum(layers * s.numel for _, layers, specs in groups for s in specs if s.fp32),
    )


def flops_per_token(c: ModelConfig, sequence_length: int) -> float:
    """Forward operations per token, MTP depths included; a training step is three forwards."""
    return sum(flops_by_block(c, sequence_length).values())


def flops_by_block(c: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Forward operations per token over all layers of each kind, at documents of `sequence_length` tokens.

    A product of [1, a] by [a, b] counts 2ab. What is causal counts half its square: attention's two products,
    and in each chunk of the SSD scan the scores (per group) and their use (per head). States cost 4 x heads x
    head_dim x state (in and out), the convolution 2 x kernel x channels. Norms, gates and softmax: nothing.
    """
    one = {x: layer_flops(c, x, sequence_length) for x in BLOCK_LETTERS}
    counted = {name: c.pattern.count(x) * one[x] for x, name in BLOCK_LETTERS.items()}
    head = 2.0 * c.hidden_size * c.vocab_size
    inner = sum(one[x] for x in c.mtp_pattern)
    counted["head"] = head
    counted["mtp"] = c.depths * (4.0 * c.hidden_size**2 + inner + head)
    return {name: flops for name, flops in counted.items() if flops}


def layer_flops(c: ModelConfig, letter: str, sequence_length: int) -> float:
    """Forward operations per token of one layer; the convention is that of `flops_by_block`."""
    width = c.hidden_size
    if letter == "M":
        inner, chunk = c.mamba_inner, min(c.chunk_size, sequence_length)
        projections = 2 * width * (inner + c.conv_dim + c.mamba_num_heads) + 2 * inner * width
        inside = chunk * (c.n_groups * c.ssm_state_size + inner)
        return projections + 2 * c.conv_kernel * c.conv_dim + inside + 4 * inner * c.ssm_state_size
    if letter == "*":
        query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return 2 * width * (query + 2 * key) + 2 * query * width + 2 * sequence_length * query
    if letter == "-":
        return 4 * width * c.intermediate_size
    experts = 4 * c.num_experts_per_tok * c.expert_width * c.moe_intermediate_size
    shared = 4 * width * c.moe_shared_expert_intermediate_size
    return 2 * width * c.n_routed_experts + 4 * width * c.moe_latent_size + experts + shared


def activation_bytes(c: ModelConfig, tokens: int, element_bytes: int = 4, recompute: bool = False) -> int:
    """Estimate of what one forward of `tokens` tokens keeps for its backward, in bytes.

    Elements per token: each layer 2 D (stream and norm); a Mamba layer its in_proj and convolution outputs,
    d (scan) and d N / Q of chunk states (d inner width, Q chunk); attention q, k, v and output; MoE 2 E
    scores, 2 latents, K F, the shared expert's width; dense MLP F. Each MTP depth adds its layers and 5 D.
    With `recompute` every layer keeps D, and one layer at a time the rest. The head keeps nothing.
    """
    letters = c.pattern + c.mtp_pattern * c.depths
    kept = [_kept_elements(c, letter) for letter in letters]
    elements = len(letters) * c.hidden_size + max(kept) if recompute else sum(kept)
    elements += c.depths * 5 * c.hidden_size
    return element_bytes * tokens * elements


def _kept_elements(c: ModelConfig, letter: str) -> int:
    stream = 2 * c.hidden_size
    if letter == "M":
        inner = c.mamba_inner
        states = -(-inner * c.ssm_state_size // c.chunk_size)
        return stream + (inner + c.conv_dim + c.mamba_num_heads) + c.conv_dim + inner + states
    if letter == "*":
        return stream + 2 * c.head_dim * (c.num_attention_heads + c.num_key_value_heads)
    if letter == "-":
        return stream + c.intermediate_size
    routed = c.num_experts_per_tok * c.moe_intermediate_size
    return stream + 2 * (c.n_routed_experts + c.expert_width) + routed + c.moe_shared_expert_intermediate_size


def _active(c: ModelConfig, specs: list[TensorSpec]) -> int:
    return sum(s.numel * c.num_experts_per_tok // s.experts if s.experts else s.numel for s in specs)


def _task_rows(run: RunConfig) -> str | None:
    """What a step is made of where rows are problems with answers, whose lengths nobody knows before."""
    if run.data.packs is not None:
        return f"{run.trainer.global_batch_size:,} packs of whole conversations"
    if run.tasks is None:
        return None
    domains = f"{len(run.tasks.trained)} of {len(run.tasks.domains)} domains"
    if run.rollout is None:
        return f"answers to problems of {domains}"
    return (
        f"{run.rollout.prompts_per_step:,} prompts x {run.rollout.group_size} of at most "
        f"{run.rollout.max_new_tokens:,} new tokens, {domains}"
    )


def _milestones(run: RunConfig, tokens_per_step: int) -> Iterator[Milestone]:
    schedule, end = run.schedule, float(run.trainer.steps * tokens_per_step)
    total = schedule.total_tokens or end
    points = [("warmup ends", schedule.warmup_tokens)] if schedule.warmup_tokens else []
    if schedule.name == "wsd" and schedule.decay_tokens:
        points.append(("decay starts", total - schedule.decay_tokens))
    points += [
        (f"data phase {number} starts", phase.until_tokens)
        for number, phase in enumerate(run.data.phases, 2)
        if phase.until_tokens and number <= len(run.data.phases)
    ]
    if abs(total - end) >= tokens_per_step:
        points.append(("schedule ends", total))
    points.append(("run ends", end))
    for name, tokens in sorted(points, key=lambda point: point[1]):
        yield Milestone(name, tokens, math.ceil(tokens / tokens_per_step))


def _model_lines(plan: Plan) -> Iterator[str]:
    c, parameters = plan.model, plan.parameters
    mtp = f", MTP {c.mtp_pattern} x {c.depths} depths" if c.depths else ""
    yield f"pattern      {c.pattern} ({c.num_layers} layers{mtp})"
    yield (
        f"parameters   {_count(parameters.total)} total, {_count(parameters.without_mtp)} without MTP, "
        f"{_count(parameters.active)} active per token"
    )
    titles = f"{'block':<11}{'layers':>7}{'a layer':>11}{'total':>11}{'active':>11}{'FLOP/token':>13}"
    yield f"             {titles}"
    for block in parameters.blocks:
        flops = plan.flops_by_block.get(block.name, 0.0)
        yield (
            f"             {block.name:<11}{block.layers:>7}{_count(block.total / block.layers):>11}"
            f"{_count(block.total):>11}{_count(block.active):>11}{_count(flops):>13}"
        )
    yield (
        f"compute      {_scaled(plan.flops_per_token, 'TGMk')}FLOP per token forward at "
        f"{plan.sequence_length:,} tokens, three times that to train; {plan.training_flops:.3g} for the run"
    )


def _precision_lines(plan: Plan) -> Iterator[str]:
    first, *rest = plan.precision.lines()
    yield f"precision    {first}"
    yield from (f"             {line}" for line in rest)


def _memory_lines(plan: Plan) -> Iterator[str]:
    stored = "bf16, fp32 selection biases"
    yield f"checkpoint   {plan.checkpoint_bytes:,} bytes in {plan.tensors:,} tensors ({stored})"
    yield (
        f"memory       weights {_bytes(plan.weight_bytes)}, gradients (fp32) {_bytes(plan.gradient_bytes)}, "
        f"optimizer {_bytes(plan.optimizer_bytes)},"
    )
    if plan.copies:
        copies = "1 copy" if plan.copies == 1 else f"{plan.copies} copies"
        yield f"             {copies} of the weights for rollouts and teachers {_bytes(plan.copy_bytes)},"
    yield (
        f"             activations of a micro-batch about {_bytes(plan.activation_bytes)}; "
        f"together {_bytes(plan.training_bytes)} for one replica"
    )


def _schedule_lines(plan: Plan) -> Iterator[str]:
    total = _count(plan.tokens)
    most = "" if plan.task_rows is None else "at most "
    yield f"length       {plan.steps:,} steps of {most}{plan.tokens_per_step:,} tokens = {most}{total} tokens"
    if plan.task_rows is not None:
        yield f"             {plan.task_rows}"
    for milestone in plan.milestones:
        tokens = _count(milestone.tokens)
        yield f"             {milestone.name:<22}{tokens:>11} tokens   step {milestone.step:,}"


def _scaled(value: float, units: str) -> str:
    """Four significant digits and a unit: 560.5 B, 4.194 M."""
    for power, unit in zip((12, 9, 6, 3), units, strict=True):
        if value >= 0.99995 * 10**power:
            return f"{value / 10**power:.4g} {unit}"
    return f"{value:.4g} "


def _count(value: float) -> str:
    return _scaled(value, "TBMk").strip() if value else "0"


def _bytes(value: float) -> str:
    return _scaled(value, "TGMk") + "B"
