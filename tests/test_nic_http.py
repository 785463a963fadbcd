"""``blink-ref serve`` over real sockets."""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import time

import httpx
import pytest
from processes import ENGINES, Bench, wait_until_gone, wait_until_running

from blink_ref.model.store import TINY
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.ring.layout import NO_PAGES

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
USER = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module", params=ENGINES)
def served(request, tmp_path_factory):
    """One server for all tests that do it no harm."""
    with Bench(tmp_path_factory.mktemp("windows"), ENGINES[request.param]).serve() as served:
        yield served


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """One server with a quick fake engine."""
    with Bench(tmp_path_factory.mktemp("windows")).fake().serve() as served:
        yield served.http


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY)


def events(response):
    """The JSON of each server-sent event, and the last line."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]], lines[-1]


def stream(http, path, **body):
    with http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks, last = events(response)
    assert last == "data: [DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    return chunks


def test_a_completion_in_one_object(served, tokenizer):
    before = time.time() - 1
    reply = served.http.post(COMPLETIONS, json={"model": "tiny", "prompt": "It was", "max_tokens": 8, **GREEDY})
    assert reply.status_code == 200
    said = reply.json()
    assert said["id"].startswith("cmpl-")
    assert said["object"] == "text_completion"
    assert before <= said["created"] <= time.time()
    assert said["model"] == "tiny"
    (choice,) = said["choices"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    prompt = len(tokenizer.encode("It was"))
    assert said["usage"] == {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8}


def test_a_streamed_completion_joins_to_the_whole(served):
    body = {"prompt": "She had — 😀 —", "max_tokens": 40, **GREEDY}
    whole = served.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    chunks = stream(served.http, COMPLETIONS, **body)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert "usage" not in chunks[0]


def test_a_chat_in_one_object_and_streamed(served, tokenizer):
    body = {"messages": USER, "max_completion_tokens": 20, **GREEDY}
    said = served.http.post(CHATS, json=body).json()
    assert said["id"].startswith("chatcmpl-")
    assert said["object"] == "chat.completion"
    message = said["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert said["usage"]["prompt_tokens"] == len(tokenizer.encode_chat(USER))
    chunks = stream(served.http, CHATS, stream_options={"include_usage": True}, **body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == message["content"]
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert (usage["choices"], usage["usage"]) == ([], said["usage"])
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}


def test_token_ids_and_their_text_are_the_same_prompt(served, tokenizer):
    ids = tokenizer.encode("It was")
    texts = [
        served.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 8, **GREEDY}).json()["choices"]
        for prompt in ("It was", ids)
    ]
    assert texts[0] == texts[1]


def test_sixteen_at_once_get_each_what_they_get_alone(served):
    bodies = [
        {"prompt": "It is a truth universally acknowledged"[: 5 + 2 * n], "max_tokens": 5 + 3 * n, **GREEDY}
        for n in range(16)
    ]
    alone = [served.http.post(COMPLETIONS, json=body).json()["choices"] for body in bodies]

    async def together():
        async with httpx.AsyncClient(base_url=served.http.base_url, timeout=60) as http:
            replies = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))
        return [reply.json()["choices"] for reply in replies]

    assert asyncio.run(together()) == alone


@pytest.fixture
def drawing(served):
    """The server's client, if its engine draws tokens."""
    if served.said["target"] == "python":
        pytest.skip("the fake engine draws nothing; the real one runs this too")
    return served.http


def test_each_of_several_answers_is_the_one_of_its_seed(drawing):
    body = {"prompt": "It is a truth universally acknowledged, that a " * 3, "max_tokens": 12, "temperature": 1}
    before = drawing.get("/health").json()["cached_positions"]
    choices = drawing.post(COMPLETIONS, json={**body, "n": 4, "seed": 5}).json()["choices"]
    assert drawing.get("/health").json()["cached_positions"] > before, "they share the prompt's pages"
    alone = [drawing.post(COMPLETIONS, json={**body, "seed": 5 + n}).json()["choices"][0] for n in range(4)]
    assert [choice["text"] for choice in choices] == [choice["text"] for choice in alone]
    assert len({choice["text"] for choice in choices}) > 1


