"""The plan of a step: who gets which rows, and what stands in them."""

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import DECODE, LENGTH, PREFILL
from blink_ref.scheduler import state
from blink_ref.scheduler.batch import chunks_spec, make_draft
from blink_ref.scheduler.residence import RECORDS_A_SAMPLE, join_batch, measure_room, take_pages
from blink_ref.simt import device
from blink_ref.simt.vocabulary import barrier, i64, thread_id

targets = pytest.mark.parametrize("target", TARGETS)
MOST, CONTEXT = 6, 64


@device
def plan_alone(block, window, slots, queue, plans, sampling, cache, joining):
    """Let slots with what they have done join the batch with the pages for it, and plan."""
    if thread_id() == 0:
        for n in range(joining.shape[0]):
            while slots.pages[joining[n]] * cache.page_size < slots.done[joining[n]]:
                take_pages(window, slots, queue, cache, joining[n], i64(slots.pages[joining[n]]), 1)
            join_batch(slots, queue, joining[n])
        measure_room(window)
    barrier()
    make_draft(window, slots, queue, plans, queue.count[state.SPARE], sampling, cache, 0)


def bench(rows, pages=200, **layout):
    sizes = {"rows": rows, "running": MOST, "pages": pages, "page_size": 4, "context": CONTEXT}
    return Bench(small(), chosen(SMALL, **sizes), **layout)


def planned(made, requests, target):
    """Chunks (slot, rows) of a step of requests (slot, prompt length, known, done)."""
    slots = made.slots
    for n, (slot, prompt, known, done) in enumerate(requests):
        slots.prompt_len[slot], slots.known[slot], slots.done[slot] = prompt, known, done
        slots.state[slot] = DECODE if known > prompt else PREFILL
        slots.limit[slot] = CONTEXT
        slots.taken[slot] = 70 + slot
        slots.order[slot] = n << 16 | slot
        slots.token[slot] = (slot * CONTEXT + np.arange(CONTEXT)) % 39
        made.sampling.temperature[slot] = slot / 8
        made.sampling.seed[slot] = 2**63 + slot
        made.sampling.filtered[slot] = slot % 2
    joining = np.array([slot for slot, *_ in requests], np.int32)
    simt.launch(plan_alone, 1, LANES[target], *made.args[:6], joining, target=target)
    return chunks_of(made.draft)


def chunks_of(plan):
    n = plan.count[state.CHUNKS]
    return list(zip(plan.chunk_slot[:n].tolist(), plan.chunk_rows[:n].tolist(), strict=True))


@st.composite
def some_requests(draw):
    """(slot, prompt length, known, done): at any point of prefill, decode, or after a preemption."""
    found = []
    for slot in draw(st.lists(st.integers(0, 15), max_size=MOST, unique=True)):
        prompt = draw(st.integers(1, 30))
        known = prompt + draw(st.integers(0, 20))
        found.append((slot, prompt, known, draw(st.sampled_from([0, known - 1, draw(st.integers(0, known - 1))]))))
    return found


