"""Small classes called after every step, in the order of their list: each adds to `metrics` or writes it.

Clock and the measuring hooks come first, then the writers, then checkpoint and signal: what a checkpoint
says has been logged is on the disk before it.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.engine.base import Metrics, Objective
from nemotron_ultra.engine.torch_engine import TorchEngine
from nemotron_ultra.errors import EXIT_SAVED_ON_SIGNAL
from nemotron_ultra.objectives.next_token import pooled, total_counts
from nemotron_ultra.observe.console import Console
from nemotron_ultra.observe.machine import peak_memory_bytes
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.observe.sinks import Sinks
from nemotron_ultra.observe.stability import stability_metrics


class Hook:
    """Base: does nothing. `state_dict` is saved in every checkpoint under the class's name."""

    def start(self) -> None:
        """Called once before the first step."""

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Called after step number `step` (the first is 1); `metrics` may be added to."""

    def finish(self) -> None:
        """Called once at the end, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Every:
    """True at each multiple of `every`, and at the last step; 0 leaves the last step only."""

    def __init__(self, every: int, last: int):
        self.every, self.last = every, last

    def __call__(self, step: int) -> bool:
        return step == self.last or (self.every > 0 and step % self.every == 0)


class Clock(Hook):
    """seconds, tokens_per_second, matmul_share, memory_gb and total tokens of each step.

    Only the step itself is timed: `restart`, the last hook of the list, sets the clock after validation and
    checkpoints.
    matmul_share = training FLOPs of the step / seconds / measured matmul FLOP/s of the machine.
    """

    def __init__(self, engine: TorchEngine, training_flops_per_token: float, matmul_flops: float):
        self.engine, self.flops_per_token, self.matmul_flops = engine, training_flops_per_token, matmul_flops
        self.restart = Restart(self)
        self.mark, self.tokens = 0.0, 0.0

    def start(self) -> None:
        self.set()

    def set(self) -> None:
        self.mark, self.tokens = time.perf_counter(), self.engine.tokens

    def after_step(self, step: int, metrics: Metrics) -> None:
        seconds = time.perf_counter() - self.mark
        rate = (self.engine.tokens - self.tokens) / seconds
        metrics |= {"step": step, "tokens": self.engine.tokens, "seconds": seconds, "tokens_per_second": rate}
        metrics["matmul_share"] = rate * self.flops_per_token / self.matmul_flops
        metrics["memory_gb"] = peak_memory_bytes() / 1e9


