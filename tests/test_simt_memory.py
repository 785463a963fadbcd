"""Ordered accesses: atomics counted over all lanes of all blocks, and messages by release and acquire."""

import ctypes
import sys
import time

import numpy as np
import pytest

from blink_ref.simt import aligned, device, launch, start
from blink_ref.simt.vocabulary import (
    BLOCK,
    GPU,
    SYSTEM,
    acquire_fence,
    atomic_add,
    atomic_cas,
    atomic_max,
    block_threads,
    i32,
    i64,
    load_acquire,
    load_relaxed,
    load_relaxed_four,
    relax,
    store_release,
    thread_id,
)

INTEGERS = ["uint32", "int32", "int64", "uint64"]


@device
def place(block):
    """This lane's number in the grid."""
    return i64(block.id) * block_threads() + thread_id()


@device
def draw_numbers(block, counter, step, rounds, drawn):
    for _ in range(rounds):
        atomic_add(drawn, i64(atomic_add(counter, 0, step[0])), i32(1))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_atomic_add_hands_each_number_to_one_lane(target, lanes, dtype):
    blocks, rounds = 2, 20 if target == "python" else 500
    counter, step = np.zeros(1, dtype), np.ones(1, dtype)
    drawn = np.zeros(blocks * lanes * rounds, np.int32)
    launch(draw_numbers, blocks, lanes, counter, step, rounds, drawn, target=target)
    assert counter[0] == len(drawn)
    assert (drawn == 1).all()


@device
def add_one_by_one(block, numbers, steps, old):
    if place(block) == 0:
        for i in range(numbers.shape[0]):
            old[i] = atomic_add(numbers, i, steps[i])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_atomic_add_wraps_as_the_type_does(target, lanes, dtype):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    numbers = np.array([most, least, most, 3, 0], dtype)
    # most is -1 where the type is unsigned
    steps = np.array([1, most, most, least, -1 if least else most], dtype)
    before, old = numbers.copy(), np.zeros(5, dtype)
    with np.errstate(over="ignore"):
        expected = numbers + steps
    launch(add_one_by_one, 1, lanes, numbers, steps, old, target=target)
    assert numbers.tolist() == expected.tolist()
    assert old.tolist() == before.tolist()


