"""One thread owns the Scheduler; everybody else hands turns to it and gets events back.

At most `most` turns wait or run. Whatever a round raises is told to all whose turns were in it, and the
scheduler is made anew, so that nobody waits for an answer that will not come.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemotron_ultra.errors import NemotronError
from nemotron_ultra.generation.answers import Answers, Turn
from nemotron_ultra.generation.base import Event
from nemotron_ultra.generation.scheduler import Scheduler

ALL = "all"


class Refused(Exception):
    """Turns that are not taken now. `status` is that of HTTP."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    """A turn that ends without a completion."""

    message: str


# Called in the worker's thread with (number of the turn in its request, what happened); must not raise.
Sink = Callable[[int, Event | Failure], None]


@dataclass(frozen=True)
class _Job:
    key: int
    number: int
    turn: Turn
    sink: Sink


class Worker:
    """`make` builds a Scheduler; the first is built in the caller's thread, whose errors it gets."""

    def __init__(self, make: Callable[[], Scheduler], most: int):
        self.make, self.most = make, most
        self.draining = False
        self.broken: str | None = None
        self.failures = 0
        self.stats: dict[str, float] = {}
        self._past: dict[str, float] = {}  # counts of schedulers that failed
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._active = 0
        # A turn to begin, keys to cancel, ALL, or None: stop.
        self._inbox: queue.SimpleQueue[_Job | list[int] | str | None] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._answers: Answers | None = Answers(make())
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Turns that wait or run."""
        return self._active

    @property
    def running(self) -> int:
        answers = self._answers
        return 0 if answers is None else len(answers.scheduler.rows.live)

    def cache_bytes(self) -> int:
        """Memory of all slots."""
        return self._answers.scheduler.rows.cache.nbytes

    def check_room(self, count: int) -> None:
        """Raises Refused where so many turns would not be taken."""
        if self.broken:
            raise Refused(500, f"the model failed and could not be set up again: {self.broken}")
        if self.draining:
            raise Refused(503, "the server is shutting down")
        if self._active + count > self.most:
            raise Refused(429, f"too many requests: {self._active} answers run or wait, {self.most} may")

    def submit(self, turns: Sequence[Turn], sink: Sink) -> list[int]:
        """Keys of the turns, all taken or none. Raises Refused."""
        with self._lock:
            self.check_room(len(turns))
            self._active += len(turns)
            jobs = [_Job(next(self._keys), number, turn, sink) for number, turn in enumerate(turns)]
            for job in jobs:
                self._inbox.put(job)
        return [job.key for job in jobs]

    def cancel(self, keys: Sequence[int]) -> None:
        """Their slots are free before the next round; turns that have ended are let be."""
        if keys:
            self._inbox.put(list(keys))

    def cancel_all(self) -> None:
        self._inbox.put(ALL)

    def stop(self) -> None:
        """End the thread; turns still there fail."""
        with self._lock:
            self.draining = True
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        message = None
        while message is None or self._anew(message):
            try:
                self._work()
                self._fail("the server is shutting down")
                return
            except Exception as error:  # whatever it is, those who wait must hear of it
                traceback.print_exc(file=sys.stderr)
                message = f"{type(error).__name__}: {error}"
            self.failures += 1
            self._fail(f"the model failed: {message}")

    def _work(self) -> None:
        """Rounds until `stop`."""
        answers = self._answers
        while self._take_in(answers):
            for key, event in answers.step():
                job = self._jobs[key]
                if event.completion is not None:
                    self._end(job)
                job.sink(job.number, event)
            now = answers.scheduler.stats
            self.stats = {name: self._past.get(name, 0) + count for name, count in now.items()}

    def _take_in(self, answers: Answers) -> bool:
        """Everything that was handed over; waits for it where there is nothing else to do. False: stop."""
        block = answers.idle
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if message is None:
                return False
            if not isinstance(message, _Job):
                answers.cancel(list(self._jobs) if message == ALL else message)
                continue
            self._jobs[message.key] = message
            try:
                answers.submit(message.key, message.turn)
            except NemotronError as error:
                self._end(message)
                message.sink(message.number, Failure(str(error)))

    def _end(self, job: _Job) -> None:
        del self._jobs[job.key]
        with self._lock:
            self._active -= 1

    def _fail(self, message: str) -> None:
        """All turns of the scheduler, and those handed over and not yet taken in."""
        while not self._inbox.empty():
            job = self._inbox.get()
            if isinstance(job, _Job):
                self._jobs[job.key] = job
            elif job is None:
                self._inbox.put(None)
                break
        for job in list(self._jobs.values()):
            self._end(job)
            job.sink(job.number, Failure(message))

    def _anew(self, message: str) -> bool:
        """A new scheduler in place of the failed one, whose memory is let go first -> whether that worked."""
        self._past, self._answers = self.stats, None
        try:
            self._answers = Answers(self.make())
        except Exception as error:  # the same: a broken server must say so instead of hanging
            with self._lock:
                self.broken = f"{message}; then {type(error).__name__}: {error}"
            self._fail(self.broken)
            return False
        return True
