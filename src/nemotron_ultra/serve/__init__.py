"""An OpenAI-compatible HTTP endpoint of one model; `generate --serve` starts it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemotron_ultra.errors import BackendError, ConfigError

if TYPE_CHECKING:
    import socket

    from nemotron_ultra.generate.load import Loaded

SLOTS, CONTEXT = 8, 4096


@dataclass(frozen=True)
class Place:
    """Where to listen, and the key that clients must send."""

    listener: socket.socket
    api_key: bytes | None
    local: bool


def check_ready(asked: argparse.Namespace) -> Place:
    """Everything that can be wrong before weights are read. Raises BackendError and ConfigError."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            "--serve needs the packages of the extra 'serve'",
            got=f"no {' and no '.join(missing)}",
            do="pip install 'nemotron-ultra[serve]'",
        )
    from nemotron_ultra.serve.server import KEY_VARIABLE, api_key, is_local, listen

    key = api_key(asked.api_key_file)
    listener = listen(asked.host, asked.port)
    local = is_local(listener)
    if not (local or key or asked.no_api_key):
        listener.close()
        raise ConfigError(
            f"--host {asked.host} lets other machines in, and there is no key",
            do=f"set {KEY_VARIABLE} or --api-key-file, or say --no-api-key",
        )
    return Place(listener, key, local)


def run(loaded: Loaded, asked: argparse.Namespace, place: Place) -> int:
    """Serve until a signal; the exit status of the process."""
    from nemotron_ultra.serve.app import Limits, Service
    from nemotron_ultra.serve.asks import Served
    from nemotron_ultra.serve.server import Server, url
    from nemotron_ultra.serve.worker import Worker

    slots, context = asked.slots or SLOTS, asked.context or CONTEXT
    served = Served(
        name=loaded.name,
        tokenizer=loaded.tokenizer,
        template=loaded.template,
        rows=loaded.rows,
        context=context,
        choices=slots + asked.max_waiting,
        thinking=asked.thinking,
        budget=asked.budget,
        most=asked.max_tokens,
        digest=loaded.digest,
    )
    worker = Worker(lambda: loaded.scheduler(slots, context), slots + asked.max_waiting)
    service = Service(
        served, worker, Limits(max_body=asked.max_body, api_key=place.api_key, local=place.local)
    )
    cache = worker.cache_bytes()
    print(
        f"{loaded.folder}: {slots} slots of {context} tokens ({cache / 1e6:,.1f} MB), "
        f"{asked.max_waiting} more may wait{', key needed' if place.api_key else ''}",
        file=sys.stderr,
    )
    place.listener.listen()
    print(f"serving {loaded.name} at {url(place.listener)}/v1", file=sys.stderr, flush=True)
    Server(service, asked.grace).run_service(place.listener)
    return 0
