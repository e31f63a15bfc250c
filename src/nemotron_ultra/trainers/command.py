"""What every trainer's command does around its training: folder, finished runs, signals, report, last
lines.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.engine.checkpoint import list_checkpoints
from nemotron_ultra.errors import CheckpointError, NemotronError
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
            asked = f" of {steps} steps" if folder.finished_steps == steps else f" steps, {steps} asked for"
            console.note(f"this run is finished: {folder.finished_steps}{asked}")
            return _finish(config, folder, console)
        if folder.finished_steps and folder.checkpoint is None:  # step 1 would erase its curves
            raise CheckpointError(
                f"{folder.path} has no checkpoint to go on from",
                got=f"a finished run of {folder.finished_steps} steps without its checkpoints",
                do="restore checkpoints/, or choose another run.name",
            )
        try:
            train(config, folder, console)
        except NemotronError:
            folder.leave_no_trace()
            raise
        except SavedOnSignal as saved:
            console.note(f"{saved.name}: step {saved.step} of {steps} is finished and saved")
            console.done(folder.path, f"{this_command(config)}   (the same command continues)")
            return saved.code
        reached = max([steps, *(step for step, _ in list_checkpoints(folder.path))])
        folder.record(finished=now(), finished_steps=reached)
        write_report([folder.path], folder.path / "report.html")
        return _finish(config, folder, console)


def this_command(config: RunConfig, *instead: str) -> str:
    """The command line that this process was started with, some of its overrides replaced by `instead`."""
    words = [f"recipe={config.recipe}", f"run.dir={config.run.dir}", f"run.name={config.run.name}"]
    if Path(sys.argv[0]).parts[-2:] == ("nemotron_ultra", "train.py"):
        words = sys.argv[1:]
    keys = tuple(word.split("=", 1)[0] + "=" for word in instead)
    kept = [word for word in words if not word.startswith(keys or "\0")]
    return shlex.join(["python", "-m", "nemotron_ultra.train", *kept, *instead])


def _in_chain() -> bool:
    """Whether this process runs a chain of runs, whose finished stages are not to be trained further."""
    return "nemotron_ultra.pipeline" in sys.orig_argv


def _finish(config: RunConfig, folder: RunFolder, console: Console) -> int:
    """The last lines: look at the run, or train it further."""
    if not (folder.path / "report.html").exists():
        write_report([folder.path], folder.path / "report.html")
    commands = [f"python -m nemotron_ultra.report {shlex.quote(str(folder.path))}"]
    if not _in_chain():
        commands.append(this_command(config, f"trainer.steps={2 * folder.finished_steps}"))
    console.done(folder.path, commands)
    return 0
