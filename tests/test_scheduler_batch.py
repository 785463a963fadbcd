"""The plan of a step: who gets which rows, and what stands in them."""

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import LENGTH
from blink_ref.scheduler.batch import RECORDS_A_SAMPLE, chunks_spec, make_plan
from blink_ref.scheduler.state import CHUNKS, ROWS, RUNNING, SAMPLES, allocate
from blink_ref.simt import device

targets = pytest.mark.parametrize("target", TARGETS)
RUNNING_AT_MOST = 6


@device
def plan_alone(block, window, slots, queue, plan, vocab):
    make_plan(block, window, slots, queue, plan, vocab)


def bench(rows, **layout):
    return Bench(small(), chosen(SMALL, rows=rows, running=RUNNING_AT_MOST), **layout)


def run_requests(made, requests):
    """Put (slot, prompt length, positions done) among the running, as if they had come that far."""
    for n, (slot, prompt, done) in enumerate(requests):
        made.queue.running[n] = slot
        made.slots.prompt_at[slot] = slot * SMALL.context
        made.slots.prompt_len[slot] = prompt
        made.slots.done[slot] = done
        made.slots.last[slot] = 40 + slot
        made.slots.temperature[slot] = slot / 8
        made.slots.seed[slot] = 2**63 + slot
    made.queue.count[RUNNING] = len(requests)
    made.window.nic["arena"][:] = np.arange(made.window.nic["arena"].size) % 39


def planned(made, target):
    simt.launch(
        plan_alone, 1, LANES[target], made.view, made.slots, made.queue, made.plan, SMALL.vocab, target=target
    )
    n = made.queue.count[CHUNKS]
    return list(zip(made.queue.chunk_slot[:n].tolist(), made.queue.chunk_rows[:n].tolist(), strict=True))


requests = st.lists(
    st.tuples(st.integers(0, 15), st.integers(1, 30), st.integers(0, 40)),
    max_size=RUNNING_AT_MOST,
    unique_by=lambda request: request[0],
)


@targets
@settings(max_examples=80, deadline=None)
@given(requests, st.integers(RUNNING_AT_MOST, 40))
def test_a_plan_deals_its_rows_as_the_spec_says(target, requests, rows):
    made = bench(rows)
    run_requests(made, requests)
    expected = chunks_spec([(prompt, done) for _, prompt, done in requests], rows)
    assert planned(made, target) == [(requests[n][0], count) for n, count in expected]

    row, samples = 0, []
    for n, count in expected:
        slot, prompt, done = requests[n]
        for position in range(done, done + count):
            token = (slot * SMALL.context + position) % 39 if position < prompt else 40 + slot
            got = made.plan.slot[row], made.plan.position[row], made.plan.token[row]
            assert got == (slot, position, token)
            row += 1
        if done + count >= prompt:
            samples.append((row - 1, done + count, np.float32(slot / 8), 2**63 + slot, -(2**63)))
    assert made.plan.count[ROWS] == row
    assert made.plan.count[SAMPLES] == len(samples)
    kept = made.plan.sample_row, made.plan.draw, made.plan.temperature, made.plan.seed, made.plan.best
    assert list(zip(*(array[: len(samples)].tolist() for array in kept), strict=True)) == samples


@given(requests, st.integers(RUNNING_AT_MOST, 40))
def test_a_plan_by_the_spec_is_fair_and_full(requests, rows):
    running = [(prompt, done) for _, prompt, done in requests]
    chunks = chunks_spec(running, rows)
    assert len({n for n, _ in chunks}) == len(chunks), "one chunk a request"
    decoding = {n for n, (prompt, done) in enumerate(running) if done >= prompt}
    assert {n for n, count in chunks if n in decoding and count == 1} == decoding, "every decode row goes along"
    wanted = sum(1 if done >= prompt else prompt - done for prompt, done in running)
    assert sum(count for _, count in chunks) == min(rows, wanted)


@targets
@settings(max_examples=40, deadline=None)
@given(requests, st.lists(st.integers(0, 8), min_size=2, max_size=2))
def test_a_full_outbox_leaves_out_its_own_workers_slots_and_no_others(target, requests, unread):
    """Decode rows and last chunks need room for two records each; they get it in order, while it lasts."""
    made = bench(40, outbox=8, workers=2)
    run_requests(made, requests)
    made.view.written[:] = unread
    chunks = dict(planned(made, target))
    room = [8 - n for n in unread]
    for slot, prompt, done in sorted(requests, key=lambda request: request[2] < request[1]):  # decode first
        worker, left = slot // 8, max(1, prompt - done)
        if room[worker] < RECORDS_A_SAMPLE:
            assert slot not in chunks
        elif slot in chunks and chunks[slot] == left:
            room[worker] -= RECORDS_A_SAMPLE
        else:
            assert sum(chunks.values()) == 40, "only the end of the rows can shorten or drop it"


def test_prompts_longer_than_a_step_are_computed_in_chunks_beside_decode_rows():
    made = bench(8)
    made.desk.ring(0, [1, 2], 20, ignore_eos=True)
    made.run(1)
    made.desk.ring(1, [3] * 20, 1, ignore_eos=True)
    shapes = []
    for _ in range(3):
        made.run(1)
        n = made.queue.count[CHUNKS]
        shapes.append((made.queue.chunk_slot[:n].tolist(), made.queue.chunk_rows[:n].tolist()))
    assert shapes == [([0, 1], [1, 7]), ([0, 1], [1, 7]), ([0, 1], [1, 6])]
    made.desk.read()
    assert not made.desk.answers[1].reason, "its token goes out with the next turn"
    made.run(1)
    made.desk.read()
    assert made.desk.answers[1].reason == LENGTH


def test_a_batch_needs_a_row_for_each_of_its_requests():
    with pytest.raises(ValueError, match="8 running requests need at least as many rows a step, not 7"):
        allocate(16, rows=7, running=8)
