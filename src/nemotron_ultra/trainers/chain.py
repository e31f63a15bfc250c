"""recipes/chains/NAME.yaml -> the stages of a chain, each one a command of the train entry point (report 3).

    common: [OVERRIDE, ...]                    for every stage that has the group that the key belongs to
    domains: [a, b]
    stages:
      - {name: sft, recipe: sft, from: pretrain, overrides: [trainer.steps=40]}
      - {name: "teacher_{domain}", recipe: grpo, from: student, overrides: ["tasks.only=[{domain}]"]}
      - {name: mopd, recipe: mopd, from: student, teachers: "teacher_{domain}"}

A stage is a run in the folder DIR/CHAIN/STAGE. {domain} in a name makes one stage a domain. No torch here.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nemotron_ultra.config import check, schema
from nemotron_ultra.config.base import Positive, config
from nemotron_ultra.config.compose import load_recipe, parse_override, read_yaml, share_dir
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import ConfigError

DOMAIN = "{domain}"
_NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._{}-]*$")]
_OWN_KEYS = ("run.from", "teachers.folders")  # the chain says these of every stage


@config
class StageOptions:
    name: _NAME
    """Folder of the stage; {domain} in it makes one stage a domain."""
    recipe: str
    """Recipe that the stage runs."""
    from_: str | None = None
    """Earlier stage whose weights it starts from; null means fresh weights."""
    teachers: str | None = None
    """Stages that teach it, {domain} standing for each domain."""
    overrides: list[str] = Field(default_factory=list)
    """Overrides of this stage, {domain} standing for its domain."""


@config
class EvaluationOptions:
    max_new_tokens: Positive | None = None
    """Longest answer to a held-out problem; null: the largest rollout.max_new_tokens of the stages."""


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


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run. `words` are its command line; `start` names the stage that it continues from."""

    name: str
    recipe: str
    start: str | None
    domain: str | None
    teachers: dict[str, str]
    words: list[str]
    config: RunConfig
    folder: Path

    @property
    def sources(self) -> list[str]:
        """Names of the stages whose weights it needs."""
        return [name for name in (self.start, *self.teachers.values()) if name]

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", "nemotron_ultra.train", *self.words])


@dataclass(frozen=True, kw_only=True)
class Chain:
    """All stages in order, and the folder that holds theirs."""

    name: str
    folder: Path
    domains: list[str]
    stages: list[Stage]
    max_new_tokens: int | None
    allow_change: bool = False

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    @property
    def mopd(self) -> Stage | None:
        """The last stage that has teachers."""
        return next((stage for stage in reversed(self.stages) if stage.teachers), None)

    @property
    def student(self) -> Stage | None:
        """The stage that distillation starts from: the first on the way back without teachers."""
        stage = self.mopd
        while stage is not None and stage.teachers:
            stage = self.stage(stage.start) if stage.start else None
        return stage


@dataclass(frozen=True)
class Override:
    """`text` for the stages whose name matches `pattern`; `used` lists those that took it."""

    text: str
    pattern: str = "*"
    used: list[str] = field(default_factory=list)

    @property
    def group(self) -> str:
        return self.text.lstrip("+~").partition("=")[0].partition(".")[0]

    @classmethod
    def parse(cls, word: str) -> Override:
        """`key=value`, or `STAGE:key=value` where STAGE may hold the wildcards * and ?."""
        head, mark, rest = word.partition("=")
        pattern, colon, key = head.partition(":")
        return cls(key + mark + rest, pattern) if colon else cls(word)


def chains(config_dir: Path | None = None) -> dict[str, Path]:
    """Chain name -> file; a user's chain comes before a shipped one of the same name."""
    folders = [share_dir("recipes"), *([config_dir] if config_dir else [])]
    return {file.stem: file for folder in folders for file in sorted((folder / "chains").glob("*.yaml"))}


