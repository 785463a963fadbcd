"""What the OpenAI API's bodies may say."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_ref.nic.openai import COMMON, NEUTRAL, parse
from blink_ref.nic.options import NAMES, renamed
from blink_ref.nic.parameters import BadParameter, Parameters
from blink_ref.nic.values import ApiError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**body):
    return parse({"prompt": "x", **body}, chat=False, model="tiny")


def parameters(**body):
    call = completion(**body)
    return Parameters(call.max_tokens, **call.options)


def chat(**body):
    return parse({**CHAT, **body}, chat=True, model="tiny")


def refused(body, chat=False):
    with pytest.raises(ApiError) as caught:
        parse(body, chat, "tiny")
    return caught.value


def test_defaults_are_those_of_the_api():
    call = completion()
    assert (call.prompt, call.messages, call.max_tokens, call.n) == ("x", None, 16, 1)
    assert (call.stream, call.include_usage) == (False, False)
    assert parameters(seed=5) == Parameters(16, temperature=1.0, seed=5)
    assert chat().max_tokens is None, "a chat's answer takes what fits"
    assert chat().messages == CHAT["messages"]


def test_without_a_seed_every_request_draws_its_own():
    assert parameters().seed != parameters().seed
    assert parameters(seed=5).seed == 5
    assert parameters(seed=-1).seed == 2**64 - 1


def test_names_of_the_api_become_those_of_a_request():
    body = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "min_tokens": 3,
        "priority": 7,
        "ignore_eos": True,
        "seed": 9,
        "stop_token_ids": [4, 5],
        "logit_bias": {"50": -100, "7": 0.5},
        "service_tier": "priority",
        "timeout": 1.5,
        "logprobs": 2,
    }
    assert parameters(**body) == Parameters(
        max_tokens=16,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.25,
        repetition=1.5,
        presence=-1,
        frequency=2,
        min_tokens=3,
        priority=7,
        ignore_eos=True,
        seed=9,
        stop_ids=(4, 5),
        logit_bias={50: -100, 7: 0.5},
        urgent=True,
        time_ms=1500,
        logprobs=2,
    )


def test_the_values_with_which_other_servers_say_off_are_known():
    off = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "top_p": 1, "logit_bias": {}, "stop_token_ids": []}
    assert parameters(**off, service_tier="auto", seed=1) == parameters(seed=1)


def test_a_chat_asks_for_log_probabilities_in_two_parameters():
    assert chat().options["logprobs"] is None
    assert chat(logprobs=False, top_logprobs=0).options["logprobs"] is None
    assert chat(logprobs=True).options["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=20).options["logprobs"] == 20
    for body, complaint in (
        ({"top_logprobs": 3}, "top_logprobs is only for logprobs: true"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs is only for logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be between 0 and 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs is -1; it must be between 0 and 20"),
        ({"logprobs": 5}, "logprobs is 5; it must be true or false"),
    ):
        assert str(refused({**CHAT, **body}, chat=True)) == complaint


def test_a_timeout_of_less_than_a_millisecond_is_one_and_not_none():
    assert parameters(timeout=1e-9).time_ms == 1


def test_what_a_request_refuses_is_said_under_the_apis_name():
    for field, name in (("repetition", "repetition_penalty"), ("stop_ids", "stop_token_ids"), ("top_p", "top_p")):
        error = renamed(BadParameter(field, "is odd"), chat=False)
        assert (str(error), error.status, error.param) == (f"{name} is odd", 400, name)
    assert renamed(BadParameter("logprobs", "is odd"), chat=True).param == "top_logprobs"


def test_null_is_the_same_as_nothing():
    nulls = dict.fromkeys(["model", "max_tokens", "n", "stream", "stream_options", *NAMES, *NEUTRAL])
    assert completion(**{**nulls, "seed": 1}) == completion(seed=1)


def test_both_names_of_the_length_of_a_chat_are_known():
    assert chat(max_tokens=7).max_tokens == chat(max_completion_tokens=7).max_tokens == 7
    assert "differ" in str(refused({**CHAT, "max_tokens": 7, "max_completion_tokens": 8}, chat=True))
    assert refused({"prompt": "x", "max_completion_tokens": 7}).code == "unknown_parameter"


def test_a_prompt_may_be_text_or_ids_or_a_batch_of_one():
    assert completion(prompt=[1, 2]).prompt == [1, 2]
    assert completion(prompt=["x"]).prompt == "x"
    assert completion(prompt=[[1, 2]]).prompt == [1, 2]


def test_content_in_text_parts_is_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "ab"


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_parameter_that_is_not_served_is_accepted_at_its_neutral_values_only(name):
    for value in NEUTRAL[name]:
        completion(**{name: value})
    error = refused({"prompt": "x", name: "other"})
    assert (error.status, error.param) == (400, name)
    assert "is not served yet; leave it out, or send" in str(error)


@pytest.mark.parametrize(
    ("body", "param", "complaint"),
    [
        ({"propmt": "x"}, "propmt", "'propmt' is not a parameter of this API"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": 5}, "prompt", "must be a string or an array of token ids"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt holds a string; .*send several prompts as several requests"),
        ({"prompt": [1, 2.0]}, "prompt", "prompt holds 2.0"),
        ({"prompt": [True, 1]}, "prompt", "prompt holds True"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": -5}, "max_tokens", "max_tokens is -5"),
        ({"max_tokens": 5.5}, "max_tokens", "max_tokens is 5.5; it must be an integer"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens is a string"),
        ({"max_tokens": True}, "max_tokens", "max_tokens is True"),
        ({"temperature": -0.1}, "temperature", "must be between 0 .greedy. and 2"),
        ({"temperature": 2.1}, "temperature", "temperature is 2.1"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan"),
        ({"temperature": "hot"}, "temperature", "temperature is a string; it must be a number"),
        ({"temperature": False}, "temperature", "temperature is False"),
        ({"seed": 2**63}, "seed", "must be a 64-bit integer"),
        ({"seed": "x"}, "seed", "seed is a string"),
        ({"stream": 1}, "stream", "stream is 1; it must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x is not served"),
        ({"stream": True, "stream_options": []}, "stream_options", "an array; it must be an object"),
        ({"ignore_eos": "yes"}, "ignore_eos", "must be true or false"),
        ({"model": 5}, "model", "model is 5; it must be a string"),
        ({"temperature": 10**400}, "temperature", "temperature is inf"),
        ({"n": 1.5}, "n", "n is 1.5; it must be an integer"),
        ({"n": True}, "n", "n is True; it must be an integer"),
        ({"top_p": "x"}, "top_p", "top_p is a string; it must be a number"),
        ({"top_k": 1.5}, "top_k", "top_k is 1.5; it must be an integer"),
        ({"min_tokens": "5"}, "min_tokens", "min_tokens is a string"),
        ({"priority": 0.5}, "priority", "priority is 0.5; it must be an integer"),
        ({"logprobs": True}, "logprobs", "logprobs is True; it must be an integer"),
        ({"top_logprobs": 5}, "top_logprobs", "top_logprobs is only for chats; send logprobs: the number"),
        ({"stop_token_ids": 5}, "stop_token_ids", "stop_token_ids is 5; it must be an array"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids", "stop_token_ids holds a string"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "stop_token_ids holds True"),
        ({"logit_bias": [1]}, "logit_bias", "logit_bias is an array; it must be an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x'; its keys must be token ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias has the key '-1'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "logit_bias has the key '9{40}'"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias", "logit_bias has the key"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "logit_bias of token 5 is a string; it must be a number"),
        ({"logit_bias": {"5": None}}, "logit_bias", "logit_bias of token 5 is null"),
        ({"service_tier": "fast"}, "service_tier", "service_tier is 'fast'; it must be one of auto, default"),
        ({"service_tier": 1}, "service_tier", "service_tier is 1; it must be a string"),
        ({"timeout": 0}, "timeout", "timeout is 0.0; it must be above 0 and at most 4294967 seconds"),
        ({"timeout": float("nan")}, "timeout", "timeout is nan"),
        ({"timeout": 1e9}, "timeout", "timeout is 1000000000.0"),
        ({"timeout": 10**400}, "timeout", "timeout is inf"),
        ({"timeout": "5s"}, "timeout", "timeout is a string"),
        ({"stop": ["\n"]}, "stop", "stop is not served yet"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(body, param, complaint):
    error = refused({"prompt": "x", **body})
    assert (error.status, error.param) == (400, param)
    with pytest.raises(ApiError, match=complaint):
        raise error


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (None, "messages is missing or empty"),
        ([], "messages is missing or empty"),
        ("hi", "messages is missing or empty"),
        (["hi"], r"messages\[0\] is a string; it must be an object"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"content": "x"}], r"messages\[0\].role is missing"),
        ([{"role": 1, "content": "x"}], r"messages\[0\].role is 1; it must be a string"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5"),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": None}],
            r"messages\[1\].content is missing",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that is no text"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], r"messages\[0\].tool_calls is not served"),
    ],
)
def test_wrong_messages_are_named_with_their_place(messages, complaint):
    error = refused({"messages": messages}, chat=True)
    with pytest.raises(ApiError, match=complaint):
        raise error


def test_another_model_is_not_found():
    error = refused({"prompt": "x", "model": "gpt-4"})
    assert (error.status, error.code) == (404, "model_not_found")
    assert error.body()["error"]["message"] == "there is no model 'gpt-4' here; 'tiny' is served"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ALL_NAMES = [*NEUTRAL, *NAMES, "prompt", "messages", "model", "max_tokens", "n", "stream", "stream_options"]


@given(JSON | st.dictionaries(st.sampled_from(ALL_NAMES), JSON, max_size=4), st.booleans())
def test_no_json_value_whatever_breaks_the_parser(body, is_chat):
    try:
        call = parse(json.loads(json.dumps(body)), is_chat, "tiny")
    except ApiError as refusal:
        json.dumps(refusal.body())
    else:
        assert call.max_tokens is None or call.max_tokens >= 1
        try:
            Parameters(call.max_tokens or 16, **call.options).check([1], 100, 300)
        except BadParameter as refusal:
            json.dumps(renamed(refusal, is_chat).body())


def test_the_page_on_the_http_server_lists_the_parameters_that_are_served():
    page = (Path(__file__).parents[1] / "docs" / "http.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == (COMMON | {"prompt", "messages", "max_completion_tokens"}) - {"model"}
