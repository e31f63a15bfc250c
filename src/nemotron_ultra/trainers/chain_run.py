"""A chain's stages one after another: train, score on held-out problems, write the table and the page.

    recovery(domain) = (MOPD - student) / (teacher of the domain - student)            report 3.4, table 5

Everything that counts is on the disk after each stage, so the same command goes on where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nemotron_ultra.config.compose import read_config, to_dict
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import CheckpointError, ConfigError
from nemotron_ultra.observe.chain_page import run_or_none, score_lines, write_chain_page
from nemotron_ultra.observe.comparison import compare, comparison_lines
from nemotron_ultra.observe.console import Console
from nemotron_ultra.observe.html import write_report
from nemotron_ultra.precision.accumulation import accumulation_rows
from nemotron_ultra.rl.environments import make_environments
from nemotron_ultra.trainers.branch import begin_branch
from nemotron_ultra.trainers.chain import Chain, Stage
from nemotron_ultra.trainers.evaluation import (
    SCORES,
    newest_step,
    read_json,
    save_scores,
    score_weights,
    write_json,
)
from nemotron_ultra.trainers.run_folder import changed_keys

SMALLEST_LEAD = 0.01  # of a teacher, below which a recovery rate would be noise over noise

Train = Callable[[Sequence[str]], int]

ACCUMULATION = "accumulation.json"

# Beginnings of lines "key: old -> new" for what no number of a stage depends on.
_HARMLESS = (
    "log.",
    "engine.",
    "cluster.",
    "trainer.checkpoint_every:",
    "trainer.keep_last:",
    "trainer.keep_every:",
    "trainer.sample_every:",
    "trainer.sample_tokens:",
    "trainer.validate_every:",
    "trainer.validate_rows:",
)


def run_chain(chain: Chain, train: Train, console: Console) -> int:
    """Run what is not finished. Returns 0, or the exit status of the stage that stopped the chain.

    `train` is the train entry point: words of a command line -> exit status.
    Raises ConfigError, before anything runs, if a finished stage was run with another configuration.
    """
    trained: set[str] = set()
    with _locked(chain.folder):
        check_folder(chain)
        check_tasks(chain)
        measure_accumulation(chain, console)
        for number, stage in enumerate(chain.stages, 1):
            head = f"stage {number} of {len(chain.stages)}: {stage.name}"
            if is_finished(stage):
                console.note(f"{head} is finished{_made_from_others(stage, trained)}")
            else:
                size = f"{stage.config.trainer.steps:,} steps"
                console.note(f"\n{head} ({stage.recipe}, {stage.beginning}, {size})")
                begin_branch(chain, stage)
                code = train(stage.words)
                if code:
                    return code
                trained.add(stage.name)
            if not (stage.folder / "report.html").exists():  # the end was interrupted
                write_report([stage.folder], stage.folder / "report.html")
            score_stage(chain, stage, console)
            write_table(chain)
        return 0


def _made_from_others(stage: Stage, trained: set[str]) -> str:
    """A remark where run.allow_config_change=true keeps a stage whose sources were trained further."""
    changed = [name for name in stage.sources if name in trained]
    return f", made from earlier weights of {', '.join(changed)}" if changed else ""


def measure_accumulation(chain: Chain, console: Console) -> None:
    """Write the chain's accumulation.json, if it is to have one and it is not there already."""
    if chain.accumulation is None or accumulation(chain) is not None:
        return
    console.note(f"gradient buffers: 1 to {chain.accumulation.micro_batches:,} micro-batches")
    settings = to_dict(chain.accumulation)
    rows = accumulation_rows(**settings)
    write_json(chain.folder / ACCUMULATION, {"settings": settings, "rows": rows})
    write_table(chain)


def accumulation(chain: Chain) -> dict[str, Any] | None:
    """The content of the chain's accumulation.json, if it was measured as the chain asks."""
    found = read_json(chain.folder / ACCUMULATION)
    return found if found and found.get("settings") == to_dict(chain.accumulation) else None


