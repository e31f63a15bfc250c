import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nemotron_ultra import prep

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "kelp", "lagoon"]


class Handler(BaseHTTPRequestHandler):
    """A small OpenAI-compatible server: the answer is a function of the request, the trouble of the model."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.seen[json.dumps(body, sort_keys=True)] += 1
            tries = server.seen[json.dumps(body, sort_keys=True)]
            server.key = self.headers.get("Authorization")
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        time.sleep(server.delay)
        getattr(self, f"as_{body['model']}")(body, tries)
        with server.lock:
            server.busy -= 1

    def as_good(self, body, tries):
        self.reply(200, completion(json.dumps(sample(body))))

    def as_flaky(self, body, tries):
        if tries < 3:
            return self.reply(503 if tries == 1 else 429, {"error": {"message": "busy"}})
        self.as_good(body, tries)

    def as_locked(self, body, tries):
        self.reply(401, {"error": {"message": "bad key"}})

    def as_strict(self, body, tries):
        self.reply(400, {"error": {"message": "response_format is not supported"}})

    def as_down(self, body, tries):
        self.reply(500, {"error": {"message": "out of order"}})

    def as_slow(self, body, tries):
        if body["seed"] % 2:
            time.sleep(0.6)
        self.as_good(body, tries)

    def as_sloppy(self, body, tries):
        """Every kind of useless answer, by the request's seed."""
        good = json.dumps(sample(body))
        kinds = [
            completion(good),
            completion("Sure! " + good),
            completion(good[:-9], "length"),
            completion(json.dumps(sample(body) | {"answer": 7})),
            completion(None),
            {"object": "nothing"},
            completion("```json\n" + good + "\n```"),
        ]
        self.reply(200, kinds[body["seed"] % len(kinds)])

    def as_odd(self, body, tries):
        """JSON that is no completion, by the request's seed."""
        message = {"role": "assistant", "content": "x"}
        choices = ["abc", {"a": 1}, [None], ["x"], [{}], [{"message": "x"}], [{"message": {"content": [1]}}]]
        kinds = [None, [], "x", {}, *({"choices": choice} for choice in choices)]
        kinds += [{"choices": [{"message": message}], "usage": usage} for usage in ("x", {}, None)]
        self.reply(200, kinds[body["seed"] % len(kinds)])

    def reply(self, status, content):
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(raw)


def completion(text, finish="stop"):
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": finish}]
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    facts = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    return facts | {"choices": choices, "usage": usage}


