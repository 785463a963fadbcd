"""Numbers that are published one by one, and awaited by lanes of other blocks, with no barrier in between."""

import numpy as np
import pytest

from blink_ref.simt import aligned, device, grid_barrier, launch
from blink_ref.simt.checker import check
from blink_ref.simt.checker.findings import Deadlock, Race
from blink_ref.simt.vocabulary import (
    UNPUBLISHED,
    awaited,
    awaited_copy,
    awaited_four,
    awaited_mix,
    awaited_sum,
    barrier,
    block_threads,
    i64,
    lane_id,
    mix_of_fours,
    publish,
    thread_id,
    unpublish,
    warp_barrier,
    warp_id,
    warp_width,
)

SEEDS = range(6)


@device
def clear(block, passed):
    """Nothing is published yet, and all blocks know."""
    i = i64(thread_id())
    if block.id == 0:
        while i < passed.shape[0]:
            unpublish(passed, i)
            i += block_threads()
    grid_barrier(block)


@device
def hand_over(block, given, passed, copied, sums, fours, ones, n):
    """The first block publishes what it is given, the others await it; nothing was there before."""
    clear(block, passed)
    i = i64(thread_id())
    if block.id == 0:
        while i < n:
            publish(passed, n - 1 - i, given[n - 1 - i])
            i += block_threads()
    elif warp_id() == 0:
        awaited_copy(block.shared, i64(8), passed, i64(0), n)
        total = awaited_sum(passed, i64(0), n)
        warp_barrier()
        i = i64(lane_id())
        while i < n:
            copied[i] = block.shared[8 + i]
            i += warp_width()
        if lane_id() == 0:
            sums[block.id] = total
            a, b, c, d = awaited_four(passed, n - 4)
            fours[0] = a
            fours[1] = b
            fours[2] = c
            fours[3] = d
            ones[0] = awaited(passed, i64(1))


@device
def mix(block, given, weights, passed, mixed, n):
    """The first block publishes what it is given; a warp of each of the others adds it up, weighed."""
    clear(block, passed)
    i = i64(thread_id())
    if block.id == 0:
        while i < given.shape[0]:
            publish(passed, i, given[i])
            i += block_threads()
    elif thread_id() == 0:
        a, b, c, d = awaited_mix(weights, i64(0), passed, i64(4), i64(12), n)
        e, f, g, h = mix_of_fours(weights, i64(0), given, i64(4), i64(12), n)
        mixed[0] = a
        mixed[1] = b
        mixed[2] = c
        mixed[3] = d
        mixed[4] = e
        mixed[5] = f
        mixed[6] = g
        mixed[7] = h


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 11])
def test_what_is_awaited_and_mixed_is_what_is_mixed(target, lanes, n):
    given, passed, weights = (
        aligned(8 + 12 * n, np.float32),
        aligned(8 + 12 * n, np.float32),
        aligned(n, np.float32),
    )
    draw = np.random.default_rng(n)
    given[:], weights[:] = draw.standard_normal(given.size), draw.standard_normal(n)
    mixed = np.zeros(8, np.float32)
    launch(mix, 2, lanes, given, weights, passed, mixed, n, target=target, shared=16)
    np.testing.assert_array_equal(mixed[:4], mixed[4:])
    fours = np.stack([given[4 + 12 * m : 8 + 12 * m] for m in range(n)])
    np.testing.assert_allclose(mixed[:4], weights @ fours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [4, 64, 128, 132, 256, 260, 512, 1100])
def test_what_is_published_comes_to_who_awaits_it_and_nothing_else(target, lanes, n):
    given = aligned(n, np.float32)
    given[:] = np.random.default_rng(n).standard_normal(n)
    given[1:4] = np.nan, np.inf, 0
    given[2:3].view(np.uint32)[:] = UNPUBLISHED  # a NaN like any other
    passed, copied = aligned(n + 8, np.float32), np.zeros(n, np.float32)
    sums, fours, ones = np.zeros(2, np.float32), np.zeros(4, np.float32), np.zeros(1, np.float32)
    launch(hand_over, 2, lanes, given, passed, copied, sums, fours, ones, n, target=target, shared=n + 16)
    np.testing.assert_array_equal(copied, given)
    np.testing.assert_array_equal(passed[:n], given)
    np.testing.assert_array_equal(fours, given[-4:])
    assert np.isnan([sums[1], ones[0]]).all()
    assert (passed.view(np.uint32)[:n] != UNPUBLISHED).all()
    assert (passed.view(np.uint32)[n:] == UNPUBLISHED).all()


@device
def add_up(block, given, passed, sums, n):
    i = i64(thread_id())
    while i < n:
        publish(passed, i, given[i])
        i += block_threads()
    barrier()
    if warp_id() == 0:
        total = awaited_sum(passed, i64(0), n)
        if lane_id() == 0:
            sums[0] = total


@pytest.mark.parametrize("n", [4, 128, 512, 516])
def test_an_awaited_sum_is_that_of_all_numbers_once(target, lanes, n):
    given, passed, sums = aligned(n, np.float32), aligned(n, np.float32), np.zeros(1, np.float32)
    given[:] = np.random.default_rng(n).integers(-8, 8, n)
    launch(add_up, 1, lanes, given, passed, sums, n, target=target)
    assert sums[0] == given.sum()


# --- as the checker sees it


@device
def publish_what_is_awaited(block, passed, found, cleared_behind_a_barrier, published):
    if block.id == 0:
        unpublish(passed, 0)
    if cleared_behind_a_barrier:
        grid_barrier(block)
    if block.id == 0:
        if published:
            publish(passed, 0, found[1])
    else:
        found[0] = awaited(passed, 0)


def run(seed, *how):
    check(publish_what_is_awaited, 2, 1, np.zeros(4, np.float32), np.zeros(2, np.float32), *how, seed=seed)


def test_publishing_and_awaiting_is_no_race():
    for seed in SEEDS:
        run(seed, True, True)


def test_clearing_with_no_barrier_behind_it_is_one():
    findings = []
    for seed in SEEDS:
        try:
            run(seed, False, True)
        except Race as race:
            findings.append(race.about)
    assert findings
    assert set(findings) == {"passed[0]"}


def test_awaiting_what_nobody_publishes_is_a_deadlock():
    with pytest.raises(Deadlock):
        run(0, True, False)


@device
def pass_on_more(block, passed, box):
    if block.id == 0:
        box[0] = 7
        publish(passed, 0, 1.0)
    else:
        box[1] = awaited(passed, 0) + box[0]


def test_a_published_number_orders_nothing_else():
    for seed in SEEDS:
        with pytest.raises(Race) as caught:
            check(pass_on_more, 2, 1, np.full(4, UNPUBLISHED, np.uint32).view(np.float32), np.zeros(2), seed=seed)
        assert caught.value.about == "box[0]"
