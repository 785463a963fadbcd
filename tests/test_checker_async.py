"""Asynchronous copies under the checker: a ring of stages is in order, and faults planted in it are reported."""

import inspect
import textwrap

import numpy as np
import pytest

from blink_ref.simt import device
from blink_ref.simt.checker import Deadlock, Finding, InFlight, Race, Unwritten, check
from blink_ref.simt.vocabulary import (
    arena_view,
    async_fence,
    barrier,
    block_threads,
    copy_async,
    f32,
    i64,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mbarriers,
    thread_id,
    widen,
)

LANES, STAGES, SIZE, ROUNDS = 8, 3, 16, 8
COPY = "an asynchronous copy of block 0"


@device
def stream(block, x, out):
    full = mbarriers(block.shared, 0, STAGES)
    empty = mbarriers(block.shared, 2 * STAGES, STAGES)
    ring = arena_view(block.shared, 32, STAGES * SIZE, x)
    if thread_id() == 0:
        for s in range(STAGES):
            mbarrier_init(full, s, 1)  # init
            mbarrier_init(empty, s, block_threads())
    barrier()  # start
    total = f32(0.0)
    for r in range(1 - STAGES, ROUNDS):
        ahead = r + STAGES - 1
        if thread_id() == 0 and ahead < ROUNDS:
            s = ahead % STAGES
            mbarrier_wait(empty, s, (ahead // STAGES & 1) ^ 1)  # free
            mbarrier_expect_bytes(full, s, SIZE * x.itemsize)  # expect
            copy_async(ring, s * SIZE, x, ahead * SIZE, SIZE, full, s)  # copy
        if r >= 0:
            s = r % STAGES
            mbarrier_wait(full, s, r // STAGES & 1)  # wait
            total += widen(ring[s * SIZE + thread_id()])  # read
            mbarrier_arrive(empty, s)  # arrive
    out[thread_id()] = total


def arguments(dtype=np.float32):
    values = np.arange(ROUNDS * SIZE, dtype=np.float32)
    x = values if dtype == np.float32 else (values.view(np.uint32) >> 16).astype(np.uint16)
    return x, np.zeros(LANES, np.float32)


def line(fn, mark):
    """The line of a device function that ends with a comment."""
    lines, first = inspect.getsourcelines(fn.python)
    (found,) = (first + n for n, text in enumerate(lines) if text.endswith(f"# {mark}\n"))
    return found


def changed(fn, mark, code="pass"):
    """The device function with other code on the line with that mark: none, if not said."""
    lines, first = inspect.getsourcelines(fn.python)
    n = line(fn, mark) - first
    lines[n] = lines[n][: len(lines[n]) - len(lines[n].lstrip())] + code + "\n"
    assert lines[0] == "@device\n"
    text, made = "\n" * first + textwrap.dedent("".join(lines[1:])), {}
    exec(compile(text, __file__, "exec"), fn.python.__globals__, made)
    other = device(fn.python)
    other.python = made[fn.python.__name__]
    return other


def found(kind, fn, *args, lanes=LANES, seeds=range(6)):
    """The finding of each seed: all of `kind`."""
    findings = []
    for seed in seeds:
        with pytest.raises(Finding) as caught:
            check(fn, 1, lanes, *args, seed=seed)
        assert type(caught.value) is kind, f"seed {seed}: {caught.value}"
        findings.append(caught.value)
    return findings


def of_copy_and_lane(finding, fn, *marks):
    """Whether a finding names the line of the copy and that of a lane, and both agents."""
    sides = {place.who.split(", lane")[0]: place.line.number for place in finding.places}
    return sides[COPY] == line(fn, "copy") and sides["block 0"] in {line(fn, mark) for mark in marks}


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_ring_of_stages_is_in_order(dtype):
    x, _ = arguments()
    for seed in range(20):
        stored, out = arguments(dtype)
        counts = check(stream, 1, LANES, stored, out, seed=seed)
        assert out.tolist() == x.reshape(ROUNDS, SIZE)[:, :LANES].sum(0).tolist()
    # what is copied counts for the lane that started it
    assert [(c.who, c.loads) for c in counts if c.array == "x"] == [("block 0, lane 0", ROUNDS * SIZE)]


def test_a_stage_that_is_read_before_the_wait_is_a_race_with_the_copy():
    for finding in found(Race, changed(stream, "wait"), *arguments()):
        assert of_copy_and_lane(finding, stream, "read")
        assert finding.about.startswith("block.shared[")
        assert "an mbarrier_wait() after the copy would" in finding.advice


def test_a_copy_into_a_stage_that_lanes_still_read_is_a_race():
    for finding in found(Race, changed(stream, "free"), *arguments()):
        assert of_copy_and_lane(finding, stream, "read")


def test_a_wait_for_the_wrong_parity_is_a_race_or_a_deadlock():
    early = changed(stream, "wait", "mbarrier_wait(full, s, (r // STAGES & 1) ^ 1)")
    for finding in found(Race, early, *arguments()):
        assert of_copy_and_lane(finding, stream, "read")
    late = changed(stream, "free", "mbarrier_wait(empty, s, ahead // STAGES & 1)")
    for finding in found(Deadlock, late, *arguments()):
        assert {place.line.number for place in finding.places} <= {line(stream, "free"), line(stream, "wait")}


@pytest.mark.parametrize(
    ("mark", "code"),
    [
        ("arrive", "pass"),
        ("copy", "pass"),
        ("expect", "pass"),
        ("expect", "mbarrier_expect_bytes(full, s, SIZE * 4 + 16)"),
        ("expect", "mbarrier_expect_bytes(full, s, SIZE * 4 - 16)"),
        ("arrive", "mbarrier_arrive(full, s)"),
    ],
)
def test_a_wait_that_nothing_will_end_is_a_deadlock(mark, code):
    for finding in found(Deadlock, changed(stream, mark, code), *arguments()):
        lines = {place.line.number for place in finding.places}
        assert lines
        assert lines <= {line(stream, "free"), line(stream, "wait")}
        assert {place.did for place in finding.places} == {"spins at"}


def test_an_mbarrier_that_is_used_with_no_barrier_behind_its_beginning_is_a_race():
    for finding in found(Race, changed(stream, "start"), *arguments()):
        assert line(stream, "init") <= min(place.line.number for place in finding.places)


@device
def arrive_at_nothing(block):
    mbarrier_arrive(mbarriers(block.shared, 2, 4), 1)  # arrive


def test_an_mbarrier_that_has_not_begun_is_reported():
    for finding in found(Unwritten, arrive_at_nothing):
        assert finding.about == "block.shared[4]"
        assert finding.places[0].line.number == line(arrive_at_nothing, "arrive")


# --- one copy


@device
def one_copy(block, x, out):
    full = mbarriers(block.shared, 0, 1)
    if thread_id() == 0:
        mbarrier_init(full, 0, 1)
    block.shared[16 + thread_id()] = f32(thread_id())  # write
    async_fence()  # fence
    barrier()
    if thread_id() == 0:
        mbarrier_expect_bytes(full, 0, 32)
        copy_async(block.shared, 16, x, 0, 8, full, 0)  # copy
        out[0] = i64(0)  # beside
    mbarrier_wait(full, 0, 0)  # wait
    out[thread_id()] = i64(block.shared[16 + thread_id()])


def one():
    return np.arange(8, dtype=np.float32), np.zeros(8, np.int64)


def test_a_copy_goes_from_global_memory_into_the_arena():
    for code in ("copy_async(x, 0, block.shared, 16, 8, full, 0)", "copy_async(x, 0, x, 0, 8, full, 0)"):
        with pytest.raises(ValueError, match="it takes global memory, and the arena"):
            check(changed(one_copy, "copy", code), 1, LANES, *one())


def test_what_lanes_wrote_is_overwritten_in_order_behind_a_fence_only():
    for seed in range(20):
        x, out = one()
        check(one_copy, 1, LANES, x, out, seed=seed)
        assert out.tolist() == x.tolist()
    for finding in found(Race, changed(one_copy, "fence"), *one()):
        assert of_copy_and_lane(finding, one_copy, "write")
        assert "async_fence()" in finding.advice


def test_the_fence_may_be_that_of_the_lane_that_starts_the_copy():
    late = changed(one_copy, "fence", "barrier(); async_fence()")
    for seed in range(20):
        check(late, 1, LANES, *one(), seed=seed)


@pytest.mark.parametrize("code", ["x[3] = f32(1.0)", "block.shared[20] = f32(1.0)", "x[0] = block.shared[20]"])
def test_source_and_stage_belong_to_the_copy_until_it_is_waited_for(code):
    for finding in found(Race, changed(one_copy, "beside", code), *one()):
        assert of_copy_and_lane(finding, one_copy, "beside")


def test_the_stage_may_be_written_by_a_lane_that_knows_of_the_end_by_a_barrier():
    @device
    def wait_for_all(block, x):
        full = mbarriers(block.shared, 0, 1)
        if thread_id() == 0:
            mbarrier_init(full, 0, 1)
            mbarrier_expect_bytes(full, 0, 32)
            copy_async(block.shared, 16, x, 0, 8, full, 0)
            mbarrier_wait(full, 0, 0)
        barrier()  # over
        block.shared[16 + thread_id()] = f32(1.0)  # write

    for seed in range(20):
        check(wait_for_all, 1, LANES, one()[0], seed=seed)


@device
def two_copies(block, x):
    full = mbarriers(block.shared, 0, 1)
    mbarrier_init(full, 0, 1)
    mbarrier_expect_bytes(full, 0, 32)
    copy_async(block.shared, 16, x, 0, 4, full, 0)  # one
    copy_async(block.shared, 16, x, 4, 4, full, 0)  # other
    mbarrier_wait(full, 0, 0)


def test_two_copies_to_one_place_race_with_each_other():
    for finding in found(Race, two_copies, one()[0], lanes=1):
        assert [place.who for place in finding.places] == [COPY, COPY]
        marks = {line(two_copies, mark) for mark in ("one", "other")}
        assert {place.line.number for place in finding.places} == marks


def test_more_copies_than_are_told_apart_are_in_order_too():
    @device
    def many_copies(block, x):
        full = mbarriers(block.shared, 0, 1)
        mbarrier_init(full, 0, 1)
        mbarrier_expect_bytes(full, 0, 40 * 16)
        for c in range(40):
            copy_async(block.shared, 16 + 4 * c, x, 0, 4, full, 0)
        mbarrier_wait(full, 0, 0)

    for seed in range(20):
        check(many_copies, 1, 1, one()[0], seed=seed)


def test_a_block_that_ends_with_a_copy_in_flight_is_reported():
    @device
    def forget(block, x):
        full = mbarriers(block.shared, 0, 1)
        if thread_id() == 3:
            mbarrier_init(full, 0, 1)
            mbarrier_expect_bytes(full, 0, 32)
            copy_async(block.shared, 16, x, 0, 8, full, 0)  # copy
        barrier()

    for finding in found(InFlight, forget, one()[0]):
        (place,) = finding.places
        assert (place.who, place.did, place.line.number) == ("block 0, lane 3", "starts it", line(forget, "copy"))
        assert finding.about == f"block 0 has ended, and no lane knows that {COPY} is over"