def sample(body):
    """A question of words drawn by the request's seed, as the schema of the request wants it."""
    schema = body["response_format"]["json_schema"]["schema"]
    number = body["seed"]
    words = " ".join(WORDS[number // 11**i % 11] + str(i) for i in range(9))
    made = {
        "question": f"Which number is under {words}?",
        "answer": str(number),
        "reasoning": f"It is {number}.",
    }
    if "wrong_answers" in schema["properties"]:
        count = schema["properties"]["wrong_answers"]["minItems"]
        made["wrong_answers"] = [str(number + i) for i in range(1, count + 1)]
    return made


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.lock, made.delay, made.busy, made.busiest = Counter(), threading.Lock(), 0.0, 0, 0
    made.url = f"http://127.0.0.1:{made.server_port}/v1"
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def arguments(server, out, model, *flags, count=24):
    flags = ("--count", str(count), "--concurrency", "4", "--timeout", "5", *flags)
    return ["synth", "--out", str(out), "--endpoint", server.url, "--model", model, *flags]


def made_by(out):
    manifest = json.loads((out / "manifest.json").read_text())
    return manifest, {step["name"]: step["dropped"] for step in manifest["steps"]}


def test_samples_of_an_endpoint(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-key")
    out = tmp_path / "out"
    assert prep.main(arguments(server, out, "good", "--key-variable", "MY_KEY")) == 0
    manifest, _ = made_by(out)
    assert manifest["samples"] == 24 and manifest["families"] == {"mcq": 12, "generative": 12}
    assert manifest["reasoned"] == 24 and set(manifest["letters"]) == {"4", "10"}
    assert server.key == "Bearer secret-key" and server.busiest <= 4
    assert not any(b"secret-key" in path.read_bytes() for path in out.rglob("*") if path.is_file())
    rows = [json.loads(line) for line in (out / "chats.jsonl").read_text().splitlines()]
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    bodies = [json.loads(body) for body in server.seen]
    assert len({body["seed"] for body in bodies}) == 24 == sum(server.seen.values())
    assert all('"additionalProperties": false' in body["messages"][1]["content"] for body in bodies)


def test_trouble_that_passes_is_tried_again(server, tmp_path):
    assert prep.main(arguments(server, tmp_path / "out", "flaky", count=6)) == 0
    assert made_by(tmp_path / "out")[0]["samples"] == 6
    assert set(server.seen.values()) == {3}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("locked", "environment variable OPENAI_API_KEY"),
        ("strict", "--response-format json_object or none"),
        ("down", "20 requests in a row without an answer; got HTTP 500"),
    ],
)
def test_trouble_that_stays_stops_the_run(server, tmp_path, capsys, model, words):
    flags = ("--retries", "0") if model == "down" else ()
    assert prep.main(arguments(server, tmp_path / "out", model, *flags, count=40)) == 5
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_no_server_at_all(server, tmp_path, capsys):
    server.url = "http://127.0.0.1:9/v1"
    assert prep.main(arguments(server, tmp_path / "out", "good", "--retries", "0")) == 5
    assert "cannot reach http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_replies_of_another_form_are_no_answers(server, tmp_path, capsys):
    assert prep.main(arguments(server, tmp_path / "out", "odd", "--retries", "0", count=100)) in (3, 5)
    error = capsys.readouterr().err
    assert "malformed reply" in error and "Traceback" not in error


def test_useless_answers_are_counted_by_kind(server, tmp_path):
    assert prep.main(arguments(server, tmp_path / "out", "sloppy", "--retries", "0", count=60)) == 0
    manifest, dropped = made_by(tmp_path / "out")
    assert set(dropped["generate"]) == {"no answer: malformed reply"}
    assert set(dropped["format"]) == {"the answer is not JSON", "the answer was cut off"}
    assert set(dropped["schema"]) == {"schema: answer"}
    left = 60 - sum(sum(reasons.values()) for reasons in dropped.values())
    assert manifest["samples"] == left > 5


def test_timeouts_are_counted(server, tmp_path):
    flags = ("--timeout", "0.3", "--retries", "0", "--family", "generative")
    assert prep.main([*arguments(server, tmp_path / "out", "slow", count=8), *flags]) == 0
    manifest, dropped = made_by(tmp_path / "out")
    odd = sum(json.loads(body)["seed"] % 2 for body in server.seen)
    assert dropped["generate"] == {"no answer: timed out": odd} and manifest["samples"] == 8 - odd


def test_killed_and_resumed_asks_nothing_twice_and_ends_the_same(server, tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    flags = ("--generator", "reasoning_gym:gcd")
    assert prep.main(arguments(server, whole, "good", *flags, count=120)) == 0
    server.seen.clear()
    server.delay = 0.03
    command = [
        sys.executable,
        "-m",
        "nemotron_ultra.prep",
        *arguments(server, torn, "good", *flags, count=120),
    ]
    process = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL)
    while sum(server.seen.values()) < 25 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    answered = (torn / "answers.jsonl").read_bytes().count(b"\n")
    assert 15 <= answered < 60 and not (torn / "manifest.json").exists()
    with open(torn / "answers.jsonl", "ab") as file:
        file.write(b'{"request": "torn')
    server.delay = 0.0
    assert prep.main(arguments(server, torn, "good", *flags, count=120)) == 0
    twice = sum(count - 1 for count in server.seen.values())
    assert len(server.seen) == 60 and twice <= 4  # only what was on its way when the kill came
    names = ["chats.jsonl", "prompts.jsonl", "manifest.json"]
    names += [f"steps/{path.name}" for path in (whole / "steps").iterdir()]
    assert all((torn / name).read_bytes() == (whole / name).read_bytes() for name in names)
    before = sum(server.seen.values())
    assert prep.main(arguments(server, torn, "good", *flags, count=120)) == 0
    assert sum(server.seen.values()) == before
