"""A request's parameters: which values are refused, and how they lie in the window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nic_bench import pair_in

from blink_ref.errors import BlinkError
from blink_ref.nic.parameters import REAL, WHOLE, BadParameter, Parameters
from blink_ref.ring.layout import IGNORE_EOS, MOST_BIASES, MOST_STOPS, REQUEST, URGENT

NAN, INF = float("nan"), float("inf")
CONTEXT, VOCAB = 100, 300
EVERYTHING = {
    "max_tokens": 7,
    "temperature": 0.5,
    "seed": 2**64 - 1,
    "ignore_eos": True,
    "priority": 3,
    "urgent": True,
    "min_tokens": 4,
    "time_ms": 2**32 - 1,
    "top_k": 40,
    "top_p": 0.75,
    "min_p": 0.125,
    "repetition": 1.25,
    "presence": -2.0,
    "frequency": 1.5,
    "stop_ids": (11, 12, 13),
    "logit_bias": {5: -100.0, 299: 0.5},
    "logprobs": 20,
}


@pytest.fixture
def pair(tmp_path):
    with pair_in(tmp_path) as pair:
        yield pair


def check(prompt=(1,), **values):
    Parameters(**{"max_tokens": 5, **values}).check(prompt, CONTEXT, VOCAB)


def test_a_request_reaches_the_gpu_as_it_was_submitted(pair):
    handle = pair.nic.submit([5, 6], **EVERYTHING)
    request = pair.request(handle)
    said = {name: request[name].item() for name in REQUEST.names if name != "unused"}
    same = (
        "max_tokens temperature seed priority min_tokens time_ms top_k top_p min_p repetition presence frequency"
    )
    assert said == {
        **{name: EVERYTHING[name] for name in same.split()},
        "prompt_at": handle.piece.at,
        "prompt_len": 2,
        "flags": IGNORE_EOS | URGENT,
        "stops": 3,
        "biases": 2,
        "logprobs": 21,
        "leader": 0,
        "leader_generation": 0,
    }
    assert pair.window.nic["doorbell"][handle.slot] == 1


def test_stop_tokens_and_then_biases_lie_behind_the_prompt(pair):
    handle = pair.nic.submit([5, 6], **EVERYTHING)
    words = pair.window.nic["arena"][handle.piece.at :][: handle.piece.length]
    assert words[:5].tolist() == [5, 6, 11, 12, 13]
    assert words[5::2].tolist() == [5, 299]
    assert words[6::2].view(np.float32).tolist() == [-100.0, 0.5]


def test_all_but_the_length_is_off_by_default_and_off_is_zero(pair):
    pair.nic.submit([5, 6], **EVERYTHING)
    pair.drain({handle: [] for handle in pair.nic._running.values()})
    again = pair.nic.submit([7], 3)
    assert again.slot == 0, "the slot whose record was full"
    nonzero = {name for name in REQUEST.names if np.any(pair.request(again)[name])}
    assert nonzero == {"prompt_len", "max_tokens"}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number from 1 to"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        ({"max_tokens": NAN}, "max_tokens is nan"),
        ({"max_tokens": "5"}, "max_tokens is 5; it must be a whole number"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be between 0 and 1e+06"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"priority": -1}, "priority is -1; it must be a whole number from 0 to 4294967295"),
        ({"min_tokens": 6}, "min_tokens is 6; it must not be more than max_tokens, 5"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"time_ms": 2**32}, "time_ms is 4294967296; it must be a whole number from 0 to 4294967295"),
        ({"time_ms": -1}, "time_ms is -1"),
        ({"time_ms": 0.5}, "time_ms is 0.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0}, "top_p is 0; it must be between 0 and 1, and not 0"),
        ({"top_p": 1.01}, "top_p is 1.01; it must be between 0 and 1, and not 0"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": 1}, "min_p is 1; it must be between 0 and 1, and not 1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": NAN}, "min_p is nan"),
        ({"repetition": 0}, "repetition is 0; it must be between 0 and 1e+06, and not 0"),
        ({"repetition": -1}, "repetition is -1"),
        ({"repetition": INF}, "repetition is inf"),
        ({"repetition": NAN}, "repetition is nan"),
        ({"presence": 2.1}, "presence is 2.1; it must be between -2 and 2"),
        ({"presence": NAN}, "presence is nan"),
        ({"frequency": -2.1}, "frequency is -2.1; it must be between -2 and 2"),
        ({"frequency": -INF}, "frequency is -inf"),
        ({"stop_ids": [1] * 17}, "stop_ids has 17 tokens; it must have at most 16"),
        ({"stop_ids": [300]}, "stop_ids has token id 300; it must be one of the vocabulary of 300"),
        ({"stop_ids": [-1]}, "stop_ids has token id -1"),
        ({"stop_ids": [1.5]}, "stop_ids has token id 1.5"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias has 301 tokens; it must have at most 300"),
        ({"logit_bias": {300: 1.0}}, "logit_bias has token id 300"),
        ({"logit_bias": {5: 100.5}}, "logit_bias of token 5 is 100.5; it must be between -100 and 100"),
        ({"logit_bias": {5: NAN}}, "logit_bias of token 5 is nan"),
        ({"logprobs": 21}, "logprobs is 21; it must be a whole number from 0 to 20"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 1.0}, "logprobs is 1.0"),
    ],
    ids=str,
)
def test_an_impossible_value_is_refused_by_its_name_value_and_limit(pair, values, complaint):
    with pytest.raises(BadParameter) as caught:
        pair.nic.submit([1], **{"max_tokens": 5, **values})
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)
    assert caught.value.name in values
    assert pair.nic.running == 0
    assert not pair.window.nic["doorbell"].any()
    assert pair.nic._arena.take(256) == 0, "nothing of the arena was taken"


def test_the_limits_themselves_are_served():
    check(min_tokens=5, priority=2**32 - 1, seed=2**64 - 1, time_ms=2**32 - 1, top_k=2**32 - 1, logprobs=20)
    check(temperature=1e6, top_p=1, min_p=0, repetition=1e6, presence=2, frequency=-2, logprobs=0)
    check(stop_ids=range(MOST_STOPS), logit_bias=dict.fromkeys(range(MOST_BIASES), 100.0))
    check(stop_ids=[np.int64(5)], logit_bias={np.uint32(5): np.float32(-100)}, top_k=np.int32(3))
    check([1] * 60, max_tokens=40)


@pytest.mark.parametrize("seen_as", ["top_p", "repetition"])
def test_a_tiny_value_does_not_become_the_zero_that_means_off(pair, seen_as):
    handle = pair.nic.submit([1], 5, **{seen_as: 1e-300})
    assert pair.request(handle)[seen_as] > 0


def test_a_temperature_too_small_to_divide_by_is_greedy_and_min_p_stays_below_one(pair):
    request = pair.request(pair.nic.submit([1], 5, temperature=1e-300, min_p=1 - 1e-16))
    assert request["temperature"] == 0
    assert 0.999 < request["min_p"] < 1


def test_as_many_likeliest_as_there_are_tokens_are_all_of_them(pair):
    assert pair.request(pair.nic.submit([1], 5, top_k=300))["top_k"] == 0
    assert pair.request(pair.nic.submit([1], 5, top_k=299))["top_k"] == 299


ANYTHING = st.none() | st.integers() | st.floats() | st.sampled_from([0, 1, 2, 5, 0.5, -1, 2**32, 2**64, 10**400])


@given(st.dictionaries(st.sampled_from([*WHOLE, *REAL, "logprobs"]), ANYTHING.filter(lambda v: v is not None)))
def test_what_is_not_refused_fits_its_record(values):
    parameters = Parameters(**{"max_tokens": 5, **values})
    try:
        parameters.check([1], CONTEXT, VOCAB)
    except BlinkError:
        return
    record = np.zeros((), REQUEST)
    for name, value in parameters.record(VOCAB).items():
        record[name] = value
        assert np.isfinite(record[name])
    assert 0 <= record["top_p"] <= 1
    assert 0 <= record["min_p"] < 1
    assert record["min_tokens"] <= record["max_tokens"]


biases = st.dictionaries(st.integers(0, 299), st.floats(-100, 100, width=32), max_size=20)


@given(st.lists(st.integers(0, 299), max_size=16), biases)
def test_stops_and_biases_come_back_as_they_were_written(stops, bias):
    tail = Parameters(5, stop_ids=stops, logit_bias=bias).tail()
    assert tail.dtype == np.uint32
    assert tail[: len(stops)].tolist() == stops
    pairs = tail[len(stops) :].reshape(-1, 2)
    assert dict(zip(pairs[:, 0].tolist(), pairs[:, 1].copy().view(np.float32).tolist(), strict=True)) == bias
