"""Cases that broke other engines, one by one; and the promises made to who asks, under preemption and pauses.

All of it with a hash under which all pages at the same depth collide, and with steps interrupted on demand.
"""

import functools
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from engine_bench import SMALL, Answer, Bench, Request, chosen, interrupt_at, small

from blink_ref import simt
from blink_ref.kvcache import prefix
from blink_ref.model.reference import Reference
from blink_ref.ring.layout import (
    BEAT_EVICTED,
    BEAT_FOUND,
    BEAT_PAUSED,
    BEAT_PREEMPTED,
    CANCEL,
    CANCELLED,
    LENGTH,
    PREFILL,
    READY,
    STOP,
    TIME,
)
from blink_ref.scheduler import pause, state
from blink_ref.scheduler.arrivals import SOONER
from blink_ref.scheduler.pause import MOST_STREAK
from blink_ref.simt import device
from blink_ref.simt.vocabulary import u64

CONTEXT = 40
P = 4
WIDE = replace(SMALL, context=600)


@device
def same_for_all(token, slot, first, n, lane, lanes):
    """In the place of prefix.page_hash."""
    return u64(5 * (lane == 0))


@pytest.fixture(scope="module", autouse=True)
def injected():
    """Both at once: the engine is compiled anew."""
    with simt.swap(prefix.page_hash, same_for_all), simt.swap(pause.watch, interrupt_at):
        yield


def bench(target="cpu", config=SMALL, **changes):
    layout = {name: changes.pop(name) for name in ("workers", "outbox", "arena") if name in changes}
    sizes = {"context": CONTEXT, "page_size": P, "running": 4, "rows": 8, "pages": 60, **changes}
    return Bench((config, small()[1]), chosen(config, target, **sizes), **layout)


def finish(made):
    """Run until all have ended, a step at a time, and see that all is well after each."""
    while any(desk.busy() for desk in made.desks):
        steps = made.steps
        made.poison()
        made.run(1)
        made.check()
        read = sum(desk.read() for desk in made.desks)
        assert read or made.steps > steps, "the engine stands still"


@functools.cache
def alone(request):
    """What a request gets on an engine of its own that shares nothing."""
    made = bench(sharing=False, blocks=1)
    request.ring(made.desk, 0)
    made.run()
    made.desk.read()
    return made.desk.answers[0]


def beat(made, word):
    """A word of the heartbeat; of the counts, the scheduler's own, which are newer."""
    places = {BEAT_FOUND: state.FOUND, BEAT_PREEMPTED: state.PREEMPTED, BEAT_PAUSED: state.PAUSES}
    return int(made.queue.count[{**places, BEAT_EVICTED: state.EVICTED}[word]])


def prompt(n, seed=0):
    return tuple(np.random.default_rng(seed).integers(10, SMALL.vocab, n).tolist())


