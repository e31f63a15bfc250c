"""recipes/chains/NAME.yaml -> the stages of a chain, each one a command of the train entry point (report 3).

A stage is a run in the folder DIR/CHAIN/STAGE: from fresh weights, from the weights of an earlier stage, or a
branch, which continues an earlier run from one of its checkpoints. No torch here.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemotron_ultra.config import check, schema
from nemotron_ultra.config.compose import load_recipe, parse_override, share_dir
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.trainers.chain_file import (
    DOMAIN,
    AccumulationOptions,
    ChainOptions,
    ComparisonOptions,
    StageOptions,
    expand,
    read_chain,
)

_OWN_KEYS = ("recipe=", "run.from", "teachers.folders")  # the chain says these of every stage


@dataclass(frozen=True, kw_only=True)
class Branch:
    """The run `source` up to `step`, which another run continues."""

    source: str
    step: int


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
    branch: Branch | None = None

    @property
    def sources(self) -> list[str]:
        """Names of the stages whose weights it needs."""
        branch = self.branch.source if self.branch else None
        return [name for name in (self.start, branch, *self.teachers.values()) if name]

    @property
    def beginning(self) -> str:
        """What its first step builds on, in words."""
        if self.branch is not None:
            return f"{self.branch.source} continued after step {self.branch.step:,}"
        return f"from {self.start}" if self.start else "fresh weights"

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
    comparison: ComparisonOptions | None = None
    accumulation: AccumulationOptions | None = None

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
    options = read_chain(known[name])
    _load.cache_clear()  # files may have changed since the last chain
    expanded = expand(options, known[name])
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
    stages = _with_branches(stages, [stage for stage, _ in expanded], config_dir)
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
        comparison=options.comparison,
        accumulation=options.accumulation,
    )


def plan_lines(chain: Chain) -> list[str]:
    """What would run: stage, steps, tokens and command of each."""
    lines = [f"chain {chain.name} in {chain.folder}: {len(chain.stages)} stages"]
    for number, stage in enumerate(chain.stages, 1):
        c = stage.config
        size = f"{c.trainer.steps:,} steps of {c.trainer.global_batch_size:,} rows"
        what = f"{number}. {stage.name}  ({stage.recipe}, {stage.beginning}, {size})"
        lines += ["", what, f"   {stage.command}"]
    return lines


def quoted(value: object) -> str:
    """A text as the value of an override, in quotes where Hydra's grammar asks for them."""
    text = str(value)
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


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
    found = _composed(options.name, options.recipe, words, config_dir)
    _check_domains(options.name, found, chain.domains)
    return Stage(
        name=options.name,
        recipe=options.recipe,
        start=options.from_,
        domain=domain,
        teachers=teachers,
        words=[f"recipe={options.recipe}", *words, *_config_dir_word(config_dir)],
        config=found,
        folder=place / options.name,
    )


def _config_dir_word(config_dir: Path | None) -> list[str]:
    return [f"--config-dir={config_dir}"] if config_dir else []


def _with_branches(stages: list[Stage], options: list[StageOptions], config_dir: Path | None) -> list[Stage]:
    """Branches know the step at which they leave; the runs that they leave keep their checkpoint of it."""
    found = {stage.name: stage for stage in stages}
    kept: dict[str, int] = {}
    for option in (option for option in options if option.branch is not None):
        source = found[option.branch.from_]
        steps = source.config.trainer.steps
        step = max(1, round(option.branch.share * steps))
        if step >= steps or kept.setdefault(source.name, step) != step:
            raise ConfigError(
                f"{option.name}: cannot leave {source.name} after step {step}",
                got=f"{source.name} has {steps} steps"
                + (f", another branch leaves after {kept[source.name]}" if source.name in kept else ""),
                allowed="a step before the last, the same for all branches of one stage",
            )
        found[source.name] = _keeping(source, step, config_dir)
        found[option.name] = replace(found[option.name], branch=Branch(source=source.name, step=step))
    return list(found.values())


def _keeping(stage: Stage, step: int, config_dir: Path | None) -> Stage:
    """The stage with overrides that make it keep its checkpoint of `step` for good."""
    every = stage.config.trainer.checkpoint_every
    extra = [] if every and not step % every else [f"trainer.checkpoint_every={step}"]
    extra.append(f"trainer.keep_every={step}")
    folder = _config_dir_word(config_dir)
    words = [*stage.words[: len(stage.words) - len(folder)], *extra]
    config = _composed(stage.name, stage.recipe, words[1:], config_dir)
    return replace(stage, words=[*words, *folder], config=config)


def _composed(name: str, recipe: str, words: Sequence[str], config_dir: Path | None) -> RunConfig:
    try:
        return _load(recipe, tuple(words), config_dir)
    except ConfigError as error:
        raise ConfigError(f"stage {name}: {error}") from error


_load = functools.cache(load_recipe)  # configurations are frozen


def _absent_groups(options: StageOptions, config_dir: Path | None) -> set[str]:
    """Groups that the stage's recipe leaves null: no loss in pretraining, no teachers in GRPO."""
    found = _composed(options.name, options.recipe, (), config_dir)
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
