"""Launching one device function: arguments, targets, failures, and the debugger."""

import importlib
import subprocess
import sys
import textwrap
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.core.errors import TypingError

from blink_ref.errors import BlinkError
from blink_ref.simt import aligned, choose_target, device, grid_barrier, launch, start
from blink_ref.simt.on_python import Divergence
from blink_ref.simt.vocabulary import (
    atomic_add,
    barrier,
    block_threads,
    f32,
    i32,
    i64,
    lane_sum,
    load_acquire,
    relax,
    row_dot,
    thread_id,
    warp_barrier,
)

# `blink_ref.simt.launch` is the function that this module defines
launching = importlib.import_module("blink_ref.simt.launch")


class Pair(NamedTuple):
    left: Any
    right: Any


class Job(NamedTuple):
    arrays: Any
    factor: int
    shift: Any


@device
def scale_and_shift(block, job, out):
    for i in range(thread_id(), out.shape[0], block_threads()):
        out[i] = f32(job.arrays.left[i] * job.factor) + job.shift
        job.arrays.right[i] = i64(i)


def test_named_tuples_of_arrays_and_numbers_are_passed_and_arrays_change_in_place(target, lanes):
    pair = Pair(np.arange(10, dtype=np.int32), np.zeros(10, np.int64))
    out = np.zeros(10, np.float32)
    launch(scale_and_shift, 1, lanes, Job(pair, 3, np.float32(0.5)), out, target=target)
    assert out.tolist() == [3 * i + 0.5 for i in range(10)]
    assert pair.right.tolist() == list(range(10))
    assert pair.left.tolist() == list(range(10))


@device
def read_only_dot(block, weights, x, out):
    total = row_dot(weights, i64(0), x, i64(0), i64(64))
    if thread_id() == 0:
        out[0] = total


def test_arrays_that_must_not_change_can_be_read(target, lanes):
    weights, x, out = aligned(64, np.float32), aligned(64, np.float32), np.zeros(1, np.float32)
    weights[:], x[:] = 2, 1
    weights.flags.writeable = False
    launch(read_only_dot, 1, lanes, weights, x, out, target=target)
    assert out[0] == 128


@device
def look_at_arena(block, sizes, seen):
    if thread_id() == 0:
        sizes[block.id] = block.shared.shape[0]
        block.shared[0] = f32(block.id)
        block.shared[block.shared.shape[0] - 1] = f32(-block.id)
    grid_barrier(block)
    if thread_id() == block_threads() - 1:
        seen[block.id, 0] = block.shared[0]
        seen[block.id, 1] = block.shared[block.shared.shape[0] - 1]


@pytest.mark.parametrize("shared", [64, 5000, 12_000])
def test_each_block_has_an_arena_of_the_size_asked_for(target, lanes, shared):
    sizes, seen = np.zeros(2, np.int64), np.zeros((2, 2), np.float32)
    launch(look_at_arena, 2, lanes, sizes, seen, target=target, shared=shared)
    assert sizes.tolist() == [shared] * 2
    assert seen.tolist() == [[0, 0], [1, -1]]


@device
def count_lanes(block, lanes):
    atomic_add(lanes, 0, i32(1))


def test_a_block_on_the_cpu_has_one_lane_whatever_is_asked():
    lanes = np.zeros(1, np.int32)
    launch(count_lanes, 3, 64, lanes, target="cpu")
    assert lanes[0] == 3


def test_an_aligned_array_starts_at_64_bytes():
    for dtype in (np.uint8, np.uint16, np.float32, np.int64):
        for n in (1, 3, 1000):
            array = aligned(n, dtype)
            assert (array.ctypes.data % 64, array.shape, array.dtype) == (0, (n,), dtype)


@device
def count_up(block, out, rest):
    if rest is None:
        out[0] += 1
        return
    out[0] += rest.there_is_no_such_field


@device
def hand_on(block, out, rest):
    count_up(block, out, rest)


