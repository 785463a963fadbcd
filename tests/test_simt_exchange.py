"""Lanes of a warp exchange values: every lane gives one, every lane gets the result."""

import numpy as np
import pytest

from blink_ref.simt import device, launch
from blink_ref.simt.on_python import WARP_WIDTH
from blink_ref.simt.vocabulary import (
    block_threads,
    i64,
    lane_any,
    lane_broadcast,
    lane_id,
    lane_max,
    lane_sum,
    thread_id,
    warp_width,
)

ONE_BLOCK = {"python": (1, 2, 3, 4, 5, 7, 8), "cpu": (1,), "cuda": (32, 64, 256)}
"""Lanes to try: in Python partial warps too."""


def warp_slices(target, lanes):
    width = {"python": WARP_WIDTH, "cpu": 1, "cuda": 32}[target]
    return [slice(first, min(first + width, lanes)) for first in range(0, lanes, width)]


@device
def exchange(block, values, sums, highest, lasts, any_negative):
    """One of each exchange, in many rounds, so that a lane which runs ahead would spoil a round."""
    me, n = thread_id(), block_threads()
    for r in range(values.shape[0] // n):
        x = values[r * n + me]
        sums[r * n + me] = lane_sum(x)
        highest[r * n + me] = lane_max(x)
        lasts[r * n + me] = lane_broadcast(x, warp_width() - 1)
        any_negative[r * n + me] = lane_any(x < 0)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_every_lane_of_a_warp_gets_sum_maximum_broadcast_and_any(target, dtype):
    rounds = 9
    for lanes in ONE_BLOCK[target]:
        # whole numbers, so that float32 sums are exact in any order
        values = np.random.default_rng(lanes).integers(-9, 1000, rounds * lanes).astype(dtype)
        got = [np.zeros_like(values) for _ in range(3)] + [np.zeros(rounds * lanes, np.int32)]
        launch(exchange, 1, lanes, values, *got, target=target)
        for r in range(rounds):
            for warp in warp_slices(target, lanes):
                here = values[r * lanes : (r + 1) * lanes][warp]
                expected = here.sum(), here.max(), here[-1], (here < 0).any()
                for result, wanted in zip(got, expected, strict=True):
                    assert (result[r * lanes : (r + 1) * lanes][warp] == wanted).all()


@device
def sum_of_floats(block, values, sums):
    sums[thread_id()] = lane_sum(values[thread_id()])


def test_all_lanes_get_the_same_bits_of_a_rounded_sum(target):
    for lanes in ONE_BLOCK[target]:
        values = np.random.default_rng(lanes).standard_normal(lanes).astype(np.float32)
        sums = np.zeros(lanes, np.float32)
        launch(sum_of_floats, 1, lanes, values, sums, target=target)
        for warp in warp_slices(target, lanes):
            assert len(set(sums[warp].tolist())) == 1
            # n additions, each rounded by at most 2**-24 of a partial sum, itself at most the sum of sizes
            exact, sizes = values[warp].astype(np.float64).sum(), np.abs(values[warp]).sum(dtype=np.float64)
            assert abs(sums[warp][0] - exact) <= len(values[warp]) * 2**-24 * sizes


@device
def truth(block, x, out):
    out[thread_id()] = lane_any(x)


def test_lane_any_gives_a_truth_value_whatever_number_it_is_asked_about(target, lanes):
    for x, wanted in ((5, 1), (0, 0)):
        out = np.full(lanes, -1, np.int64)
        launch(truth, 1, lanes, x, out, target=target)
        assert out.tolist() == [wanted] * lanes


@device
def broadcast_in_turn(block, out):
    """Each lane of the warp in turn tells its number to the others."""
    for source in range(warp_width()):
        out[thread_id() * warp_width() + source] = lane_broadcast(i64(lane_id()) * 100, source)


def test_any_lane_can_broadcast(target):
    width = {"python": WARP_WIDTH, "cpu": 1, "cuda": 32}[target]
    out = np.full(2 * width * width, -1, np.int64)
    launch(broadcast_in_turn, 1, 2 * width if target != "cpu" else 1, out, target=target)
    heard = out[: width * width] if target == "cpu" else out
    assert (heard.reshape(-1, width) == np.arange(width) * 100).all()
