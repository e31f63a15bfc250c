"""The openai client, and plain HTTP where it would not send such a thing, against a running server."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from nemotron_ultra.generation import generate
from serving import TEMPLATE, TOKENIZER, serving

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def running():
    with serving(slots=4, waiting=8) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(running, prompt, count, **options):
    options = {"vocab_size": TOKENIZER.vocab_size, "stop_ids": TEMPLATE.stop_ids} | options
    return generate(running.worker._answers.scheduler.model, [prompt], count, **options)[0]


def test_chat(client, running):
    answer = client.chat.completions.create(
        model="micro", messages=HELLO, max_tokens=9, temperature=0, logprobs=True
    )
    own = expected(running, TEMPLATE.prompt(HELLO), 9)
    choice = answer.choices[0]
    assert choice.message.content == TEMPLATE.text(own.tokens) and choice.finish_reason == own.finish_reason
    assert [row.logprob for row in choice.logprobs.content] == pytest.approx(own.model_logprobs, abs=1e-5)
    assert answer.usage.prompt_tokens == len(TEMPLATE.prompt(HELLO)) and answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9


def test_a_stream_is_the_answer_in_pieces(client):
    asked = dict(model="micro", messages=HELLO, max_tokens=12, seed=3, temperature=0.8)
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 4
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage and len({chunk.id for chunk in chunks}) == 1


def test_token_ids_in_and_out(client, running):
    asked = dict(model="micro", max_tokens=6, seed=5, logprobs=1, extra_body={"return_token_ids": True})
    answer = client.completions.create(prompt=[5, 6, 7], **asked).choices[0]
    own = expected(running, [5, 6, 7], 6, temperature=1.0, seeds=[5], stop_ids=())
    assert answer.token_ids == own.tokens and answer.prompt_token_ids == [5, 6, 7]
    assert answer.sampling_logprobs == pytest.approx(own.logprobs, abs=1e-5)
    assert answer.logprobs.token_logprobs == pytest.approx(own.model_logprobs, abs=1e-5)
    assert answer.text == TOKENIZER.decode(own.tokens) and answer.logprobs.text_offset[0] == 0
    chunks = list(client.completions.create(prompt=[5, 6, 7], **asked, stream=True))
    assert [id for chunk in chunks for id in chunk.choices[0].token_ids] == own.tokens
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.text


def test_several_prompts_and_choices_have_numbers_of_their_own(client):
    answer = client.completions.create(model="micro", prompt=["one", "two"], n=2, max_tokens=8, seed=1)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    first = client.completions.create(model="micro", prompt="one", max_tokens=8, seed=1)
    assert first.choices[0].text == texts[0] and answer.usage.completion_tokens == 32
    again = client.completions.create(model="micro", prompt=["one", "two"], n=2, max_tokens=8, seed=1)
    assert [choice.text for choice in again.choices] == texts


@pytest.mark.parametrize(
    "options", [{"top_k": 10**30}, {"top_k": -1}, {"seed": -(10**30)}, {"temperature": 1000}]
)
def test_numbers_at_the_edge(running, options):
    body = {"prompt": "x", "max_tokens": 3, "return_token_ids": True} | options
    answer = httpx.post(running.url + "/v1/completions", json=body).json()["choices"][0]
    assert len(answer["token_ids"]) <= 3 and None not in answer["sampling_logprobs"]


def test_a_stop_text_is_left_out(client):
    asked = dict(model="micro", prompt="one", max_tokens=16, seed=1)
    whole = client.completions.create(**asked).choices[0].text
    found = client.completions.create(**asked, stop=[whole[6:8], "never"]).choices[0]
    assert found.text == whole.split(whole[6:8])[0] and found.finish_reason == "stop"


def test_thoughts_with_a_budget_are_told_apart(client):
    asked = dict(model="micro", messages=HELLO, max_tokens=20, seed=2, logprobs=True)
    extra = {"thinking_budget": 4, "return_token_ids": True}
    answer = client.chat.completions.create(**asked, reasoning_effort="high", extra_body=extra)
    choice = answer.choices[0]
    close = [*TOKENIZER.encode("\n"), TOKENIZER.id("</think>")]
    assert choice.token_ids[4:6] == close and answer.prompt_token_ids == TEMPLATE.prompt(
        HELLO, True, budget=4
    )
    assert choice.message.reasoning_content == TOKENIZER.decode(choice.token_ids[:4]).removesuffix("\n")
    assert choice.message.content == TEMPLATE.text(choice.token_ids, thinking=True).removeprefix("\n")
    assert [row.logprob is None for row in choice.logprobs.content[4:7]] == [True, True, False]
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6
    kwargs = {"chat_template_kwargs": {"enable_thinking": True, "reasoning_budget": 4}}
    stream = client.chat.completions.create(**asked, extra_body=kwargs, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in stream]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == choice.message.reasoning_content
    assert "".join(d.get("content") or "" for d in deltas) == choice.message.content


def test_tools_are_part_of_the_prompt(client):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"properties": {}}}}]
    asked = dict(model="micro", messages=HELLO, max_tokens=2, extra_body={"return_token_ids": True})
    answer = client.chat.completions.create(**asked, tools=tools)
    assert answer.prompt_token_ids == TEMPLATE.prompt(HELLO, tools=tools)
    answer = client.chat.completions.create(**asked, tools=tools, tool_choice="none")
    assert answer.prompt_token_ids == TEMPLATE.prompt(HELLO)


def test_an_answer_given_back_with_its_ids_is_not_encoded_anew(client):
    asked = dict(model="micro", max_tokens=7, seed=4, extra_body={"return_token_ids": True})
    first = client.chat.completions.create(messages=HELLO, **asked)
    choice = first.choices[0]
    ids = {"prompt_token_ids": first.prompt_token_ids, "token_ids": choice.token_ids}
    said = {"role": "assistant", "content": choice.message.content}
    messages = [*HELLO, said | ids, {"role": "user", "content": "and?"}]
    second = client.chat.completions.create(messages=messages, **asked)
    drawn = [*first.prompt_token_ids, *choice.token_ids]
    rest = TEMPLATE.prompt([*HELLO, {"role": "assistant", "content": "x"}, messages[-1]])
    assert second.prompt_token_ids[: len(drawn)] == drawn
    assert rest[-(len(second.prompt_token_ids) - len(drawn)) :] == second.prompt_token_ids[len(drawn) :]
    result = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "43"}]
    third = client.chat.completions.create(messages=[*HELLO, said | ids, *result], **asked)
    assert "42" in TOKENIZER.decode(third.prompt_token_ids[len(drawn) :])
    with pytest.raises(openai.BadRequestError, match="must be a list of token ids"):
        client.chat.completions.create(messages=[*HELLO, said | {"token_ids": "x"}, HELLO[0]], **asked)


def test_models_health_and_metrics(client, running):
    assert [model.id for model in client.models.list()] == ["micro"]
    assert client.models.retrieve("micro").max_model_len == 256
    assert httpx.get(running.url + "/health").json() == {"status": "ok"}
    text = httpx.get(running.url + "/metrics").text
    assert 'requests_total{path="/v1/models",status="200"}' in text and "answers_limit 12\n" in text


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("chat/completions", {}, 400, "messages: needed"),
        ("chat/completions", {"messages": []}, 400, "messages: needed"),
        ("chat/completions", {"messages": "hi"}, 400, 'messages: got "hi"; allowed: a list of objects'),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "must end with"),
        ("chat/completions", {"messages": [*HELLO, {"role": "user", "content": 5}]}, 400, "must be text"),
        ("chat/completions", {"messages": HELLO, "model": "other"}, 404, "there is 'micro'"),
        ("chat/completions", {"messages": HELLO, "temperature": -1}, 400, "temperature: got -1"),
        ("chat/completions", {"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
        ("chat/completions", {"messages": HELLO, "temprature": 1}, 400, "did you mean 'temperature'"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens: got 0"),
        ("chat/completions", {"messages": HELLO, "max_tokens": True}, 400, "max_tokens: got true"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 9999}, 400, "context is 256 tokens"),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 5}, 400, "of the tokens drawn"),
        ("chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "form"),
        ("chat/completions", {"messages": HELLO, "n": 100, "max_tokens": 1}, 400, "at most 12"),
        ("chat/completions", [], 400, "must be a JSON object"),
        ("completions", {"prompt": ""}, 400, "prompt is empty"),
        ("completions", {"prompt": []}, 400, "prompt: got []"),
        ("completions", {"prompt": [1, "x"]}, 400, "prompt: got"),
        ("completions", {"prompt": [999_999]}, 400, "token id the model does not have"),
        ("completions", {"prompt": [-1]}, 400, "token id the model does not have"),
        ("completions", {"prompt": "x", "stop_token_ids": [-5]}, 400, "stop_ids"),
        ("completions", {"prompt": "word " * 400}, 400, "context is 256 tokens"),
        ("completions", {"prompt": [[1]] * 99, "n": 128}, 400, "12672 choices in one request"),
        ("completions", {"prompt": "x", "temperature": 1e-40}, 400, "temperature: got 1e-40"),
        ("completions", {"prompt": "x", "stop": "x" * 300}, 400, "256 letters"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop: got"),
        ("completions", {"prompt": "x", "logprobs": 5}, 400, "logprobs"),
        ("nothing", {}, 404, "/v1/nothing"),
    ],
)
def test_what_cannot_be_is_one_error(running, path, body, status, said):
    answer = httpx.post(f"{running.url}/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status and said in error["message"] and error["type"], answer.text
    assert running.worker.active == 0


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"prompt": NaN}', {}, 400),
        (b'{"prompt": "\\ud800"}', {}, 400),
        (b'{"prompt": "\xed\xa0\x80"}', {}, 400),
        ('{"prompt": "\\ud800"}'.encode("utf-16"), {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"prompt": "x"}', {"Content-Type": "text/plain"}, 415),
        (b"x" * 5_000, {}, 413),
        (b'{"prompt": "x"}', {"Host": "evil.example"}, 403),
    ],
)
def test_bodies_that_are_no_request(content, headers, status):
    with serving(max_body=200_000 if content.startswith(b"[") else 4_000) as running:
        send = {"Content-Type": "application/json"} | headers
        answer = httpx.post(running.url + "/v1/completions", content=content, headers=send)
        chunked = httpx.post(running.url + "/v1/completions", content=iter([content]), headers=send)
    assert answer.status_code == chunked.status_code == status and answer.json()["error"]["message"]


def test_arguments_of_calls_that_are_nested_too_deeply(running):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 50_000}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, *HELLO]
    answer = httpx.post(running.url + "/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400 and "nested too deeply" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["LOCALHOST", "127.0.0.2:1", "[::1]:80", "[::1]"])
def test_names_of_this_machine(running, host):
    assert httpx.get(running.url + "/v1/models", headers={"Host": host}).status_code == 200


def test_a_key_of_any_letters():
    key = "schlüssel".encode()
    with serving(api_key=key) as running:
        answer = httpx.get(running.url + "/v1/models", headers={"Authorization": b"Bearer " + key})
        assert answer.status_code == 200


def test_a_key():
    with serving(api_key=b"secret") as running:
        wrong = openai.OpenAI(base_url=running.url + "/v1", api_key="wrong")
        with wrong as client, pytest.raises(openai.AuthenticationError, match="API key"):
            client.models.list()
        with openai.OpenAI(base_url=running.url + "/v1", api_key="secret") as client:
            assert client.models.list().data[0].id == "micro"
        assert httpx.get(running.url + "/health").status_code == 200
        assert httpx.get(running.url + "/metrics").status_code == 401


def test_the_stream_ends_with_done(running):
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    with httpx.stream("POST", running.url + "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"
