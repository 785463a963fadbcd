"""Drawing with filters: the device against the specification, and the specification against probabilities."""

import itertools

import numpy as np
import pytest
from filter_bench import Ask, Samples, random_ask

from blink_ref.kernels import filters, logits, sampling
from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import i64

COMPILED = pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
"""For tests that are too much for an interpreter."""


# --- the specification, by hand

HALVES = np.log(np.array([1 / 16, 1 / 2, 1 / 8, 1 / 4, 1 / 16], np.float32))
"""Logits of tokens with these probabilities."""


def kept(x=HALVES, temperature=1.0, top_k=0, top_p=0.0, min_p=0.0):
    return np.flatnonzero(filters.kept_spec(np.float32(x), temperature, top_k, top_p, min_p)).tolist()


def test_top_k_keeps_the_likeliest_and_what_is_as_likely_as_the_last():
    assert [kept(top_k=k) for k in (1, 2, 3)] == [[1], [1, 3], [1, 2, 3]]
    assert kept(top_k=4) == kept(top_k=5) == kept(top_k=1000) == kept() == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_fewest_that_reach_it_and_what_is_as_likely_as_the_last():
    assert [kept(top_p=p) for p in (1e-9, 0.49, 0.51, 0.74, 0.76)] == [[1], [1], [1, 3], [1, 3], [1, 2, 3]]
    assert kept(top_p=0.9) == kept(top_p=1.0) == kept(top_p=np.nextafter(np.float32(1), 0)) == [0, 1, 2, 3, 4]


def test_min_p_keeps_those_that_are_likely_enough_beside_the_likeliest():
    assert [kept(min_p=p) for p in (1.0, 0.51, 0.49, 0.24, 0.12)] == [[1], [1], [1, 3], [1, 2, 3], [0, 1, 2, 3, 4]]
    assert kept(min_p=1e-38) == [0, 1, 2, 3, 4]
    assert kept(min_p=7.0) == [1]


def test_filters_see_probabilities_at_the_temperature_and_top_k_does_not():
    # squared, the probabilities are 1/4, 1/16, 1/64 and 1/256, 3/4 of their sum being the first
    assert kept(temperature=0.5, top_p=0.7) == kept(temperature=0.5, min_p=0.26) == [1]
    assert kept(temperature=0.5, top_k=2) == kept(top_k=2)


def test_top_p_is_a_share_of_what_min_p_and_top_k_leave():
    # of the two likeliest, the first has two thirds
    assert kept(top_k=2, top_p=0.66) == kept(min_p=0.4, top_p=0.66) == [1]
    assert kept(top_k=2, top_p=0.67) == [1, 3]


def test_plus_and_minus_zero_are_as_likely():
    assert kept([-1.0, -0.0, 0.0, -2.0], top_k=1) == [1, 2]


# --- the device, token for token

SWITCHES = ("greedy", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "biases", "min_tokens")


def test_every_combination_of_parameters_draws_the_token_of_the_specification(target, lanes):
    # Equal but where rounding decides. Two scores have to be within some 2**-20 of each other for that, or a
    # probability so near to a bar: one case in a hundred thousand, and these are not among them.
    draw = np.random.default_rng(1)
    combinations = itertools.product((False, True), repeat=len(SWITCHES))
    asks = [random_ask(draw, 40, dict(zip(SWITCHES, on, strict=True))) for on in combinations]
    x = draw.standard_normal((len(asks), 40)) * draw.choice([0.5, 2, 5], (len(asks), 1))
    samples = Samples(x, asks, first=100)
    wanted = [ask.drawn(row, 100 + s) for s, (ask, row) in enumerate(zip(asks, samples.x, strict=True))]
    assert samples.draw(target, lanes) == wanted
    sizes = {int(ask.kept(row).sum()) for ask, row in zip(asks, samples.x, strict=True)}
    assert len(sizes) > 20  # from one token kept to all of them


@COMPILED
def test_a_vocabulary_of_a_real_size_too(target):
    draw = np.random.default_rng(2)
    vocab = 49152
    x = draw.standard_normal((24, vocab)) * 2
    x[:, :2000] += np.linspace(15, 4, 2000)
    tokens = draw.integers(0, vocab, 400).tolist()
    asks = [
        Ask(seed=s, top_k=k, top_p=p, min_p=m, repetition=1.2, frequency=0.1, prompt=tokens, answer=tokens[:99])
        for s, (k, p, m) in enumerate(itertools.product((0, 50), (0.0, 0.9, 0.999), (0.0, 0.02)))
    ]
    samples = Samples(x, asks, first=5)
    drawn = samples.draw(target, 256)
    assert drawn == [asks[s % len(asks)].drawn(row, 5 + s) for s, row in enumerate(samples.x)]
    assert len(set(drawn)) > 12


