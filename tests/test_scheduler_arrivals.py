"""Doorbells become waiting requests, each once and in order; cancel words and deadlines become ends."""

import time

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Answer, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import (
    BAD_REQUEST,
    CANCEL,
    CANCELLED,
    DECODE,
    DONE,
    FREE,
    LENGTH,
    MOST_BIASES,
    MOST_STOPS,
    PREFILL,
    READY,
    TIME,
)
from blink_ref.scheduler import state
from blink_ref.scheduler.arrivals import (
    LATER,
    MOST_PRIORITY,
    PATIENT,
    SOONER,
    listen,
    look_around,
    order_spec,
    scan_spec,
)
from blink_ref.simt import device
from blink_ref.simt.vocabulary import i32, thread_id

targets = pytest.mark.parametrize("target", TARGETS)
SLOTS = 32


@device
def look_alone(block, window, slots, queue, sampling, cache, context, vocab):
    look_around(window, slots, queue, sampling, cache, context, vocab, 0, False)


@device
def listen_alone(block, window, slots, queue, cache, turns, patience, result):
    turns, heard = listen(window, slots, queue, cache, turns, patience)
    if thread_id() == 0:
        result[0] = turns
        result[1] = i32(heard)


def bench(**changes):
    return Bench(small(), chosen(SMALL, **changes))


def look(made, target="cpu"):
    """Look around once; returns who waits, in order."""
    rest = made.slots, made.queue, made.sampling, made.cache, made.settings.context, SMALL.vocab
    simt.launch(look_alone, 1, LANES[target], made.view, *rest, target=target)
    return made.waiting()


def ended(made):
    """The slots marked to end, and why."""
    slots = made.queue.ended[: made.queue.count[state.ENDING]].tolist()
    assert len(set(slots)) == len(slots)
    return {slot: int(made.slots.ending[slot]) for slot in slots}


words = st.integers(0, 3) | st.integers(0, 2**32 - 1)


@targets
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words, st.booleans()), min_size=SLOTS, max_size=SLOTS))
def test_a_look_finds_exactly_the_slots_that_have_rung_and_are_free(target, words):
    made = bench(slots=SLOTS)
    for slot, (rung, taken, busy) in enumerate(words):
        made.window.nic["doorbell"][slot] = rung
        made.slots.taken[slot] = taken
        made.slots.state[slot] = PREFILL if busy else FREE
        made.window.nic["cancel"][slot] = taken + 1 & 0xFFFFFFFF if busy else 0
    rung, taken, busy = zip(*words, strict=True)
    expected = [slot for slot in scan_spec(rung, taken) if not busy[slot]]
    assert look(made, target) == expected
    assert made.slots.taken.tolist() == [r if s in expected else t for s, (r, t, _) in enumerate(words)]
    for slot in expected:
        assert made.slots.state[slot] == made.window.gpu["state"][slot] == READY
    assert made.queue.count[state.WAITING] == made.queue.count[state.ARRIVED] == len(expected)
    assert look(made, target) == expected, "once is enough"
    assert made.queue.count[state.ARRIVED] == len(expected)


@targets
@pytest.mark.parametrize(
    ("turns", "patience", "rung", "waits", "expected"),
    [
        (0, 0, False, False, (PATIENT, 0)),
        (PATIENT - 1, 0, True, False, (PATIENT, 0)),  # a look at all of the window is due, which finds it
        (0, 5, False, False, (5, 0)),
        (3, 0, True, False, (4, 1)),
        (3, 0, True, True, (4, 0)),  # somebody waits, so there is more to look at
    ],
)
def test_who_listens_hears_a_doorbell_at_once_and_looks_up_now_and_then(
    target, turns, patience, rung, waits, expected
):
    made, result = bench(), np.full(2, -1, np.int32)
    made.window.nic["doorbell"][3] = rung
    made.queue.count[state.WAITING] = waits
    rest = made.slots, made.queue, made.cache, turns, patience, result
    simt.launch(listen_alone, 1, LANES[target], made.view, *rest, target=target)
    assert tuple(result) == expected
    assert made.queue.rung[: made.queue.count[state.RUNG]].tolist() == [3] * expected[1]


