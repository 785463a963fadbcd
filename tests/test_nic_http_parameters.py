"""What the HTTP server makes of sampling parameters, several answers, log probabilities, urgency and time."""

import json

import pytest
from fake_engine import scores
from processes import Bench, wait_until_running

from blink_ref.model.store import TINY
from blink_ref.model.tokenizer import Tokenizer

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
IDS = [43, 86, 305, 12]
"""What the fake engine says, in turn."""
BODIES = {
    COMPLETIONS: {"prompt": "She was", "ignore_eos": True},
    CHATS: {"messages": [{"role": "user", "content": "She was"}], "ignore_eos": True},
}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    with Bench(tmp_path_factory.mktemp("windows")).fake(answer=IDS, slots=8).serve() as served:
        yield served.http


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY)


def say(http, path, **body):
    """The answer to a body, whole."""
    reply = http.post(path, json={**BODIES[path], **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks(http, path, **body):
    """The choices of all chunks of a streamed answer, one a chunk."""
    with http.stream("POST", path, json={**BODIES[path], "stream": True, **body}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    objects = [json.loads(line) for line in lines[:-1]]
    return [chunk["choices"][0] for chunk in objects if chunk["choices"]], objects[-1]


def refusal(http, path, **body):
    reply = http.post(path, json={**BODIES[path], **body})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"top_p": 0}, "top_p", "top_p is 0.0; it must be between 0 and 1, and not 0"),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5; it must be between 0 and 1, and not 0"),
        ({"top_k": -2}, "top_k", "top_k is -2; it must be a whole number from 0 to 4294967295"),
        ({"min_p": 1}, "min_p", "min_p is 1.0; it must be between 0 and 1, and not 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0.0; it must be between 0 and"),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty is 3.0; it must be between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty is -3.0; it must be between -2 and 2"),
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens",
            "min_tokens is 9; it must not be more than max_tokens, 8",
        ),
        ({"priority": -1}, "priority", "priority is -1; it must be a whole number from 0 to 4294967295"),
        (
            {"stop_token_ids": [5000]},
            "stop_token_ids",
            "stop_token_ids has token id 5000; it must be one of the voc",
        ),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids", "stop_token_ids has 17 tokens; it must have at most 16"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "logit_bias has token id 5000; it must be one of the voc"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias of token 5 is 101.0; it must be between -100 and"),
        ({"n": 0}, "n", "n is 0; it must be between 1 and 8, the number of request slots"),
        ({"n": 9}, "n", "n is 9; it must be between 1 and 8, the number of request slots"),
        ({"timeout": -1}, "timeout", "timeout is -1.0; it must be above 0"),
    ],
    ids=lambda value: json.dumps(value)[:30] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("path", BODIES)
def test_an_impossible_value_is_a_400_that_names_it(http, path, body, param, message):
    said = refusal(http, path, **body)
    assert said[0] == param
    assert said[1].startswith(message)
    assert http.get("/health").json()["running"] == 0


def test_log_probabilities_of_a_completion_beyond_the_limit_are_named_as_it_names_them(http):
    assert refusal(http, COMPLETIONS, logprobs=21)[0] == "logprobs"
    assert refusal(http, CHATS, logprobs=True, top_logprobs=21)[0] == "top_logprobs"


@pytest.mark.parametrize("path", BODIES)
def test_several_answers_come_with_their_index_and_all_their_tokens_are_counted(http, tokenizer, path):
    before = http.get("/health").json()["cached_positions"]
    said = say(http, path, n=3, max_tokens=4)
    text = tokenizer.decode(IDS)
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in said["choices"]} == {"length"}
    texts = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in said["choices"]]
    assert texts == [text] * 3
    assert said["usage"]["completion_tokens"] == 12
    prompt = said["usage"]["prompt_tokens"]
    assert http.get("/health").json()["cached_positions"] == before + 2 * prompt, "shared by two of the three"


@pytest.mark.parametrize("path", BODIES)
def test_several_answers_are_streamed_side_by_side(http, tokenizer, path):
    choices, last = chunks(http, path, n=3, max_tokens=40, stream_options={"include_usage": True})
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        texts = [c["text"] if path == COMPLETIONS else c["delta"].get("content", "") for c in own]
        assert "".join(texts) == tokenizer.decode(IDS * 10)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        if path == CHATS:
            assert own[0]["delta"]["role"] == "assistant"
    assert last["usage"]["completion_tokens"] == 120


def test_a_client_that_leaves_ends_all_its_answers(tmp_path):
    with Bench(tmp_path).fake(delay=0.01).serve() as served:
        body = {**BODIES[COMPLETIONS], "n": 5, "max_tokens": 900, "stream": True}
        with served.http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()  # which leaves when it is forgotten
            next(lines)
            wait_until_running(served.http, 5)
        wait_until_running(served.http, 0)


def test_fewer_free_slots_than_answers_is_429(tmp_path):
    with Bench(tmp_path).fake(slots=4, delay=0.02).serve() as served:
        body = {**BODIES[COMPLETIONS], "n": 3, "max_tokens": 900, "stream": True}
        with served.http.stream("POST", COMPLETIONS, json=body):
            reply = served.http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "n": 2})
    assert reply.status_code == 429
    assert "2 samples need as many request slots, and 1 are free" in reply.json()["error"]["message"]


