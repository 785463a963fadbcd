"""The heavy inner loops against float64, on every target, between walls of NaN that they must not read.

Tolerance: a float32 sum of n products, in whatever order and fused or not, is off by at most
gamma(n) = n u / (1 - n u) times the sum of the products' sizes, u = 2**-24 (Higham, "Accuracy and
Stability of Numerical Algorithms", section 3.1).
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features

from blink_ref.simt import aligned, device, launch
from blink_ref.simt.vocabulary import (
    block_copy,
    block_scale,
    block_threads,
    dot,
    f32,
    i64,
    lane_id,
    row_dot,
    row_dots,
    row_dots_of_two,
    row_mix,
    thread_id,
    warp_id,
    warps,
)

SIZES = np.array([*range(8, 520, 8), 776, 1024, 2048, 2056, 4096])
WEIGHTS = ["uint16", "int16", "float32"]
KEPT = ["uint16", "float32"]
"""What keys and values are stored as."""
NAN_BITS = {"uint16": 0x7FC0, "int16": 0x7E00, "float32": np.nan}


def gamma(n):
    return n * 2**-24 / (1 - n * 2**-24)


def stored(values, dtype):
    """float32 values rounded to a stored type: bfloat16 bits (by cutting), half bits, or themselves."""
    if dtype == "uint16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16).view(np.int16) if dtype == "int16" else values


def wide(weights):
    """float64 of stored weights."""
    if weights.dtype == np.uint16:
        return (weights.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (weights.view(np.float16) if weights.dtype == np.int16 else weights).astype(np.float64)


def walled(rows, dtype, step=8):
    """The rows in one aligned array, each at a multiple of `step`, NaN before, between and behind; and where."""
    starts, end = [], step
    for row in rows:
        starts.append(end)
        end += -(-len(row) // step) * step + step
    flat = aligned(end, dtype)
    flat.fill(NAN_BITS[np.dtype(dtype).name])
    for start, row in zip(starts, rows, strict=True):
        flat[start : start + len(row)] = row
    return flat, np.array(starts)


def random_rows(sizes, seed):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(n).astype(np.float32) for n in sizes]


@device
def all_row_dots(block, w, w_at, x, x_at, sizes, out):
    """Every warp makes all of them; every lane keeps what it got."""
    for s in range(sizes.shape[0]):
        out[s, thread_id()] = row_dot(w, w_at[s], x, x_at[s], sizes[s])


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_row_dot_sums_all_products_and_every_lane_gets_the_sum(target, lanes, dtype):
    rows = [stored(row, dtype) for row in random_rows(SIZES, 1)]
    activations = random_rows(SIZES, 2)
    w, w_at = walled(rows, dtype)
    x, x_at = walled(activations, "float32")
    out = np.full((len(SIZES), lanes), np.nan, np.float32)
    launch(all_row_dots, 1, lanes, w, w_at, x, x_at, SIZES, out, target=target)
    for n, row, activation, got in zip(SIZES, rows, activations, out, strict=True):
        products = wide(row) * activation
        assert len(set(got.tolist())) == 1, n
        assert abs(got[0] - products.sum()) <= gamma(n) * np.abs(products).sum(), n


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_row_dot_gives_the_same_bits_wherever_and_with_whatever_else_it_is_computed(target, lanes, dtype):
    n, copies = 840, 6
    row, activation = stored(random_rows([n], 3)[0], dtype), random_rows([n], 4)[0]
    alone = np.zeros((1, lanes), np.float32)
    w, w_at = walled([row], dtype)
    x, x_at = walled([activation], "float32")
    launch(all_row_dots, 1, lanes, w, w_at, x, x_at, np.array([n]), alone, target=target)
    # the same pair among others, at places of other alignment within a cache line
    others = random_rows([8 * k for k in range(1, copies + 1)], 5)
    pairs = [pair for other in others for pair in ((stored(other, dtype), other), (row, activation))]
    w, w_at = walled([pair[0] for pair in pairs], dtype)
    x, x_at = walled([pair[1] for pair in pairs], "float32")
    among = np.zeros((len(pairs), lanes), np.float32)
    launch(all_row_dots, 1, lanes, w, w_at, x, x_at, np.array([len(p[1]) for p in pairs]), among, target=target)
    assert (among[1::2] == alone).all()


PRINT_ROW_DOTS = """
import sys
sys.path.insert(0, {folder!r})
from test_simt_inner_loops import *
w, w_at = walled([stored(row, "uint16") for row in random_rows(SIZES, 1)], "uint16")
x, x_at = walled(random_rows(SIZES, 2), "float32")
out = np.zeros((len(SIZES), 1), np.float32)
launch(all_row_dots, 1, 1, w, w_at, x, x_at, SIZES, out, target="cpu")
print(out.tobytes().hex())
"""


def test_row_dot_gives_the_same_bits_on_processors_with_vectors_of_other_widths(tmp_path):
    host = get_host_cpu_features()
    if not (host.get("avx2") and host.get("fma")):
        # Without fused multiply-add a product is rounded before it is added, so the bits do differ.
        pytest.skip("this processor lacks AVX2 or FMA, which the code compiled for the others needs")
    kinds = {
        "haswell": "+avx2,+fma,+bmi,+bmi2,+f16c",
        "haswell without avx2": "+avx,+fma,-avx2,+prefer-128-bit",
        "this one": "",
    }
    script, bits = PRINT_ROW_DOTS.format(folder=str(Path(__file__).parent)), set()
    for kind, features in kinds.items():
        environment = {**os.environ, "BLINK_REF_CACHE": str(tmp_path / kind)}
        if features:
            environment |= {"NUMBA_CPU_NAME": kind.split()[0], "NUMBA_CPU_FEATURES": features}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        bits.add(done.stdout.strip())
    assert len(bits) == 1
    assert len(bits.pop()) == 8 * len(SIZES)


@device
def one_by_one_and_together(block, w, x, rows, n, single, together):
    """The first warp makes each row's dot product alone, then all at once."""
    if warp_id() == 0:
        for t in range(rows):
            y = row_dot(w, i64(0), x, t * n, n)
            if lane_id() == 0:
                single[t] = y
        row_dots(w, i64(0), x, i64(0), rows, n, together, i64(1))


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("n", [8, 24, 264, 576, 2056])
def test_row_dots_of_any_number_of_rows_are_bit_for_bit_those_of_row_dot(target, lanes, dtype, n):
    for rows in (1, 2, 3, 4, 5, 8, 11):
        values = random_rows([n] * (rows + 1), seed=rows)
        w, x = aligned(n, dtype), aligned(rows * n, np.float32)
        w[:] = stored(values[0], dtype)
        x[:] = np.concatenate(values[1:])
        single, together = np.full(rows, np.nan, np.float32), np.full(rows + 2, np.nan, np.float32)
        launch(one_by_one_and_together, 1, lanes, w, x, rows, n, single, together, target=target)
        np.testing.assert_array_equal(together[1:-1].view(np.uint32), single.view(np.uint32))
        assert np.isnan(together[[0, -1]]).all()