# --- prefixes


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_prompts_around_the_page_size_are_right_when_computed_and_when_cached(size):
    """Of a fully cached prompt the last position is computed all the same: its logits are wanted."""
    made = bench(config=WIDE, context=2 * size + 8, page_size=size, pages=16, rows=64)
    for length in (size - 1, size, size + 1, 2 * size):
        request = Request(prompt(length, length), 3, ignore_eos=True)
        expected = Reference(WIDE, small()[1]).generate(list(request.prompt), 3, ignore_eos=True)
        for found in (0, (length - 1) // size * size):
            before = beat(made, BEAT_FOUND)
            request.ring(made.desk, length % 16)
            finish(made)
            assert made.desk.answers[length % 16].tokens == expected
            assert beat(made, BEAT_FOUND) - before == found


def test_a_prompt_that_is_fully_cached_computes_its_last_position_only():
    made = bench(page_size=1)
    for found in (0, 7):
        Request(prompt(8), 1).ring(made.desk, 3)
        made.run(1)
        assert made.plan.count[state.ROWS] == 8 - found
        finish(made)
        assert made.desk.answers[3] == alone(Request(prompt(8), 1))


def test_texts_whose_hashes_collide_do_not_share_a_page():
    made = bench()
    first, second = Request(prompt(12, 1), 5, ignore_eos=True), Request(prompt(12, 2), 5, ignore_eos=True)
    for slot, request in enumerate((first, second, first)):
        request.ring(made.desk, slot)
        finish(made)
        assert made.desk.answers[slot] == alone(request)
    assert made.slots.hashed[:2].tolist() == [4, 4]
    assert made.cache.chain[0, :4].tolist() == made.cache.chain[1, :4].tolist()
    assert beat(made, BEAT_FOUND) == 8, "the third found the first's"


def test_who_computes_the_same_pages_at_the_same_time_keeps_one_of_each():
    made = bench(rows=32)
    for slot in (0, 1):
        Request(prompt(9), 3, ignore_eos=True).ring(made.desk, slot)
    made.run(2)
    assert made.held_pages(0)[:2] == made.held_pages(1)[:2]
    assert made.held_pages(0)[2] != made.held_pages(1)[2]
    finish(made)
    assert made.desk.answers[0] == made.desk.answers[1] == alone(Request(prompt(9), 3, ignore_eos=True))


def test_samples_of_one_prompt_share_its_pages_and_differ_by_their_seed():
    made, samples = bench(), [Request(prompt(13), 6, 1.2, seed, True) for seed in range(4)]
    samples[0].ring(made.desk, 0)
    generation = int(made.window.nic["doorbell"][0])
    for slot in (1, 2, 3):
        samples[slot].ring(made.desk, slot, leader=1, leader_generation=generation)
    made.run(1)
    assert (made.running(), made.waiting()) == ([0], [1, 2, 3])
    made.run(3)
    shared = made.held_pages(0)[:3]
    assert all(made.held_pages(slot)[:3] == shared for slot in range(4))
    assert made.cache.references[shared].tolist() == [4, 4, 4]
    assert beat(made, BEAT_FOUND) == 3 * 12
    finish(made)
    answers = [made.desk.answers[slot] for slot in range(4)]
    assert answers == [alone(request) for request in samples]
    assert len({tuple(tokens) for tokens, _ in answers}) == 4


def test_pages_of_several_positions_are_evicted_oldest_first_and_the_answers_stay_right():
    made = bench(pages=10, page_size=3)
    requests = [Request(prompt(n, n), 4, ignore_eos=True) for n in (9, 14, 20, 7, 14, 9, 26, 20)]
    for request, slot in zip(requests, itertools.cycle((15, 0, 7)), strict=False):
        request.ring(made.desk, slot)
        finish(made)
        assert made.desk.answers[slot] == alone(request)
    assert beat(made, BEAT_EVICTED) > 0


# --- preemption


@pytest.mark.parametrize(("steps", "decoding"), [(3, False), (6, True)], ids=["mid-prefill", "mid-decode"])
def test_a_preempted_request_finds_pages_again_and_goes_on_with_the_same_tokens(steps, decoding):
    made, first = bench(pages=9), Request(prompt(26, 1), 9, 0.8, 4, True)
    urgent = Request(prompt(14, 2), 1)
    first.ring(made.desk, 0)
    made.run(steps)
    known, order = int(made.slots.known[0]), int(made.slots.order[0])
    assert (known > 26) == decoding
    urgent.ring(made.desk, 1, urgent=True)
    while not beat(made, BEAT_PREEMPTED):
        made.run(1)
        made.check()
    assert made.running() == [1]
    assert (made.slots.state[0], made.slots.done[0], made.slots.order[0]) == (READY, 0, order)
    known = int(made.slots.known[0])
    while made.slots.state[0] == READY:
        made.run(1)
        made.check()
    assert made.slots.state[0] == PREFILL, "it is not taken for one that decodes"
    found = beat(made, BEAT_FOUND)
    assert found >= P
    assert made.plan.chunk_first[0] == found
    assert made.plan.chunk_rows[0] == min(8, known - found) > 1
    while made.slots.done[0] < known - 1:
        assert made.slots.known[0] == known, "nothing is drawn before all it knew is computed"
        made.run(1)
        made.check()
    finish(made)
    assert [made.desk.answers[0], made.desk.answers[1]] == [alone(first), alone(urgent)]


def test_requests_that_preempt_each_other_all_the_time_get_their_tokens():
    """Four that need nine pages each, of twelve."""
    made = bench(pages=12)
    requests = [Request(prompt(8, n), 27, 0.9, n, True) for n in range(4)]
    for slot, request in enumerate(requests):
        request.ring(made.desk, slot)
    finish(made)
    assert [made.desk.answers[slot] for slot in range(4)] == [alone(request) for request in requests]
    assert beat(made, BEAT_PREEMPTED) > 2


def test_the_last_page_and_the_last_slot_serve_as_well_as_any():
    made, request = bench(pages=CONTEXT // P), Request(prompt(CONTEXT - 5), 5, ignore_eos=True)
    request.ring(made.desk, 15)
    made.run(9)
    assert sorted(made.held_pages(15)) == list(range(CONTEXT // P)), "it fills the whole cache"
    finish(made)
    assert made.desk.answers[15] == alone(request)


# --- pauses


@pytest.mark.parametrize("layer", range(1, SMALL.layers))
@pytest.mark.parametrize("answering", [False, True])
def test_an_urgent_request_is_served_between_two_layers_and_the_paused_rows_go_on(layer, answering):
    made = bench()
    paused = [Request(prompt(7, slot), 8, 0.7, slot, True) for slot in (0, 1)]
    urgent = Request(prompt(10, 9), 4, 0.7, 9, True)
    for slot, request in enumerate(paused):
        request.ring(made.desk, slot)
    if answering:
        made.run(4)
    made.interrupt(layer)
    made.run(1)
    assert made.plan.count[state.INTERRUPTED] == layer
    rows = made.plan.slot[: made.plan.count[state.ROWS]].tolist()
    made.interrupt()
    urgent.ring(made.desk, 2, urgent=True)
    made.run(1)
    assert made.queue.count[state.PAUSED] == 1
    assert set(made.plan.slot[: made.plan.count[state.ROWS]].tolist()) == {2}
    made.run(2)  # the end of its prompt; then what was paused
    assert made.plan.slot[: made.plan.count[state.ROWS]].tolist() == rows
    assert made.plan.count[state.FIRST_LAYER] == layer
    made.desk.read()
    assert len(made.desk.answers[2].tokens) == 1, "its first token has come before the paused step ends"
    finish(made)
    assert beat(made, BEAT_PAUSED) == 1
    assert [made.desk.answers[slot] for slot in range(3)] == [alone(r) for r in (*paused, urgent)]


def test_pages_of_a_paused_step_whose_request_is_cancelled_wait_in_limbo_and_its_slot_is_reused():
    made = bench(pages=12)
    beside = Request(prompt(2, 5), 9, 0.7, 5, True)
    beside.ring(made.desk, 1)
    Request(prompt(20, 1), 9).ring(made.desk, 0)
    made.interrupt(1)
    made.run(1)
    pages = made.held_pages(0)
    assert len(pages) == 2
    made.interrupt()
    made.desk.cancel(0)
    urgent = Request(prompt(20, 2), 3, 0.7, 1, True)
    urgent.ring(made.desk, 3, urgent=True)
    made.run(1)
    assert sorted(made.limbo()) == sorted(pages), "the paused step will still write to them"
    made.desk.read()
    assert made.desk.answers[0] == Answer([], CANCEL)
    assert made.window.gpu["state"][0] == CANCELLED
    again = Request(prompt(5, 3), 4, 0.7, 2, True)
    again.ring(made.desk, 0, urgent=True)
    made.run(1)
    assert made.waiting() == [0], "its slot's old rows are still to be computed"
    assert sorted(made.limbo()) == sorted(pages)
    assert not set(pages) & set(made.held_pages(3))
    made.check()
    finish(made)
    assert not made.limbo()
    assert [made.desk.answers[slot] for slot in (0, 1, 3)] == [alone(r) for r in (again, beside, urgent)]


def test_a_cached_page_of_a_cancelled_paused_request_is_shared_and_given_back_once():
    """It may be used at once, since the paused step only reads it, and for nobody."""
    made = bench()
    Request(prompt(20, 1), 9).ring(made.desk, 0)
    made.run(2)
    made.interrupt(1)
    made.run(1)
    made.interrupt()
    made.desk.cancel(0)
    Request(prompt(20, 1), 9).ring(made.desk, 1, urgent=True)
    made.run(1)
    made.check()
    assert beat(made, BEAT_FOUND) >= 2 * P
    made.desk.cancel(1)
    made.run(1)
    made.check()
    finish(made)
    assert len(made.free_pages()) + len(made.unused_pages()) == made.cache.pages


def test_a_slot_is_reused_at_once_after_a_cancel():
    made = bench()
    for n in range(6):
        Request(prompt(9, n), 20, ignore_eos=True).ring(made.desk, 2)
        if n:
            made.run(n)
        made.desk.cancel(2)
        made.run(1)
        made.desk.read()
        assert made.desk.answers[2].reason == CANCEL
        made.check()
    request = Request(prompt(9, 9), 6, ignore_eos=True)
    request.ring(made.desk, 2)
    finish(made)
    assert made.desk.answers[2] == alone(request)


# --- who goes first


def test_an_endless_stream_of_urgent_requests_leaves_others_a_step_in_sixty_five():
    made = bench(running=3, reserved=2)
    modest = Request(prompt(3), 4, ignore_eos=True)
    modest.ring(made.desk, 0)
    made.run(1)
    gaps, since, count, length = [], 0, 0, 1
    while made.desk.busy() != [1, 2] and len(gaps) < 3:
        for slot in (1, 2):
            if slot not in made.desk.busy():
                made.desk.ring(slot, prompt(20, count), 1, urgent=True)
                count += 1
        made.run(1)
        made.desk.read()
        since += 1
        if len(made.desk.answers[0].tokens) > length:
            length = len(made.desk.answers[0].tokens)
            gaps.append(since)
            since = 0
        assert since <= MOST_STREAK + 2
    assert max(gaps) > MOST_STREAK // 2, "the stream was endless"
    finish(made)
    assert made.desk.answers[0] == alone(modest)


def test_a_best_effort_request_goes_before_urgent_ones_that_come_much_later():
    made = bench(running=1, reserved=0)
    made.desk.ring(5, prompt(3), 9, ignore_eos=True)
    made.run(1)
    made.desk.ring(0, prompt(3), 2)
    made.run(1)
    made.desk.ring(1, prompt(3), 2, urgent=True)
    made.run(1)
    assert made.waiting() == [1, 0]
    made.queue.count[state.ARRIVED] += SOONER  # so many have come and gone
    made.desk.ring(2, prompt(3), 2, urgent=True)
    made.run(1)
    assert made.waiting() == [1, 0, 2]
    finish(made)


def test_priorities_decide_who_is_admitted_and_who_gives_way():
    made = bench(running=2, pages=9)
    for slot, priority in enumerate((3, 0, 1)):
        made.desk.ring(slot, prompt(8, slot), 20, ignore_eos=True, priority=priority)
    made.run(1)
    assert made.running() == [1, 2]
    while not beat(made, BEAT_PREEMPTED):
        made.run(1)
    assert 1 in made.running()
    assert made.slots.state[2] == READY
    finish(made)
    for slot in range(3):
        assert made.desk.answers[slot] == alone(Request(prompt(8, slot), 20, ignore_eos=True))


def test_four_thousand_requests_queued_behind_eight_places_are_served_in_order():
    made = bench(slots=4096, running=8, rows=16, pages=40, context=16)
    kinds = [Request(prompt(1 + n % 5, n), 1 + n % 3, 0.8, n, True) for n in range(30)]
    for slot in made.desk.slots:
        kinds[slot % 30].ring(made.desk, slot)
    while made.desk.busy():
        made.run(100)
        assert made.desk.read()
        ahead = [slot for slot in made.waiting()[:1] for slot in range(slot)]
        assert not set(ahead) & set(made.waiting()[1:])
    made.check()
    assert [made.desk.answers[slot] for slot in made.desk.slots] == [alone(kinds[s % 30]) for s in made.desk.slots]


# --- who does not read


def test_who_does_not_read_gives_its_place_to_whom_can_go_on_and_loses_nothing():
    made = bench(workers=2, outbox=4, running=2, reserved=0, arena=16 * 48)
    still = [Request(prompt(6, n), 12, 0.8, n, True) for n in range(3)]
    for slot, request in enumerate(still):
        request.ring(made.desks[0], slot)
    made.run()
    made.check()
    assert made.running() == [0, 1], "while nobody else waits, it keeps it"
    others = [Request(prompt(9, n), 7, 0.8, n, True) for n in range(3)]
    for slot, request in enumerate(others):
        request.ring(made.desks[1], 8 + slot, urgent=slot == 2)
    while made.desks[1].busy():
        made.run()
        made.check()
        assert made.desks[1].read()
    assert [made.desks[1].answers[8 + slot] for slot in range(3)] == [alone(request) for request in others]
    finish(made)
    assert [made.desks[0].answers[slot] for slot in range(3)] == [alone(request) for request in still]


# --- ends


def test_who_has_a_sample_in_the_plan_does_not_lose_its_pages_because_that_fills_the_outbox():
    """It did once, and then two requests took pages from each other for ever."""
    made = bench(workers=2, outbox=2, pages=3, page_size=4, rows=16, running=2, reserved=0, arena=16 * 48)
    asked = [Request(prompt(8, n), 4, ignore_eos=True) for n in range(2)]
    for desk, request in zip(made.desks, asked, strict=True):
        request.ring(desk, desk.slots[0])
    made.run(1)
    made.check()
    first, second = (desk.slots[0] for desk in made.desks)
    assert made.running() == [first, second]
    assert made.slots.pages[[first, second]].tolist() == [2, 1]
    for _ in range(100):
        made.run(10)
        if not sum(desk.read() for desk in made.desks):
            break
    assert [desk.answers[desk.slots[0]] for desk in made.desks] == [alone(request) for request in asked]


def test_time_that_is_over_ends_a_request_with_what_it_has():
    made = bench()
    request = Request(prompt(5), 30, ignore_eos=True)
    request.ring(made.desk, 0, time_ms=1)
    request.ring(made.desk, 1)
    made.run(3)
    time.sleep(0.002)
    made.run(1)
    made.desk.read()
    tokens, reason = made.desk.answers[0]
    assert reason == TIME
    assert tokens == alone(request).tokens[: len(tokens)]
    made.check()
    finish(made)
    assert made.desk.answers[1] == alone(request)


def test_a_stop_token_is_the_last_of_its_answer():
    made = bench()
    tokens = alone(Request(prompt(5), 20, ignore_eos=True)).tokens
    for slot, stops in enumerate(([tokens[6]], [60, tokens[3], tokens[9]], [tokens[0]] * 16)):
        Request(prompt(5), 20, ignore_eos=True, stops=tuple(stops)).ring(made.desk, slot)
        end = min(tokens.index(stop) for stop in stops if stop in tokens)
        finish(made)
        assert made.desk.answers[slot] == Answer(tokens[: end + 1], STOP)


def test_no_end_token_and_no_stop_token_comes_before_the_least_number_of_tokens():
    made = bench()
    ends = {*SMALL.eos_ids, 30, 31}
    for slot, least in enumerate((0, 1, 7, 20)):
        fields = (("min_tokens", least),)
        Request(prompt(5), 20, 1.5, 3, filters=fields, stops=(30, 31)).ring(made.desk, slot)
        finish(made)
        tokens, reason = made.desk.answers[slot]
        assert not ends & set(tokens[:least])
        assert not ends & set(tokens[:-1])
        assert reason == (STOP if tokens[-1] in ends else LENGTH)
        assert len(tokens) > least or (len(tokens), reason) == (20, LENGTH)


# --- the same seed, the same tokens

SEEDED = [
    Request(prompt(11, 3), 8, 0.9, 2**63 + 1, True),
    Request(prompt(11, 3), 8, 0.9, 2**63 + 1, True, (("top_k", 5), ("top_p", 0.8), ("repetition", 1.2))),
    Request(prompt(6, 4), 8, 0.0, 0, True),
]


@pytest.mark.parametrize(
    "how", ["1 block", "2 blocks", "8 blocks", "own block", "chunks of 1", "chunks of 3", "no sharing"]
)
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch_and_chunks(how):
    changes = {
        "1 block": {"blocks": 1},
        "8 blocks": {"blocks": 8},
        "own block": {"blocks": 4, "scheduler_block": True},
        "chunks of 1": {"rows": 1, "running": 1, "reserved": 0},
        "chunks of 3": {"rows": 3, "running": 3},
        "no sharing": {"sharing": False},
    }
    made = bench(**changes.get(how, {}))
    for slot, request in enumerate(SEEDED * 2):
        request.ring(made.desk, slot, priority=slot % 2)
    finish(made)
    assert [made.desk.answers[slot] for slot in range(6)] == [alone(request) for request in SEEDED * 2]


def test_a_seed_gives_the_same_tokens_on_four_blocks_in_python():
    made = bench("python", blocks=4, lanes=2)
    request = SEEDED[1]._replace(max_tokens=2, prompt=SEEDED[1].prompt[:5])
    request.ring(made.desk, 0)
    finish(made)
    assert made.desk.answers[0] == alone(request)
