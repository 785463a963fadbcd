"""Admission: who goes first, whole requests only, and a reason for those that can never run."""

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Answer, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.kvcache import pages as kvcache
from blink_ref.kvcache.pages import pages_spec
from blink_ref.ring.layout import BAD_REQUEST, CANCEL, FAILED, LENGTH, NO_PAGES, PREFILL, TOO_LONG
from blink_ref.scheduler.admit import admit, refusal_spec
from blink_ref.scheduler.arrivals import look_around, order_spec
from blink_ref.scheduler.residence import measure_room
from blink_ref.scheduler.retire import end_requests
from blink_ref.simt import device
from blink_ref.simt.vocabulary import barrier, thread_id

targets = pytest.mark.parametrize("target", TARGETS)
CONTEXT, PAGE, ROOM = 24, 4, 32


@device
def take_in(block, window, slots, queue, sampling, cache, context, vocab):
    """A turn of the scheduler but for the plan; those that admission refuses end with it."""
    look_around(window, slots, queue, sampling, cache, context, vocab, 0, False)
    if thread_id() == 0:
        end_requests(window, slots, queue, cache)
        measure_room(window)
    barrier()
    admit(window, slots, queue, cache, sampling, vocab)
    if thread_id() == 0:
        end_requests(window, slots, queue, cache)
    barrier()


def bench(**changes):
    sizes = {"context": CONTEXT, "page_size": PAGE, "running": 4, "rows": 8, "pages": 12}
    return Bench(small(), chosen(SMALL, **{**sizes, **changes}), outbox=64, arena=16 * ROOM)


def admitted(made, target="cpu"):
    """Take in what has rung and admit; returns the running."""
    rest = made.view, made.slots, made.queue, made.sampling, made.cache, CONTEXT, SMALL.vocab
    simt.launch(take_in, 1, LANES[target], *rest, target=target)
    made.desk.read()
    made.check()
    return made.running()


# --- who is admitted


def admission_spec(waiting, places, reserved, spare):
    """The slots admitted, in turn, of `waiting` (order, slot, urgent, pages needed) into `places`."""
    left, taken, ordinary, full = sorted(waiting), [], 0, False
    while left and len(taken) < places:
        closed = full or ordinary >= places - reserved
        able = [request for request in left if request[2] or not closed]
        if not able:
            break
        _, slot, urgent, needed = able[0]
        if needed > spare and not urgent:
            full = True
            continue
        left.remove(able[0])
        taken.append(slot)
        ordinary += not urgent
    return taken


sizes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans(), st.integers(0, 2)), max_size=10)


@targets
@settings(max_examples=80, deadline=None)
@given(sizes, st.integers(1, 12), st.integers(0, 12), st.integers(0, 3))
def test_requests_are_admitted_in_order_until_one_lacks_pages_or_a_place(target, sizes, pages, spare, reserved):
    """Urgent ones in any case, into any place; pages are taken later, as they are computed."""
    made = bench(pages=pages, reserved=reserved)
    spare = min(spare, pages)
    held = made.cache.free[spare:pages].tolist()  # by a request that runs, say
    made.cache.count[kvcache.FREE] = spare
    waiting, refused = [], {}
    for slot, (length, limit, urgent, priority) in enumerate(sizes):
        made.desk.ring(slot, [1] * length, limit, urgent=urgent, priority=priority)
        if reason := refusal_spec(length, limit, CONTEXT, pages, PAGE):
            refused[slot] = reason
        else:
            waiting.append((order_spec(0, priority, urgent, slot), slot, urgent, pages_spec(length + 1, PAGE)))
    expected = admission_spec(waiting, 4, reserved, spare)
    rest = made.view, made.slots, made.queue, made.sampling, made.cache, CONTEXT, SMALL.vocab
    simt.launch(take_in, 1, LANES[target], *rest, target=target)
    made.desk.read()
    assert held == made.cache.free[spare:pages].tolist()
    assert made.running() == sorted(expected, key=lambda slot: made.slots.order[slot])
    assert {s: answer.reason for s, answer in made.desk.answers.items() if answer.reason} == refused
    for slot in expected:
        assert made.held_pages(slot) == []
        assert made.slots.token[slot, : sizes[slot][0]].tolist() == [1] * sizes[slot][0]
        assert made.slots.known[slot] == sizes[slot][0]
        assert made.slots.state[slot] == made.window.gpu["state"][slot] == PREFILL
    assert made.waiting() == [slot for _, slot, *_ in sorted(waiting) if slot not in expected]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages():
    made = bench()
    made.desk.ring(0, [1] * 16, 8, ignore_eos=True)
    made.desk.ring(1, [2] * 16, 8, ignore_eos=True)
    made.run(4)  # 8 of 12 pages
    made.desk.ring(2, [3] * 20, 4)  # 6 at once: too many
    made.desk.ring(3, [4], 1)  # 1
    made.run(1)
    assert made.running() == [0, 1]
    assert made.waiting() == [2, 3]
    made.desk.cancel(0)
    made.run(1)
    assert made.running() == [1, 2, 3], "its pages are enough, and behind the large one there is room"
    made.check()