def check_tasks(chain: Chain) -> None:
    """Make the first problems now: a missing library or a wrong argument is told before hours of training."""
    configs = [stage.config for stage in chain.stages if stage.config.tasks is not None]
    if configs:
        make_environments(configs[0].tasks, configs[0].run.seed)


def score_stage(chain: Chain, stage: Stage, console: Console) -> None:
    """Write STAGE/scores.json for the stage's newest weights, unless it is there already."""
    tasks = stage.config.tasks
    if tasks is None or stage_scores(chain, stage) is not None:
        return
    console.note(f"{stage.name}: answering {tasks.validation_problems} held-out problems of each domain")
    found = score_weights(stage.folder, stage.config, max_new_tokens=chain.max_new_tokens)
    save_scores(found, stage.folder)
    cells = "  ".join(f"{domain} {100 * score:.1f}" for domain, score in found.scores.items())
    console.note(f"{stage.name}: {cells} %")


def stage_scores(chain: Chain, stage: Stage) -> dict[str, Any] | None:
    """The stage's scores.json if it belongs to its newest weights and to what the chain asks."""
    found, tasks = read_json(stage.folder / SCORES), stage.config.tasks
    if found is None or tasks is None:
        return None
    wanted = {
        "domains": list(tasks.domains),
        "problems": tasks.validation_problems,
        "temperature": tasks.validation_temperature,
        "max_new_tokens": chain.max_new_tokens,
        "seed": stage.config.run.seed,
    }
    settings = found.get("settings")
    same = isinstance(settings, dict) and all(settings.get(key) == value for key, value in wanted.items())
    newest = newest_step(stage.folder)
    # Without checkpoints there is nothing to score again: what the finished run scored stays.
    step = finished_steps(stage) if newest is None else newest
    return found if same and found.get("step") == step else None


def write_table(chain: Chain) -> dict[str, Any]:
    """Write the chain's scores.json and report.html from the stages' files; returns the former."""
    found = summary(chain)
    write_json(chain.folder / SCORES, found)
    write_chain_page(chain.folder, found)
    return found


def summary(chain: Chain) -> dict[str, Any]:
    """What the table, the page and a script need: an entry a stage, and the recovery rates."""
    entries = [_entry(chain, stage) for stage in chain.stages]
    compared = chain.comparison and compare(
        {stage.name: run for stage in chain.stages if (run := run_or_none(stage.folder))},
        **to_dict(chain.comparison),
    )
    return {
        "chain": chain.name,
        "seed": chain.stages[0].config.run.seed,
        "domains": chain.domains,
        "finished": all(entry["finished"] for entry in entries),
        "stages": entries,
        "recovery": chain_recovery(chain, {entry["name"]: entry.get("scores") for entry in entries}),
        "comparison": compared,
        "accumulation": accumulation(chain) if chain.accumulation else None,
    }


def _entry(chain: Chain, stage: Stage) -> dict[str, Any]:
    scores = stage_scores(chain, stage)
    entry = {
        "name": stage.name,
        "recipe": stage.recipe,
        "from": stage.start,
        "domain": stage.domain,
        "branch": stage.branch and {"from": stage.branch.source, "step": stage.branch.step},
        "steps": stage.config.trainer.steps,
        "finished": is_finished(stage) and (stage.config.tasks is None or scores is not None),
    }
    if scores is not None:
        entry |= {key: scores[key] for key in ("step", "scores", "mean", "settings")}
        entry["scoring_seconds"] = scores.get("seconds")
    return entry