@targets
@settings(max_examples=80, deadline=None)
@given(some_requests(), st.integers(MOST, 40))
def test_a_plan_deals_its_rows_as_the_spec_says(target, requests, rows):
    made = bench(rows)
    expected = chunks_spec([(known, done) for _, _, known, done in requests], rows)
    assert planned(made, requests, target) == [(requests[n][0], count) for n, count in expected]

    plan, row, samples, decoding, filtered = made.draft, 0, [], 0, 0
    for chunk, (n, count) in enumerate(expected):
        slot, prompt, known, done = requests[n]
        assert plan.chunk_row[chunk] == row
        assert (plan.chunk_first[chunk], plan.chunk_taken[chunk]) == (done, 70 + slot)
        decoding += done >= prompt
        for position in range(done, done + count):
            got = plan.slot[row], plan.position[row], plan.token[row], plan.source[row]
            assert got == (slot, position, (slot * CONTEXT + position) % 39, -1)
            row += 1
        last = done + count == known
        assert plan.chunk_sample[chunk] == (len(samples) if last else -1)
        if last:
            samples.append((row - 1, slot, known, np.float32(slot / 8), 2**63 + slot))
            filtered += slot % 2
        assert made.slots.pages[slot] >= -(-(done + count) // 4), "it has the pages that it writes to"
    counts = [plan.count[place] for place in (state.ROWS, state.SAMPLES, state.DECODING, state.FILTERED)]
    assert counts == [row, len(samples), decoding, filtered]
    kept = plan.sample_row, plan.sample_slot, plan.draw, plan.temperature, plan.seed
    assert list(zip(*(array[: len(samples)].tolist() for array in kept), strict=True)) == samples


@given(some_requests(), st.integers(MOST, 40))
def test_a_plan_by_the_spec_is_fair_and_full(requests, rows):
    running = [(known, done) for _, _, known, done in requests]
    chunks = chunks_spec(running, rows)
    assert len({n for n, _ in chunks}) == len(chunks), "one chunk a request"
    decoding = {n for n, (known, done) in enumerate(running) if known - done == 1}
    assert {n for n, count in chunks if n in decoding and count == 1} == decoding, "every decode row goes along"
    assert sum(count for _, count in chunks) == min(rows, sum(known - done for known, done in running))


@targets
@settings(max_examples=40, deadline=None)
@given(some_requests(), st.lists(st.integers(0, 8), min_size=2, max_size=2))
def test_a_full_outbox_leaves_out_its_own_workers_slots_and_no_others(target, requests, unread):
    """A sample needs room for two records; slots get it in order, while it lasts."""
    made = bench(200, outbox=8, workers=2)
    made.view.written[:] = unread
    chunks = planned(made, requests, target)
    room, expected = [8 - n for n in unread], []
    for slot, _, known, done in requests:
        if room[slot // 8] >= RECORDS_A_SAMPLE:
            room[slot // 8] -= RECORDS_A_SAMPLE
            expected.append((slot, known - done))
    assert chunks == expected


@targets
@settings(max_examples=60, deadline=None)
@given(some_requests(), st.integers(MOST, 40), st.integers(0, 12))
def test_with_too_few_pages_the_first_gets_all_it_wants_and_the_last_give_theirs(target, requests, rows, spare):
    """Also where the first wants more than is left: whatever the last have is his."""
    held = sum(-(-done // 4) for *_, done in requests)
    made = bench(rows, pages=max(held + spare, 16))
    chunks = dict(planned(made, requests, target))
    running = made.running()
    assert running == [slot for slot, *_ in requests if slot in running], "the order stays"
    gone = [slot for slot, *_ in requests if slot not in running]
    assert made.queue.count[state.PREEMPTED] == made.queue.count[state.WAITING] == len(gone)
    for slot in gone:
        assert made.slots.pages[slot] == made.slots.done[slot] == 0
        assert slot not in chunks
    for slot, n in chunks.items():
        assert made.slots.pages[slot] * 4 >= made.slots.done[slot] + n
    if requests:
        slot, _, known, done = requests[0]
        assert slot in running
        wants = known - done
        assert chunks[slot] == (wants if wants == 1 else min(wants, left_for_many(requests, rows)))
    owned = [page for slot in range(16) for page in made.held_pages(slot)]
    assert sorted(owned + made.free_pages()) == list(range(made.cache.pages))


def left_for_many(requests, rows):
    """Rows that are left for those who want more than one."""
    return rows - sum(known - done == 1 for _, _, known, done in requests)


def test_prompts_longer_than_a_step_are_computed_in_chunks_beside_decode_rows():
    made = bench(8)
    made.desk.ring(0, [1, 2], 20, ignore_eos=True)
    made.run(1)
    made.desk.ring(1, [3] * 20, 1, ignore_eos=True)
    shapes = []
    for _ in range(3):
        made.run(1)
        shapes.append(chunks_of(made.plan))
        made.check()
    assert shapes == [[(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (1, 6)]]
    made.desk.read()
    assert not made.desk.answers[1].reason, "its token goes out with the next turn"
    made.run(1)
    made.desk.read()
    assert made.desk.answers[1].reason == LENGTH


def test_a_batch_needs_a_row_for_each_of_its_requests():
    with pytest.raises(ValueError, match="8 running requests need at least as many rows a step, not 7"):
        state.allocate_plan(rows=7, running=8)
