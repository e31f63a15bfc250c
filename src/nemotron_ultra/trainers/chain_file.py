"""What a file of recipes/chains may say, and its stages written out: one a domain, in the order of running.

    common: [OVERRIDE, ...]                    for every stage that has the group that the key belongs to
    domains: [a, b]
    stages:
      - {name: sft, recipe: sft, from: pretrain, overrides: [trainer.steps=40]}
      - {name: "teacher_{domain}", recipe: grpo, from: student, overrides: ["tasks.only=[{domain}]"]}
      - {name: mopd, recipe: mopd, from: student, teachers: "teacher_{domain}"}

A chain of runs that only differ in one thing has a comparison in place of domains:

    comparison: {baseline: bf16, metrics: [loss]}
    stages:
      - {name: bf16, recipe: pretrain, overrides: [precision=bf16]}
      - {name: nvfp4, recipe: pretrain, overrides: [precision=nvfp4]}
      - {name: late, recipe: pretrain, branch: {from: nvfp4, share: 0.8}, overrides: [precision=bf16]}

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nemotron_ultra.config import check
from nemotron_ultra.config.base import Fraction, Positive, PositiveReal, config
from nemotron_ultra.config.compose import read_yaml
from nemotron_ultra.errors import ConfigError

DOMAIN = "{domain}"
_NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._{}-]*$")]


@config
class BranchOptions:
    from_: str
    """Earlier stage whose run is continued in a folder of its own: weights, optimizer, data, everything."""
    share: Annotated[Fraction, Field(gt=0)]
    """Share of that stage's steps after which the branch leaves it."""


@config
class StageOptions:
    name: _NAME
    """Folder of the stage; {domain} in it makes one stage a domain."""
    recipe: str
    """Recipe that the stage runs."""
    from_: str | None = None
    """Earlier stage whose weights it starts from; null means fresh weights."""
    branch: BranchOptions | None = None
    """Checkpoint of an earlier stage that it goes on from; null for a run from its first step."""
    teachers: str | None = None
    """Stages that teach it, {domain} standing for each domain."""
    overrides: list[str] = Field(default_factory=list)
    """Overrides of this stage, {domain} standing for its domain."""

    @property
    def sources(self) -> list[str]:
        """Stages that it needs, teachers aside."""
        return [name for name in (self.from_, self.branch.from_ if self.branch else None) if name is not None]


@config
class EvaluationOptions:
    max_new_tokens: Positive | None = None
    """Longest answer to a held-out problem; null: the largest rollout.max_new_tokens of the stages."""


@config
class ComparisonOptions:
    baseline: str
    """Stage that all others are compared with, step by step."""
    metrics: Annotated[list[str], Field(min_length=1)]
    """Keys of metrics.jsonl that are laid over each other; relative gaps are drawn for each."""
    level: PositiveReal | None = None
    """A relative gap to draw beside the curves, such as 0.004."""
    level_name: str = "level"
    """What that gap is."""


@config
class AccumulationOptions:
    micro_batches: Positive = 1024
    """Most micro-batches; every power of two up to it is a point."""
    mtp_scale: PositiveReal = 0.05
    """Weight of one MTP depth's gradient beside the main one (report 2.4: 0.1 over two depths)."""


@config
class ChainOptions:
    domains: list[str] = Field(default_factory=list)
    """Task domains in the order of the table."""
    common: list[str] = Field(default_factory=list)
    """Overrides of all stages; a stage without the group of a key (no `rollout`, say) leaves it out."""
    stages: Annotated[list[StageOptions], Field(min_length=1)]
    """The runs in their order."""
    evaluation: EvaluationOptions = Field(default_factory=EvaluationOptions)
    """How held-out problems are answered after each stage."""
    comparison: ComparisonOptions | None = None
    """Curves of the stages over each other; null where stages build on each other."""
    accumulation: AccumulationOptions | None = None
    """Arithmetic of gradient buffers, shown before the runs; null leaves it out."""


def read_chain(file: Path) -> ChainOptions:
    """The checked content of a chain file. Raises ConfigError that names the file and lists all mistakes."""
    try:
        options = check.checked(ChainOptions, read_yaml(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from error
    return options


def expand(options: ChainOptions, file: Path) -> list[tuple[StageOptions, str | None]]:
    """Every stage with its domain, if it has one. Raises ConfigError for an order that cannot be run."""
    templates = [stage.name for stage in options.stages if DOMAIN in f"{stage.name} {stage.teachers}"]
    if templates and not options.domains:
        raise ConfigError(
            f"{file}: domains: got []; allowed: at least one domain, which {DOMAIN} of the stage "
            f"'{templates[0]}' stands for"
        )
    expanded = [one for stage in options.stages for one in _one_a_domain(stage, options.domains)]
    _check_order(file, [stage for stage, _ in expanded], options.comparison)
    return expanded


def _one_a_domain(stage: StageOptions, domains: list[str]) -> Iterator[tuple[StageOptions, str | None]]:
    """The stage itself, or one a domain."""
    if DOMAIN not in stage.name:
        yield stage, None
        return
    for domain in domains:

        def put(text: str, domain: str = domain) -> str:
            return text.replace(DOMAIN, domain)

        yield (
            StageOptions(
                name=put(stage.name),
                recipe=stage.recipe,
                from_=put(stage.from_) if stage.from_ else None,
                branch=stage.branch,
                teachers=stage.teachers,
                overrides=[put(text) for text in stage.overrides],
            ),
            domain,
        )


def _check_order(file: Path, stages: list[StageOptions], comparison: ComparisonOptions | None) -> None:
    """Each stage comes once and after those it needs. Raises ConfigError that lists all mistakes."""
    names, problems = [stage.name for stage in stages], []
    starts = {stage.name: stage.from_ for stage in stages}
    for number, stage in enumerate(stages):
        if stage.name in names[:number]:
            problems.append(f"stages: two are named {stage.name}")
            continue
        if stage.from_ is not None and stage.branch is not None:
            problems.append(f"{stage.name}: has from and branch; allowed: one of them")
        for start in stage.sources:
            problems += _order_problem(stage.name, start, names, number, starts)
    if comparison is not None and comparison.baseline not in names:
        hint = check.nearest(comparison.baseline, names)
        problems.append(
            f"comparison.baseline: '{comparison.baseline}' is no stage{hint}; allowed: {', '.join(names)}"
        )
    if problems:
        raise ConfigError(f"{file}: {check.mistakes(problems)}")


def _order_problem(
    name: str, start: str, names: list[str], number: int, starts: dict[str, str | None]
) -> Iterator[str]:
    if start not in names:
        hint = check.nearest(start, names)
        yield f"{name}: from '{start}' is no stage{hint}; allowed: {', '.join(names[:number])}"
    elif start not in names[:number]:
        way = _way_back(name, starts)
        what = f"leads back to itself ({way})" if way else f"starts from {start}, which comes later"
        yield f"{name}: {what}; put the stages in the order of their running"


def _way_back(name: str, starts: dict[str, str | None]) -> str:
    """ "a from b from a" if following `from` leads round to `name`, else ""."""
    way, at = [name], starts.get(name)
    while at is not None and at not in way:
        way.append(at)
        at = starts.get(at)
    return " from ".join([*way, name]) if at == name else ""