def test_a_request_that_waits_for_pages_is_admitted_as_soon_as_they_come_back():
    made = bench(pages=6)
    made.desk.ring(0, [1] * 20, 2, ignore_eos=True)
    made.desk.ring(1, [2] * 20, 2, ignore_eos=True)
    made.run()
    made.desk.read()
    assert [made.desk.answers[slot].reason for slot in (0, 1)] == [LENGTH, LENGTH]
    made.check()


@pytest.mark.parametrize("target", ["cpu", "python"])
def test_a_follower_waits_until_its_leader_has_computed_the_prompt(target):
    made = bench()
    made.desk.ring(0, range(1, 13), 3, ignore_eos=True)
    generation = made.window.nic["doorbell"][0]
    for slot in (1, 2):
        made.desk.ring(slot, range(1, 13), 3, ignore_eos=True, leader=1, leader_generation=generation)
    made.desk.ring(3, range(1, 13), 3, leader=1, leader_generation=generation + 1)
    made.desk.ring(4, [9], 3, leader=6, leader_generation=0)
    assert admitted(made, target) == [0, 3, 4], "one that names another request, or none, does not wait"
    assert made.waiting() == [1, 2]
    made.desk.cancel(0)
    assert sorted(admitted(made, target)) == [1, 2, 3, 4], "its leader has gone"
    assert made.waiting() == []


# --- who never is


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_len": 0}, BAD_REQUEST),
        ({"max_tokens": 0}, BAD_REQUEST),
        ({"prompt_len": 0, "max_tokens": 0}, BAD_REQUEST),
        ({"prompt_at": 16 * ROOM - 2}, BAD_REQUEST),
        ({"prompt_at": 2**32 - 1}, BAD_REQUEST),
        ({"prompt_len": 2**32 - 1}, BAD_REQUEST),
        ({"prompt_at": 2**32 - 1, "prompt_len": 2**32 - 1, "max_tokens": 2**32 - 1}, BAD_REQUEST),
        ({"temperature": -0.1}, BAD_REQUEST),
        ({"temperature": np.nan}, BAD_REQUEST),
        ({"temperature": -np.nan}, BAD_REQUEST),
        ({"temperature": np.inf}, BAD_REQUEST),
        ({"temperature": -np.inf}, BAD_REQUEST),
        ({"temperature": -np.finfo(np.float32).tiny}, BAD_REQUEST),
        ({"temperature": 1e30}, BAD_REQUEST),
        ({"min_tokens": 4}, BAD_REQUEST),
        ({"min_tokens": 2**32 - 1}, BAD_REQUEST),
        ({"stops": 17}, BAD_REQUEST),
        ({"stops": 2**32 - 1}, BAD_REQUEST),
        ({"biases": 301}, BAD_REQUEST),
        ({"biases": 2**32 - 1, "stops": 2**32 - 1}, BAD_REQUEST),
        ({"prompt_at": 16 * ROOM - 4, "stops": 2}, BAD_REQUEST),
        ({"prompt_at": 16 * ROOM - 4, "biases": 1}, BAD_REQUEST),
        ({"logprobs": 22}, BAD_REQUEST),
        ({"top_p": 1.5}, BAD_REQUEST),
        ({"top_p": -0.5}, BAD_REQUEST),
        ({"top_p": np.nan}, BAD_REQUEST),
        ({"min_p": 1.5}, BAD_REQUEST),
        ({"min_p": np.nan}, BAD_REQUEST),
        ({"repetition": -1}, BAD_REQUEST),
        ({"repetition": np.inf}, BAD_REQUEST),
        ({"presence": np.nan}, BAD_REQUEST),
        ({"frequency": -np.inf}, BAD_REQUEST),
        ({"leader": 17}, BAD_REQUEST),
        ({"leader": 2**32 - 1}, BAD_REQUEST),
        ({"max_tokens": CONTEXT - 2}, TOO_LONG),
        ({"max_tokens": 2**31}, TOO_LONG),
        ({"max_tokens": 2**32 - 1}, TOO_LONG),
        ({"prompt_len": CONTEXT, "max_tokens": 1}, TOO_LONG),
        ({"max_tokens": 18}, NO_PAGES),
    ],
    ids=str,
)
@targets
def test_what_can_never_run_is_refused_with_its_reason_and_the_next_is_served(target, fields, reason):
    made = bench(pages=5)
    made.desk.ring(0, [1, 2, 3], 3, overwrite=fields)
    made.desk.ring(1, [1, 2, 3], 3)
    assert admitted(made, target) == [1]
    assert made.desk.answers[0] == Answer([], reason)
    assert made.window.gpu["state"][0] == FAILED
    assert made.slots.state[0] == made.slots.pages[0] == 0
    assert made.waiting() == []


