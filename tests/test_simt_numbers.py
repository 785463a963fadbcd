"""Words that turn numbers into numbers, on every target the same as in Python and NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import (
    bf16,
    block_threads,
    clock_ns,
    divide,
    exp,
    f32,
    fp16,
    i64,
    narrow_put,
    opaque,
    rank,
    rank_index,
    relax,
    thread_id,
    widen,
)

ALL_HALVES = np.arange(65536).astype(np.uint16)
EDGES = np.array([0.0, -0.0, 1.0, -1.0, 2**-149, -(2**-149), 3.4e38, -3.4e38, np.inf, -np.inf], np.float32)
NAN, MINUS_NAN = np.array([0x7FC00001, 0xFFC00001], np.uint32).view(np.float32)


def run(fn, target, lanes, *arrays):
    launch(fn, 1, lanes, *arrays, target=target)


def float_bits(a):
    return np.asarray(a, np.float32).view(np.uint32)


@device
def all_bf16(block, bits, out):
    for i in range(thread_id(), bits.shape[0], block_threads()):
        out[i] = bf16(bits[i])


@device
def all_fp16(block, bits, out):
    for i in range(thread_id(), bits.shape[0], block_threads()):
        out[i] = fp16(bits[i])


@device
def all_widened(block, stored, out):
    for i in range(thread_id(), stored.shape[0], block_threads()):
        out[i] = widen(stored[i])


@pytest.mark.parametrize("fn", [all_bf16, all_widened], ids=["bf16", "widen"])
def test_every_bfloat16_becomes_the_float_with_the_same_upper_half(target, lanes, fn):
    out = np.zeros(65536, np.float32)
    run(fn, target, lanes, ALL_HALVES, out)
    assert (float_bits(out) == ALL_HALVES.astype(np.uint32) << 16).all()


@pytest.mark.parametrize("fn", [all_fp16, all_widened], ids=["fp16", "widen"])
def test_every_half_becomes_the_float_of_its_value(target, lanes, fn):
    out = np.zeros(65536, np.float32)
    run(fn, target, lanes, ALL_HALVES.view(np.int16), out)
    expected = ALL_HALVES.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert np.isnan(out[nan]).all()
    assert (float_bits(out[~nan]) == float_bits(expected[~nan])).all()


def test_widening_a_float_leaves_it(target, lanes):
    numbers, out = np.append(EDGES, NAN), np.zeros(len(EDGES) + 1, np.float32)
    run(all_widened, target, lanes, numbers, out)
    assert (float_bits(out) == float_bits(numbers)).all()


@device
def all_narrowed(block, numbers, out):
    for i in range(thread_id(), numbers.shape[0], block_threads()):
        narrow_put(out, i, numbers[i])


def nearest_bfloat16(x):
    """The nearer of the two bfloat16 around each float32, of two as near the even one; not of infinity and NaN."""
    below = x.view(np.uint32) >> 16 << 16
    low, high = (bits.view(np.float32).astype(np.float64) for bits in (below, below + 0x10000))
    largest = np.abs(x) >= 2.0**128 - 2.0**120
    high[largest] = np.copysign(2.0**128, low[largest])  # what would follow, of which infinity takes the place
    down, up = np.abs(x - low), np.abs(high - x)
    above = (up < down) | ((up == down) & (below >> 16 & 1 == 1))
    return (below >> 16) + above


def test_a_number_is_narrowed_to_the_nearest_bfloat16_and_halfway_to_the_even_one(target, lanes):
    bits = np.random.default_rng(6).integers(0, 2**32, 2000, np.uint32)
    halfway = bits & 0xFFFF0000 | 0x8000
    edges = np.array([0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF, 0x00008000, 0x00018000, 0x80008001], np.uint32)
    bits = np.concatenate([bits, halfway, halfway - 1, halfway + 1, edges, EDGES.view(np.uint32)])
    numbers = bits.view(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    out = np.zeros(len(numbers), np.uint16)
    run(all_narrowed, target, lanes, numbers, out)
    assert (out == nearest_bfloat16(numbers)).all()


def test_infinity_stays_infinity_and_nan_nan_when_they_are_narrowed(target, lanes):
    nans = np.array([0x7FC00001, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    numbers = np.concatenate([np.array([np.inf, -np.inf], np.float32), nans])
    out = np.zeros(len(numbers), np.uint16)
    run(all_narrowed, target, lanes, numbers, out)
    assert out[:2].tolist() == [0x7F80, 0xFF80]
    assert np.isnan((out[2:].astype(np.uint32) << 16).view(np.float32)).all()


def test_where_float32_is_kept_a_number_is_kept_as_it_is(target, lanes):
    out = np.zeros(len(EDGES), np.float32)
    run(all_narrowed, target, lanes, EDGES, out)
    assert (float_bits(out) == float_bits(EDGES)).all()


floats = st.one_of(st.floats(width=32), st.sampled_from([*EDGES.tolist(), math.nan]))
indices = st.integers(0, 2**31 - 1)


@given(floats, indices, floats, indices)
def test_ranks_order_by_value_then_by_smaller_index_with_nan_below_all(a, i, b, j):
    # the meaning: a tuple that Python compares; -0 equals 0
    def meaning(value, index):
        return (not math.isnan(value), 0.0 if math.isnan(value) else value, -index)

    one, other = rank(a, i), rank(b, j)
    assert (one < other) == (meaning(a, i) < meaning(b, j))
    assert (one == other) == (meaning(a, i) == meaning(b, j))
    assert (rank_index(one), rank_index(other)) == (i, j)


@device
def all_ranks(block, values, indices, keys, back):
    for i in range(thread_id(), values.shape[0], block_threads()):
        key = rank(values[i], indices[i])
        keys[i] = key
        back[i] = rank_index(key)


def test_ranks_are_the_same_on_every_target(target, lanes):
    draw = np.random.default_rng(5)
    some = draw.integers(0, 2**32, 2000, np.uint32).view(np.float32)  # one in 128 of them is NaN
    values = np.concatenate([some, EDGES, [NAN, MINUS_NAN]]).astype(np.float32)
    indices = draw.integers(0, 2**31, len(values))
    indices[:2] = 0, 2**31 - 1
    keys, back = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
    run(all_ranks, target, lanes, values, indices, keys, back)
    assert keys.tolist() == [int(rank(v, i)) for v, i in zip(values, indices, strict=True)]
    assert (back == indices).all()


@device
def all_quotients(block, a, b, quotients, remainders):
    for i in range(thread_id(), a.shape[0], block_threads()):
        q, r = divide(a[i], b[i])
        quotients[i] = q
        remainders[i] = r


def test_divide_is_exact_up_to_2_to_the_31(target, lanes):
    draw = np.random.default_rng(6)
    most = 2**31 - 1
    a = np.concatenate([draw.integers(0, 2**31, 500), [0, 0, most, most, most, 1]])
    b = np.concatenate([draw.integers(1, 2 ** draw.integers(1, 32, 500)), [1, most, 1, most, 2, most]])
    quotients, remainders = np.zeros_like(a), np.zeros_like(a)
    run(all_quotients, target, lanes, a, b, quotients, remainders)
    assert (quotients == a // b).all()
    assert (remainders == a % b).all()


@device
def all_powers(block, x, out):
    for i in range(thread_id(), x.shape[0], block_threads()):
        out[i] = exp(x[i])


def test_exp_has_the_right_ends(target, lanes):
    x = np.array([-np.inf, -200, 0, -0.0, 89, np.inf, np.nan], np.float32)
    out = np.zeros(len(x), np.float32)
    run(all_powers, target, lanes, x, out)
    assert out[:6].tolist() == [0, 0, 1, 1, np.inf, np.inf]
    assert np.isnan(out[6])


def test_exp_is_accurate_to_three_units_in_the_last_place(target, lanes):
    # NumPy states 2.52 units for its vectorised float32 exp, the CUDA programming guide 2 for expf,
    # glibc 1. The range is that of normal results.
    x = np.random.default_rng(7).uniform(-87, 88, 2000).astype(np.float32)
    out = np.zeros(len(x), np.float32)
    run(all_powers, target, lanes, x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 3 * np.spacing(exact.astype(np.float32))).all()


@device
def survive(block, x, out):
    """Arithmetic that flags for finite numbers only would let a compiler fold."""
    if thread_id() == 0:
        nan, minus_infinity = x[0], x[1]
        out[0] = nan * f32(0.0)
        out[1] = nan - nan
        out[2] = minus_infinity + f32(1.0)
        out[3] = minus_infinity - minus_infinity
        out[4] = max(minus_infinity, f32(-3e38))
        out[5] = 1 if nan != nan else 0
        out[6] = 1 if minus_infinity < f32(-3e38) else 0
        out[7] = exp(minus_infinity)


def test_nan_and_minus_infinity_survive_arithmetic(target, lanes):
    out = np.zeros(8, np.float32)
    run(survive, target, lanes, np.array([np.nan, -np.inf], np.float32), out)
    assert np.isnan(out[[0, 1, 3]]).all()
    assert out[2] == -np.inf
    assert out[[4, 5, 6, 7]].tolist() == [np.float32(-3e38), 1, 1, 0]


def test_fast_math_on_the_cpu_keeps_nan_infinity_and_the_order_of_sums():
    from blink_ref.simt.on_cpu import FASTMATH

    assert not FASTMATH & {"fast", "nnan", "ninf", "reassoc"}


@device
def watch_the_clock(block, out):
    if thread_id() == 0:
        begin = clock_ns()
        now, turns = begin, i64(0)
        while now == begin and turns < 10_000_000:
            now = clock_ns()
            turns += 1
        out[0] = now - begin
        out[1] = opaque(i64(41)) + 1


def test_the_clock_moves_on_and_opaque_changes_nothing(target, lanes):
    out = np.zeros(2, np.int64)
    run(watch_the_clock, target, lanes, out)
    assert 0 < out[0] < 10**9
    assert out[1] == 42


@device
def wait_in_every_way(block, spins, took):
    if thread_id() == 0:
        for i in range(spins.shape[0]):
            begin = clock_ns()
            relax(spins[i])
            took[i] = clock_ns() - begin


def test_a_pause_is_bounded_however_long_the_wait_has_been(target, lanes):
    spins = np.array([0, 63, 64, 1999, 2000, 30_000, 2**40])
    took = np.zeros(len(spins), np.int64)
    run(wait_in_every_way, target, lanes, spins, took)
    # the longest sleep is 1.5 ms; the rest is for a machine busy with other work
    assert took.max() < 500_000_000
