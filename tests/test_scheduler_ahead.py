"""A scheduler with a block of its own: what it drafts, and what it leaves to the time between steps."""

import subprocess
import sys

import pytest
from engine_bench import SMALL, Bench, Request, answers_alone, chosen, interruptible, small  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.engine.settings import choose
from blink_ref.errors import BlinkError
from blink_ref.ring.layout import CANCEL, DONE, FREE, SHUTDOWN
from blink_ref.scheduler import ahead, pause, state
from blink_ref.scheduler.arrivals import scan
from blink_ref.simt import device
from blink_ref.simt.vocabulary import i32

pytestmark = pytest.mark.usefixtures("interruptible")


def bench(own_block=True, config=SMALL, **changes):
    layout = {name: changes.pop(name) for name in ("outbox", "workers") if name in changes}
    sizes = {"blocks": 2 + own_block, "running": 6, "rows": 9, "page_size": 4, **changes}
    return Bench(small(), chosen(config, scheduler_block=own_block, **sizes), **layout)


ALONE = answers_alone(Bench(small(), chosen(SMALL)))


def planned(made):
    """The step that was run last: (slot, position, token) by row, and (row, position to be drawn) by sample."""
    plan = made.plan
    rows, samples = plan.count[state.ROWS], plan.count[state.SAMPLES]
    by_row = zip(plan.slot[:rows].tolist(), plan.position[:rows].tolist(), plan.token[:rows].tolist(), strict=True)
    return list(by_row), list(zip(plan.sample_row[:samples].tolist(), plan.draw[:samples].tolist(), strict=True))


def drafted(made):
    return int(made.queue.count[state.DRAFTED])


prompts = st.lists(st.integers(0, SMALL.vocab - 1), min_size=1, max_size=20)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(1, 8), st.booleans()), min_size=1, max_size=8), st.integers(2, 12))
def test_a_drafted_step_is_the_one_that_would_be_planned_when_the_step_before_has_ended(requests, steps):
    """While no request ends early and there are pages for all: chunks, decode rows, new places in the batch."""
    between, beside = bench(False), bench()
    for made in (between, beside):
        for slot, (prompt, most, sampled) in enumerate(requests):
            made.desk.ring(slot, prompt, most, 0.9 * sampled, slot, ignore_eos=True)
    if len(requests) <= 6:  # who waits for a place sees it free only when the step is over
        for n in range(1, steps):
            again = bench()
            for slot, (prompt, most, sampled) in enumerate(requests):
                again.desk.ring(slot, prompt, most, 0.9 * sampled, slot, ignore_eos=True)
            between.run(1)
            again.run(n)
            assert planned(again) == planned(between)
            assert drafted(again) == max(0, min(again.steps, n - 1) - 1), "but the first and the last of a launch"
    between.run()
    beside.run()
    for made in (between, beside):
        made.desk.read()
        made.check()
    assert beside.desk.answers == between.desk.answers


def test_a_request_that_ends_with_a_stop_token_has_a_row_computed_for_nothing_and_it_is_dropped():
    made, request = bench(), Request((1, 2, 3), 30)
    request.ring(made.desk, 0)
    made.run()
    made.desk.read()
    assert made.desk.answers[0] == ALONE(request)
    tokens = len(made.desk.answers[0].tokens)
    assert tokens < 30, "this model says an end token after a while"
    assert made.steps == tokens + 1
    assert drafted(made) == tokens
    made.check()


def test_a_request_that_ends_with_its_last_token_has_no_row_computed_for_nothing():
    made = bench()
    made.desk.ring(0, [1, 2, 3], 9, ignore_eos=True)
    made.run()
    assert made.steps == 9
    assert drafted(made) == 8


@device
def scan_alone(block, window, slots, queue):
    scan(window, slots, queue)


@pytest.mark.parametrize("flight", [0, state.IN_PAUSED, state.IN_RUNNING])
def test_a_slot_is_not_taken_again_while_a_row_of_its_last_request_is_computed(flight):
    """Its parameters are read by those who compute the row; in a paused step nobody reads them now."""
    made = bench()
    made.desk.ring(3, [1], 1)
    made.slots.flight[3] = flight
    simt.launch(scan_alone, 1, 1, made.view, made.slots, made.queue, target="cpu")
    assert made.queue.count[state.RUNG] == (flight != state.IN_RUNNING)


def test_equal_prompts_that_are_computed_at_the_same_time_come_to_share_their_pages():
    """The page tables are being read when that is found out, so they are changed a step later."""
    made, text = bench(rows=24), list(range(20, 28))
    made.desk.ring(0, text, 8, ignore_eos=True)
    made.desk.ring(1, text, 8, 0.9, 1, ignore_eos=True)
    made.run(1)
    assert made.held_pages(0) != made.held_pages(1)
    made.run(3)
    made.check()
    assert made.held_pages(0)[:2] == made.held_pages(1)[:2]
    assert made.cache.references[made.held_pages(0)[:2]].tolist() == [2, 2]
    made.run()
    made.desk.read()
    made.check()
    assert made.desk.answers[0] == ALONE(Request(tuple(text), 8, ignore_eos=True))
    assert made.desk.answers[1] == ALONE(Request(tuple(text), 8, 0.9, 1, True))