@device
def raise_to(block, values, highest, old):
    i = place(block)
    old[i] = atomic_max(highest, 0, values[i])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_atomic_max_keeps_the_highest_of_all_lanes(target, lanes, dtype):
    blocks = 3
    draw = np.random.default_rng(3)
    limits = np.iinfo(dtype)
    for low, high in ((limits.min, limits.max), (limits.min, limits.min // 2 + 1)):  # all negative, if any are
        values = draw.integers(low, high, blocks * lanes, dtype, endpoint=True)
        highest, old = np.full(1, limits.min, dtype), np.zeros_like(values)
        launch(raise_to, blocks, lanes, values, highest, old, target=target)
        assert highest[0] == values.max()
        # what a lane found was there before, or what another lane put
        assert set(old.tolist()) <= {limits.min, *values.tolist()}


@device
def gather_fours(block, words, found):
    i = 4 * place(block)
    if i < words.shape[0]:
        found[i + 3], found[i + 2], found[i + 1], found[i] = load_relaxed_four(words, i, SYSTEM)


@pytest.mark.parametrize("dtype", ["uint32", "int32"])
def test_four_neighbours_are_loaded_in_their_order(target, lanes, dtype):
    limits = np.iinfo(dtype)
    words = aligned(4 * lanes, dtype)
    words[:] = np.random.default_rng(5).integers(limits.min, limits.max, 4 * lanes, dtype, endpoint=True)
    found = np.zeros_like(words)
    launch(gather_fours, 1, lanes, words, found, target=target)
    assert found.reshape(-1, 4)[:, ::-1].tolist() == words.reshape(-1, 4).tolist()


@device
def add_by_swapping(block, counter, one, rounds):
    for _ in range(rounds):
        spins = i64(0)
        while True:
            seen = load_relaxed(counter, 0)
            if atomic_cas(counter, 0, seen, seen + one[0]) == seen:
                break
            relax(spins)
            spins += 1


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_count_kept_by_compare_and_swap_loses_nothing(target, lanes, dtype):
    blocks, rounds = 2, {"python": 5, "cpu": 500, "cuda": 20}[target]
    counter = np.zeros(1, dtype)
    launch(add_by_swapping, blocks, lanes, counter, np.ones(1, dtype), rounds, target=target)
    assert counter[0] == blocks * lanes * rounds


@device
def swap(block, a, expected, value, old):
    if place(block) == 0:
        for i in range(a.shape[0]):
            old[i] = atomic_cas(a, i, expected[i], value[i])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_compare_and_swap_changes_only_what_it_expected(target, lanes, dtype):
    most = np.iinfo(dtype).max
    a, old = np.array([5, 6, most], dtype), np.zeros(3, dtype)
    launch(swap, 1, lanes, a, np.array([5, 5, most], dtype), np.array([most, 8, 9], dtype), old, target=target)
    assert a.tolist() == [most, 6, 9]
    assert old.tolist() == [5, 6, most]


class Hesitant:
    """An array that lets other threads run between reading and writing an element."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def __getitem__(self, i):
        value = self.array[i]
        time.sleep(0.001)
        return value

    def __setitem__(self, i, value):
        self.array[i] = value


@device
def do_all_three(block, added, highest, swapped, values):
    atomic_add(added, 0, i64(1))
    atomic_max(highest, 0, values[place(block)])
    atomic_cas(swapped, 0, i64(0), i64(place(block) + 1))


def test_in_python_no_lane_comes_between_the_reading_and_the_writing_of_an_atomic_step():
    values = np.array([3, 1, 9, 4, 8, 2, 7, 5])
    added, highest, swapped = (np.zeros(1, np.int64) for _ in range(3))
    arrays = [Hesitant(a) for a in (added, highest, swapped)]
    launch(do_all_three, 2, 4, *arrays, values, target="python")
    assert (added[0], highest[0]) == (8, 9)
    assert swapped[0] in range(1, 9)


def waits_with_an_acquire(scope):
    @device
    def wait_for(flag, r):
        spins = i64(0)
        while load_acquire(flag, 0, scope) < r:
            relax(spins)
            spins += 1

    return wait_for


def waits_with_a_fence(scope):
    @device
    def wait_for(flag, r):
        spins = i64(0)
        while load_relaxed(flag, 0, scope) < r:
            relax(spins)
            spins += 1
        acquire_fence(scope)

    return wait_for


def messenger(wait_for, scope):
    """The first lane of the grid sends messages to the last: payload, then flag; it waits for an answer."""

    @device
    def correspond(block, rounds, payload, flag, answer, wrong):
        me, last = place(block), block.blocks * block_threads() - 1
        for r in range(1, rounds + 1):
            if me == 0:
                for i in range(payload.shape[0]):
                    payload[i] = r * 1000 + i
                store_release(flag, 0, i64(r), scope)
                wait_for(answer, r)
            elif me == last:
                wait_for(flag, r)
                for i in range(payload.shape[0]):
                    if payload[i] != r * 1000 + i:
                        wrong[0] += 1
                    payload[i] = -1
                store_release(answer, 0, i64(r), scope)

    return correspond


@pytest.mark.parametrize("waits", [waits_with_an_acquire, waits_with_a_fence])
@pytest.mark.parametrize(
    ("scope", "blocks"),
    [(BLOCK, 1), (GPU, 2), (SYSTEM, 2)],
    ids=["block", "gpu", "system"],
)
def test_a_message_released_is_seen_whole_by_the_lane_that_acquires(target, lanes, scope, blocks, waits):
    if target == "cpu":
        blocks = 2  # a block has one lane, and the CPU has one scope for all
    rounds = 50 if target == "python" else 2000
    payload, wrong = np.zeros(16, np.int64), np.zeros(1, np.int64)
    flag, answer = np.zeros(1, np.int64), np.zeros(1, np.int64)
    launch(messenger(waits(scope), scope), blocks, lanes, rounds, payload, flag, answer, wrong, target=target)
    assert (flag[0], answer[0], wrong[0]) == (rounds, rounds, 0)


@device
def count_until_told(block, stop, count):
    while load_acquire(stop, 0, SYSTEM) == 0:
        atomic_add(count, 0, i64(1), SYSTEM)
        relax(i64(0))


def test_a_grid_on_the_cpu_runs_on_while_python_holds_its_lock():
    stop, count = np.zeros(1, np.int32), np.zeros(1, np.int64)
    running = start(count_until_told, 1, 1, stop, count, target="cpu", shared=64)
    hold = ctypes.PyDLL(None).usleep  # a call through PyDLL keeps the lock
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # and nobody asks for it before or after
    try:
        while count[0] == 0:
            hold(1000)
        before = int(count[0])
        hold(50_000)
        after = int(count[0])
    finally:
        sys.setswitchinterval(interval)
        stop[0] = 1
    running.wait()
    assert after > before + 100


@device
def wait_until_told(block, stop, spins):
    turns = i64(0)
    while load_acquire(stop, 0, SYSTEM) == 0:
        relax(turns)
        turns += 1
        store_release(spins, block.id, turns, SYSTEM)


def test_a_grid_on_the_cpu_that_has_waited_long_leaves_the_processor_to_others():
    stop, spins = np.zeros(1, np.int32), np.zeros(2, np.int64)
    running = start(wait_until_told, 2, 1, stop, spins, target="cpu", shared=64)
    try:
        while spins.min() < 3500:  # by then, after about a second, pauses have their full length
            time.sleep(0.01)
        busy, since = time.process_time(), time.perf_counter()
        time.sleep(0.5)
        busy, since = time.process_time() - busy, time.perf_counter() - since
    finally:
        stop[0] = 1
    running.wait()
    assert busy < 0.05 * since