def load_chain(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Chain:
    """The checked stages of a chain, with every stage's configuration.

    overrides: key=value for all stages, STAGE:key=value for some; run.dir and run.name place the chain.
    Raises ConfigError for an unknown chain, a mistake in its file, in a stage, or in an override.
    """
    known = chains(config_dir)
    if name not in known:
        raise ConfigError(
            f"chain: no chain '{name}'{check.nearest(name, known)}",
            allowed=", ".join(known),
            do="`--list` says what each is",
        )
    options = _read(known[name])
    _load.cache_clear()  # files may have changed since the last chain
    expanded = [one for stage in options.stages for one in _expand(stage, options.domains)]
    _check_order(known[name], [stage for stage, _ in expanded])
    place, rest = _place(name, overrides)
    extra = [Override.parse(word) for word in rest]
    _check_targets(extra, [stage.name for stage, _ in expanded])
    stages = [
        _stage(stage, domain, options, place=place, extra=extra, config_dir=config_dir)
        for stage, domain in expanded
    ]
    unused = [override.text for override in extra if not override.used]
    if unused:
        raise ConfigError(
            f"{unused[0]}: no stage that it is meant for has such a group",
            allowed=f"groups of the stages' recipes: {', '.join(_groups(stages))}",
        )
    _check_tasks(stages)
    _check_teachers(stages)
    lengths = [stage.config.rollout.max_new_tokens for stage in stages if stage.config.rollout]
    return Chain(
        name=name,
        folder=place,
        domains=options.domains,
        stages=stages,
        max_new_tokens=options.evaluation.max_new_tokens or max(lengths, default=None),
        allow_change=any(stage.config.run.allow_config_change for stage in stages),
    )


def plan_lines(chain: Chain) -> list[str]:
    """What would run: stage, steps, tokens and command of each."""
    lines = [f"chain {chain.name} in {chain.folder}: {len(chain.stages)} stages"]
    for number, stage in enumerate(chain.stages, 1):
        start = f"from {stage.start}" if stage.start else "fresh weights"
        c = stage.config
        size = f"{c.trainer.steps:,} steps of {c.trainer.global_batch_size:,} rows"
        lines += ["", f"{number}. {stage.name}  ({stage.recipe}, {start}, {size})", f"   {stage.command}"]
    return lines


def quoted(value: object) -> str:
    """A text as the value of an override, in quotes where Hydra's grammar asks for them."""
    text = str(value)
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _read(file: Path) -> ChainOptions:
    try:
        return check.checked(ChainOptions, read_yaml(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from error


def _expand(stage: StageOptions, domains: list[str]) -> Iterator[tuple[StageOptions, str | None]]:
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
                teachers=stage.teachers,
                overrides=[put(text) for text in stage.overrides],
            ),
            domain,
        )


def _check_order(file: Path, stages: list[StageOptions]) -> None:
    """Each stage comes once and after the one it starts from. Raises ConfigError that lists all mistakes."""
    names, problems = [stage.name for stage in stages], []
    starts = {stage.name: stage.from_ for stage in stages}
    for number, (name, start) in enumerate((stage.name, stage.from_) for stage in stages):
        if name in names[:number]:
            problems.append(f"stages: two are named {name}")
        elif start is not None and start not in names:
            hint = check.nearest(start, names)
            problems.append(f"{name}: from '{start}' is no stage{hint}; allowed: {', '.join(names[:number])}")
        elif start is not None and start not in names[:number]:
            way = _way_back(name, starts)
            what = f"leads back to itself ({way})" if way else f"starts from {start}, which comes later"
            problems.append(f"{name}: {what}; put the stages in the order of their running")
    if problems:
        raise ConfigError(f"{file}: {check.mistakes(problems)}")


def _way_back(name: str, starts: dict[str, str | None]) -> str:
    """ "a from b from a" if following `from` leads round to `name`, else ""."""
    way, at = [name], starts.get(name)
    while at is not None and at not in way:
        way.append(at)
        at = starts.get(at)
    return " from ".join([*way, name]) if at == name else ""


def _place(name: str, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The chain's folder, run.dir/run.name (run.name is the chain's name if not given), and the other words.

    Words that are no overrides are told here, before any recipe is composed.
    """
    found, rest = {"run.dir": "runs", "run.name": name}, []
    for word in overrides:
        override = Override.parse(word)
        parsed = parse_override(override.text)
        if override.text.startswith(_OWN_KEYS):
            raise ConfigError(f"{override.text}: the chain itself sets this key of every stage")
        if parsed.key_or_group in found and override.pattern == "*":
            found[parsed.key_or_group] = str(parsed.value())
        else:
            rest.append(word)
    return Path(found["run.dir"]) / found["run.name"], rest


def _check_targets(extra: list[Override], names: list[str]) -> None:
    for override in extra:
        if not fnmatch.filter(names, override.pattern):
            raise ConfigError(
                f"{override.pattern}:{override.text}: no stage '{override.pattern}'"
                f"{check.nearest(override.pattern, names)}",
                allowed=", ".join(names),
            )


def _stage(
    options: StageOptions,
    domain: str | None,
    chain: ChainOptions,
    *,
    place: Path,
    extra: list[Override],
    config_dir: Path | None,
) -> Stage:
    """The stage's command: the chain's overrides, its own, the command line's, then the links to others."""
    own = options.overrides
    absent = _absent_groups(options, config_dir) - {Override(text).group for text in own}
    common = [text for text in chain.common if Override(text).group not in absent]
    typed = []
    for override in extra:
        if fnmatch.fnmatchcase(options.name, override.pattern) and override.group not in absent:
            override.used.append(options.name)
            typed.append(override.text)
    links = [f"run.dir={quoted(place)}", f"run.name={options.name}"]
    if options.from_:
        links.append(f"run.from={quoted(place / options.from_)}")
    teachers = {one: options.teachers.replace(DOMAIN, one) for one in chain.domains if options.teachers}
    if teachers:
        folders = [f"{one}: {quoted(place / name)}" for one, name in teachers.items()]
        links += ["~teachers.folders", f"teachers.folders={{{', '.join(folders)}}}"]
    words = [*common, *own, *typed, *links]
    found = _composed(options, words, config_dir)
    _check_domains(options.name, found, chain.domains)
    folder = [f"--config-dir={config_dir}"] if config_dir else []
    return Stage(
        name=options.name,
        recipe=options.recipe,
        start=options.from_,
        domain=domain,
        teachers=teachers,
        words=[f"recipe={options.recipe}", *words, *folder],
        config=found,
        folder=place / options.name,
    )


def _composed(options: StageOptions, words: Sequence[str], config_dir: Path | None) -> RunConfig:
    try:
        return _load(options.recipe, tuple(words), config_dir)
    except ConfigError as error:
        raise ConfigError(f"stage {options.name}: {error}") from error


_load = functools.cache(load_recipe)  # configurations are frozen


def _absent_groups(options: StageOptions, config_dir: Path | None) -> set[str]:
    """Groups that the stage's recipe leaves null: no loss in pretraining, no teachers in GRPO."""
    found = _composed(options, (), config_dir)
    return {group for group in schema.groups() if getattr(found, group) is None}


def _check_domains(name: str, found: RunConfig, domains: list[str]) -> None:
    known = found.tasks.domains if found.tasks is not None else domains
    for domain in domains:
        if domain not in known:
            raise ConfigError(
                f"domains: stage {name} has no domain '{domain}'{check.nearest(domain, known)}",
                allowed=", ".join(known),
            )


def _groups(stages: list[Stage]) -> list[str]:
    return [name for name in schema.groups() if any(getattr(s.config, name) is not None for s in stages)]


def _check_tasks(stages: list[Stage]) -> None:
    """One list of held-out problems for all stages, so that their scores can be compared."""
    tasks = [(stage.name, replace(stage.config.tasks, only=[])) for stage in stages if stage.config.tasks]
    for name, found in tasks:
        if found != tasks[0][1]:
            raise ConfigError(
                "tasks: all stages are scored on the same held-out problems, so only tasks.only may differ",
                got=f"other tasks in {name} than in {tasks[0][0]}",
                do="set them in `common`, or on the command line for all stages",
            )


def _check_teachers(stages: list[Stage]) -> None:
    """Teachers come before those who learn from them."""
    for number, stage in enumerate(stages):
        earlier = [other.name for other in stages[:number]]
        missing = [name for name in stage.teachers.values() if name not in earlier]
        if missing:
            raise ConfigError(
                f"{stage.name}: its teacher '{missing[0]}' is no stage before it"
                f"{check.nearest(missing[0], earlier)}",
                allowed=", ".join(earlier),
            )
