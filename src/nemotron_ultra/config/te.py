"""Emulation or Transformer Engine for each low-precision format of a run, from plain data.

What Transformer Engine (TE) can do depends on its version, the GPU, the options of the policy and the shapes
of its layers. The facts are those of TE 2.20's source and of its issue 3062; nothing here was run on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from nemotron_ultra.config.policy import Modules, PolicyTable, width_key
from nemotron_ultra.config.precision import BLOCK, Format, Nvfp4Config, PrecisionConfig
from nemotron_ultra.errors import BackendError

Kind = Literal["no_te", "old_te", "no_gpu", "no_fp4_gpu", "unknown_gpu", "mxfp8_only", "no_rht_sr", "full"]
Version = tuple[int, int]

OLDEST: Version = (2, 14)  # up to 2.13 block scales are computed in another order
WHOLE_RECIPE = ((10, 0), (10, 3))  # compute capabilities that train with every technique of the recipe
INSTALL = 'install the extra "te" (pip compiles it, docs/dependencies.md) or use NVIDIA\'s PyTorch container'

CHANGES_THE_NUMBERS = {
    "NVTE_USE_FAST_MATH": "approximates reciprocals and rounds at other places, so its codes are not those "
    "of the policy",
    "NVTE_BACKWARD_OVERRIDE": "takes other operands in the backward than the policy says",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "scales activations by row, the policy by tensor",
    "NVTE_NVFP4_4OVER6": "chooses block scales by another rule than the policy",
}
_UNSET = ("", "0", "none")


@dataclass(frozen=True)
class Capability:
    """What TE can realise at one place. `why` is one phrase; `scale_rule` is the order of operations in which
    this version computes NVFP4 block scales, None without TE.
    """

    kind: Kind
    why: str
    scale_rule: Literal["te", "te_2_13"] | None = None

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats that TE multiplies here; nvfp4 may need options, see `obstacles`."""
        found: dict[Kind, tuple[Format, ...]] = {
            "full": ("nvfp4", "mxfp8"),
            "no_rht_sr": ("nvfp4",),
            "mxfp8_only": ("mxfp8",),
        }
        return found.get(self.kind, ())


def capability(te_version: str | None, compute_capability: Version | None) -> Capability:
    """What TE `te_version` (None: not installed) does on a GPU of `compute_capability` (None: no GPU).

    TE's own check of NVFP4 asks for 10.0 or more only, so GPUs are told apart here.
    """
    if te_version is None:
        return Capability("no_te", "no Transformer Engine is installed")
    here = f"Transformer Engine {te_version}"
    rule: Literal["te", "te_2_13"] = "te" if _version(te_version) >= OLDEST else "te_2_13"
    if compute_capability is None:
        return Capability("no_gpu", f"{here} has no GPU to compute on", rule)
    gpu = "compute capability {}.{}".format(*compute_capability)
    if compute_capability < (10, 0):
        return Capability("no_fp4_gpu", f"{gpu} is no FP4 GPU (10.0 and 10.3 are)", rule)
    if rule == "te_2_13":
        what = "is older than 2.14 and computes block scales in another order (scale_rule=te_2_13)"
        return Capability("old_te", f"{here} {what}", rule)
    if compute_capability in WHOLE_RECIPE:
        return Capability("full", f"{here} on {gpu}", rule)
    if compute_capability[0] == 12:
        return Capability("no_rht_sr", f"{here} on {gpu}: no MXFP8, no Hadamard or stochastic rounding", rule)
    if compute_capability < (12, 0):
        return Capability("mxfp8_only", f"{here} on {gpu}: MXFP8, but not the whole recipe of NVFP4", rule)
    return Capability("unknown_gpu", f"nothing is known of {here} on {gpu}", rule)


def installed_version() -> str | None:
    """Version of the installed transformer-engine, of PyPI or of a container; None without it."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def _version(text: str) -> Version:
    """(2, 14) of 2.14.0+abc; (0, 0) of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True)
class Multiple:
    """A side of a product must be a multiple of `of`. filled: the adapter makes it one with rows of zeros."""

    side: Literal["inputs", "outputs", "tokens", "tokens of an expert"]
    of: int
    why: str
    filled: bool = False


MULTIPLES = (
    Multiple("inputs", 32, "the forward product contracts them"),
    Multiple("outputs", 32, "the product of the input gradient contracts them"),
    Multiple("tokens", 64, "the product of the weight gradient contracts them (32), a fused kernel", True),
    Multiple("tokens of an expert", 128, "the same in grouped products", True),
)
"""TE's shape constraints in training: blocks ask for 16 (MXFP8 32), contractions for 32, results for 8."""


def multiple(side: str) -> int:
    """What a side must be a multiple of."""
    return next(row.of for row in MULTIPLES if row.side == side)


