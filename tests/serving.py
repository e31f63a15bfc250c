"""A server of a micro model in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from micro import micro_model
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.generation import Scheduler
from nemotron_ultra.serve.app import Limits, Service
from nemotron_ultra.serve.asks import Served
from nemotron_ultra.serve.server import Server, listen, url
from nemotron_ultra.serve.worker import Worker

TOKENIZER = load_tokenizer("builtin")
TEMPLATE = ChatTemplate(TOKENIZER)


@dataclass
class Running:
    url: str
    service: Service
    server: Server
    thread: threading.Thread

    @property
    def worker(self) -> Worker:
        return self.service.worker


@contextmanager
def serving(slots=4, waiting=8, context=256, grace=5.0, make=None, **limits) -> Iterator[Running]:
    model = micro_model(vocab_size=TOKENIZER.vocab_size)

    def scheduler() -> Scheduler:
        return Scheduler(
            model,
            max_slots=slots,
            max_tokens=context,
            vocab_size=TOKENIZER.vocab_size,
            decode=TOKENIZER.decode,
        )

    served = Served(
        name="micro",
        tokenizer=TOKENIZER,
        template=TEMPLATE,
        rows=TOKENIZER.vocab_size,
        context=context,
        choices=slots + waiting,
    )
    worker = Worker(make or scheduler, slots + waiting)
    service = Service(served, worker, Limits(**limits))
    server, listener = Server(service, grace), listen("127.0.0.1", 0)
    listener.listen()
    thread = threading.Thread(target=server.run_service, args=(listener,))
    thread.start()
    try:
        yield Running(url(listener), service, server, thread)
    finally:
        server.drain()
        thread.join(30)
        assert not thread.is_alive()


def wait_for(condition, seconds: float = 20.0) -> None:
    """Fails where the condition does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)