def test_what_follows_a_return_where_an_argument_is_none_is_not_compiled():
    out = np.zeros(1, np.int64)
    launch(hand_on, 1, 1, out, None, target="cpu")
    assert out[0] == 1
    with pytest.raises(TypingError, match="there_is_no_such_field"):
        launch(hand_on, 1, 1, out, out, target="cpu")


@device
def doubled(x):
    return x * 2


@device
def double_all(block, a):
    barrier()
    for i in range(a.shape[0]):
        a[i] = lane_sum(doubled(a[i]))


def test_a_device_function_called_outside_a_launch_is_plain_python():
    a = np.arange(4)
    double_all(None, a)
    assert a.tolist() == [0, 2, 4, 6]
    assert doubled(21) == 42
    assert repr(doubled) == "<device function test_simt_launch.doubled>"


# --- failures, on the python target


@device
def fail_in_one_lane(block, who, when):
    """One lane fails; the others are at a barrier, on the way to it, or in another block."""
    place = block.id * block_threads() + thread_id()
    if place == who:
        if when:
            time.sleep(0.05)
        raise ValueError(f"lane {place} found a fault")
    if not when:
        time.sleep(0.05)
    grid_barrier(block)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", [0, 1], ids=["before the others come", "while the others wait"])
@pytest.mark.parametrize("who", [0, 1, 5])
def test_what_a_lane_raises_reaches_the_caller_and_ends_the_others(who, when):
    with pytest.raises(ValueError, match=f"lane {who} found a fault"):
        launch(fail_in_one_lane, 2, 3, who, when, target="python")


def test_a_started_grid_raises_when_it_is_waited_for():
    running = start(fail_in_one_lane, 1, 2, 1, 0, target="python", shared=64)
    with pytest.raises(ValueError, match="lane 1 found a fault"):
        running.wait()


@device
def fail_while_another_spins(block, flag):
    if block.id == 1:
        raise KeyError("block 1")
    spins = i64(0)
    while load_acquire(flag, 0) == 0:
        relax(spins)
        spins += 1


@pytest.mark.timeout(60)
def test_a_lane_that_spins_is_released_when_another_has_failed():
    with pytest.raises(KeyError, match="block 1"):
        launch(fail_while_another_spins, 2, 2, np.zeros(1, np.int32), target="python")


@device
def miss_a_barrier(block, late):
    if thread_id() == 1:
        if late:
            time.sleep(0.05)
    else:
        if not late:
            time.sleep(0.05)
        barrier()


@device
def miss_a_warp_barrier(block, late):
    if thread_id() == 1:
        if late:
            time.sleep(0.05)
    else:
        if not late:
            time.sleep(0.05)
        warp_barrier()


