"""Doorbells become waiting requests, each once and in order; cancel words become ends."""

import pytest
from engine_bench import LANES, SMALL, TARGETS, Answer, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import CANCEL, CANCELLED, LENGTH, PREFILL, READY
from blink_ref.scheduler.arrivals import cancel_running, scan, scan_spec
from blink_ref.scheduler.state import RUNNING, WAITING_HEAD, WAITING_TAIL
from blink_ref.simt import device

targets = pytest.mark.parametrize("target", TARGETS)
SLOTS = 32


@device
def scan_alone(block, window, slots, queue):
    scan(window, slots, queue)


@device
def cancel_alone(block, window, slots, queue, cache):
    cancel_running(window, slots, queue, cache)


def bench(**changes):
    return Bench(small(), chosen(SMALL, **changes))


def scanned(made, target):
    simt.launch(scan_alone, 1, LANES[target], made.view, made.slots, made.queue, target=target)
    return made.waiting()


words = st.integers(0, 3) | st.integers(0, 2**32 - 1)


@targets
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words, st.booleans()), min_size=SLOTS, max_size=SLOTS), st.integers(0, 100))
def test_a_scan_finds_exactly_the_slots_that_have_rung_and_are_free(target, words, turned):
    made = bench(slots=SLOTS)
    made.queue.count[[WAITING_HEAD, WAITING_TAIL]] = turned  # the waiting ring begins anywhere
    for slot, (rung, taken, busy) in enumerate(words):
        made.window.nic["doorbell"][slot] = rung
        made.slots.taken[slot] = taken
        made.slots.state[slot] = PREFILL if busy else 0
    rung, taken, busy = zip(*words, strict=True)
    expected = [slot for slot in scan_spec(rung, taken) if not busy[slot]]
    waiting = scanned(made, target)
    assert sorted(waiting) == expected
    assert made.slots.taken.tolist() == [r if s in expected else t for s, (r, t, _) in enumerate(words)]
    for slot in expected:
        assert made.slots.state[slot] == made.window.gpu["state"][slot] == READY
    assert scanned(made, target) == waiting, "once is enough"


@targets
@pytest.mark.parametrize("slots", [1, 2, 4, 8, 4096])
def test_a_scan_reaches_every_slot_of_a_window_of_any_size(target, slots):
    if target == "python":
        slots = min(slots, 64)
    made = bench(slots=slots)
    made.window.nic["doorbell"][:] = 1
    assert sorted(scanned(made, target)) == list(range(slots))


@targets
def test_a_later_scan_puts_its_arrivals_behind_those_of_an_earlier(target):
    made = bench()
    for slot in (9, 2, 14, 0):
        made.window.nic["doorbell"][slot] += 1
        scanned(made, target)
    assert made.waiting() == [9, 2, 14, 0]


def test_the_waiting_ring_turns_for_ever():
    made = bench(slots=4)
    made.queue.count[[WAITING_HEAD, WAITING_TAIL]] = 2**40 - 2
    made.window.nic["doorbell"][:] = 1
    assert scanned(made, "cpu") == [0, 1, 2, 3]
    assert made.queue.count[WAITING_TAIL] == 2**40 + 2


@targets
@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)))
def test_cancel_words_end_those_running_slots_whose_generation_they_name(target, running, named, stale):
    made = bench()
    running = sorted(running)
    made.queue.running[: len(running)] = running
    made.queue.count[RUNNING] = len(running)
    for slot in range(16):
        made.slots.taken[slot] = 5
        made.slots.state[slot] = PREFILL
        made.window.nic["cancel"][slot] = 5 if slot in named else 4 if slot in stale else 0
        made.desk.answers[slot] = Answer([], 0)
    simt.launch(cancel_alone, 1, 1, made.view, made.slots, made.queue, made.cache, target=target)
    gone = [slot for slot in running if slot in named]
    assert made.running() == [slot for slot in running if slot not in named], "and the order stays"
    made.desk.read()
    assert [s for s, answer in made.desk.answers.items() if answer.reason == CANCEL] == gone
    assert all(made.window.gpu["state"][slot] == CANCELLED for slot in gone)


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


def test_generations_turn_for_ever():
    made = bench()
    made.slots.taken[3] = 2**32 - 1
    made.window.nic["doorbell"][3] = 2**32 - 1
    made.desk.ring(3, [1], 1)
    assert made.window.nic["doorbell"][3] == 1
    made.run()
    made.desk.read()
    assert made.desk.answers[3].reason == LENGTH