def chain_recovery(chain: Chain, scores: Mapping[str, Mapping[str, float] | None]) -> dict[str, Any] | None:
    """Recovery by domain, with the three scores that it is made of; None until MOPD is scored."""
    mopd, student = chain.mopd, chain.student
    if mopd is None or student is None or not scores.get(mopd.name) or not scores.get(student.name):
        return None
    own = {d: scores[name][d] for d, name in mopd.teachers.items() if scores.get(name)}
    before, after = scores[student.name], scores[mopd.name]
    rates = {domain: recovery(before[domain], teacher, after[domain]) for domain, teacher in own.items()}
    known = [rate for rate in rates.values() if rate is not None]
    return {
        "domains": rates,
        "mean": sum(known) / len(known) if known else None,
        "student": {domain: before[domain] for domain in own},
        "teacher": own,
        "mopd": {domain: after[domain] for domain in own},
    }


def recovery(student: float, teacher: float, mopd: float) -> float | None:
    """(MOPD - student) / (teacher - student); None where the teacher leads by less than SMALLEST_LEAD."""
    gap = teacher - student
    return (mopd - student) / gap if gap >= SMALLEST_LEAD else None


def table_lines(found: Mapping[str, Any]) -> list[str]:
    """The tables for a screen, with what their marks mean."""
    lines = []
    if found["domains"]:
        note = "* a teacher on its own domain; recovery = (MOPD - student) / (teacher - student)"
        lines += [*score_lines(found), note]
    if found["comparison"]:
        lines += comparison_lines(found["comparison"])
    return lines


def is_finished(stage: Stage) -> bool:
    """Whether the stage came to its end with the steps that are asked for."""
    return finished_steps(stage) >= stage.config.trainer.steps


def finished_steps(stage: Stage) -> int:
    """Steps of the stage when it came to its end; 0 if it did not."""
    facts = read_json(stage.folder / "run.json") or {}
    return int(facts.get("finished_steps", 0))


def check_folder(chain: Chain) -> None:
    """Raise ConfigError if the chain's folder holds something else, or finished stages of another chain."""
    if (chain.folder / "run.json").exists():
        raise ConfigError(f"{chain.folder} is a run, not a chain", do="choose another run.name or run.dir")
    found = (read_json(chain.folder / SCORES) or {}).get("chain", chain.name)
    if found != chain.name:
        raise ConfigError(
            f"{chain.folder} belongs to chain={found}",
            got=f"chain={chain.name}",
            do="choose another run.name",
        )
    if not chain.allow_change:
        for stage in chain.stages:
            _check_finished(chain, stage)


def _check_finished(chain: Chain, stage: Stage) -> None:
    """A stage that came to its end is used as it is, so it must be the one that the chain asks for."""
    if not finished_steps(stage):
        return
    changes = changed_keys(_comparable(read_config(stage.folder / "config.yaml")), _comparable(stage.config))
    changes = [line for line in changes if not line.startswith(_HARMLESS)]
    if changes:
        raise ConfigError(
            f"{stage.folder} is finished, with another configuration than the chain asks for now",
            got="; ".join(changes[:8]),
            do="take the old values, choose another run.name for the chain, or use the stage as it is with "
            "run.allow_config_change=true",
        )
    for source in map(chain.stage, stage.sources):
        if not finished_steps(source):
            raise CheckpointError(
                f"{stage.folder} is finished, but {source.name}, which it was made from, is not",
                do=f"restore {source.folder}, remove {stage.folder}, or choose another run.name",
            )


def _comparable(config: RunConfig) -> dict[str, Any]:
    """The configuration with names in place of paths: a chain's folder may be moved or named otherwise."""
    found = to_dict(config)
    del found["run"]["dir"]
    if config.run.from_:
        found["run"]["from"] = Path(config.run.from_).name
    if config.teachers is not None:
        found["teachers"]["folders"] = {n: Path(path).name for n, path in config.teachers.folders.items()}
    return found


@contextmanager
def _locked(folder: Path):
    """One chain at a time in a folder; the system drops the lock when this process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{folder} is being written by another chain",
            do="wait for it, stop it, or choose another run.name",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be used", got=error.strerror, do="choose another run.dir or run.name"
        ) from error
    try:
        yield
    finally:
        lock.release()
