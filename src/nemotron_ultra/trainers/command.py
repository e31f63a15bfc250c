"""What every trainer's command does around its training: folder, finished runs, signals, report, last
lines.
"""

from __future__ import annotations

from collections.abc import Callable

from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.observe.console import Console
from nemotron_ultra.observe.html import write_report
from nemotron_ultra.trainers.hooks import SavedOnSignal
from nemotron_ultra.trainers.run_folder import RunFolder, now

Train = Callable[[RunConfig, RunFolder, Console], None]


def in_run_folder(config: RunConfig, train: Train) -> int:
    """Call `train` in the run's folder, new or continued. Returns the exit status of the process."""
    steps = config.trainer.steps
    console = Console(steps, config.log.every)
    with RunFolder.open(config) as folder:
        if folder.finished_steps >= steps:
            console.note(f"this run is finished: {folder.finished_steps} of {steps} steps")
            console.done(folder.path, next_commands(config, folder))
            return 0
        try:
            train(config, folder, console)
        except SavedOnSignal as saved:
            console.note(f"{saved.name}: step {saved.step} of {steps} is finished and saved")
            console.done(folder.path, f"{this_command(config)}   (the same command continues)")
            return saved.code
        folder.record(finished=now(), finished_steps=steps)
        write_report([folder.path], folder.path / "report.html")
        console.done(folder.path, next_commands(config, folder))
    return 0


def this_command(config: RunConfig) -> str:
    return f"python -m nemotron_ultra.train recipe={config.recipe} run.name={config.run.name}"


def next_commands(config: RunConfig, folder: RunFolder) -> list[str]:
    """What a person may want to do with a finished run: look at it, or train it further."""
    return [
        f"python -m nemotron_ultra.report {folder.path}",
        f"{this_command(config)} trainer.steps={2 * folder.facts['finished_steps']}",
    ]
