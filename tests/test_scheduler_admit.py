"""Admission: first come, first served, whole requests only, and a reason for those that can never run."""

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Answer, Bench, Request, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.kvcache.pages import pages_for, pages_spec, return_pages, take_pages
from blink_ref.ring.layout import BAD_REQUEST, CANCEL, FAILED, LENGTH, NO_PAGES, PREFILL, REQUEST, TOO_LONG
from blink_ref.scheduler.admit import admit, refusal_spec
from blink_ref.simt import device
from blink_ref.simt.vocabulary import barrier, i32, thread_id

targets = pytest.mark.parametrize("target", TARGETS)
CONTEXT, PAGE, ROOM = 24, 4, 32


@device
def admit_alone(block, window, slots, queue, cache, context, vocab):
    admit(block, window, slots, queue, cache, context, vocab)


@device
def take_alone(block, cache, slot, n):
    take_pages(cache, slot, n)
    barrier()
    if thread_id() == 0:
        cache.count[0] -= i32(n)


@device
def return_alone(block, cache, slot, n):
    return_pages(cache, slot, n)


@device
def pages_alone(block, positions, page_size, out):
    out[0] = pages_for(positions, page_size)


def bench(**changes):
    sizes = {"context": CONTEXT, "page_size": PAGE, "running": 4, "rows": 8, "pages": 12}
    return Bench(small(), chosen(SMALL, **{**sizes, **changes}), outbox=64, arena=16 * ROOM)


def admitted(made, target="cpu"):
    """Put all rung slots into the waiting ring, in slot order, and admit; returns the running."""
    for slot in made.desk.busy():
        if made.slots.taken[slot] != made.window.nic["doorbell"][slot]:
            made.slots.taken[slot] = made.window.nic["doorbell"][slot]
            made.slots.state[slot] = 1
            made.queue.waiting[made.queue.count[1] % made.settings.slots] = slot
            made.queue.count[1] += 1
    rest = made.view, made.slots, made.queue, made.cache, CONTEXT, SMALL.vocab
    simt.launch(admit_alone, 1, LANES[target], *rest, target=target)
    made.desk.read()
    return made.running()


# --- pages


@targets
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 300), st.integers(1, 256))
def test_pages_for_positions_are_those_of_the_spec(target, positions, page_size):
    out = np.full(1, -1, np.int64)
    simt.launch(pages_alone, 1, 1, positions, page_size, out, target=target)
    assert out[0] == pages_spec(positions, page_size)


@targets
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6)), max_size=20))
def test_pages_taken_and_returned_in_any_order_are_neither_lost_nor_doubled(target, moves):
    made = bench()
    for slot, n in moves:
        if held := int(made.slots.pages[slot]):
            simt.launch(return_alone, 1, 1, made.cache, slot, held, target=target)
            made.slots.pages[slot] = 0
        elif n <= made.cache.count[0]:
            simt.launch(take_alone, 1, LANES[target], made.cache, slot, n, target=target)
            made.slots.pages[slot] = n
        owned = [page for slot in range(16) for page in made.held_pages(slot)]
        assert sorted(owned + made.free_pages()) == list(range(12))


@targets
def test_a_page_returned_last_is_taken_first(target):
    made = bench()
    for slot in (0, 1):
        simt.launch(take_alone, 1, LANES[target], made.cache, slot, 3, target=target)
    first, second = made.cache.table[0, :3].tolist(), made.cache.table[1, :3].tolist()
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    simt.launch(return_alone, 1, 1, made.cache, 0, 3, target=target)
    simt.launch(take_alone, 1, LANES[target], made.cache, 2, 3, target=target)
    assert made.cache.table[2, :3].tolist() == first


# --- who is admitted