class Restart(Hook):
    """Sets its clock again, so that what ran between is in no step's seconds."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def after_step(self, step: int, metrics: Metrics) -> None:
        self.clock.set()


class Stability(Hook):
    """MaxVio of each MoE layer in both definitions, and the residual norm after each layer (report 2.7)."""

    def __init__(self, engine: TorchEngine):
        self.engine = engine

    def after_step(self, step: int, metrics: Metrics) -> None:
        metrics |= stability_metrics(self.engine.counts_LE, self.engine.residual_norm_L)


class Validation(Hook):
    """val/ losses, each MTP depth by itself, and bits per byte of the validation text.

    bits_per_byte = loss x labels / (ln 2 x bytes of the labels); the end-of-document label costs bits and
    adds no byte. Batches that name their stats["source"] also give val/SOURCE/loss, over its labels alone.
    """

    def __init__(
        self,
        engine: TorchEngine,
        objective: Objective,
        batches: Sequence[TokenBatch],
        bytes_V: np.ndarray,
        when: Every,
    ):
        self.engine, self.objective, self.when = engine, objective, when
        self.sources: dict[str | None, list[TokenBatch]] = {}
        for batch in batches:
            self.sources.setdefault(batch.stats.get("source"), []).append(batch)
        self.counts = {source: total_counts(objective, part) for source, part in self.sources.items()}
        self.labels = sum(float(batch.weight_T.sum()) for batch in batches)
        kept = [batch.labels_T[batch.weight_T > 0].cpu().numpy() for batch in batches]
        self.bytes = float(sum(bytes_V[labels].sum() for labels in kept))

    def after_step(self, step: int, metrics: Metrics) -> None:
        if not self.when(step):
            return
        by_source = {name: self.engine.evaluate(part, self.objective) for name, part in self.sources.items()}
        found = pooled([(own, self.counts[source]) for source, own in by_source.items()])
        metrics |= {f"val/{name}": value for name, value in found.items()}
        metrics |= {f"val/{source}/loss": own["loss"] for source, own in by_source.items() if source}
        if self.bytes:
            metrics["val/bits_per_byte"] = found["loss"] * self.labels / (math.log(2) * self.bytes)


class Measure(Hook):
    """Adds what `measure()` gives: every step, or only where `when(step)`."""

    def __init__(self, measure: Callable[[], Metrics], when: Every | None = None):
        self.measure, self.when = measure, when

    def after_step(self, step: int, metrics: Metrics) -> None:
        if self.when is None or self.when(step):
            metrics |= self.measure()


class Publish(Hook):
    """Hands the new weights to whoever draws tokens, before anything else looks at the step."""

    def __init__(self, publish: Callable[[int], None], close: Callable[[], None] | None = None):
        self.publish, self.close = publish, close

    def after_step(self, step: int, metrics: Metrics) -> None:
        begin = time.perf_counter()
        self.publish(step)
        metrics["seconds/publish"] = time.perf_counter() - begin

    def finish(self) -> None:
        if self.close is not None:
            self.close()


class Rows(Hook):
    """Appends the rows that `rows()` gives to a file of lines, each with its step."""

    def __init__(
        self, engine: TorchEngine, log: MetricsLog, rows: Callable[[], list[dict[str, Any]]], when: Every
    ):
        self.engine, self.log, self.rows, self.when = engine, log, rows, when

    def start(self) -> None:
        self.log.truncate_after(self.engine.step)

    def after_step(self, step: int, metrics: Metrics) -> None:
        if self.when(step):
            for row in self.rows():
                self.log.append({"step": step} | row)


class Log(Hook):
    """metrics.jsonl, the step line and the sinks. Rows after the step to go on from are dropped at start."""

    def __init__(self, engine: TorchEngine, log: MetricsLog, console: Console, sinks: Sinks):
        self.engine, self.log, self.console, self.sinks = engine, log, console, sinks

    def start(self) -> None:
        self.log.truncate_after(self.engine.step)

    def after_step(self, step: int, metrics: Metrics) -> None:
        row = {"step": step} | metrics
        self.log.append(row)
        self.console.step(row)
        self.sinks.write(step, row)

    def finish(self) -> None:
        self.sinks.close()
        self.console.close()


class Samples(Hook):
    """Text written by the model after a prompt from the validation text, appended to samples.jsonl."""

    def __init__(
        self,
        engine: TorchEngine,
        log: MetricsLog,
        console: Console,
        write_text: Callable[[int], tuple[str, str]],
        when: Every,
    ):
        self.engine, self.log, self.console = engine, log, console
        self.write_text, self.when = write_text, when

    def start(self) -> None:
        self.log.truncate_after(self.engine.step)

    def after_step(self, step: int, metrics: Metrics) -> None:
        if not self.when(step):
            return
        prompt, text = self.write_text(step)
        self.log.append({"step": step, "prompt": prompt, "text": text})
        self.console.note(f"sample after {prompt[-40:]!r}: {text[:80]!r}")


class Checkpoint(Hook):
    """Saves every so many steps and at the last one."""

    def __init__(self, save: Callable[[], Path], when: Every):
        self.save, self.when = save, when
        self.saved_step = -1

    def after_step(self, step: int, metrics: Metrics) -> None:
        if self.when(step):
            self.save_now(step)

    def save_now(self, step: int) -> None:
        if self.saved_step != step:
            self.save()
            self.saved_step = step


class SavedOnSignal(SystemExit):
    """Raised after a signal once the step is finished and saved; its exit status says: run me again."""

    def __init__(self, name: str, step: int):
        super().__init__(EXIT_SAVED_ON_SIGNAL)
        self.name, self.step = name, step


# Windows has no SIGUSR1.
_SIGNALS = [s for s in signal.Signals if s.name in ("SIGTERM", "SIGUSR1", "SIGINT")]


class Signals(Hook):
    """SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, stop. A second Ctrl-C stops at once."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.received: signal.Signals | None = None
        self.before: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        for name in _SIGNALS:
            self.before[name] = signal.signal(name, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        os.write(2, f"\n{self.received.name} received: finishing the step, then saving\n".encode())

    def after_step(self, step: int, metrics: Metrics) -> None:
        if self.received is not None:
            self.checkpoint.save_now(step)
            raise SavedOnSignal(self.received.name, step)

    def finish(self) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)