@dataclass(frozen=True)
class Refusal:
    """Layers of one kind that TE would refuse, and the mend."""

    layers: tuple[str, ...]
    format: Format
    shape: tuple[int, ...]
    rule: Multiple
    size: int
    key: str

    def __str__(self) -> str:
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        shape = ", ".join(map(str, self.shape))
        fitting = -(-self.size // self.rule.of) * self.rule.of
        return (
            f"{self.layers[0]} [{shape}]{more}: {self.format} by Transformer Engine needs {self.rule.side} "
            f"in multiples of {self.rule.of}, {self.rule.why}; got {self.size:,}, {fitting:,} would do: "
            f"change model.{self.key}, give it bf16 by an earlier rule, or take precision.backend=emulate"
        )


def refusals(table: PolicyTable, modules: Modules) -> list[Refusal]:
    """Low-precision layers of a policy table whose shapes TE would refuse, layers of a kind together.

    modules: the same that the table was planned from.
    """
    found: dict[tuple[str, Format, tuple[int, ...], str], list[str]] = {}
    for name, format in table.formats.items():
        if format not in BLOCK:
            continue
        kind = name.partition(".mixer.")[2] or name
        for shape in modules[name].values():
            for side in _wrong_sides(shape):
                found.setdefault((kind, format, shape, side), []).append(name)
    return [
        Refusal(tuple(names), format, shape, rule, _size(shape, rule.side), width_key(names[0], rule.side))
        for (_, format, shape, side), names in found.items()
        for rule in MULTIPLES
        if rule.side == side
    ]


def _wrong_sides(shape: tuple[int, ...]) -> Iterator[str]:
    """Sides of a weight [outputs, inputs] or [E, outputs, inputs] that TE refuses."""
    for rule in MULTIPLES:
        if len(shape) > 1 and not rule.filled and _size(shape, rule.side) % rule.of:
            yield rule.side


def _size(shape: tuple[int, ...], side: str) -> int:
    return shape[-1] if side == "inputs" else shape[-2]


def obstacles(format: Format, policy: PrecisionConfig, found: Capability) -> Iterator[str]:
    """Why TE cannot realise a format as the policy has it, one phrase each; shapes are not looked at."""
    if format not in found.formats:
        yield found.why
        return
    if policy.weights != "bf16":
        yield f"Transformer Engine multiplies bf16 weights, precision.weights={policy.weights}"
    if policy.gradients_bf16:
        yield "Transformer Engine adds gradients up in fp32, precision.gradients_bf16 is not empty"
    if format != "nvfp4":
        return
    options = policy.nvfp4 or Nvfp4Config()
    if options.scale_rule != found.scale_rule:
        yield (
            f"Transformer Engine trains with scale_rule={found.scale_rule}, "
            f"precision.nvfp4.scale_rule={options.scale_rule}"
        )
    if found.kind == "no_rht_sr" and (options.hadamard, options.stochastic_rounding) != ("none", "none"):
        yield f"{found.why}; set precision.nvfp4.hadamard=none and precision.nvfp4.stochastic_rounding=none"


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises BackendError for a variable that makes TE compute other numbers than the policy says."""
    for name, reason in CHANGES_THE_NUMBERS.items():
        value = environ.get(name, "")
        if value.lower() not in _UNSET:
            raise BackendError(
                f"{name} {reason}",
                got=f"{name}={value}",
                do=f"unset {name}, or take precision.backend=emulate",
            )


@dataclass(frozen=True)
class Realisation:
    """Who multiplies the operands of one format in this run, and why."""

    format: Format
    name: Literal["emulate", "te"]
    why: str


def realise(
    table: PolicyTable, modules: Modules, found: Capability, environ: Mapping[str, str]
) -> tuple[Realisation, ...]:
    """One row for each low-precision format of the table: TE where everything fits, else emulation.

    precision.backend=emulate never takes TE. BackendError: precision.backend=te and something does not fit,
    all of it in one message; TE would be taken, and a variable of `environ` changes its numbers.
    """
    policy, refused = table.policy, refusals(table, modules)
    rows, problems = [], []
    for format in (format for format in BLOCK if format in table.formats.values()):
        if policy.backend == "emulate":
            rows.append(Realisation(format, "emulate", "precision.backend=emulate"))
            continue
        against = [
            *obstacles(format, policy, found),
            *(str(refusal) for refusal in refused if refusal.format == format),
        ]
        problems += against
        rows.append(Realisation(format, *(("emulate", against[0]) if against else ("te", found.why))))
    if policy.backend == "te" and problems:
        raise BackendError(
            "precision.backend=te: " + "; ".join(dict.fromkeys(problems)),
            do=INSTALL if found.kind == "no_te" else "take precision.backend=auto or emulate",
        )
    if any(row.name == "te" for row in rows):
        check_environment(environ)
    return tuple(rows)
