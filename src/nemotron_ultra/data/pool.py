"""Parts worked in this process or in many: one tokenizer a process, one part at a time, results as they
come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from nemotron_ultra.data.inputs import Part
from nemotron_ultra.data.parts import Options, Receipt, process_part
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.errors import DataError

_worker: dict[str, Any] = {}


def work_parts(
    todo: Iterable[Part], folder: Path, options: Options, tokenizer: Tokenizer, workers: int
) -> Iterator[Receipt]:
    """Receipts of the parts in the order in which they finish. Raises DataError if a worker is killed."""
    if workers == 1:
        for part in todo:
            yield process_part(part, folder, options, tokenizer)
        return
    # spawn: a fork would copy the tokenizer library's threads in an unknown state.
    context = get_context("spawn")
    setup = (str(folder), tokenizer.name, tokenizer.hash, options)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=setup)
    try:
        yield from _pump(pool, iter(todo), 2 * workers)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed",
            got="most often the system's answer to too little memory",
            do="give the same command again with fewer --workers; it goes on from the finished parts",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pump(pool: ProcessPoolExecutor, todo: Iterator[Part], window: int) -> Iterator[Receipt]:
    """Keep `window` parts in flight, so that a stream is not read further ahead than it is worked off."""
    flying: set[Future] = set()
    for part in todo:
        flying.add(pool.submit(_work, part))
        if len(flying) >= window:
            landed, flying = wait(flying, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in landed)
    while flying:
        landed, flying = wait(flying, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in landed)


def _start_worker(folder: str, tokenizer: str, wanted_hash: str, options: Options) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each: the processes are the parallel part
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, also inside the library
    _worker.update(folder=Path(folder), options=options, tokenizer=load_tokenizer(tokenizer))
    assert _worker["tokenizer"].hash == wanted_hash, "the tokenizer's file changed while it was in use"
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent_process().join()
    os._exit(1)


def _work(part: Part) -> Receipt:
    return process_part(part, _worker["folder"], _worker["options"], _worker["tokenizer"])