def test_a_large_bias_decides_the_answer(drawing, tokenizer):
    (token,) = tokenizer.encode(" the")
    body = {"prompt": "It was", "max_tokens": 5, **GREEDY, "logit_bias": {str(token): 100}}
    assert drawing.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == " the" * 5
    body["stop_token_ids"] = [token]
    said = drawing.post(COMPLETIONS, json=body).json()
    assert (said["choices"][0]["finish_reason"], said["usage"]["completion_tokens"]) == ("stop", 1)


def test_a_greedy_token_is_the_likeliest_and_probabilities_add_up_to_less_than_one(drawing):
    body = {"messages": USER, "max_tokens": 8, **GREEDY, "logprobs": True, "top_logprobs": 20}
    content = drawing.post(CHATS, json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        logprobs = [other["logprob"] for other in entry["top_logprobs"]]
        assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(map(math.exp, logprobs)) < 1 + 1e-5


def test_an_urgent_answer_is_the_same_as_an_ordinary_one(drawing):
    body = {"prompt": "It was", "max_tokens": 8, **GREEDY}
    answers = [
        drawing.post(COMPLETIONS, json={**body, "service_tier": tier}).json()["choices"]
        for tier in ("auto", "priority")
    ]
    assert answers[0] == answers[1]


def test_models_lists_the_one(served):
    said = served.http.get("/v1/models").json()
    assert said["object"] == "list"
    assert [(model["id"], model["object"]) for model in said["data"]] == [("tiny", "model")]


def test_health_says_who_serves(served):
    said = served.http.get("/health").json()
    assert said["status"] == "ok"
    assert said["engine_pid"] == served.said["engine_pid"]
    assert said["nic_pid"] == served.process.pid
    assert said["target"] in ("cpu", "cuda", "python")
    assert said["steps"] >= 0
    wait_until_running(served.http, 0)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_gives_its_slot_back(served, streaming):
    body = {"prompt": "It was", "max_tokens": 1000, "stream": streaming, **GREEDY}
    for _ in range(3):
        if streaming:
            with served.http.stream("POST", COMPLETIONS, json=body) as response:
                next(response.iter_lines())
        else:
            with contextlib.suppress(httpx.ReadTimeout):
                served.http.post(COMPLETIONS, json=body, timeout=0.2)
    wait_until_running(served.http, 0)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "complaint"),
    [
        ("POST", COMPLETIONS, b"", 400, "the body is not JSON"),
        ("POST", COMPLETIONS, b"\xff\xfe", 400, "the body is not JSON"),
        ("POST", COMPLETIONS, b"[" * 100_000, 400, "the body is not JSON"),
        ("POST", COMPLETIONS, b"[]", 400, "the body is an array; it must be a JSON object"),
        ("POST", COMPLETIONS, b'{"prompt": ""}', 400, "the prompt is empty"),
        ("POST", COMPLETIONS, b'{"prompt": [1, 5000]}', 400, "token id 5000 in the prompt is outside"),
        ("POST", COMPLETIONS, b'{"prompt": [-1]}', 400, "token id -1"),
        ("POST", COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "lone surrogate"),
        ("POST", COMPLETIONS, b'{"prompt": "x", "max_tokens": 5000}', 400, "exceed the context of 1024"),
        ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400, "temperature is nan"),
        ("POST", COMPLETIONS, b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens is 0"),
        ("POST", COMPLETIONS, b'{"prompt": "x", "tempreature": 0}', 400, "'tempreature' is not a parameter"),
        ("POST", COMPLETIONS, b'{"prompt": "x", "model": "gpt-4"}', 404, "there is no model 'gpt-4'"),
        ("POST", CHATS, b'{"messages": []}', 400, "messages is missing or empty"),
        ("POST", COMPLETIONS, b"x" * 5_000_000, 413, "the body has 5000000 bytes; at most"),
        ("GET", COMPLETIONS, b"", 405, "Method Not Allowed"),
        ("POST", "/health", b"", 405, "Method Not Allowed"),
        ("GET", "/v1/nothing", b"", 404, "GET /v1/nothing: Not Found"),
    ],
)
def test_a_bad_request_is_answered_in_the_form_of_the_api(fake, method, path, content, status, complaint):
    reply = fake.request(method, path, content=content)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert complaint in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert fake.get("/health").json()["running"] == 0