@device
def two_together(block, w, x, rows, n, first, second, out):
    """The first warp makes the dot products of two stored rows, one after the other and as two."""
    if warp_id() == 0:
        row_dots(w, i64(0), x, i64(0), rows, n, first, i64(0))
        row_dots(w, n, x, i64(0), rows, n, second, i64(0))
        row_dots_of_two(w, i64(0), n, x, i64(0), rows, n, out, i64(1), i64(rows + 1))


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_row_dots_of_two_stored_rows_are_bit_for_bit_those_of_each(target, lanes, dtype):
    for rows, n in ((1, 8), (3, 576), (4, 72), (9, 264)):
        values = random_rows([n] * (rows + 2), seed=rows)
        w, x = aligned(2 * n, dtype), aligned(rows * n, np.float32)
        w[:] = stored(np.concatenate(values[:2]), dtype)
        x[:] = np.concatenate(values[2:])
        first, second, out = (np.full(size, np.nan, np.float32) for size in (rows, rows, 2 * rows + 2))
        launch(two_together, 1, lanes, w, x, rows, n, first, second, out, target=target)
        alone = np.concatenate([first, second])
        np.testing.assert_array_equal(out[1:-1].view(np.uint32), alone.view(np.uint32))
        assert np.isnan(out[[0, -1]]).all()


@device
def all_dots(block, a, a_at, b, b_at, sizes, out):
    """Each lane takes pairs of its own."""
    for s in range(thread_id(), sizes.shape[0], block_threads()):
        out[s] = dot(a, a_at[s], b, b_at[s], sizes[s])


@pytest.mark.parametrize("dtype", KEPT)
def test_dot_is_one_lanes_own(target, lanes, dtype):
    first, second = random_rows(SIZES, 6), [stored(row, dtype) for row in random_rows(SIZES, 7)]
    a, a_at = walled(first, "float32")
    b, b_at = walled(second, dtype)
    out = np.full(len(SIZES), np.nan, np.float32)
    launch(all_dots, 1, lanes, a, a_at, b, b_at, SIZES, out, target=target)
    for n, x, y, got in zip(SIZES, first, second, out, strict=True):
        products = x.astype(np.float64) * wide(y)
        assert abs(got - products.sum()) <= gamma(n) * np.abs(products).sum(), n


