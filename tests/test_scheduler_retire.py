"""Tokens out, ends, and what a request leaves behind."""

import numpy as np
import pytest
from engine_bench import SMALL, TARGETS, Answer, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import (
    CANCEL,
    CANCELLED,
    DECODE,
    DONE,
    FAILED,
    FREE,
    LENGTH,
    PREFILL,
    REASONS,
    SHUTDOWN,
    STOP,
    STOPPED,
    TIME,
    TOKEN,
    pack_record,
)
from blink_ref.scheduler import state
from blink_ref.scheduler.arrivals import mark_ending
from blink_ref.scheduler.retire import end_reason, end_requests, end_spec
from blink_ref.simt import device

targets = pytest.mark.parametrize("target", TARGETS)
END_TOKEN = SMALL.eos_ids[0]


@device
def end_alone(block, slots, sampling, eos, slot, token, out):
    out[0] = end_reason(slots, sampling, eos, slot, token)


@device
def finish_alone(block, window, slots, queue, cache, slot, reason):
    if reason > 0:
        mark_ending(slots, queue, slot, reason)
    end_requests(window, slots, queue, cache)


def bench(outbox=64, **changes):
    return Bench(small(), chosen(SMALL, **changes), outbox=outbox)


@targets
@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 9),
    st.lists(st.integers(0, 9), max_size=4),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(1, 5),
    st.integers(0, 4),
)
def test_a_request_ends_for_the_reason_of_the_spec(target, token, eos, ignore_eos, stops, produced, left):
    slots, _ = state.allocate(4, 4, 16)
    sampling = state.allocate_sampling(4)
    slots.prompt_len[2], slots.known[2], slots.limit[2] = 3, 3 + produced, produced + left
    slots.ignore_eos[2] = ignore_eos
    sampling.stops[2], sampling.stop[2, : len(stops)] = len(stops), stops
    sampling.stop[2, len(stops) :] = token  # beyond their number they do not count
    out = np.full(1, -1, np.int64)
    simt.launch(end_alone, 1, 1, slots, sampling, np.array(eos, np.int32), 2, token, out, target=target)
    assert out[0] == end_spec(token, tuple(eos), ignore_eos, tuple(stops), left)


def test_a_stop_token_ends_also_who_ignores_end_tokens_and_counts_before_the_limit():
    assert end_spec(2, (2,), False, (), 0) == STOP
    assert end_spec(2, (2,), True, (), 0) == LENGTH
    assert end_spec(2, (2,), True, (2,), 0) == STOP
    assert end_spec(2, (), True, (), 1) == 0


@targets
@pytest.mark.parametrize("reason", REASONS)
def test_an_end_gives_back_pages_and_place_and_shows_how_it_ended(target, reason):
    made = bench()
    for slot in (4, 5, 6):
        made.desk.ring(slot, [slot] * 9, 9)
    made.run(1)
    rest = made.view, made.slots, made.queue, made.cache, 5, reason
    simt.launch(finish_alone, 1, 1, *rest, target=target)
    assert made.running() == [4, 6]
    assert made.slots.pages[5] == 0
    assert made.slots.state[5] == FREE
    seen = CANCELLED if reason in (CANCEL, TIME) else FAILED if reason > CANCEL else DONE
    assert made.window.gpu["state"][5] == seen
    made.check()
    made.desk.read()
    assert made.desk.answers[5] == Answer([], reason)


@targets
def test_an_end_without_room_in_the_outbox_gives_its_pages_back_and_its_slot_only_with_the_record(target):
    made = bench(outbox=2)
    for slot in (0, 1):
        made.desk.ring(slot, [slot], 9)
    made.run(1)
    made.view.written[0] = 2
    rest = made.view, made.slots, made.queue, made.cache
    for reason in (LENGTH, 0):  # the second time it is marked already
        simt.launch(finish_alone, 1, 1, *rest, 0, reason, target=target)
        assert made.running() == [1]
        assert made.slots.state[0] == DONE
        assert made.view.written[0] == 2
        made.check()
    made.window.nic["consumed"][0] = made.desk.index = 1
    simt.launch(finish_alone, 1, 1, *rest, 0, 0, target=target)
    assert made.slots.state[0] == FREE
    assert made.view.written[0] == 3
    assert made.queue.count[state.ENDING] == 0


def test_the_states_of_a_request_can_be_watched():
    made = bench(rows=4, running=4)
    watched = made.window.gpu["state"]
    made.desk.ring(0, [1] * 6, 2, ignore_eos=True)
    seen = []
    for _ in range(4):
        made.run(1)
        seen.append(int(watched[0]))
    assert seen == [PREFILL, PREFILL, DECODE, DONE]


