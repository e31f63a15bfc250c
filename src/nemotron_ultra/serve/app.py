"""The HTTP face: routes, keys and limits, streams, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nemotron_ultra.generation.base import Event
from nemotron_ultra.generation.speculative import draft_metrics
from nemotron_ultra.serve.asks import Ask, Served, chat_ask, completion_ask, parse
from nemotron_ultra.serve.errors import ApiError
from nemotron_ultra.serve.replies import Delta, Reply
from nemotron_ultra.serve.worker import Failure, Refused, Worker

BODY_SECONDS = 60.0
LAST_SECONDS = 2.0  # at the end: for bodies to come, and for errors to reach the clients of cancelled answers


class ClientGone(Exception):
    """Nobody is there to answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """api_key: None lets everybody in. local: only Host headers of this machine are answered, so that a web
    page cannot reach a server at the loopback address by a name of its own.
    """

    max_body: int = 8 << 20
    api_key: bytes | None = None
    local: bool = True


class Service:
    """Routes of one model on one worker. `open` counts requests that are being answered, `reading` has the
    time limits of those whose bodies are still to come.
    """

    def __init__(self, served: Served, worker: Worker, limits: Limits):
        self.served, self.worker, self.limits = served, worker, limits
        self.counts: Counter[tuple[str, int]] = Counter()
        self.open = self.gone = 0
        self.reading: set[asyncio.Timeout] = set()
        self._started = int(time.time())

    def app(self) -> Starlette:
        def post(path: str, ask: Callable[[object, Served], Ask]) -> Route:
            def read(body: bytes) -> Ask:
                try:
                    return ask(parse(body), self.served)
                except RecursionError as error:  # there, or where the template writes what is in it
                    raise ApiError("the body is nested too deeply", code="invalid_json") from error

            async def handle(request: Request) -> Response:
                body = await self._body(request)
                self.worker.check_room(1)
                return await self._answer(request, await run_in_threadpool(read, body))

            return Route(path, self._guarded(path, handle), methods=["POST"])

        return Starlette(
            routes=[
                post("/v1/chat/completions", chat_ask),
                post("/v1/completions", completion_ask),
                Route("/v1/models", self._guarded("/v1/models", self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._guarded("/v1/models", self._models), methods=["GET"]),
                Route("/metrics", self._guarded("/metrics", self._metrics), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    def _guarded(self, path: str, handle: Callable[[Request], Awaitable[Response]]):
        """`handle` for those who may, with every error in OpenAI's form, counted."""

        async def endpoint(request: Request) -> Response:
            self.open += 1
            try:
                self._check_caller(request)
                response = await handle(request)
            except ApiError as error:
                response = error.response()
            except Refused as refused:
                response = ApiError(str(refused), status=refused.status).response()
            except (ClientGone, ClientDisconnect):
                self.gone += 1
                response = Response(status_code=499)
            except Exception as error:  # a mistake of ours must not end the connection without a word
                traceback.print_exc(file=sys.stderr)
                response = ApiError(f"internal error: {type(error).__name__}", status=500).response()
            finally:
                self.open -= 1
            self.counts[path, response.status_code] += 1
            return response

        return endpoint

    def _check_caller(self, request: Request) -> None:
        host = request.headers.get("host", "localhost")
        if self.limits.local and not _is_local(host):
            raise ApiError(f"this server answers to localhost, not to '{host}'", status=403)
        if self.limits.api_key is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes that came
        if not hmac.compare_digest(given, b"Bearer " + self.limits.api_key):
            raise ApiError("wrong or missing API key", status=401, code="invalid_api_key")

    def hurry(self) -> None:
        """Wait no longer than LAST_SECONDS for bodies that are still to come."""
        latest = asyncio.get_running_loop().time() + LAST_SECONDS
        for limit in self.reading:
            if not limit.expired():
                limit.reschedule(min(latest, limit.when()))

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(f"Content-Type must be application/json; got '{kind}'", status=415)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.limits.max_body:
            raise self._too_large()
        body = bytearray()
        limit = asyncio.timeout(LAST_SECONDS if self.worker.draining else BODY_SECONDS)
        self.reading.add(limit)
        try:
            async with limit:
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.max_body:
                        raise self._too_large()
        except TimeoutError as error:
            self.worker.check_room(0)  # while shutting down that is the reason
            raise ApiError(f"the body did not come within {BODY_SECONDS:g} s", status=408) from error
        finally:
            self.reading.discard(limit)
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(f"the body is larger than {self.limits.max_body:,} bytes", status=413)

    async def _answer(self, request: Request, ask: Ask) -> Response:
        reply = Reply(ask, self.served)
        events = self._events(request, ask)
        if ask.stream:
            await anext(events)  # all turns are taken; else the answer is an error and no stream
            return EventStream(self._chunks(reply, events))
        deltas = [Delta() for _ in ask.turns]
        async with aclosing(events):
            await anext(events)
            async for number, event in events:
                deltas[number].add(reply.choices[number].take(event))
        return JSONResponse(reply.whole(deltas))

    async def _events(self, request: Request, ask: Ask) -> AsyncIterator[tuple[int, Event | None]]:
        """(-1, None) once the turns are taken, then their events. Raises Refused, ApiError and ClientGone.

        However it ends, no turn of the request is left in a slot.
        """
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue()

        def sink(number: int, what: Event | Failure) -> None:
            with suppress(RuntimeError):  # the loop has ended, and all who listened with it
                loop.call_soon_threadsafe(inbox.put_nowait, (number, what))

        keys = dict(enumerate(self.worker.submit(ask.turns, sink)))
        gone = asyncio.create_task(_wait_until_gone(request.receive))
        gone.add_done_callback(lambda _: inbox.put_nowait((-1, None)))
        try:
            yield -1, None
            while keys:
                number, what = await inbox.get()
                if what is None:
                    raise ClientGone
                if self._ends(what):
                    del keys[number]
                yield number, what
        finally:
            self.worker.cancel(list(keys.values()))
            gone.cancel()

    def _ends(self, what: Event | Failure) -> bool:
        """Whether a turn ends with this. Raises ApiError where it ends without an answer."""
        if isinstance(what, Failure):
            raise ApiError(what.message, status=503 if self.worker.draining else 500)
        if what.completion is not None and what.completion.finish_reason == "cancelled":
            raise ApiError("the server is shutting down", status=503)
        return what.completion is not None

    async def _chunks(self, reply: Reply, events: AsyncIterator) -> AsyncIterator[bytes]:
        """Server-sent events. An error in the middle is an event too, and no [DONE] follows it."""
        self.open += 1
        try:
            async with aclosing(events):
                for chunk in reply.first():
                    yield _sent(chunk)
                async for number, event in events:
                    yield _sent(reply.chunk(number, reply.choices[number].take(event)))
                for chunk in reply.last():
                    yield _sent(chunk)
                yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _sent(error.content())
        except ClientGone:
            self.gone += 1
        finally:
            self.open -= 1

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name", self.served.name)
        if name != self.served.name:
            raise ApiError(f"no model '{name}' here", status=404, code="model_not_found")
        model = {
            "id": self.served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "nemotron_ultra",
            "max_model_len": self.served.context,
        }
        one = "name" in request.path_params
        return JSONResponse(model if one else {"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        if self.worker.broken:
            return JSONResponse({"status": "broken", "error": self.worker.broken}, 503)
        if self.worker.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        """Counters and gauges in the text format of Prometheus."""
        worker, stats = self.worker, self.worker.stats
        lines = [
            f'requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.counts.items())
        ]
        figures = {
            "clients_gone_total": self.gone,
            "model_failures_total": worker.failures,
            "prompt_tokens_read_total": stats.get("prefill_tokens", 0),
            "new_tokens_total": stats.get("new_tokens", 0),
            "steps_total": stats.get("steps", 0),
            "answers_running": worker.running,
            "answers_running_or_waiting": worker.active,
            "answers_limit": worker.most,
        } | draft_metrics(stats)
        lines += [f"{name} {value}" for name, value in figures.items()]
        return PlainTextResponse("".join(f"nemotron_ultra_{line}\n" for line in lines))


class EventStream(Response):
    """Sends what an async generator of bytes gives, and closes it however the sending ends."""

    def __init__(self, parts: AsyncIterator[bytes]):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.parts = parts
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with aclosing(self.parts) as parts:
            await send(start)
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_local(host: str) -> bool:
    """Whether a Host header is "localhost" or an address of this machine alone."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _sent(content: object) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(message, status=error.status_code).response()
