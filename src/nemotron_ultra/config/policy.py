"""Which module computes in which format, from names and shapes alone (report 2.2).

A product of [T, K] by a weight [N, K] counts 2NK operations per token, a routed expert's top-k / E of that;
an MTP module runs once per depth and the head once more per depth. Attention's own two products, the scan and
the convolution have no weight matrix and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nemotron_ultra.config.hf_tensors import state_tensors
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.config.precision import BLOCK, PRECISE, Format, PrecisionConfig, gradient_problems
from nemotron_ultra.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
"""Parameters of one module: name inside it -> shape."""
Modules = Mapping[str, Shapes]
"""Modules that own parameters, in the order of the model: name -> shapes."""

OTHER = "norms, conv1d, A, D, dt"
_KINDS = {
    "embeddings": "embedding",
    "lm_head": "head",
    "in_proj": "Mamba in_proj",
    "out_proj": "Mamba out_proj",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention q, k, v, o"),
    **dict.fromkeys(("fc1_latent_proj", "fc2_latent_proj"), "latent projections"),
    "gate": "router",
    "experts": "routed experts",
    **dict.fromkeys(("up_proj", "down_proj"), "dense MLP"),
}
_WIDTHS = {  # what the inputs of a module are counted by
    "out_proj": "mamba_num_heads x mamba_head_dim",
    "o_proj": "num_attention_heads x head_dim",
    "fc2_latent_proj": "moe_latent_size",
    "shared_experts.down_proj": "moe_shared_expert_intermediate_size",
    "down_proj": "intermediate_size",
    "experts": "moe_latent_size (hidden_size without it) and moe_intermediate_size",
}
_OUTPUTS = {  # the same for its outputs, where they are not hidden_size
    "in_proj": "mamba_num_heads, mamba_head_dim, n_groups or ssm_state_size",
    "q_proj": "num_attention_heads x head_dim",
    **dict.fromkeys(("k_proj", "v_proj"), "num_key_value_heads x head_dim"),
    "fc1_latent_proj": "moe_latent_size",
    "shared_experts.up_proj": "moe_shared_expert_intermediate_size",
    "up_proj": "intermediate_size",
    "experts": _WIDTHS["experts"],
}


@dataclass(frozen=True)
class PolicyRow:
    """Modules of one kind in one format. `layers`: their hybrid layer indices, empty outside the stack;
    `flops`: forward operations of their weight products per token.
    """

    format: Format
    kind: str
    layers: tuple[int, ...]
    parameters: int
    flops: float


@dataclass(frozen=True)
class PolicyTable:
    """What a policy does to one model. `formats` holds every module that multiplies by its weights."""

    policy: PrecisionConfig
    pattern: str
    formats: Mapping[str, Format]
    rows: tuple[PolicyRow, ...]
    warnings: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)

    def layers(self, format: Format, kind: str = "") -> tuple[int, ...]:
        """Hybrid layer indices with a product in `format`, of one kind or of any."""
        found = (r.layers for r in self.rows if r.format == format and r.flops and kind in ("", r.kind))
        return tuple(sorted({i for layers in found for i in layers}))

    def parameter_share(self, format: Format) -> float:
        return sum(row.parameters for row in self.rows if row.format == format) / self.parameters

    def flop_share(self, format: Format) -> float:
        return sum(row.flops for row in self.rows if row.format == format) / self.flops

    def used(self) -> tuple[Format, ...]:
        """Formats with at least one row, the lowest first."""
        return tuple(format for format in PRECISE if any(row.format == format for row in self.rows))

    def facts(self) -> list[dict[str, object]]:
        """A dict per row, for run.json and the report page."""
        return [
            {
                "format": row.format,
                "modules": row.kind,
                "layers": len(row.layers) or "",
                "which": which(row.layers, self.pattern),
                "parameters": row.parameters,
                "share of parameters": percent(row.parameters / self.parameters),
                "share of GEMM FLOPs": percent(row.flops / self.flops),
            }
            for row in self.rows
        ]

    def summary(self) -> list[str]:
        """A line per format, for the start panel."""
        return [
            f"{format}: {percent(self.parameter_share(format))} of parameters, "
            f"{percent(self.flop_share(format))} of GEMM FLOPs: {self._kinds(format)}"
            for format in self.used()
        ]

    def lines(self) -> list[str]:
        """The whole table as text: rows, formats together, warnings."""
        kept = self.policy.kept_layers(self.num_layers)
        last = f"; last {kept} of {self.num_layers} layers at least {self.policy.last_layers_format}"
        head = f"{self.policy.name}: weights {self.policy.weights}, gradients {self._gradients()}"
        titles = f"{'format':<8}{'modules':<24}{'layers':>6}  {'which':<10}"
        titles += f"{'parameters':>16}{'share':>9}{'GEMM FLOPs':>12}"
        rows = [self._line(row.format, row.kind, row.layers, [row]) for row in self.rows]
        totals = [
            self._line(format, "together", self.layers(format), self._of(format)) for format in self.used()
        ]
        return [head + (last if kept else ""), titles, *rows, *totals, *self.warnings]

    def _of(self, format: Format) -> list[PolicyRow]:
        return [row for row in self.rows if row.format == format]

    def _kinds(self, format: Format) -> str:
        rows = [(row.kind, which(row.layers, self.pattern)) for row in self._of(format)]
        return ", ".join(f"{kind} ({layers})" if layers else kind for kind, layers in rows)

    def _gradients(self) -> str:
        lowered = ", ".join(self.policy.gradients_bf16)
        return self.policy.gradients + (f" but bf16 for {lowered}" if lowered else "")

    def _line(self, format: Format, kind: str, layers: tuple[int, ...], rows: list[PolicyRow]) -> str:
        parameters, flops = (sum(row.parameters for row in rows), sum(row.flops for row in rows))
        share, work = percent(parameters / self.parameters), percent(flops / self.flops)
        where = "" if kind == "together" else which(layers, self.pattern)
        start = f"{format:<8}{kind:<24}{len(layers) or '-':>6}  {where:<10}"
        return f"{start}{parameters:>16,}{share:>9}{work:>12}"


def plan_policy(modules: Modules, precision: PrecisionConfig, model: ModelConfig) -> PolicyTable:
    """The table of `precision` on modules of a model (`config_modules`, or those of any nn.Module).

    Modules without a weight product stay in the format of the weights, and the router computes in fp32
    whatever a rule says. Errors: ConfigError where the gradient of a matrix that MTP shares would be lowered
    (report 2.7), or where a block of the format does not divide a module's inputs.
    """
    problems = [*gradient_problems(precision, bool(model.depths)), *shape_problems(modules, precision, model)]
    if problems:
        raise ConfigError(f"precision {precision.name}: " + "; ".join(problems))
    formats: dict[str, Format] = {}
    groups: dict[tuple[Format, str], tuple[set[int], int, float]] = {}
    for name, shapes in modules.items():
        work = module_flops(name, shapes, model)
        found = module_format(name, precision, model) if work else precision.weights
        if work:
            formats[name] = found
        layers, parameters, flops = groups.setdefault((found, module_kind(name)), (set(), 0, 0.0))
        parts = name.split(".")
        if parts[:2] == ["backbone", "layers"]:
            layers.add(int(parts[2]))
        size = sum(math.prod(shape) for shape in shapes.values())
        groups[found, module_kind(name)] = (layers, parameters + size, flops + work)
    rows = [PolicyRow(*key, tuple(sorted(layers)), *rest) for key, (layers, *rest) in groups.items()]
    rows.sort(key=lambda row: (PRECISE.index(row.format), -row.parameters))
    warnings = tuple(_warnings(modules, formats, precision))
    return PolicyTable(precision, model.pattern, formats, tuple(rows), warnings)


def config_modules(model: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Modules that own trainable parameters, as the built model has them, from the config alone."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for spec in state_tensors(model):
        if not spec.fp32:  # the router's selection bias is a buffer
            module, _, parameter = spec.name.rpartition(".")
            modules.setdefault(module, {})[parameter] = spec.shape
    return modules


def module_format(name: str, precision: PrecisionConfig, model: ModelConfig) -> Format:
    """Format of a module's products: the policy's, but for the router, which computes in fp32."""
    return "fp32" if _is_router(name) else precision.format_of(name, model.num_layers)


def module_flops(name: str, shapes: Shapes, model: ModelConfig) -> float:
    """Forward operations per token of a module's weight products; 0 for a module that has none."""
    if name.endswith("embeddings"):
        return 0.0
    chosen = model.num_experts_per_tok / model.n_routed_experts
    stacked = name.endswith(".experts")
    elements = sum(math.prod(shape) for shape in shapes.values() if len(shape) == (3 if stacked else 2))
    times = 1.0
    if name.startswith("mtp."):
        times = model.depths / model.num_nextn_predict_layers
    elif name == "lm_head":
        times = 1.0 + model.depths
    return 2.0 * elements * times * (chosen if stacked else 1.0)