@targets
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), max_size=10), st.integers(1, 12))
def test_requests_are_admitted_in_order_until_one_lacks_pages_or_a_place(target, sizes, pages):
    made = bench(pages=pages)
    for slot, (length, limit) in enumerate(sizes):
        made.desk.ring(slot, [1] * length, limit)
    expected, refused, free, stuck = [], {}, pages, False
    for slot, (length, limit) in enumerate(sizes):
        reason, need = refusal_spec(length, limit, CONTEXT, pages, PAGE), pages_spec(length + limit, PAGE)
        stuck = stuck or (not reason and (need > free or len(expected) == 4))
        if not stuck and reason:
            refused[slot] = reason
        elif not stuck:
            expected.append(slot)
            free -= need
    assert admitted(made, target) == expected
    assert {s: answer.reason for s, answer in made.desk.answers.items() if answer.reason} == refused
    assert made.cache.count[0] == free
    for slot in expected:
        assert len(made.held_pages(slot)) == pages_spec(sum(sizes[slot]), PAGE)
        assert made.slots.state[slot] == made.window.gpu["state"][slot] == PREFILL
    assert made.waiting() == [s for s in range(len(sizes)) if s not in expected and s not in refused]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages():
    made = bench()
    made.desk.ring(0, [1] * 16, 8)  # 6 of 12 pages
    made.desk.ring(1, [1] * 18, 6)  # 6
    made.desk.ring(2, [1] * 20, 4)  # 6: none left
    made.desk.ring(3, [1], 1)  # 1
    assert admitted(made) == [0, 1]
    assert made.waiting() == [2, 3]
    made.desk.cancel(0)
    made.run(1)
    assert made.running() == [1, 2], "its pages are exactly enough; the last waits on"


def test_a_request_that_waits_for_pages_is_admitted_as_soon_as_they_come_back():
    made = bench(pages=6)
    made.desk.ring(0, [1] * 20, 2, ignore_eos=True)
    made.desk.ring(1, [2] * 20, 2, ignore_eos=True)
    made.run()
    made.desk.read()
    assert [made.desk.answers[slot].reason for slot in (0, 1)] == [LENGTH, LENGTH]


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
@pytest.mark.parametrize("fields", [{"temperature": -0.0}, {"temperature": 1e6}, {"max_tokens": 17}], ids=str)
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
    assert made.waiting() == [2, 3, 4]
    assert made.desk.read() == 2
    made.run()
    assert made.desk.read() == 2
    made.run()
    assert [made.desk.read(), made.desk.busy()] == [1, []]


requests = st.binary(min_size=REQUEST.itemsize, max_size=REQUEST.itemsize)
nearly = st.fixed_dictionaries(
    {
        "prompt_at": st.integers(0, 400),
        "prompt_len": st.integers(0, 30),
        "max_tokens": st.integers(0, 30),
        "temperature": st.floats(width=32),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(requests, st.none() | nearly), min_size=15, max_size=15),
    st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16),
)
def test_garbage_in_requests_and_prompts_harms_nobody_else(garbage, tokens):
    made = bench(pages=30)
    made.window.nic["arena"][:] = np.resize(np.array(tokens, np.uint32), made.window.layout.arena)
    good = Request((4, 9, 1), 5, 0.8, 11)
    for slot, (raw, fields) in enumerate(garbage):
        made.desk.answers[slot] = Answer([], 0)
        made.window.nic["request"][slot] = np.frombuffer(raw, REQUEST)[0]
        for name, value in (fields or {}).items():
            made.window.nic["request"][slot][name] = value
        made.window.nic["doorbell"][slot] = 1
    made.desk.ring(15, *good)
    for _ in range(100):
        if not made.desk.busy():
            break
        made.run()
        made.desk.read()
    assert not made.desk.busy()
    assert made.cache.count[0] == 30
    alone = bench(pages=30)
    alone.desk.ring(15, *good)
    alone.run()
    alone.desk.read()
    assert made.desk.answers[15] == alone.desk.answers[15]


def test_a_prompt_token_outside_the_vocabulary_counts_as_token_0():
    made = bench()
    made.desk.ring(0, [SMALL.vocab, 2**32 - 1, 2], 4)
    made.desk.ring(1, [0, 0, 2], 4)
    made.run()
    made.desk.read()
    assert made.desk.answers[0] == made.desk.answers[1]
