"""A step is interrupted for an urgent request, put aside, and brought back as it was."""

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import LINE
from blink_ref.scheduler import sight, state
from blink_ref.scheduler.pause import MOST_STREAK, bring_back, copy_stream, put_aside, urgent_first, watch
from blink_ref.scheduler.residence import RECORDS_A_SAMPLE
from blink_ref.simt import device

targets = pytest.mark.parametrize("target", TARGETS)


@device
def watch_alone(block, window, plan, layer, layers):
    watch(window, plan, layer, layers)


@device
def first_alone(block, slots, queue, out):
    out[0] = urgent_first(slots, queue)


@device
def put_aside_alone(block, window, slots, queue, plan):
    put_aside(window, slots, queue, plan)


@device
def bring_back_alone(block, window, queue, plan):
    bring_back(window, queue, plan)


@device
def copy_alone(block, x, kept, n):
    copy_stream(block, x, 0, kept, n)


def bench(**layout):
    return Bench(small(), chosen(SMALL, running=6, rows=8), **layout)


@targets
@pytest.mark.parametrize("preemptible", [0, 1])
@pytest.mark.parametrize("seen", [3, 2**32 - 1, 4])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_step_is_interrupted_when_somebody_rings_and_it_may_be_and_has_a_layer_to_go(
    target, layer, seen, preemptible
):
    made = bench(workers=2)
    made.window.nic["urgent"][:: LINE // 4] = 2**32 - 1, 5  # 4, modulo 2**32
    made.plan.count[state.URGENT_SEEN] = np.uint32(seen).astype(np.int32)
    made.plan.count[state.PREEMPTIBLE] = preemptible
    simt.launch(watch_alone, 1, 1, made.view, made.plan, layer, 2, target=target)
    rung = preemptible and seen != 4
    assert made.plan.count[state.INTERRUPTED] == (layer if rung and layer < 2 else 0)
    assert made.plan.count[state.RUNG_LATE] == (rung and layer == 2)


@targets
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=6),
    st.sampled_from([0, MOST_STREAK - 1, MOST_STREAK, 10**9]),
)
def test_a_step_is_for_the_urgent_while_one_waits_for_its_first_token_but_not_for_ever(target, running, streak):
    made = bench()
    made.queue.count[state.RUNNING], made.queue.count[state.STREAK] = len(running), streak
    for slot, (urgent, answering, in_flight) in enumerate(running):
        made.queue.running[slot] = slot
        made.slots.urgent[slot], made.slots.flight[slot] = urgent, state.IN_PAUSED * in_flight
        made.slots.prompt_len[slot], made.slots.known[slot] = 5, 5 + answering
    waits = any(urgent and not answering and not in_flight for urgent, answering, in_flight in running)
    others = any(not urgent for urgent, *_ in running)
    out = np.full(1, -1, np.int64)
    simt.launch(first_alone, 1, 1, made.slots, made.queue, out, target=target)
    assert bool(out[0]) == (waits and not (others and streak >= MOST_STREAK))


@targets
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**31), st.booleans())
def test_a_plan_put_aside_and_brought_back_is_the_same_but_for_the_layer_to_begin_with(
    target, chunks, samples, seed, long_streak
):
    made, draw = bench(workers=2), np.random.default_rng(seed)
    plan, samples = made.plan, min(samples, chunks)
    for field in plan[2:]:
        field[:] = draw.integers(0, 2**31, field.shape)
    plan.stamp[:] = np.arange(16)
    plan.stamp[sight.NUMBER] = 77
    plan.chunk_slot[:chunks] = draw.permutation(16)[:chunks]
    plan.chunk_sample[:chunks] = [n if n < samples else -1 for n in range(chunks)]
    for place, value in (("CHUNKS", chunks), ("ROWS", 8), ("SAMPLES", samples), ("INTERRUPTED", 1)):
        plan.count[getattr(state, place)] = value
    plan.count[state.PREEMPTIBLE] = 1
    before = [field.copy() for field in plan]
    simt.launch(put_aside_alone, 1, 1, made.view, made.slots, made.queue, plan, target=target)
    slots = plan.chunk_slot[:chunks].tolist()
    assert sorted(np.flatnonzero(made.slots.flight)) == sorted(slots)
    sampled = [slot // 8 for slot, sample in zip(slots, plan.chunk_sample[:chunks], strict=True) if sample >= 0]
    assert made.view.reserved.tolist() == [RECORDS_A_SAMPLE * sampled.count(worker) for worker in (0, 1)]
    assert made.queue.count[state.PAUSED] == made.queue.count[state.PAUSES] == 1
    made.queue.count[state.STREAK] = MOST_STREAK * long_streak
    simt.launch(bring_back_alone, 1, 1, made.view, made.queue, plan, target=target)
    before[0][state.FIRST_LAYER], before[0][state.INTERRUPTED] = 1, 0
    before[0][state.URGENT_SEEN] = made.queue.count[state.URGENT_RUNG]
    before[0][state.PREEMPTIBLE] = not long_streak  # for the others it is high time
    for n, (old, new) in enumerate(zip(before, plan, strict=True)):
        if n != 1:
            np.testing.assert_array_equal(new, old)
    moved = plan.stamp[: sight.NUMBER] - np.arange(sight.NUMBER)
    assert len(set(np.delete(moved, sight.LAYERS))) == 1, "as if no time had passed"
    assert plan.stamp[sight.NUMBER] == 77
    assert not made.view.reserved.any()
    assert made.queue.count[state.PAUSED] == made.queue.count[state.STREAK] == 0


@targets
@pytest.mark.parametrize("n", [4, 32, 60])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_residual_stream_is_copied_whole_and_no_further(target, blocks, n):
    x, kept = np.arange(64, dtype=np.float32), np.full(64, -1, np.float32)
    simt.launch(copy_alone, blocks, LANES[target], x, kept, n, target=target)
    assert kept.tolist() == [*range(n), *[-1] * (64 - n)]