def test_the_tokens_of_an_answer_come_before_its_end_token_ends_it():
    made = bench()
    made.desk.ring(0, [1, 2, 3], 30)  # greedy; this model says an end token after a while
    made.run()
    made.desk.read()
    tokens, reason = made.desk.answers[0]
    assert reason == STOP
    assert tokens[-1] in SMALL.eos_ids
    assert not set(tokens[:-1]) & set(SMALL.eos_ids)
    made.desk.ring(0, [1, 2, 3], 30, ignore_eos=True)
    made.run()
    made.desk.read()
    longer, reason = made.desk.answers[0]
    assert (reason, len(longer)) == (LENGTH, 30)
    assert longer[: len(tokens)] == tokens


def test_a_full_outbox_pauses_its_slots_and_loses_nothing():
    made = bench(outbox=4)
    for slot in range(3):
        made.desk.ring(slot, [slot, 9], 12, ignore_eos=True)
    made.run()
    standing = made.steps
    made.run()
    assert made.steps == standing, "no step runs while nobody reads"
    while made.desk.busy():
        assert made.desk.read(1)
        made.run()
    roomy = bench()
    for slot in range(3):
        roomy.desk.ring(slot, [slot, 9], 12, ignore_eos=True)
    roomy.run()
    roomy.desk.read()
    assert made.desk.answers == roomy.desk.answers


def test_a_reader_that_has_gone_does_not_pause_the_other_worker():
    made = Bench(small(), chosen(SMALL), outbox=4, workers=2)
    for slot in (0, 1, 8, 9):
        made.desks[slot // 8].ring(slot, [slot], 10, ignore_eos=True)
    for _ in range(100):
        made.run()
        made.desks[1].read()
    assert made.desks[1].busy() == []
    assert made.running() == [0, 1]


def test_a_reader_that_lies_about_what_it_has_read_harms_only_itself():
    made = Bench(small(), chosen(SMALL), outbox=4, workers=2)
    for slot in (0, 8):
        made.desks[slot // 8].ring(slot, [slot], 9, ignore_eos=True)
    made.window.nic["consumed"][0] = 12345
    for _ in range(20):
        made.run()
        made.desks[1].read()
    assert not made.desks[1].busy()
    made.stop()
    assert made.window.gpu["heartbeat"][2] == STOPPED


@pytest.mark.parametrize("records", [2**16 * 8 - 5, 2**32 - 5, 2**40 - 5], ids=["tag", "count", "far"])
def test_the_outbox_goes_on_where_its_counters_wrap(records):
    made, fresh = bench(outbox=8), bench(outbox=8)
    for index in range(records - 8, records):  # what the lap before has left there
        made.window.gpu["outbox"][index % 8] = pack_record(index, 8, 0, TOKEN, 0)
    made.view.written[0] = made.desk.index = records
    assert made.desk.read() == 0
    for each in (made, fresh):
        for slot in range(3):
            each.desk.ring(slot, [slot, 1], 11, 0.9, slot, True)
        while each.desk.busy():
            each.run()
            assert each.desk.read()
    assert made.desk.answers == fresh.desk.answers


# --- the end of all


def test_a_stop_ends_running_and_waiting_requests_with_shutdown():
    made = bench(running=2, rows=8)
    for slot in range(4):
        made.desk.ring(slot, [slot, 1], 20, ignore_eos=True)
    made.run(5)
    assert len(made.waiting()) == 2
    made.stop()
    made.desk.read()
    assert [answer.reason for answer in made.desk.answers.values()] == [SHUTDOWN] * 4
    assert [len(answer.tokens) for answer in made.desk.answers.values()] == [5, 5, 0, 0], "no token drawn is lost"
    assert made.window.gpu["heartbeat"][2] == STOPPED
    assert len(made.free_pages()) + len(made.unused_pages()) == made.cache.pages
    assert made.running() == made.waiting() == []
    made.check()


def test_a_stop_with_a_full_outbox_leaves_at_once_and_says_so():
    made = bench(outbox=4)
    for slot in range(6):
        made.desk.ring(slot, [slot, 1], 20, ignore_eos=True)
    made.run()
    made.stop()
    assert made.window.gpu["heartbeat"][2] == STOPPED
    made.desk.read()
    assert made.desk.busy(), "those have to learn it from the heartbeat"


def test_a_stopped_engine_takes_nothing_new():
    made = bench()
    made.stop()
    steps = made.steps
    made.desk.ring(0, [1], 1)
    made.run()
    assert made.steps == steps
    assert made.queue.count[state.RUNNING] == 0
    made.desk.read()
    assert made.desk.answers[0].reason == SHUTDOWN
