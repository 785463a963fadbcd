"""Drawing a token: the random numbers, the noise, the draw, and the logits it is made from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_bench import U, check, floats, gamma, model_of, nans, plan_of, poison_arena, room_for

from blink_ref.kernels import logits, rmsnorm, sampling
from blink_ref.scheduler import state
from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import block_threads, i64, rank_index, thread_id, u64

SPARE = 16


# --- Philox

ONES = 0xFFFFFFFF
KNOWN = {
    "zeros": ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ([ONES] * 4, [ONES] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "digits of pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}
"""Counter, key and words of philox4x32-10, from ``kat_vectors`` of the authors' library Random123."""


@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_the_words_its_authors_publish(name):
    counter, key, words = KNOWN[name]
    got = sampling.philox_spec(np.array([counter], np.uint64), key[0] | key[1] << 32)
    assert " ".join(f"{word:08x}" for word in got[0]) == words


@device
def first_words(block, seeds, firsts, seconds, out):
    for i in range(thread_id(), out.shape[0], block_threads()):
        out[i] = sampling.philox(seeds[i], firsts[i], seconds[i])


def test_philox_on_the_device_is_that_of_the_specification(target, lanes):
    draw = np.random.default_rng(1)
    seeds = np.append(draw.integers(0, 2**64, 60, np.uint64), np.array([0, 1, 2**32, 2**64 - 1], np.uint64))
    firsts, seconds = (np.append(draw.integers(0, 2**32, 60, np.uint64), [0, 0, ONES, ONES]) for _ in range(2))
    firsts, seconds, out = firsts.astype(np.uint64), seconds.astype(np.uint64), np.zeros(64, np.uint64)
    launch(first_words, 1, lanes, seeds, firsts, seconds, out, target=target)
    for seed, first, second, word in zip(seeds, firsts, seconds, out, strict=True):
        counter = np.array([[first, second, 0, 0]], np.uint64)
        assert word == sampling.philox_spec(counter, int(seed))[0, 0]


# --- noise


@device
def noise_of(block, words, out):
    for i in range(thread_id(), words.shape[0], block_threads()):
        out[i] = sampling.gumbel(words[i])


def test_noise_is_finite_and_right_for_the_first_and_the_last_random_words(target, lanes):
    ends = [0, 1, 511, 512, 2**31 - 1, 2**31, ONES - 512, ONES - 511, ONES - 256, ONES - 1, ONES]
    words = np.array([*ends, *np.random.default_rng(2).integers(0, 2**32, 200)], np.uint64)
    out = np.zeros(len(words), np.float32)
    launch(noise_of, 1, lanes, words, out, target=target)
    uniform = ((words >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    exact = -np.log(-np.log(uniform))
    assert np.isfinite(out).all()
    assert exact.max() < 17  # no token can win by noise alone against logits that differ by more than 34
    # u is exact. Each logarithm is right to 3 units in the last place, 6 u relative; that of the inner one
    # becomes 6 u absolute in the outer one.
    check(out, exact, 6 * U + 6 * U * np.abs(exact))
    check(sampling.gumbel_spec(words), exact, 6 * U + 6 * U * np.abs(exact))


# --- the draw, as specified


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_at_temperature_zero_the_highest_logit_wins_and_ties_go_to_the_smaller_id(values, seed, position):
    drawn = sampling.spec(np.array(values, np.float32), 0, seed, position)
    assert drawn == values.index(max(values))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_logits_over_temperature(temperature):
    given_logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0], np.float32)
    n = 12_000
    drawn = [sampling.spec(given_logits, temperature, 1234567890123, position) for position in range(n)]
    expected = np.exp(given_logits / temperature)
    expected *= n / expected.sum()
    assert expected.min() > 5  # what the chi-squared approximation asks for
    chi_squared = ((np.bincount(drawn, minlength=6) - expected) ** 2 / expected).sum()
    # with 5 degrees of freedom one in a million draws of this size is above 35.9
    assert chi_squared < 35.9