def test_a_prompt_longer_than_the_context_is_refused(fake):
    reply = fake.post(COMPLETIONS, json={"prompt": "a b" * 2000})
    assert reply.status_code == 400
    assert "exceed the context of 1024; shorten the prompt" in reply.json()["error"]["message"]


def test_too_many_requests_are_turned_away_and_later_served(tmp_path):
    with Bench(tmp_path).fake(slots=2, delay=0.02).serve() as served:
        body = {"prompt": "x y", "max_tokens": 1000, "stream": True, **GREEDY}
        with contextlib.ExitStack() as streams:
            for _ in range(2):
                streams.enter_context(served.http.stream("POST", COMPLETIONS, json=body))
            reply = served.http.post(COMPLETIONS, json={"prompt": "x"})
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "1"
            assert "all 2 request slots are taken" in reply.json()["error"]["message"]
        wait_until_running(served.http, 0)
        assert served.http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("streaming", [True, False])
def test_what_the_gpu_refuses_has_a_status_of_its_own(tmp_path, streaming):
    with Bench(tmp_path).fake(refuse=NO_PAGES).serve() as served:
        reply = served.http.post(COMPLETIONS, json={"prompt": "x", "stream": streaming})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "the request failed: the KV cache can never hold it"


def test_a_killed_engine_ends_the_streams_and_then_every_request_with_503(tmp_path):
    with Bench(tmp_path).fake(delay=0.01).serve() as served:
        body = {"prompt": "x y", "max_tokens": 1000, "stream": True, **GREEDY}
        with served.http.stream("POST", COMPLETIONS, json=body) as response:
            os.kill(served.said["engine_pid"], signal.SIGKILL)
            *_, last = response.iter_lines(), *[line for line in response.iter_lines() if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert error["message"].startswith(f"the engine (process {served.said['engine_pid']}) died")
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHATS, {"messages": USER})):
            reply = served.http.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_gone")
        health = served.http.get("/health")
        assert health.status_code == 503
        assert "died" in health.json()["status"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_streams_server_and_engine_in_order(tmp_path, number, code):
    bench = Bench(tmp_path).fake(delay=0.01)
    with bench.serve() as served:
        body = {"prompt": "x y", "max_tokens": 1000, "stream": True, **GREEDY}
        with served.http.stream("POST", COMPLETIONS, json=body) as response:
            served.process.send_signal(number)
            chunks, last = events(response)
        assert chunks
        assert "the server is shutting down" in last
        served.http.close()
        assert served.process.wait(10) == code
        assert b"Traceback" not in served.process.stderr.read()
        wait_until_gone(served.said["engine_pid"], 0)
    assert bench.left() == []


def test_a_killed_server_leaves_no_engine(tmp_path):
    bench = Bench(tmp_path).fake()
    with bench.serve() as served:
        served.process.kill()
        wait_until_gone(served.said["engine_pid"])
    assert bench.left() == []


def test_a_taken_port_is_one_line_and_starts_no_engine(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bench = Bench(tmp_path, {"BLINK_REF_ENGINE": "/never/started"})
        _, err = bench.run("serve", "--model", "tiny", "--port", str(port), code=1)
    assert err == (
        f"blink-ref: error: port {port} of 127.0.0.1 is taken; "
        "pass another --host or --port (0 picks a free port)\n"
    )


@pytest.mark.parametrize("host", ["256.1.1.1", "not a host", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_one_line(tmp_path, host):
    bench = Bench(tmp_path, {"BLINK_REF_ENGINE": "/never/started"})
    _, err = bench.run("serve", "--model", "tiny", "--host", host, "--port", "0", code=1)
    assert err.startswith(f"blink-ref: error: {host}:0 cannot be listened on (")
    assert err.count("\n") == 1


def test_an_idle_server_sleeps(tmp_path):
    with Bench(tmp_path).fake().serve() as served:
        served.http.post(COMPLETIONS, json={"prompt": "x"})
        with open(f"/proc/{served.process.pid}/stat") as stat:
            before = stat.read()
            time.sleep(1)
            stat.seek(0)
            after = stat.read()
    ticks = [sum(map(int, text.rpartition(")")[2].split()[11:13])) for text in (before, after)]
    assert ticks[1] - ticks[0] <= 0.05 * os.sysconf("SC_CLK_TCK")