@targets
@pytest.mark.parametrize(
    ("at", "word"), [(0, SMALL.vocab), (2, 2**32 - 1), (3, SMALL.vocab), (5, 0x7F800000), (5, 0x7FC00000)]
)
def test_a_token_outside_the_vocabulary_or_a_bias_that_is_no_number_is_refused(target, at, word):
    """Prompt, stop tokens and biases lie behind each other in the arena."""
    made = bench()
    made.desk.ring(0, [1, 2, 3], 3, stops=[4], biases={5: 1.0})
    made.window.nic["arena"][at] = word
    made.desk.ring(1, [1, 2, 3], 3, stops=[4], biases={5: 1.0})
    assert admitted(made, target) == [1]
    assert made.desk.answers[0] == Answer([], BAD_REQUEST)
    assert made.waiting() == []


@targets
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.0},
        {"temperature": 1e6},
        {"max_tokens": 17},
        {"min_tokens": 3},
        {"logprobs": 21},
        {"top_k": 2**32 - 1},
        {"top_p": 1.0, "min_p": 1.0},
        {"repetition": 1.0},
        {"priority": 2**32 - 1},
        {"time_ms": 2**32 - 1},
        {"flags": 2**32 - 1},
        {"leader": 16, "leader_generation": 77},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_what_is_just_within_the_limits_is_admitted(target, fields):
    made = bench(pages=5)
    made.desk.ring(0, [1, 2, 3], 3, overwrite=fields)
    assert admitted(made, target) == [0]


def test_a_request_of_exactly_the_context_is_served_to_its_last_token():
    made = bench()
    made.desk.ring(0, [1] * (CONTEXT - 1), 1, ignore_eos=True)
    made.desk.ring(1, [1], CONTEXT - 1, ignore_eos=True)
    made.run()
    made.desk.read()
    assert [len(made.desk.answers[slot].tokens) for slot in (0, 1)] == [1, CONTEXT - 1]


def test_a_request_cancelled_while_it_waits_takes_no_place():
    made = bench()
    made.desk.ring(0, [1, 2], 3)
    made.desk.cancel(0)
    assert admitted(made) == []
    assert made.desk.answers[0] == Answer([], CANCEL)


def test_a_refusal_waits_for_room_in_the_outbox():
    made = Bench(small(), chosen(SMALL, context=CONTEXT), outbox=2)
    for slot in range(5):
        made.desk.ring(slot, [1], 0)
    made.run()
    assert made.waiting() == []
    assert made.desk.read() == 2
    made.run()
    assert made.desk.read() == 2
    made.run()
    assert [made.desk.read(), made.desk.busy()] == [1, []]
    made.check()