@targets
@pytest.mark.parametrize("slots", [1, 2, 4, 8, 4096])
def test_a_look_reaches_every_slot_of_a_window_of_any_size(target, slots):
    if target == "python":
        slots = min(slots, 64)
    made = bench(slots=slots)
    made.window.nic["doorbell"][:] = 1
    assert look(made, target) == list(range(slots))


@targets
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1) | st.integers(0, 3), st.booleans(), st.integers(0, 2)),
        min_size=16,
        max_size=16,
    )
)
def test_the_order_of_a_request_is_that_of_the_spec(target, arrivals):
    """Requests ring in up to three turns; of one turn they count as equally early, and slots decide."""
    made = bench()
    expected, count = {}, 0
    for turn in range(3):
        rung = [slot for slot, (_, _, when) in enumerate(arrivals) if when == turn]
        for slot in rung:
            priority, urgent, _ = arrivals[slot]
            made.desk.ring(slot, [1], 1, priority=priority, urgent=urgent)
            expected[slot] = order_spec(count, priority, urgent, slot)
        count += len(rung)
        look(made, target)
    assert dict(enumerate(made.slots.order.tolist())) == expected
    assert made.waiting() == sorted(expected, key=expected.get)
    assert [slot for slot in range(16) if made.slots.urgent[slot]] == [s for s in range(16) if arrivals[s][1]]


@given(st.integers(0, 2**40), st.integers(0, 15), st.booleans(), st.integers(0, 15), st.integers(0, 2**32))
def test_nobody_is_overtaken_for_ever(arrival, slot, urgent, other, priority):
    """Best effort is overtaken by SOONER later urgent requests at most, and priority p by LATER * p of 0."""
    mine = order_spec(arrival, priority, urgent, slot)
    bound = LATER * min(priority, MOST_PRIORITY)
    if not urgent:
        assert mine < order_spec(arrival + bound + SOONER + 1, 0, True, other)
        assert order_spec(arrival + bound + SOONER - 1, 0, True, other) < mine
    assert mine < order_spec(arrival + bound + 1, 0, urgent, other)
    assert mine <= order_spec(arrival, priority, urgent, 15)


@targets
def test_a_later_look_puts_its_arrivals_behind_those_of_an_earlier(target):
    made = bench()
    for slot in (9, 2, 14, 0):
        made.desk.ring(slot, [1], 1)
        look(made, target)
    assert made.waiting() == [9, 2, 14, 0]


states = st.sampled_from([FREE, READY, PREFILL, DECODE, DONE])


@targets
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(states, st.sampled_from([0, 4, 5]), st.sampled_from(["none", "past", "future"]), st.booleans()),
        min_size=16,
        max_size=16,
    )
)
def test_cancel_words_and_deadlines_end_whom_they_name_once(target, slots):
    made = bench()
    expected = {}
    for slot, (state_now, cancel, deadline, marked) in enumerate(slots):
        made.slots.taken[slot] = made.window.nic["doorbell"][slot] = 5
        made.slots.state[slot] = state_now
        made.queue.count[state.WAITING] += state_now != FREE
        made.window.nic["cancel"][slot] = cancel
        made.slots.deadline[slot] = {"none": 0, "past": 1, "future": 2**62}[deadline]
        if state_now == DONE or (marked and state_now != FREE):
            made.slots.ending[slot] = LENGTH
        elif state_now != FREE and (cancel == 5 or deadline == "past"):
            expected[slot] = CANCEL if cancel == 5 else TIME
    look(made, target)
    assert ended(made) == expected
    look(made, target)
    assert ended(made) == expected


@targets
def test_a_request_that_is_cancelled_before_it_is_seen_is_to_end(target):
    made = bench()
    made.desk.ring(3, [1], 1)
    made.desk.cancel(3)
    assert look(made, target) == [3]
    assert ended(made) == {3: CANCEL}


