"""Parts worked in this process or in many: a worker opens what it needs once, does one part at a time, and
results come as they are ready."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from nemotron_ultra.data.inputs import Part
from nemotron_ultra.data.parts import Options, Receipt, process_part
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.errors import DataError

# Called once in every worker; gives the function that does one part. Both must be picklable.
Opener = Callable[[], Callable[[Any], Any]]

_worker: dict[str, Any] = {}


class WorkerKilled(DataError):
    """A worker process ended without a result. What it had finished before is on disk."""


def work_parts(
    todo: Iterable[Part], folder: Path, options: Options, tokenizer: Tokenizer, workers: int
) -> Iterator[Receipt]:
    """Receipts of parts of text in the order in which they finish. Raises WorkerKilled."""
    if workers == 1:
        for part in todo:
            yield process_part(part, folder, options, tokenizer)
        return
    yield from work_all(todo, partial(_open_text, folder, tokenizer.name, tokenizer.hash, options), workers)


def work_all(todo: Iterable[Any], opener: Opener, workers: int) -> Iterator[Any]:
    """Results of `todo` in the order in which they are ready. Raises WorkerKilled if a worker is killed."""
    if workers == 1:
        yield from map(opener(), todo)
        return
    # spawn: a fork would copy the tokenizer library's threads in an unknown state.
    context = get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(opener,))
    try:
        yield from _pump(pool, iter(todo), 2 * workers)
    except BrokenProcessPool as error:
        raise WorkerKilled(
            "a worker process was killed",
            got="most often the system's answer to too little memory",
            do="give the same command again with fewer --workers; it goes on from the finished parts",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pump(pool: ProcessPoolExecutor, todo: Iterator[Any], window: int) -> Iterator[Any]:
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


def _start_worker(opener: Opener) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each: the processes are the parallel part
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, also inside the library
    Thread(target=_end_with_parent, daemon=True).start()
    _worker["opener"] = opener


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent_process().join()
    os._exit(1)


def _work(part: Any) -> Any:
    if "do" not in _worker:  # here and not at the start, where an error would look like a killed worker
        _worker["do"] = _worker["opener"]()
    return _worker["do"](part)


def _open_text(folder: Path, name: str, wanted_hash: str, options: Options) -> Callable[[Part], Receipt]:
    tokenizer = load_tokenizer(name)
    check_unchanged(tokenizer, wanted_hash)
    return partial(process_part, folder=folder, options=options, tokenizer=tokenizer)


def check_unchanged(tokenizer: Tokenizer, wanted_hash: str) -> None:
    """Raises DataError where a worker finds another tokenizer than the one that the command began with."""
    if tokenizer.hash != wanted_hash:
        do = "put the old one back, or remove the folder and give the command again"
        raise DataError(f"the file of tokenizer {tokenizer.name} changed while it was in use", do=do)