@device
def plain_draws(block, plan, samples, rows, vocab):
    for s in range(samples):
        logits.draw(plan, s, rows, i64(s) * vocab, i64(0), i64(vocab))


def test_with_all_filters_off_the_token_is_that_of_the_plain_draw_bit_for_bit(target, lanes):
    draw = np.random.default_rng(3)
    x = (draw.standard_normal((40, 61)) * draw.choice([0.01, 1, 30], (40, 1))).astype(np.float32)
    x[draw.random(x.shape) < 0.1] = np.nan
    x[draw.random(x.shape) < 0.1] = -np.inf
    x[:, 7] = x[:, 50] = 1e-3  # some ties
    x[0, 9], x[1, 30] = np.inf, np.inf
    asks = [Ask(temperature=t, seed=s) for s, t in enumerate([0, 0.01, 0.3, 1, 1.7, 5, 1e6])]
    samples = Samples(x, asks)
    drawn = samples.draw(target, lanes)
    keys = samples.plan.best.copy()
    samples.plan.best[:] = logits.LOWEST
    launch(plain_draws, 1, lanes, samples.plan, 40, samples.x.reshape(-1), 61, target=target)
    assert (samples.plan.best == keys).all()
    assert drawn[:2] == [9, 30]


def test_a_token_does_not_depend_on_lanes_or_blocks(target, lanes):
    draw = np.random.default_rng(4)
    asks = [random_ask(draw, 33, dict.fromkeys(SWITCHES[1:], True)) for _ in range(9)]
    x = draw.standard_normal((9, 33))

    def results(lanes, blocks, shared=195):
        samples = Samples(x, asks)
        samples.draw(target, lanes, blocks, shared)
        act = samples.act
        return [a.tobytes() for a in (samples.plan.best, act.chosen_logprob, act.likely)]

    first = results(lanes, 1)
    counts = {"python": (1, 4, 12), "cpu": (1,), "cuda": (32, 512)}[target]
    for other, blocks in itertools.product(counts, (1, 2, 13)):
        assert results(other, blocks, 2048) == first


def test_samples_without_filters_are_left_alone(target, lanes):
    draw = np.random.default_rng(5)
    samples = Samples(draw.standard_normal((6, 20)), [Ask(seed=s) for s in range(6)])
    alone = samples.draw(target, lanes)
    keys = samples.plan.best.copy()
    samples = Samples(samples.x, samples.asks)
    samples.sampling.filtered[[0, 3, 4]] = 0
    samples.plan.best[[0, 3, 4]] = keys[[0, 3, 4]]
    assert samples.draw(target, lanes, blocks=2) == alone
    assert np.isnan(samples.act.adjusted.reshape(-1, 20)[[0, 3, 4]]).all()
    assert not np.isnan(samples.act.adjusted.reshape(-1, 20)[[1, 2, 5]]).any()


# --- the ends


def everything(**changed):
    return Ask(**({"top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition": 1.1} | changed))


def test_at_temperature_zero_the_highest_adjusted_logit_wins_and_ties_go_to_the_smaller_id(target, lanes):
    x = np.zeros((3, 10))
    x[0, [2, 5, 8]] = 4
    x[1, [2, 5, 8]] = 4, 4, 5
    ask = everything(temperature=0, presence=1, prompt=[0], answer=[2, 8])
    assert Samples(x, [ask]).draw(target, lanes) == [5, 5, 0]


def test_nan_is_never_drawn(target, lanes):
    x = np.full((12, 8), np.nan)
    x[:, 5], x[:, 6] = 1, 0.9
    x[::2, 0] = -np.float32(np.nan)
    asks = [everything(temperature=t, seed=s) for s, t in enumerate([0, 1, 1000])]
    assert set(Samples(x, asks).draw(target, lanes)) == {5, 6}


@pytest.mark.parametrize("nothing", [np.nan, -np.inf])
def test_where_nothing_can_be_drawn_it_is_token_0(target, lanes, nothing):
    asks = [everything(temperature=0), everything(), Ask(logprobs=21)]
    samples = Samples(np.full((3, 8), nothing), asks)
    assert samples.draw(target, lanes) == [0, 0, 0]
    assert [ask.drawn(row, 0) for ask, row in zip(asks, samples.x, strict=True)] == [0, 0, 0]


