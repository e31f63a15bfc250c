"""Answers of any OpenAI-compatible endpoint, each kept on disk, so that nothing answered is asked again."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_ultra.data.order import keyed
from nemotron_ultra.data.synthetic.gym import missing
from nemotron_ultra.data.synthetic.shapes import json_schema
from nemotron_ultra.data.synthetic.steps import Drop, Row
from nemotron_ultra.data.synthetic.topics import chat
from nemotron_ultra.errors import BackendError

ANSWERS = "answers.jsonl"
ROW_OF_FAILURES = 20  # requests in a row without an answer: the endpoint is down, not unlucky


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Where and how to ask. model to response_format shape the answers; the others only how they come.

    response_format: "json_schema", "json_object" or "none". timeout: seconds of one try. retries: tries
    after the first, with growing pauses or as long as the server's Retry-After says. key_variable: the
    environment variable that holds the key; the key itself is written nowhere.
    """

    url: str
    model: str
    temperature: float = 1.0
    max_tokens: int = 4096
    response_format: str = "json_schema"
    concurrency: int = 8
    timeout: float = 120.0
    retries: int = 4
    key_variable: str = "OPENAI_API_KEY"

    def identity(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("model", "temperature", "max_tokens", "response_format")}


class Endpoint:
    """Asks for the samples of seed rows, `concurrency` at a time.

    A request that stays without an answer is a Drop. Raises BackendError where asking on is useless: wrong
    key, unknown model, a request the server refuses, no connection, many failures in a row; what was answered
    until then is kept. `asked` counts requests that went out, `known` those answered from disk.
    """

    def __init__(self, options: EndpointOptions, folder: Path, seed: int):
        try:
            import openai
        except ImportError as error:
            raise missing("answers of an endpoint", "openai") from error
        self.options, self._seed, self._openai = options, seed, openai
        self._client = openai.OpenAI(
            base_url=options.url,
            api_key=os.environ.get(options.key_variable) or "none",
            timeout=options.timeout,
            max_retries=options.retries,
        )
        self._answers = Answers(folder / ANSWERS)
        self._failures = self.asked = self.known = 0
        self._lock = threading.Lock()

    def make(self, rows: list[Row]) -> list[Row | Drop]:
        """{"raw": {text, finish}} for every row, in order."""
        with ThreadPoolExecutor(self.options.concurrency) as pool:
            futures = [pool.submit(self._one, row) for row in rows]
            try:
                return [future.result() for future in futures]
            except BackendError:
                for future in futures:
                    future.cancel()
                raise

    def close(self) -> None:
        self._client.close()
        self._answers.close()

    def request(self, row: Row) -> dict[str, Any]:
        """The body of the request for a row; the same row has the same body."""
        schema = json_schema(row["family"], row.get("options", 0))
        formats = {
            "json_schema": {"type": "json_schema"}
            | {"json_schema": {"name": row["family"], "strict": True, "schema": schema}},
            "json_object": {"type": "json_object"},
        }
        body = {
            "model": self.options.model,
            "messages": chat(row, self._seed),
            "seed": keyed(self._seed, "request", row["id"]) % 2**31,
            "temperature": self.options.temperature,
            "max_tokens": self.options.max_tokens,
        }
        found = formats.get(self.options.response_format)
        return body | ({"response_format": found} if found else {})

    def _one(self, row: Row) -> Row | Drop:
        body = self.request(row)
        key = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
        answer = self._answers.get(key)
        if answer is None:
            answer = self._ask(body)
            if isinstance(answer, Drop):
                return answer
            self._answers.put(key, answer)
        else:
            with self._lock:
                self.known += 1
        return {"raw": {"text": answer["text"], "finish": answer["finish"]}}

    def _ask(self, body: dict[str, Any]) -> dict[str, Any] | Drop:
        openai = self._openai
        with self._lock:
            self.asked += 1
        try:
            reply = self._client.chat.completions.create(**body)
        except openai.APITimeoutError:
            return self._failed("timed out", f"{self.options.timeout:g} s, {self.options.retries} retries")
        except openai.APIConnectionError as error:
            do = "start it, or mend --endpoint; the same command goes on from here"
            raise BackendError(
                f"cannot reach {self.options.url}", got=error.__cause__ or error, do=do
            ) from error
        except openai.APIStatusError as error:
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                return self._failed(f"HTTP {error.status_code}", str(error)[:200])
            raise self._refused(error.status_code, str(error)[:500]) from error
        except (openai.APIError, ValueError) as error:  # a reply that is not the API's JSON
            return self._failed("malformed reply", str(error)[:200])
        return self._read(reply)

    def _read(self, reply: Any) -> dict[str, Any] | Drop:
        """The text of a reply, which a server that is only nearly compatible may have left out."""
        try:
            text, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
        except (AttributeError, LookupError, TypeError):
            text = finish = None
        if not isinstance(text, str):
            return self._failed("malformed reply", str(reply)[:200])
        with self._lock:
            self._failures = 0
        counts = {"in": "prompt_tokens", "out": "completion_tokens"}
        used = {key: getattr(reply.usage, name, None) for key, name in counts.items()}
        return {"text": text, "finish": finish, "usage": {k: v for k, v in used.items() if v is not None}}

    def _failed(self, what: str, detail: str) -> Drop:
        with self._lock:
            self._failures += 1
            failures = self._failures
        most = max(ROW_OF_FAILURES, 2 * self.options.concurrency)
        if failures >= most:
            raise BackendError(
                f"{self.options.url}: {most} requests in a row without an answer",
                got=f"{what}: {detail}",
                do="look at the server, raise --timeout or lower --concurrency; the same command goes on",
            )
        return Drop(f"no answer: {what}", detail)

    def _refused(self, status: int, text: str) -> BackendError:
        do = {
            401: f"put the key into the environment variable {self.options.key_variable} (--key-variable)",
            403: f"this key ({self.options.key_variable}) may not ask this model",
            404: "mend --endpoint (it ends in /v1 as a rule) or --model",
        }.get(status, "if the server knows no JSON schemas, give --response-format json_object or none")
        return BackendError(f"{self.options.url} refuses the request (HTTP {status})", got=text, do=do)


class Answers:
    """Request hash -> answer, appended to a file and synced before it is used. A torn last line is cut."""

    def __init__(self, path: Path):
        self._known: dict[str, dict[str, Any]] = {}
        path.touch()
        self._file = open(path, "r+b")  # noqa: SIM115, closed by close()
        good = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            self._known[row.pop("request")] = row
            good += len(line)
        self._file.seek(good)
        self._file.truncate()
        self._lock = threading.Lock()

    def get(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def put(self, key: str, answer: dict[str, Any]) -> None:
        line = json.dumps({"request": key, **answer}) + "\n"
        with self._lock:
            self._file.write(line.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._known[key] = answer

    def close(self) -> None:
        self._file.close()