def test_a_chats_log_probabilities_have_the_apis_shape(http, tokenizer):
    (choice,) = say(http, CHATS, max_tokens=4, logprobs=True, top_logprobs=3)["choices"]
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content] == [tokenizer.token_bytes(token) for token in IDS]
    for entry, token in zip(content, IDS, strict=True):
        logprob, likeliest = scores(token, 3)
        assert entry["token"] == tokenizer.token_bytes(token).decode(errors="replace")
        assert entry["logprob"] == logprob
        assert [(bytes(other["bytes"]), other["logprob"]) for other in entry["top_logprobs"]] == [
            (tokenizer.token_bytes(other), logprob) for other, logprob in likeliest
        ]


def test_a_completions_log_probabilities_have_the_apis_shape(http, tokenizer):
    (choice,) = say(http, COMPLETIONS, max_tokens=3, logprobs=2)["choices"]
    said, texts = choice["logprobs"], [tokenizer.decode([token]) for token in IDS[:3]]
    assert said["tokens"] == texts
    assert said["token_logprobs"] == [scores(token, 2)[0] for token in IDS[:3]]
    assert said["text_offset"] == [0, len(texts[0]), len(texts[0] + texts[1])]
    assert [len(each) for each in said["top_logprobs"]] == [2, 2, 2], "the token itself is among them"


def test_without_alternatives_a_token_still_has_its_own_log_probability(http):
    (choice,) = say(http, CHATS, max_tokens=2, logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]
    (choice,) = say(http, COMPLETIONS, max_tokens=2, logprobs=0)["choices"]
    assert [list(each.values()) for each in choice["logprobs"]["top_logprobs"]] == [[-IDS[0] / 8], [-IDS[1] / 8]]
    assert say(http, COMPLETIONS, max_tokens=2)["choices"][0]["logprobs"] is None


def test_streamed_log_probabilities_join_to_those_of_the_whole(http):
    whole = say(http, CHATS, max_tokens=20, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    choices, _ = chunks(http, CHATS, max_tokens=20, logprobs=True, top_logprobs=1)
    assert [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]] == whole
    whole = say(http, COMPLETIONS, max_tokens=20, logprobs=1)["choices"][0]["logprobs"]
    choices, _ = chunks(http, COMPLETIONS, max_tokens=20, logprobs=1)
    for name in whole:
        assert [each for c in choices if c["logprobs"] for each in c["logprobs"][name]] == whole[name]


def test_tokens_within_a_character_are_scored_one_by_one(tmp_path, tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    with Bench(tmp_path).fake(answer=ids).serve() as served:
        choices, _ = chunks(served.http, COMPLETIONS, max_tokens=len(ids), logprobs=0)
        scored = [choice for choice in choices if choice["logprobs"]]
        assert [choice["text"] for choice in scored] == [""] * (len(ids) - 1) + ["😀"]
        assert scored[0]["logprobs"]["tokens"] == [
            "bytes:" + "".join(f"\\x{b:02x}" for b in tokenizer.token_bytes(ids[0]))
        ]
        chat = say(served.http, CHATS, max_tokens=len(ids), logprobs=True)["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in chat) == "😀".encode()


@pytest.mark.parametrize("path", BODIES)
def test_a_stop_token_ends_the_answer_but_not_before_min_tokens(http, path):
    said = say(http, path, max_tokens=16, stop_token_ids=[IDS[1]])
    assert said["choices"][0]["finish_reason"] == "stop"
    assert said["usage"]["completion_tokens"] == 2
    assert say(http, path, max_tokens=16, stop_token_ids=[IDS[1]], min_tokens=3)["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_whose_time_is_over_is_cut_short_and_says_by_what(tmp_path, path):
    with Bench(tmp_path).fake(answer=IDS, delay=0.02).serve() as served:
        said = say(served.http, path, max_tokens=900, timeout=0.2)
        choices, _ = chunks(served.http, path, max_tokens=900, timeout=0.2)
    for choice in (said["choices"][0], choices[-1]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    assert 0 < said["usage"]["completion_tokens"] < 900
    assert len(choices) > 1


def test_urgent_requests_are_served(http):
    """The fake engine ends with an error should one be counted before its doorbell."""
    for _ in range(20):
        say(http, COMPLETIONS, max_tokens=1, service_tier="priority", n=2)
    assert http.get("/health").json()["status"] == "ok"


def test_metrics_are_those_of_health_in_the_form_of_prometheus(http):
    say(http, COMPLETIONS, max_tokens=4)
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.text.splitlines()
    said = dict(line.split() for line in lines if not line.startswith("#"))
    assert set(said) == {
        "blink_ref_steps_total",
        "blink_ref_running",
        "blink_ref_waiting",
        "blink_ref_preempted_total",
        "blink_ref_paused_total",
        "blink_ref_cached_positions_total",
        "blink_ref_evicted_pages_total",
    }
    assert int(said["blink_ref_steps_total"]) == http.get("/health").json()["steps"] > 0
    for name in said:
        assert any(line.startswith(f"# HELP {name} ") for line in lines)
        assert f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}" in lines