def test_other_seeds_and_other_positions_draw_independently():
    flat, n = np.zeros(4, np.float32), 4000
    by_position = [sampling.spec(flat, 1.0, 7, position) for position in range(n)]
    by_seed = [sampling.spec(flat, 1.0, seed, 7) for seed in range(n)]
    for drawn in (by_position, by_seed):
        pairs = np.zeros((4, 4))
        np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
        expected = (n - 1) / 16
        # 15 degrees of freedom: one in a million is above 56.5
        assert ((pairs - expected) ** 2 / expected).sum() < 56.5


# --- logits and draw


@device
def draw_alone(block, plan, samples, sampling, model, x, out):
    poison_arena(block)
    logits.logits_and_draw(block, plan, samples, sampling, model, x, out)


def run(target, lanes, plan, samples, model, x, tile, blocks=2, filtered=()):
    """Logits [S, vocab] and the tokens drawn; samples in `filtered` are of a slot that has filters."""
    slots = state.allocate_sampling(2)
    slots.filtered[1] = 1
    plan.sample_slot[list(filtered)] = 1
    plan.best[:] = logits.LOWEST
    out = nans(samples * model.vocab + SPARE)
    shared = room_for(tile, model.hidden, target, lanes)
    args = plan, samples, slots, model, x.reshape(-1), out
    launch(draw_alone, blocks, lanes, *args, target=target, shared=shared)
    assert np.isnan(out[samples * model.vocab :]).all()
    assert (plan.best[samples:] == logits.LOWEST).all()
    return out[: samples * model.vocab].reshape(samples, -1), [int(rank_index(key)) for key in plan.best[:samples]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("samples", [1, 3, 33])
def test_logits_are_those_of_the_normalised_rows_that_want_a_sample(target, lanes, samples, dtype):
    model, weights, config = model_of(dtype)
    # every other row wants a sample, in no order; the rows between are NaN
    rows = 2 * np.random.default_rng(samples).permutation(samples) + 1
    x = nans((2 * samples + 1) * config.hidden).reshape(-1, config.hidden)
    x[rows] = floats(samples, config.hidden, seed=samples)
    plan = plan_of(samples + 1, sample_row=rows)
    got, drawn = run(target, lanes, plan, samples, model, x, tile=4)
    normed = rmsnorm.spec(x[rows].astype(np.float64), weights.norm[-1].astype(np.float64), config.rms_eps)
    head = weights.dense(weights.head, config.vocab, config.hidden).astype(np.float64)
    # a normalised number is off by gamma(D) / 2 + 6 u (see test_kernels_layers.py), the sum by gamma(D) more
    bound = 1.01 * (1.5 * gamma(config.hidden) + 6 * U) * (np.abs(normed) @ np.abs(head).T)
    check(got, logits.spec(normed, head), bound)
    assert drawn == np.argmax(got, axis=1).tolist()


def test_equal_logits_draw_the_smaller_id_and_nan_is_never_drawn(target, lanes):
    model, weights, config = model_of("float32")
    head = weights.flat[weights.head :][: config.vocab * config.hidden].reshape(config.vocab, config.hidden)
    x = floats(1, config.hidden, seed=3)
    winner = np.sign(x[0])  # no row of weights this size gives more
    head[:] = 0
    head[[17, 40, 55]] = winner
    plan = plan_of(1)
    got, drawn = run(target, lanes, plan, 1, model, x, tile=1)
    assert (got[0] == got[0, 17]).nonzero()[0].tolist() == [17, 40, 55]
    assert drawn == [17]
    head[17] = np.nan
    assert run(target, lanes, plan, 1, model, x, tile=1)[1] == [40]
    head[:] = 0
    head[1:9] = -0.0
    assert run(target, lanes, plan, 1, model, x, tile=1)[1] == [0]


def test_draws_on_the_device_are_those_of_the_specification_for_the_same_logits(target, lanes):
    model, _, config = model_of("bfloat16")
    samples, draw = 60, np.random.default_rng(4)
    plan = plan_of(
        samples,
        sample_row=draw.integers(0, 5, samples),
        temperature=draw.choice(np.array([0, 0.3, 1, 1.7], np.float32), samples),
        seed=np.append(draw.integers(0, 2**64, samples - 2, np.uint64), np.array([0, 2**64 - 1], np.uint64)),
        draw=draw.integers(0, 100_000, samples),
    )
    got, drawn = run(target, lanes, plan, samples, model, floats(5, config.hidden, seed=5), tile=7)
    for s, token in enumerate(drawn):
        temperature, seed, position = plan.temperature[s], int(plan.seed[s]), int(plan.draw[s])
        wanted = sampling.spec(got[s], temperature, seed, position)
        if token != wanted:
            # Allowed only where rounding decides: a score is off by 2 u of the scaled logit, 6 u and 6 u of the
            # noise (see above), and u of the sum; two scores are compared, each computed twice.
            assert temperature > 0
            counters = np.array([[t, position, 0, 0] for t in (token, wanted)], np.uint64)
            noise = sampling.gumbel_spec(sampling.philox_spec(counters, seed)[:, 0])
            scaled = got[s, [token, wanted]] / temperature
            score, size = scaled + noise, (np.abs(scaled) + np.abs(noise)).max()
            assert score[1] - score[0] <= 4 * U * (6 + 9 * size)


def test_a_draw_does_not_depend_on_batch_tile_or_grid(target, lanes):
    model, _, config = model_of("bfloat16")
    x = floats(5, config.hidden, seed=6)
    columns = {
        "sample_row": np.arange(5),
        "temperature": np.array([0, 1, 1, 0.5, 2], np.float32),
        "seed": np.arange(5) + 10,
        "draw": np.arange(5) + 100,
    }
    together, drawn = run(target, lanes, plan_of(5, **columns), 5, model, x, tile=2)
    for tile, blocks in ((5, 1), (1, 3)):
        again, drawn_again = run(target, lanes, plan_of(5, **columns), 5, model, x, tile, blocks)
        assert (again == together).all()
        assert drawn_again == drawn
    for s in range(5):
        alone = {name: values[s : s + 1] for name, values in columns.items()}
        again, (token,) = run(target, lanes, plan_of(1, **alone), 1, model, x, tile=1)
        assert (again[0] == together[s]).all()
        assert token == drawn[s]


def test_samples_that_have_filters_get_their_logits_and_are_not_drawn(target, lanes):
    model, _, config = model_of("bfloat16")
    x = floats(5, config.hidden, seed=6)
    plan = plan_of(5, sample_row=np.arange(5))
    together, drawn = run(target, lanes, plan, 5, model, x, tile=2)
    some, _ = run(target, lanes, plan, 5, model, x, tile=2, filtered=[1, 4])
    assert (some == together).all()
    assert (plan.best[:5] == logits.LOWEST).nonzero()[0].tolist() == [1, 4]
    assert [int(rank_index(plan.best[s])) for s in (0, 2, 3)] == [drawn[s] for s in (0, 2, 3)]


def test_more_warps_than_tokens_draw_one_of_the_tokens(target, lanes):
    model, _, config = model_of("float32", vocab=2)
    x = floats(1, config.hidden, seed=7)
    got, drawn = run(target, lanes, plan_of(1), 1, model, x, tile=1, blocks=3)
    assert drawn == [int(got[0].argmax())]


@device
def score_alone(block, values, temperature, out):
    if thread_id() == 0:
        for i in range(values.shape[0]):
            out[i] = sampling.score(values[i], temperature, u64(5), i64(6), i64(i))


def test_at_temperature_zero_a_score_is_the_logit_itself(target, lanes):
    values, out = np.array([1.5, -np.inf, np.inf, -0.0], np.float32), nans(4)
    launch(score_alone, 1, lanes, values, np.float32(0), out, target=target)
    assert out.tolist() == values.tolist()


# --- cost


def test_the_costs_are_those_counted_by_hand():
    # head [5, 8] in 16 bits; for 2 samples 8 floats read and 5 logits written; a product and a sum a weight
    assert logits.cost(2, 8, 5) == (2 * 40 + 4 * (16 + 10), 2 * 2 * 40)
    # ten rounds of two products, two shifts or masks and two exclusive ors, for each of 2 x 5 tokens
    assert sampling.cost(2, 5) == (0, 10 * 6 * 10)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_specification_never_draws_nan(temperature):
    values = np.array([1.0, np.nan, 2.0, np.nan], np.float32)
    assert all(sampling.spec(values, temperature, seed, position=3) in (0, 2) for seed in range(50))
