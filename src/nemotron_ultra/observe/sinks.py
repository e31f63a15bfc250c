"""wandb and tensorboard beside metrics.jsonl, each in a process of its own: nothing it does can stop a run.

A missing package is an error at start. Afterwards a sink that raises, hangs or dies is reported once and
switched off.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nemotron_ultra.config.runtime import LogConfig
from nemotron_ultra.errors import BackendError
from nemotron_ultra.observe.metrics import encode_row

_BUILTIN = {
    "wandb": "nemotron_ultra.observe.sink_worker:WandbSink",
    "tensorboard": "nemotron_ultra.observe.sink_worker:TensorboardSink",
}
_QUEUE_ROWS = 4096


class Sinks:
    """All sinks of a run. `write` never waits and never raises; `close` waits at most `close_seconds`."""

    def __init__(self, sinks: list[Sink], close_seconds: float = 30.0):
        self._sinks, self._close_seconds = sinks, close_seconds
        if sinks:
            atexit.register(self.close)

    @property
    def alive(self) -> list[str]:
        """Names of the sinks that still take rows."""
        return [sink.name for sink in self._sinks if sink.alive]

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        for sink in self._sinks:
            sink.put({**metrics, "step": step})

    def close(self) -> None:
        """Finish every sink, for example the upload of wandb; a second call does nothing."""
        deadline = time.monotonic() + self._close_seconds
        for sink in self._sinks:
            sink.put(None)
        for sink in self._sinks:
            sink.join(max(0.0, deadline - time.monotonic()))
        if self._sinks:
            atexit.unregister(self.close)
        self._sinks = []


def open_sinks(
    config: LogConfig,
    run_dir: str | Path,
    settings: Mapping[str, object],
    *,
    extra: Mapping[str, str] | None = None,
    report: Callable[[str], None] | None = None,
    start_seconds: float = 60.0,
    close_seconds: float = 30.0,
) -> Sinks:
    """Start the sinks that `config` names, and `extra` ones given as name -> "module:Class".

    Args: settings: the resolved configuration, shown by wandb; report: takes one line (default: stderr).
    Errors: BackendError when a package is missing, naming the extra that brings it.
    """
    for name in config.sinks:
        _require(name)
    classes = {name: _BUILTIN[name] for name in config.sinks} | dict(extra or {})
    options = {
        "run_dir": str(Path(run_dir).resolve()),
        "project": config.wandb_project,
        "mode": config.wandb_mode,
        "config": settings,
    }
    say = report or (lambda line: print(line, file=sys.stderr, flush=True))
    return Sinks(
        [Sink(name, place, options, say, start_seconds) for name, place in classes.items()], close_seconds
    )


def _require(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if (
        spec is None or spec.origin is None
    ):  # a folder called wandb beside the run is a namespace, not the package
        raise BackendError(
            f"log.sinks asks for {name}, which is not installed",
            do=f'pip install "nemotron-ultra[{name}]", or leave {name} out of log.sinks',
        )


class Sink:
    """One sink: a queue here, a thread that pumps it, and the worker process that holds the library."""

    def __init__(
        self, name: str, place: str, options: Mapping[str, object], say: Callable, start_seconds: float
    ):
        self.name, self._place, self._options = name, place, dict(options)
        self._say, self._start_seconds = say, start_seconds
        self._rows: queue.Queue = queue.Queue(_QUEUE_ROWS)
        self._worker: Worker | None = None
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._pump, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._failed.is_set()

    def put(self, row: Mapping[str, object] | None) -> None:
        if self._failed.is_set():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail(f"it took no row for {_QUEUE_ROWS} steps")

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {seconds:.0f} s")

    def _fail(self, why: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._say(f"{self.name} is switched off: {why}; the run and metrics.jsonl go on")
        if self._worker is not None:
            self._worker.kill()

    def _pump(self) -> None:
        try:
            self._start()
            while not self._failed.is_set() and (row := self._rows.get()) is not None:
                self._worker.send(encode_row(row))
                self._worker.receive(0.0)
            self._worker.finish()
        except Exception as error:  # reported, and the run goes on: that is what a sink owes a run
            self._fail(str(error) or type(error).__name__)
        finally:
            if self._worker is not None:
                self._worker.kill()

    def _start(self) -> None:
        online = self.name == "wandb" and self._options["mode"] == "online"
        try:
            self._launch()
        except (RuntimeError, TimeoutError) as error:
            if not online or self._failed.is_set():
                raise
            self._worker.kill()
            self._say(f"wandb cannot go online ({error}); it writes offline into the run folder")
            self._options["mode"] = "offline"
            self._launch()

    def _launch(self) -> None:
        self._worker = Worker(self.name, self._place, self._options)
        if self._failed.is_set():  # the run gave it up while it was being started
            self._worker.kill()
        if self._worker.receive(self._start_seconds) is None:
            raise TimeoutError(f"no answer within {self._start_seconds:.0f} s")


class Worker:
    """The process of a sink. Options and rows go to its standard input; a line of JSON comes back when it is
    ready or has failed. What the library prints goes to NAME.log in the run folder."""

    def __init__(self, name: str, place: str, options: Mapping[str, object]):
        log_path = Path(options["run_dir"]) / f"{name}.log"
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nemotron_ultra.observe.sink_worker", place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the run only, which closes its sinks itself
            )
        self._ended = f"its process ended, see {log_path}"
        self._unread = b""
        self._killing = threading.Lock()
        self.send(json.dumps(options, default=str))

    def send(self, line: str) -> None:
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.receive(5.0)
            raise RuntimeError(self._ended) from None

    def receive(self, seconds: float) -> dict[str, object] | None:
        """Next message, or None if none comes in time. RuntimeError if the worker failed or ended."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            readable, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            if not readable:
                return None
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise RuntimeError(self._ended)
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        if "failed" in message:
            raise RuntimeError(message["failed"])
        return message

    def finish(self) -> None:
        """Close its input and wait until it has ended, however long that takes."""
        self._process.stdin.close()
        rest = self._unread + self._process.stdout.read()
        for line in rest.splitlines():
            message = json.loads(line)
            if "failed" in message:
                raise RuntimeError(message["failed"])
        if self._process.wait():
            raise RuntimeError(self._ended)

    def kill(self) -> None:
        """End the process if it is still there, and all that the library started: it leads a session."""
        with self._killing:  # the run and the sink's thread may both give it up
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