@device
def mix(block, weight, i, n, rows, j, width, out, at):
    """Each warp adds the same mixture to a part of `out` of its own."""
    row_mix(weight, i, n, rows, j, width, out, at + (width + 8) * warp_id())


@pytest.mark.parametrize("dtype", KEPT)
@pytest.mark.parametrize("width", [8, 64, 72, 128])
@pytest.mark.parametrize("n", [0, 1, 3, 16, 33, 93])
def test_row_mix_adds_weighted_rows(target, lanes, n, width, dtype):
    draw = np.random.default_rng(n * 1000 + width)
    shares, drawn = draw.random(n, np.float32), stored(draw.standard_normal((n, width)).astype(np.float32), dtype)
    weight, (i,) = walled([shares], "float32")
    rows, (j,) = walled([drawn.reshape(-1)], dtype)
    values = wide(drawn)
    many = 1 if target == "cpu" else 2
    before = random_rows([width] * many, 8)
    out, starts = walled(before, "float32")
    launch(mix, 1, lanes, weight, int(i), n, rows, int(j), width, out, int(starts[0]), target=target)
    expected = before + shares.astype(np.float64) @ values
    sizes = np.abs(before) + shares.astype(np.float64) @ np.abs(values)
    got = np.stack([out[start : start + width] for start in starts])
    # n products are added to what was there: n + 1 terms
    assert (np.abs(got - expected) <= gamma(n + 1) * sizes).all()
    assert np.isnan(out).sum() == len(out) - many * width  # nothing else was written


COPIES = np.array([4, 8, 12, 60, 64, 252, 256, 260, 1020, 1024, 1028, 2052])


@device
def all_copies(block, out, out_at, a, a_at, sizes):
    for s in range(sizes.shape[0]):
        block_copy(out, out_at[s], a, a_at[s], sizes[s])


@device
def all_scaled(block, out, out_at, a, a_at, sizes, scale, gain, gain_at):
    for s in range(sizes.shape[0]):
        block_scale(out, out_at[s], a, a_at[s], scale[0], gain, gain_at[s], sizes[s])


def test_block_copy_copies_exactly_and_nothing_else(target, lanes):
    rows = random_rows(COPIES, 9)
    a, a_at = walled(rows, "float32", step=4)
    out, out_at = walled([np.full(n, np.nan, np.float32) for n in COPIES], "float32", step=12)
    launch(all_copies, 1, lanes, out, out_at, a, a_at, COPIES, target=target)
    for start, row in zip(out_at, rows, strict=True):
        assert (out[start : start + len(row)] == row).all()
    assert np.isnan(out).sum() == len(out) - COPIES.sum()


def test_block_scale_multiplies_by_scale_then_gain_exactly(target, lanes):
    rows, gains = random_rows(COPIES, 10), random_rows(COPIES, 11)
    a, a_at = walled(rows, "float32", step=4)
    gain, gain_at = walled(gains, "float32", step=8)
    out, out_at = walled([np.full(n, np.nan, np.float32) for n in COPIES], "float32", step=12)
    scale = np.array([1.7], np.float32)
    launch(all_scaled, 1, lanes, out, out_at, a, a_at, COPIES, scale, gain, gain_at, target=target)
    for start, row, its_gain in zip(out_at, rows, gains, strict=True):
        assert (out[start : start + len(row)] == row * scale * its_gain).all()
    assert np.isnan(out).sum() == len(out) - COPIES.sum()


@device
def poisoned_sums(block, w, x, out):
    if warp_id() == warps() - 1:
        total = row_dot(w, i64(0), x, i64(0), i64(64))
        if lane_id() == 0:
            out[0] = total
            out[1] = total if total > f32(0.0) else f32(-1.0)


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_nan_in_a_weight_or_an_activation_shows_in_the_sum(target, lanes, dtype):
    ones = stored(np.ones(64, np.float32), dtype)
    for at in (0, 7, 8, 63):
        for poison_weights in (True, False):
            w, x = aligned(64, dtype), aligned(64, np.float32)
            w[:], x[:] = ones, 1
            if poison_weights:
                w[at] = NAN_BITS[dtype]
            else:
                x[at] = np.nan
            out = np.zeros(2, np.float32)
            launch(poisoned_sums, 1, lanes, w, x, out, target=target)
            assert np.isnan(out[0])
            assert out[1] == -1