def test_where_all_tokens_are_banned_it_is_token_0(target, lanes):
    ask = everything(min_tokens=1, stops=[0, 2, 4], biases=[(1, 50.0)], prompt=[0, 1], temperature=0.7)
    assert Samples(np.zeros((2, 5)), [ask]).draw(target, lanes) == [0, 0]


def test_infinite_logits_and_temperatures_near_zero_draw_the_likeliest(target, lanes):
    x = np.tile(np.array([0, 3, np.inf, 3, np.inf, -np.inf], np.float32), (40, 1))
    asks = [everything(seed=s) for s in range(40)]
    assert set(Samples(x, asks).draw(target, lanes)) == {2}  # a tie, whatever the noise
    x[:, [2, 4]] = 3.5, 2
    asks = [everything(seed=s, temperature=1e-30) for s in range(40)]
    assert set(Samples(x, asks).draw(target, lanes)) == {2}


def test_a_min_p_above_one_leaves_the_likeliest(target, lanes):
    x = np.tile(np.array([0, 2, 2, -1], np.float32), (50, 1))
    assert set(Samples(x, [Ask(min_p=5.0)]).draw(target, lanes)) == {1, 2}


def test_tokens_as_likely_as_the_last_one_kept_are_all_drawn(target, lanes):
    x = np.tile(np.array([0, 2, -0.0, 0, -1], np.float32), (200, 1))
    # the likeliest has a mass of 1, each of the three 0.135, so of the four together 0.75 are reached by two
    for ask in (Ask(top_k=2), Ask(top_p=0.75), Ask(min_p=0.13)):
        assert set(Samples(x, [ask]).draw(target, lanes)) == {0, 1, 2, 3}


def test_a_single_token_makes_a_vocabulary(target, lanes):
    assert Samples(np.zeros((2, 1)), [Ask(), everything(prompt=[0])]).draw(target, lanes) == [0, 0]


def test_no_noise_reaches_what_the_draw_takes_for_the_most():
    assert sampling.gumbel_spec(np.array([0xFFFFFFFF], np.uint64))[0] < filters.MOST_NOISE - 0.2


# --- distributions

BASE = np.array([2.0, 1.5, 1.5, 1.1, 0.8, 0.5, 0.2, 0.0, -0.1, -0.4, -0.7, -1.0], np.float32)
DRAWS = 100_000
FILTERS = {"top_k": 8, "top_p": 0.85, "min_p": 0.1}
PENALTIES = {
    "repetition": 1.3,
    "presence": 0.4,
    "frequency": 0.3,
    "biases": [(6, 1.0), (0, -0.5), (6, 0.5), (9, 3.0)],
}


def chi_squared_limit(freedom: int) -> float:
    """What one in a million draws exceeds: Wilson and Hilferty's approximation (1931), at 4.75 deviations."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.75 * part**0.5) ** 3


@COMPILED
@pytest.mark.parametrize("filters_on", list(itertools.product((False, True), repeat=len(FILTERS))))
def test_draws_follow_the_probabilities_of_the_specification(target, filters_on):
    some = dict(itertools.compress(FILTERS.items(), filters_on))
    rows = np.tile(BASE, (DRAWS, 1))
    for number, on in enumerate(itertools.product((False, True), repeat=len(PENALTIES))):
        ask = Ask(
            temperature=(0.7, 1.0, 1.6)[number % 3],
            seed=1000 * number + sum(filters_on),
            prompt=[0, 3, 3, 7],
            answer=[1, 4, 1, 10, 1, 3],
            **some,
            **dict(itertools.compress(PENALTIES.items(), on)),
        )
        drawn = np.bincount(Samples(rows, [ask]).draw(target, 32), minlength=len(BASE))
        may = ask.kept(BASE)
        assert drawn[~may].sum() == 0
        probability = np.exp(ask.adjusted(BASE)[may].astype(np.float64) / ask.temperature)
        expected = DRAWS * probability / probability.sum()
        assert expected.min() > 5  # what the chi-squared approximation asks for
        assert len(expected) > 1
        chi_squared = ((drawn[may] - expected) ** 2 / expected).sum()
        assert chi_squared < chi_squared_limit(len(expected) - 1)


# --- cost


def test_the_cost_is_that_counted_by_hand():
    # two samples of 5 tokens: three passes, 17 halvings, two draws of two passes; 60 + 10 operations a token drawn
    assert filters.cost(2, 5, 17, 2) == (4 * 10 * (3 + 17 + 4), 70 * 10 * 2)