@targets
@pytest.mark.parametrize("field", ["prompt_len", "stops", "biases"])
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**32 - 1])
def test_what_a_request_that_cannot_run_leaves_behind_stays_within_the_arrays(target, field, value):
    """A paused step may have a row of the slot's last request, whose filters read as far as these numbers say."""
    made = bench()
    made.desk.ring(3, [1], 1, overwrite={field: value})
    look(made, target)
    assert ended(made) == {3: BAD_REQUEST}
    assert 0 <= made.slots.prompt_len[3] <= made.settings.context
    assert 0 <= made.sampling.stops[3] <= MOST_STOPS
    assert 0 <= made.sampling.biases[3] <= MOST_BIASES


def test_a_cancelled_request_that_waits_gets_its_end_at_once():
    """Also while all places in the batch are taken."""
    made = bench(running=1, rows=4)
    made.desk.ring(0, [1], 40, ignore_eos=True)
    made.desk.ring(1, [1], 40, ignore_eos=True)
    made.run(1)
    made.desk.cancel(1)
    made.run(1)
    made.desk.read()
    assert made.desk.answers[1] == Answer([], CANCEL)
    assert made.window.gpu["state"][1] == CANCELLED
    assert made.running() == [0]
    made.check()


@targets
def test_time_runs_from_the_first_look_on(target):
    made = bench()
    made.desk.ring(0, [1], 1, time_ms=2**32 - 1)
    made.desk.ring(1, [1], 1)
    made.desk.ring(2, [1], 1, time_ms=1)
    look(made, target)
    assert made.slots.deadline[1] == 0
    assert made.slots.deadline[0] - made.slots.deadline[2] == pytest.approx((2**32 - 2) * 1e6, abs=1e9)
    time.sleep(0.002)
    look(made, target)
    assert ended(made) == {2: TIME}


def test_a_cancel_word_from_the_slots_past_does_not_hit_its_next_request():
    made = bench()
    made.desk.ring(0, [1], 1)
    made.run()
    made.desk.read()
    made.desk.cancel(0)  # too late
    made.desk.ring(0, [1], 1)
    made.run()
    made.desk.read()
    assert made.desk.answers[0].reason == LENGTH
    made.check()


def test_a_slot_rung_again_before_its_end_is_taken_once_more_after_it():
    """No NIC does that; if it does, it harms itself only."""
    made = bench()
    made.desk.ring(0, [1, 2], 3, ignore_eos=True)
    made.run(1)
    made.window.nic["doorbell"][0] += 1
    made.run(1)
    assert made.running() == [0]
    made.run(1)
    made.run(1)
    made.desk.read(4)
    assert made.desk.answers[0].reason == LENGTH
    assert made.running() == [0]
    made.check()


def test_generations_turn_for_ever():
    made = bench()
    made.slots.taken[3] = 2**32 - 1
    made.window.nic["doorbell"][3] = 2**32 - 1
    made.desk.ring(3, [1], 1)
    assert made.window.nic["doorbell"][3] == 1
    made.run()
    made.desk.read()
    assert made.desk.answers[3].reason == LENGTH


@targets
def test_parameters_are_taken_as_they_are_and_what_is_off_is_no_filter(target):
    made = bench()
    made.desk.ring(0, [1], 5)
    values = {"top_k": 3, "top_p": 0.5, "min_p": 0.25, "presence": -1.0, "frequency": 2.0, "repetition": 1.5}
    made.desk.ring(1, [1], 5, 0.5, 9, stops=[4, 6], biases={7: 1.5}, min_tokens=2, logprobs=21, **values)
    look(made, target)
    assert ended(made) == {}
    sampling = made.sampling
    assert sampling.filtered[:2].tolist() == [0, 1]
    assert (sampling.temperature[1], sampling.seed[1]) == (np.float32(0.5), 9)
    for name, value in values.items():
        assert getattr(sampling, name)[:2].tolist() == [0, value]
    for name, value in {"stops": 2, "biases": 1, "min_tokens": 2, "logprobs": 21}.items():
        assert getattr(sampling, name)[:2].tolist() == [0, value]