def test_too_few_pages_leave_the_step_to_be_planned_when_the_one_before_has_ended():
    """Who decodes is in flight all the time, and nobody's victim: so pages are taken from others between steps."""
    made = bench(pages=6, running=2)
    asked = [Request((n, 7), 18, ignore_eos=True) for n in range(2)]
    for slot, request in enumerate(asked):
        request.ring(made.desk, slot)
    made.run()
    made.desk.read()
    made.check()
    assert [made.desk.answers[slot] for slot in range(2)] == [ALONE(request) for request in asked]
    assert made.queue.count[state.PREEMPTED] >= 1
    assert 0 < drafted(made) < made.steps - 1


def test_log_probabilities_are_sent_before_the_next_step_can_write_others():
    made = bench()
    made.desk.ring(0, [1, 2], 6, ignore_eos=True, logprobs=3)
    made.run()
    assert drafted(made) == 0
    made.desk.ring(1, [1, 2], 6, ignore_eos=True, top_p=0.9, temperature=1.0)
    made.run()
    assert drafted(made) == 5


def test_a_draft_is_dropped_when_the_step_is_interrupted_and_made_again_when_it_goes_on():
    made = bench()
    asked = [Request((n, 5, 6), 9, 0.8, n, True) for n in range(3)]
    asked[0].ring(made.desk, 0)
    asked[1].ring(made.desk, 1)
    made.interrupt(1)
    made.run(4)
    asked[2].ring(made.desk, 2, urgent=True)
    made.run()
    made.desk.read()
    made.check()
    assert made.queue.count[state.PAUSES] > 2
    assert drafted(made) > 0
    assert [made.desk.answers[slot] for slot in range(3)] == [ALONE(request) for request in asked]


def test_an_outbox_that_is_full_is_seen_with_all_that_is_on_its_way():
    made = bench(outbox=4)
    for slot in range(3):
        made.desk.ring(slot, [slot, 9], 12, ignore_eos=True)
    for _ in range(200):
        made.run(2)
        made.desk.read(1)
        made.check()
    for slot in range(3):
        assert made.desk.answers[slot] == ALONE(Request((slot, 9), 12, ignore_eos=True))


def test_a_cancel_and_a_stop_word_are_heard_while_the_others_compute():
    made = bench()
    for slot in range(3):
        made.desk.ring(slot, [slot, 9], 40, ignore_eos=True)
    made.run(4)
    made.desk.cancel(1)
    made.run(4)
    assert made.slots.state[1] in (DONE, FREE)
    made.check()
    made.stop()
    made.desk.read()
    assert [made.desk.answers[slot].reason for slot in range(3)] == [SHUTDOWN, CANCEL, SHUTDOWN]
    assert made.running() == []
    made.check()


def test_a_launch_with_a_draft_takes_off_where_the_last_one_came_down():
    """In pieces of any length, the same answers."""
    asked = [Request((n, 5, 6), 15, 0.8, n, True) for n in range(4)]
    for steps in (1, 2, 3, 7):
        made = bench()
        for slot, request in enumerate(asked):
            request.ring(made.desk, slot)
        while made.desk.busy():
            made.run(steps)
            made.check()
            made.desk.read()
        assert [made.desk.answers[slot] for slot in range(4)] == [ALONE(request) for request in asked]


@device
def never_draft(queue, plan):
    return i32(0)


@device
def hear_late(window, plan, layer, layers):
    plan.count[state.RUNG_LATE] = i32(layer == layers)


@pytest.mark.parametrize(("function", "other"), [(ahead.may_draft, never_draft), (pause.watch, hear_late)])
def test_a_scheduler_of_its_own_plans_as_any_other_where_no_draft_is_made_or_an_urgent_request_rings_late(
    function, other
):
    asked = [Request((n, 5, 6), 15, 0.8, n, True) for n in range(4)]
    with simt.swap(function, other):
        made = bench()
        for slot, request in enumerate(asked):
            request.ring(made.desk, slot)
        made.run()
        made.desk.read()
        made.check()
    assert drafted(made) == 0
    assert [made.desk.answers[slot] for slot in range(4)] == [ALONE(request) for request in asked]


def test_one_block_cannot_be_the_schedulers_own():
    with pytest.raises(BlinkError, match="add --sms 2, or leave it out"):
        choose(SMALL, "cpu", 1, scheduler_block=True)
    assert choose(SMALL, "cpu", 2, scheduler_block=True).scheduler_block


def generated(*options: str) -> str:
    command = sys.executable, "-m", "blink_ref", "generate", "--model", "tiny", "--target", "cpu", "--sms", "2"
    return subprocess.run([*command, *options, "Elizabeth"], capture_output=True, text=True, check=True).stdout


def test_the_command_line_gives_the_scheduler_its_own_block():
    most = "--max-tokens", "24"
    assert generated(*most, "--scheduler-block") == generated(*most)


def test_a_draft_that_was_given_up_is_not_taken_for_one_of_a_later_launch():
    """Somebody rings late in a step that ends all there is: the draft beside it is never run."""
    first, second = Request((8, 9), 6, ignore_eos=True), Request((10, 11), 5, ignore_eos=True)
    tokens, _ = ALONE(first)
    made = bench()
    made.interrupt(SMALL.layers)
    first._replace(stops=(tokens[1],)).ring(made.desk, 0)
    made.run()
    made.interrupt()
    second.ring(made.desk, 1)
    for n in range(1, 6):
        before = made.steps
        made.run(1)
        assert made.steps == before + 1, f"step {n}"
    made.run()
    made.desk.read()
    assert made.desk.answers[1] == ALONE(second)