def module_kind(name: str) -> str:
    """Mamba in_proj, routed experts, head ...: a module's name without its layer."""
    parts = name.split(".")
    if parts[0] == "mtp":
        return "MTP router" if _is_router(name) else "MTP"
    if "shared_experts" in parts:
        return "shared experts"
    return _KINDS.get(parts[-1], OTHER)


def shape_problems(modules: Modules, precision: PrecisionConfig, model: ModelConfig) -> Iterator[str]:
    """One line for each kind of module that cannot be in its format: the head, or inputs of broken blocks."""
    if not set(precision.formats) & set(BLOCK):
        return
    told = set()
    for name, shapes in modules.items():
        if not module_flops(name, shapes, model):
            continue
        format = module_format(name, precision, model)
        if name == "lm_head" and format in BLOCK:
            yield (
                f"rules: lm_head cannot be {format}: the head has no low-precision product; give it bf16 or "
                "fp32 by an earlier rule"
            )
            continue
        block, kind = BLOCK.get(format, 1), (name.partition(".mixer.")[2] or name, format)
        wrong = [shape for shape in shapes.values() if len(shape) > 1 and shape[-1] % block]
        if wrong and kind not in told:
            told.add(kind)
            shape, inputs = ", ".join(map(str, wrong[0])), wrong[0][-1]
            yield (
                f"rules: {name} [{shape}] cannot be {format}: its {inputs:,} inputs are not a multiple "
                f"of {block}; change model.{width_key(name)}, or give it another format by an earlier rule"
            )


