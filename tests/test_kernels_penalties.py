"""Bans, biases and penalties: the specification by hand, and the device against it."""

import numpy as np
import pytest
from filter_bench import EOS, Ask, Samples, random_ask
from kernel_bench import U

from blink_ref.kernels import penalties

NEVER = -np.inf


def adjusted(target, lanes, x, ask, shared=195):
    """Adjusted logits [vocab] of one sample, by the device."""
    samples = Samples(x, [ask])
    samples.draw(target, lanes, blocks=1, shared=shared)
    return samples.act.adjusted[: samples.x.shape[1]]


def test_the_penalties_are_those_computed_by_hand():
    x = np.array([4, 2, -2, 1, 0], np.float32)
    got = penalties.spec(x, prompt=[0, 2, 2], answer=[1, 1, 2], repetition=2, presence=0.25, frequency=0.5)
    # 0: in the prompt; 1: twice in the answer; 2: in both, once in the answer
    assert got.tolist() == [2, 1 - 1 - 0.25, -4 - 0.5 - 0.25, 1, 0]
    assert penalties.spec(x, [0, 2, 2], [1, 1, 2]).tolist() == x.tolist()


def test_biases_come_before_the_repetition_penalty_and_do_not_lift_a_ban():
    x = np.array([1, 1, 1], np.float32)
    got = penalties.spec(
        x, prompt=[0, 1], answer=[], banned=[2], biases=[(0, -2), (2, 100), (0, -1)], repetition=2
    )
    assert got.tolist() == [-4, 0.5, NEVER]


def test_the_device_adjusts_as_the_specification(target, lanes):
    draw = np.random.default_rng(1)
    asks = [random_ask(draw, 30) for _ in range(100)]
    samples = Samples(draw.standard_normal((100, 30)) * 3, asks)
    samples.sampling.min_p[:] = 0  # it would leave its marks
    samples.draw(target, lanes)
    for ask, x, got in zip(asks, samples.x, samples.act.adjusted.reshape(-1, 30), strict=False):
        wanted = ask.adjusted(x)
        assert (np.isinf(got) == np.isinf(wanted)).all()
        # at most 8 biases and 4 operations, each off by u of a number below 3 * 5 + 8 * 3 + 8 * 1 + 1 = 48
        finite = np.isfinite(wanted)
        assert (np.abs(got[finite] - wanted[finite]) <= 12 * 48 * U).all()


def test_a_token_counts_once_for_presence_and_each_time_for_frequency(target, lanes):
    got = adjusted(
        target, lanes, np.zeros(8), Ask(presence=0.5, frequency=0.25, prompt=[6] * 9, answer=[2] * 5 + [4])
    )
    assert got.tolist() == [0, 0, -1.75, 0, -0.75, 0, 0, 0]


def test_the_repetition_penalty_is_applied_once_to_tokens_of_prompt_and_answer(target, lanes):
    x = [2, 2, -2, -2, 2, 0]
    got = adjusted(target, lanes, x, Ask(repetition=2.0, prompt=[0, 2] * 7, answer=[2, 4, 4, 5]))
    assert got.tolist() == [1, 2, -4, -2, 1, 0]


def test_penalties_below_zero_and_repetition_below_one_reward(target, lanes):
    got = adjusted(target, lanes, np.ones(6), Ask(repetition=0.5, presence=-1, prompt=[0], answer=[2]))
    assert got.tolist() == [2, 1, 3, 1, 1, 1]


@pytest.mark.parametrize("answered", [0, 2, 3, 4])
def test_end_and_stop_tokens_are_banned_until_the_answer_is_long_enough(target, lanes, answered):
    ask = Ask(
        min_tokens=3, stops=[5], biases=[(5, 100.0), (EOS[0], 100.0)], prompt=[6, 6, 6, 6], answer=[7] * answered
    )
    got = adjusted(target, lanes, np.zeros(8), ask)
    banned = np.flatnonzero(got == NEVER).tolist()
    assert banned == (sorted([*EOS, 5]) if answered < 3 else [])


def test_biases_of_one_token_add_up_in_their_order(target, lanes):
    # in float32, 1e8 takes in a 1 before it is gone, and not after
    ask = Ask(biases=[(1, 1e8), (0, 0.5), (1, 1.0), (1, -1e8), (0, 0.25), (2, 1e8), (2, -1e8), (2, 1.0)])
    assert adjusted(target, lanes, np.zeros(4), ask).tolist() == [0.75, 0, 1, 0]


def test_as_many_biases_as_a_request_can_carry(target, lanes):
    biases = [(7 * i % 90, 0.5) for i in range(300)]
    got = adjusted(target, lanes, np.zeros(90), Ask(biases=biases))
    assert got.tolist() == [0.5 * sum(7 * i % 90 == token for i in range(300)) for token in range(90)]


def test_tokens_that_the_model_does_not_have_are_passed_over(target, lanes):
    ask = Ask(min_tokens=1, stops=[8, -1], biases=[(8, 1.0), (-2, 1.0), (2**31 - 1, 1.0), (4, 1.0)])
    got = adjusted(target, lanes, np.zeros(8), ask)
    assert np.flatnonzero(got).tolist() == sorted([*EOS, 4])


def test_long_histories_of_few_tokens_are_counted_exactly(target, lanes):
    answer = np.random.default_rng(2).integers(0, 3, 400).tolist()
    got = adjusted(
        target, lanes, np.zeros(4), Ask(frequency=1.0, repetition=1.5, prompt=[3, 0] * 50, answer=answer)
    )
    assert got.tolist() == [-answer.count(token) for token in range(4)]


def test_the_cost_is_that_counted_by_hand():
    # two samples: 5 logits read and written; 7 tokens, each with its count, seen three times
    assert penalties.cost(2, 5, 7) == (2 * (5 * 8 + 7 * 3 * 8), 2 * 4 * 7)
