"""Log probabilities against a log-softmax in float64."""

import numpy as np
import pytest
from filter_bench import Ask, Samples

from blink_ref.kernels import logprobs, tensors
from blink_ref.ring import layout

CLOSE = 1e-3
"""What the project promises; the sum of a softmax is off by 2**-20 or so, and a logit below 100 by 2**-17."""


def reported(target, lanes, x, ask):
    """For each sample the token drawn, its log probability, the likeliest ids, and their log probabilities."""
    samples = Samples(x, [ask])
    drawn = samples.draw(target, lanes)
    n = len(drawn)
    most = tensors.MOST_LOGPROBS
    values, ids = samples.act.chosen_logprob.reshape(-1, 1 + most)[:n], samples.act.likely.reshape(-1, most)[:n]
    wanted = ask.logprobs - 1
    assert np.isnan(values[:, 1 + wanted :]).all()  # no more is written
    assert (ids[:, wanted:] == -1).all()
    return drawn, values[:, 0], ids[:, :wanted], values[:, 1 : 1 + wanted]


@pytest.mark.parametrize("n", [0, 1, 5, 20])
@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_they_are_those_of_the_raw_logits(target, lanes, n, scale):
    x = np.random.default_rng(n).standard_normal((6, 50)).astype(np.float32) * np.float32(scale)
    # what changes the draw does not change them
    ask = Ask(
        temperature=2.5, top_k=9, repetition=1.5, biases=[(4, 5.0)], prompt=[1, 2], answer=[4], logprobs=1 + n
    )
    for row, drawn, chosen, ids, values in zip(x, *reported(target, lanes, x, ask), strict=True):
        wanted, likeliest = logprobs.spec(row, n)
        assert abs(chosen - wanted[drawn]) <= CLOSE
        assert ids.tolist() == likeliest.tolist()
        assert (np.abs(values - wanted[likeliest]) <= CLOSE).all()


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 4.0])
def test_they_are_close_in_a_vocabulary_of_a_real_size(target, scale):
    x = np.random.default_rng(5).standard_normal((3, 128256)).astype(np.float32) * np.float32(scale)
    for row, drawn, chosen, ids, values in zip(x, *reported(target, 256, x, Ask(logprobs=21)), strict=True):
        wanted, likeliest = logprobs.spec(row, 20)
        assert abs(chosen - wanted[drawn]) <= CLOSE
        assert ids.tolist() == likeliest.tolist()
        assert (np.abs(values - wanted[likeliest]) <= CLOSE).all()


def test_ties_go_to_the_smaller_id(target, lanes):
    x = np.zeros((1, 30), np.float32)
    x[0, [20, 7]], x[0, 3] = 1, -0.0
    _, _, ids, _ = reported(target, lanes, x, Ask(logprobs=8))
    assert ids[0].tolist() == [7, 20, 0, 1, 2, 3, 4]


def test_what_a_small_vocabulary_lacks_is_token_0_with_a_probability_of_0(target, lanes):
    _, _, ids, values = reported(target, lanes, np.array([[0.0, 2, 1]]), Ask(logprobs=6))
    assert ids[0].tolist() == [1, 2, 0, 0, 0]
    assert np.isfinite(values[0, :3]).all()
    assert (values[0, 3:] == -np.inf).all()


def test_nan_has_a_probability_of_0_and_comes_last(target, lanes):
    x = np.array([[np.nan, 1, -np.inf, 1, np.nan]])
    _, chosen, ids, values = reported(target, lanes, x, Ask(logprobs=6))
    assert ids[0].tolist() == [1, 3, 2, 0, 4]
    assert np.allclose([*chosen, *values[0, :2]], np.log(0.5), atol=1e-6)
    assert (values[0, 2:] == -np.inf).all()


def test_as_many_as_the_window_has_room_for():
    assert tensors.MOST_LOGPROBS == layout.MOST_LOGPROBS


def test_the_cost_is_that_counted_by_hand():
    # two samples of 5 tokens: a pass for the sum, and one for each of 3, or for the highest alone
    assert logprobs.cost(2, 5, 3) == (4 * 10 * 4, 4 * 10)
    assert logprobs.cost(2, 5, 0) == (4 * 10 * 2, 4 * 10)