@device
def miss_an_exchange(block, late):
    if thread_id() == 1:
        if late:
            time.sleep(0.05)
    else:
        if not late:
            time.sleep(0.05)
        lane_sum(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("late", [0, 1], ids=["it ended before", "it ends after"])
@pytest.mark.parametrize("fn", [miss_a_barrier, miss_a_warp_barrier, miss_an_exchange], ids=lambda f: f.__name__)
def test_a_meeting_that_one_lane_misses_is_an_error_not_a_hang(fn, late):
    with pytest.raises(Divergence, match=r"lane .* barrier"):
        launch(fn, 1, 4, late, target="python")


def test_after_a_failure_the_same_thread_can_launch_again():
    with pytest.raises(Divergence):
        launch(miss_a_barrier, 1, 4, 0, target="python")
    lanes = np.zeros(1, np.int32)
    launch(count_lanes, 2, 3, lanes, target="python")
    assert lanes[0] == 6


@pytest.mark.cuda
def test_a_grid_too_large_to_be_resident_is_refused_not_hung():
    with pytest.raises(Exception, match=r"exceeds the limit|COOPERATIVE_LAUNCH_TOO_LARGE"):
        launch(count_lanes, 100_000, 1024, np.zeros(1, np.int32), target="cuda")


@pytest.mark.cuda
def test_an_arena_larger_than_the_gpu_has_is_refused_with_both_sizes():
    with pytest.raises(BlinkError, match=r"4000000 bytes of shared memory; this GPU gives at most \d+"):
        launch(count_lanes, 1, 32, np.zeros(1, np.int32), target="cuda", shared=1_000_000)


# --- which target


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(BlinkError, match="target 'tpu' is not known; choose one of auto, cuda, cpu, python"):
        choose_target("tpu")
    with pytest.raises(BlinkError, match="'tpu'"):
        launch(count_lanes, 1, 1, np.zeros(1, np.int32), target="tpu")


def test_cuda_where_there_is_none_is_refused_with_the_reason_and_what_to_do(monkeypatch):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setattr(launching, "why_no_cuda", lambda: "the GPU is on holiday")
    with pytest.raises(BlinkError, match="'cuda' is not available: the GPU is on holiday; use --target cpu"):
        choose_target("cuda")


def test_a_missing_numba_cuda_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert launching.why_no_cuda() == "numba-cuda is not installed (pip install 'blink-ref[cuda13]')"


@pytest.mark.parametrize(("reason", "chosen"), [("no GPU", "cpu"), ("", "cuda")])
def test_auto_takes_cuda_where_it_can_and_else_the_cpu(monkeypatch, reason, chosen):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setattr(launching, "why_no_cuda", lambda: reason)
    assert choose_target() == chosen
    assert choose_target("cpu") == "cpu"
    assert choose_target("python") == "python"


def run_script(folder, text, stdin="", options=(), **environment):
    """Run a script in a process of its own; returns what it printed on both streams."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *options, script],
        input=stdin,
        env={**launching.os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


MEETING = """
    import numpy as np
    from blink_ref.simt import device, grid_barrier, launch
    from blink_ref.simt.vocabulary import barrier, thread_id

    @device
    def fill(block, out):
        place = block.id * 2 + thread_id()
        if place == {stop_in}:
            {stop}
        out[place] = place + 100
        grid_barrier(block)
        out[place] += 1

    out = np.zeros(4, np.int64)
    launch(fill, 2, 2, out, target="{target}")
    print("result", out.tolist())
"""
RESULT = "result [101, 102, 103, 104]"


@pytest.mark.parametrize("target", ["auto", "cuda"])
def test_asking_numba_for_its_simulator_selects_the_python_target_and_says_so(tmp_path, target):
    text = MEETING.format(stop_in=-1, stop="pass", target=target)
    out, err = run_script(tmp_path, text, NUMBA_ENABLE_CUDASIM="1")
    assert RESULT in out
    assert "NUMBA_ENABLE_CUDASIM=1: running on the 'python' target" in err


# --- the debugger


@pytest.mark.parametrize("place", [0, 3], ids=["first lane", "last lane"])
def test_breakpoint_in_a_device_function_stops_there(tmp_path, place):
    text = MEETING.format(stop_in=place, stop="breakpoint()", target="python")
    commands = "p 'place', place\np 'block', block.id\np 'thread', thread_id()\nc\n"
    out, _ = run_script(tmp_path, text, commands)
    assert f"('place', {place})" in out
    assert f"('block', {place // 2})" in out
    assert f"('thread', {place % 2})" in out
    assert RESULT in out


def test_a_debugger_started_before_the_launch_can_stop_any_lane(tmp_path):
    text = MEETING.format(stop_in=-1, stop="pass", target="python")
    line = 1 + textwrap.dedent(text).splitlines().index("    out[place] = place + 100")
    commands = f"b {line}, place == 3\nc\np 'place', place\nc\nq\n"
    out, _ = run_script(tmp_path, text, commands, options=["-m", "pdb"])
    assert "('place', 3)" in out
    assert RESULT in out


@pytest.mark.cuda
def test_a_cuda_block_of_broken_warps_is_refused():
    with pytest.raises(BlinkError, match=r"whole warps of 32 lanes.*not 33"):
        launch(count_lanes, 1, 33, np.zeros(1, np.int32), target="cuda")
