"""Who gives way when pages run out, and what a request that does leaves and keeps."""

import numpy as np
import pytest
from engine_bench import SMALL, TARGETS, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import READY
from blink_ref.scheduler import state
from blink_ref.scheduler.residence import (
    RECORDS_A_SAMPLE,
    find_victim,
    join_batch,
    leave_batch,
    preempt,
    victim_spec,
)
from blink_ref.simt import device

targets = pytest.mark.parametrize("target", TARGETS)


@device
def find_alone(block, window, slots, queue, out):
    out[0] = find_victim(window, slots, queue)


@device
def join_alone(block, slots, queue, slot):
    join_batch(slots, queue, slot)


@device
def leave_alone(block, queue, slot):
    leave_batch(queue, slot)


@device
def preempt_alone(block, window, slots, queue, cache, slot):
    preempt(window, slots, queue, cache, slot)


def bench(**layout):
    return Bench(small(), chosen(SMALL, running=6, rows=8, page_size=4), **layout)


@targets
@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), min_size=1, max_size=6), st.data())
def test_the_victim_is_that_of_the_spec(target, running, data):
    """Slots of two workers, one of which may not read; of those without pages or in a paused step, none."""
    made = bench(workers=2, outbox=8)
    full = data.draw(st.booleans())
    made.view.room[:] = 8, RECORDS_A_SAMPLE - 1 if full else RECORDS_A_SAMPLE
    mine = data.draw(st.integers(0, len(running) - 1))
    able, places = [], []
    for n, (second, in_flight, pages) in enumerate(running):
        slot = n + 8 * second
        made.queue.running[n] = slot
        made.slots.flight[slot], made.slots.pages[slot] = in_flight, pages
        if n == mine or (pages and not in_flight):
            places.append(n)
            able.append((n, second and full))
    made.queue.count[state.RUNNING], made.queue.count[state.DEALING] = len(running), mine
    expected = victim_spec(able, places.index(mine))
    out = np.full(1, -2, np.int64)
    simt.launch(find_alone, 1, 1, made.view, made.slots, made.queue, out, target=target)
    assert out[0] == (-1 if expected is None else made.queue.running[places[expected]])


@targets
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_the_batch_is_kept_in_order_and_the_place_that_is_dealt_stays_with_its_slot(target, orders, data):
    made = bench()
    for slot, order in enumerate(orders):
        made.slots.order[slot] = order << 16 | slot
        simt.launch(join_alone, 1, 1, made.slots, made.queue, slot, target=target)
    expected = sorted(range(len(orders)), key=lambda slot: made.slots.order[slot])
    assert made.running() == expected
    dealt = data.draw(st.sampled_from(expected))
    made.queue.count[state.DEALING] = expected.index(dealt)
    for slot in data.draw(st.lists(st.sampled_from(expected), unique=True)):
        if slot != dealt:
            simt.launch(leave_alone, 1, 1, made.queue, slot, target=target)
            expected.remove(slot)
    assert made.running() == expected
    assert expected[made.queue.count[state.DEALING]] == dealt


def test_who_is_preempted_keeps_its_tokens_and_its_turn_and_leaves_its_pages():
    made = bench()
    for slot in (2, 5):
        made.desk.ring(slot, [slot] * 9, 9, ignore_eos=True)
    made.run(6)
    known, order, full = made.slots.known[2], made.slots.order[2], int(made.slots.done[2]) // 4
    tokens = made.slots.token[2, :known].tolist()
    simt.launch(preempt_alone, 1, 1, made.view, made.slots, made.queue, made.cache, 2, target="cpu")
    assert made.running() == [5]
    assert made.waiting() == [2]
    assert made.slots.state[2] == made.window.gpu["state"][2] == READY
    assert made.slots.done[2] == made.window.gpu["position"][2] == 0
    assert (made.slots.known[2], made.slots.order[2]) == (known, order)
    assert made.slots.token[2, :known].tolist() == tokens
    assert len(made.unused_pages()) == full > 1, "its full pages stay cached"
    assert made.cache.parent[made.unused_pages()[0]] == 1 + made.unused_pages()[1], "the last one is to go first"
