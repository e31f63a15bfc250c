"""A server in trouble: too many clients, clients that leave, a model that fails, the end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from micro import micro_model
from nemotron_ultra.generation import Scheduler
from nemotron_ultra.model.hf_folder import save_model
from serving import TOKENIZER, serving, wait_for

LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}


def post(url, **changes):
    return httpx.post(url + "/v1/completions", json=LONG | changes, timeout=60)


def test_64_clients_are_all_answered_or_refused():
    with serving(slots=4, waiting=12) as running:
        client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=64))

        def ask(number):
            body = LONG | {"max_tokens": 8, "seed": number, "stream": number % 2 == 1}
            return client.post(running.url + "/v1/completions", json=body)

        with ThreadPoolExecutor(64) as pool, client:
            answers = list(pool.map(ask, range(128)))
        codes = Counter(answer.status_code for answer in answers)
        assert codes[200] + codes[429] == 128 and codes[200] >= 16, codes
        assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 429)
        good = [answer for answer in answers if answer.status_code == 200]
        assert all("[DONE]" in a.text or a.json()["usage"]["completion_tokens"] == 8 for a in good)
        wait_for(lambda: running.worker.active == 0 and running.service.open == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(stream):
    with serving(slots=1, waiting=0, context=4096) as running:
        body = LONG | {"max_tokens": 4000, "stream": stream}
        with httpx.Client(timeout=0.5) as client:
            request = client.build_request("POST", running.url + "/v1/completions", json=body)
            if stream:
                answer = client.send(request, stream=True)
                next(answer.iter_lines())
                answer.close()
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.send(request)
        wait_for(lambda: running.worker.active == 0)
        assert running.worker.stats["new_tokens"] < 4000
        assert post(running.url, max_tokens=2).status_code == 200
        wait_for(lambda: running.service.gone == 1)


class Faulty(Scheduler):
    """Fails in the round after `armed` is set."""

    armed = threading.Event()

    def step(self):
        if self.armed.is_set():
            self.armed.clear()
            raise RuntimeError("out of order")
        return super().step()


def faulty():
    model = micro_model(vocab_size=TOKENIZER.vocab_size)
    return lambda: Faulty(model, max_slots=2, max_tokens=2048, decode=TOKENIZER.decode)


def test_a_failure_is_told_and_the_next_request_is_answered(capfd):
    with serving(make=faulty(), context=2048) as running, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(post, running.url, max_tokens=2000) for _ in range(2)]
        streaming = pool.submit(post, running.url, max_tokens=2000, stream=True)
        wait_for(lambda: running.worker.active == 3 and running.worker.running == 2)
        Faulty.armed.set()
        assert [found.result().status_code for found in waiting] == [500, 500]
        assert "out of order" in streaming.result().text and "[DONE]" not in streaming.result().text
        assert post(running.url, max_tokens=2).status_code == 200
        assert running.worker.failures == 1 and running.worker.active == 0
    assert "out of order" in capfd.readouterr().err


def test_a_model_that_cannot_be_set_up_again_says_so(capfd):
    make = iter([faulty()])
    with serving(make=lambda: next(make)()) as running:
        Faulty.armed.set()
        assert post(running.url).status_code == 500
        wait_for(lambda: running.worker.broken)
        assert post(running.url).status_code == 500
        assert httpx.get(running.url + "/health").status_code == 503


def test_at_the_end_nothing_new_is_taken_and_what_runs_is_finished():
    with serving(context=512) as running, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, running.url, max_tokens=300)
        wait_for(lambda: running.worker.running == 1)
        running.server.drain()
        late = post(running.url)
        assert late.status_code == 503 and late.headers["retry-after"] == "1"
        assert httpx.get(running.url + "/health").status_code == 503
        assert first.result().json()["usage"]["completion_tokens"] == 300


def test_what_runs_too_long_at_the_end_is_cancelled():
    with serving(context=8192, grace=0.2) as running, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, running.url, max_tokens=8000)
        second = pool.submit(post, running.url, max_tokens=8000, stream=True)
        wait_for(lambda: running.worker.running == 2)
        running.server.drain()
        assert first.result().status_code == 503 and "shutting down" in first.result().text
        assert "shutting down" in second.result().text and "[DONE]" not in second.result().text


def test_bodies_that_do_not_come_do_not_delay_the_end():
    with serving(grace=1000) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as half:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            half.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
            wait_for(lambda: running.service.reading)
            running.server.drain()
            assert b"503" in half.recv(100)


def test_the_command_line_serves_until_sigterm(tmp_path):
    save_model(micro_model(vocab_size=TOKENIZER.vocab_size), tmp_path / "micro")
    TOKENIZER.save(tmp_path / "micro")
    command = [sys.executable, "-m", "nemotron_ultra.generate", "micro", "--serve", "--port", "0"]
    environment = os.environ | {"NEMOTRON_ULTRA_API_KEY": "secret"}
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        lines = [process.stderr.readline() for _ in range(2)]
        address = re.search(r"http://127.0.0.1:\d+", lines[-1])
        assert address and "key needed" in lines[0], lines
        url, key = address.group() + "/v1/completions", {"Authorization": "Bearer secret"}
        body = {"prompt": "x", "max_tokens": 3}
        assert httpx.post(url, json=body, headers=key, timeout=60).json()["usage"]["completion_tokens"] <= 3
        assert httpx.post(url, json=body).status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and "SIGTERM" in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0", "--port", "0"], "lets other machines in"),
        (["--api-key-file", "nowhere"], "cannot be read"),
        (["--api-key-file", "two"], "more than one word"),
        (["--host", "256.1.1.1"], "cannot listen"),
    ],
)
def test_a_server_that_cannot_be_is_one_line(tmp_path, capsys, monkeypatch, arguments, said):
    from nemotron_ultra import generate as cli

    monkeypatch.delenv("NEMOTRON_ULTRA_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two").write_text("one\ntwo\n")
    assert cli.main([str(tmp_path), "--serve", *arguments]) in (2, 5)
    assert said in capsys.readouterr().err
