"""The process that holds wandb or tensorboard: options, then one row a line on standard input, until its end.

`observe/sinks.py` starts it as `python -m nemotron_ultra.observe.sink_worker module:Class`. A sink is a class
whose constructor takes the options (run_dir, project, mode, config), with write(step, metrics) and close().
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

from nemotron_ultra.observe.metrics import decode_row

_INIT_SECONDS = 20


class SinkLike(Protocol):
    def write(self, step: int, metrics: Mapping[str, object]) -> None: ...

    def close(self) -> None: ...


class WandbSink:
    """wandb run whose id is kept in the run folder, so that a resumed run goes on in the same curve."""

    def __init__(self, options: Mapping[str, object]):
        import wandb

        run_dir = Path(options["run_dir"])
        self._run = wandb.init(
            project=options["project"],
            name=run_dir.name,
            id=_wandb_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=options["config"],
            mode=options["mode"],
            settings=wandb.Settings(init_timeout=_INIT_SECONDS, console="off", x_stats_pid=os.getppid()),
        )
        self._run.define_metric("*", step_metric="step")  # rows repeated after a resume stay at their step

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / "wandb_id"
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()


class TensorboardSink:
    """Scalars in RUN/tensorboard, written with tensorboard's own event writer (no torch in this process)."""

    def __init__(self, options: Mapping[str, object]):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(options["run_dir"]) / "tensorboard"), flush_secs=10)

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.add_event(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


def main(place: str) -> int:
    """Serve one sink until its input ends; a failure goes back as one line and ends the process."""
    rows, replies = _private_streams()
    module, _, name = place.partition(":")
    try:
        sink = getattr(importlib.import_module(module), name)(json.loads(rows.readline()))
        _reply(replies, {"ready": True})
        for line in rows:
            row = decode_row(line)
            sink.write(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
        sink.close()
    except Exception as error:
        _reply(replies, {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:300]})
        raise
    return 0


def _private_streams() -> tuple[TextIO, TextIO]:
    """Keep the pipes for this protocol: the library sees an empty input, and its output goes to the log."""
    rows = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return rows, replies


def _reply(replies: TextIO, message: Mapping[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the run has ended first
        replies.write(json.dumps(message) + "\n")
        replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
