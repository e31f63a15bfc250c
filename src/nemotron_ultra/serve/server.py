"""A socket, a key, signals: the process around the service.

SIGTERM or Ctrl-C: new requests get 503, running answers have `grace` seconds, what is left then is cancelled.
A second signal ends at once.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import time
from pathlib import Path

import uvicorn

from nemotron_ultra.errors import BackendError, ConfigError
from nemotron_ultra.serve.app import LAST_SECONDS, Service

KEY_VARIABLE = "NEMOTRON_ULTRA_API_KEY"
KEEP_SECONDS = 75  # of a connection without requests; short ones race with clients that use them again


class Server(uvicorn.Server):
    """`run_service` in the main thread; a test may run it in another one and call `drain`."""

    def __init__(self, service: Service, grace: float):
        config = uvicorn.Config(
            service.app(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_SECONDS,
            timeout_graceful_shutdown=5,
            server_header=False,
        )
        super().__init__(config)
        self.service, self.grace = service, grace
        self._deadline: float | None = None
        self._cancelled = False

    def drain(self) -> None:
        """Take nothing new, and end when nothing is left or the time is over."""
        self.service.worker.draining = True
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace

    def handle_exit(self, sig: int, frame: object) -> None:
        if self._deadline is not None:
            self.service.worker.cancel_all()
            self.should_exit = self.force_exit = True
            return
        print(f"{signal.Signals(sig).name}: finishing what runs ({self.grace:g} s at most)", file=sys.stderr)
        self.drain()

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            self.service.hurry()
            late = time.monotonic() - self._deadline
            if late > 0 and not self._cancelled:
                self.service.worker.cancel_all()
                self._cancelled = True
            if not (self.service.open or self.service.worker.active) or late > LAST_SECONDS:
                return True
        return await super().on_tick(counter)

    def run_service(self, listener: socket.socket) -> None:
        try:
            self.run(sockets=[listener])
        finally:
            self.service.worker.stop()


def listen(host: str, port: int) -> socket.socket:
    """Raises BackendError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise BackendError(
            f"cannot listen at {host}:{port}",
            got=error.strerror or error,
            do="choose another --host or --port",
        ) from error
    return listener


def is_local(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def api_key(file: Path | None) -> bytes | None:
    """From a file, else from the environment; never from the command line, which others can read."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
    else:
        try:
            key = file.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--api-key-file cannot be read", got=error) from error
        if not key:
            raise ConfigError(f"--api-key-file {file} is empty")
    if len(key.split()) > 1:
        raise ConfigError("the API key is more than one word, which no client can send", do="give one word")
    return key.encode("utf-8", "surrogateescape") or None
