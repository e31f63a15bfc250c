"""A server under load: is every request answered or refused, and how fast?

    python benchmarks/serve_load.py RUN [--clients 64] [--seconds 30] [--slots 8] [--max-waiting 32]

Starts `generate RUN --serve` and lets the clients ask without a pause, each in its own way: chats and
completions, whole and as streams, token ids in and out; one in eight leaves in the middle of a stream. A
client that is refused (429) waits as long as Retry-After says. A request is lost if its connection breaks,
its stream ends without [DONE], or its answer has not the tokens it says. Exit status 1 if any is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median, quantiles

import httpx
import psutil


@dataclass
class Tally:
    outcomes: Counter = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # to the first token of a stream
    tokens: int = 0
    lost: list[str] = field(default_factory=list)


def body_of(number: int, turn: int, tokens: int) -> tuple[str, dict]:
    """Path and body of a client's next request."""
    seed = number * 100_003 + turn
    common = {"max_tokens": tokens, "seed": seed, "ignore_eos": True, "stream": number % 2 == 1}
    if number % 4 < 2:
        prompt = [5 + seed % 50, 6, 7, 8] if number % 3 else f"The answer to question {seed} is"
        return "/v1/completions", common | {"prompt": prompt, "return_token_ids": True}
    return "/v1/chat/completions", common | {
        "messages": [{"role": "user", "content": f"What is {seed} + 1?"}]
    }


async def whole(client: httpx.AsyncClient, path: str, body: dict, tally: Tally) -> str:
    answer = await client.post(path, json=body)
    if answer.status_code != 200:
        return await refused(answer)
    new = answer.json()["usage"]["completion_tokens"]
    tally.tokens += new
    return "answered" if new == body["max_tokens"] else f"lost: {new} tokens of {body['max_tokens']}"


async def stream(client: httpx.AsyncClient, path: str, body: dict, tally: Tally, leaves: bool) -> str:
    begin, seen, last = time.perf_counter(), 0, ""
    async with client.stream("POST", path, json=body | {"stream_options": {"include_usage": True}}) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return await refused(answer)
        async for line in answer.aiter_lines():
            if not line:
                continue
            seen += 1
            if seen == 2:
                tally.first.append(time.perf_counter() - begin)
            if leaves and seen == 6:
                return "left"
            before, last = last, line
    if last != "data: [DONE]":
        return f"lost: the stream ended with {last[:80]}"
    new = json.loads(before.removeprefix("data: "))["usage"]["completion_tokens"]
    tally.tokens += new
    return "answered" if new == body["max_tokens"] else f"lost: {new} tokens of {body['max_tokens']}"


async def refused(answer: httpx.Response) -> str:
    if answer.status_code == 429:
        await asyncio.sleep(float(answer.headers["Retry-After"]))
        return "refused (429)"
    return f"lost: status {answer.status_code} {answer.text[:80]}"


async def one_client(client: httpx.AsyncClient, number: int, until: float, tokens: int, tally: Tally) -> None:
    turn = 0
    while time.perf_counter() < until:
        path, body = body_of(number, turn, tokens)
        begin = time.perf_counter()
        try:
            if body["stream"]:
                outcome = await stream(client, path, body, tally, leaves=number % 8 == 7)
            else:
                outcome = await whole(client, path, body, tally)
        except httpx.HTTPError as error:
            outcome = f"lost: {type(error).__name__}"
        kind = outcome.partition(":")[0]
        tally.outcomes[kind] += 1
        if kind == "lost":
            tally.lost.append(outcome)
        if kind == "answered":
            tally.seconds.append(time.perf_counter() - begin)
        turn += 1


async def load(url: str, asked: argparse.Namespace) -> tuple[Tally, float, str]:
    tally, limits = Tally(), httpx.Limits(max_connections=asked.clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        begin = time.perf_counter()
        until = begin + asked.seconds
        tasks = [one_client(client, number, until, asked.tokens, tally) for number in range(asked.clients)]
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begin
        await asyncio.sleep(0.5)
        metrics = (await client.get("/metrics")).text
    return tally, seconds, metrics


def report(tally: Tally, seconds: float, metrics: str, asked: argparse.Namespace) -> None:
    total = sum(tally.outcomes.values())
    print(f"{asked.clients} clients, {seconds:.1f} s, {asked.slots} slots, {asked.max_waiting} may wait")
    print(
        f"  {total:,} requests: " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(tally.outcomes.items()))
    )
    print(f"  {tally.outcomes['answered'] / seconds:.1f} answers/s, {tally.tokens / seconds:,.0f} tokens/s")
    for name, values in (("whole answer", tally.seconds), ("first token of a stream", tally.first)):
        if len(values) > 1:
            print(f"  {name}: median {median(values):.2f} s, 95 % within {quantiles(values, n=20)[-1]:.2f} s")
    kept = [line for line in metrics.splitlines() if re.search("running|gone|failures|new_tokens", line)]
    print("  server: " + ", ".join(line.removeprefix("nemotron_ultra_") for line in kept))
    for outcome, count in Counter(tally.lost).most_common(8):
        print(f"  {count} x {outcome}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    for name, default in (
        ("clients", 64),
        ("seconds", 30),
        ("slots", 8),
        ("max-waiting", 32),
        ("tokens", 32),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "nemotron_ultra.generate", asked.run, "--serve", "--port", "0"]
    command += ["--slots", str(asked.slots), "--max-waiting", str(asked.max_waiting), "--context", "512"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr.readline, "")
        address = next((found for line in lines if (found := re.search(r"http://\S+:\d+", line))), None)
        if address is None:
            return process.wait() or 1
        before = psutil.Process(process.pid).cpu_times()
        tally, seconds, metrics = asyncio.run(load(address.group(), asked))
        after = psutil.Process(process.pid).cpu_times()
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    report(tally, seconds, metrics, asked)
    busy = after.user + after.system - before.user - before.system
    print(
        f"  the server took {busy:.1f} CPU seconds, {tally.tokens / max(busy, 0.01):,.0f} tokens a CPU second"
    )
    print(f"  the server ended with exit status {code}")
    return 1 if tally.lost or code else 0


if __name__ == "__main__":
    sys.exit(main())
