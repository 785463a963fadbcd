"""What the OpenAI API's bodies may say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_ref.nic.openai import NEUTRAL, ApiError, parse

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**body):
    return parse({"prompt": "x", **body}, chat=False, model="tiny")


def chat(**body):
    return parse({**CHAT, **body}, chat=True, model="tiny")


def refused(body, chat=False):
    with pytest.raises(ApiError) as caught:
        parse(body, chat, "tiny")
    return caught.value


def test_defaults_are_those_of_the_api():
    call = completion()
    assert (call.prompt, call.messages, call.max_tokens, call.temperature) == ("x", None, 16, 1.0)
    assert (call.stream, call.include_usage, call.ignore_eos) == (False, False, False)
    assert chat().max_tokens is None, "a chat's answer takes what fits"
    assert chat().messages == CHAT["messages"]


def test_without_a_seed_every_request_draws_its_own():
    assert completion().seed != completion().seed
    assert completion(seed=5).seed == 5
    assert completion(seed=-1).seed == 2**64 - 1


def test_null_is_the_same_as_nothing():
    nulls = dict.fromkeys(["model", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos"])
    assert completion(**nulls, **dict.fromkeys(NEUTRAL), seed=1) == completion(seed=1)


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
        ({"n": 2}, "n", "n is not served yet; leave it out, or send 1"),
        ({"n": True}, "n", "n is not served yet"),
        ({"logprobs": 0}, "logprobs", "logprobs is not served yet"),
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
NAMES = [*NEUTRAL, "prompt", "messages", "model", "max_tokens", "temperature", "seed", "stream", "stream_options"]


@given(JSON | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), st.booleans())
def test_no_json_value_whatever_breaks_the_parser(body, is_chat):
    try:
        call = parse(json.loads(json.dumps(body)), is_chat, "tiny")
    except ApiError as refusal:
        json.dumps(refusal.body())
    else:
        assert call.max_tokens is None or call.max_tokens >= 1