def which(layers: tuple[int, ...], pattern: str) -> str:
    """Exactly these layers in few letters: "E 1-90" is every E from layer 1 to 90, "0-2, 7" needs none."""
    if not layers:
        return ""
    first, last, letter = layers[0], layers[-1], pattern[layers[0]]
    alike = tuple(i for i in range(first, last + 1) if pattern[i] == letter)
    if layers == alike:
        return f"{letter} {first}-{last}" if first < last else f"{letter} {first}"
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def percent(share: float) -> str:
    """Two decimals below a tenth, else one: 92.4 %, 0.04 %, 0 %."""
    return f"{100 * share:.{1 if share >= 0.1 else 2}f} %" if share else "0 %"


def _is_router(name: str) -> bool:
    return name.endswith(".mixer.gate")


def width_key(name: str, side: str = "inputs") -> str:
    """Key of the model that a module's inputs or outputs are counted by."""
    inside = name.partition(".mixer.")[2]
    return (_WIDTHS if side == "inputs" else _OUTPUTS).get(inside, "hidden_size")


def _warnings(modules: Modules, formats: Mapping[str, Format], precision: PrecisionConfig) -> Iterator[str]:
    """One line for each rule or glob without effect."""
    left = set(modules)
    for number, rule in enumerate(precision.rules):
        what = f"warning: rules.{number}, {rule.match!r} -> {rule.format}, "
        matched = {name for name in modules if fnmatchcase(name, rule.match)}
        reached = matched & left
        left -= matched
        if not matched:
            yield what + "matches no module of this model"
        elif not reached:
            yield what + "is never reached: earlier rules take all that it matches"
        elif not reached & set(formats):
            yield what + "has no effect: what it matches has no weight product"
        elif rule.format != "fp32" and all(_is_router(name) for name in reached & set(formats)):
            yield what + "has no effect: the router computes in fp32"
    parameters = [f"{module}.{name}" for module, shapes in modules.items() for name in shapes]
    names = [*modules, *parameters]
    for glob in precision.gradients_bf16:
        if not any(fnmatchcase(name, glob) for name in names):
            yield f"warning: gradients_bf16, {glob!r}, matches no module and no parameter of this model"
