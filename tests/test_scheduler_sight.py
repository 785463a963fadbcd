"""What the kernel lets people see: owners of pages, and the rows and times of steps."""

import numpy as np
import pytest
from engine_bench import SMALL, TARGETS, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.ring.layout import (
    CACHED,
    HISTORY,
    PHASES,
    STEP_DECODE,
    STEP_NS,
    STEP_NUMBER,
    STEP_PHASES,
    STEP_PREFILL,
    STEP_SAMPLES,
    STEP_WORDS,
    Layout,
)
from blink_ref.scheduler import sight, state
from blink_ref.scheduler.sight import show_step
from blink_ref.simt import device

targets = pytest.mark.parametrize("target", TARGETS)


def records(bench):
    """The window's history: u32 [HISTORY, STEP_WORDS]."""
    return bench.window.gpu["history"].reshape(HISTORY, STEP_WORDS)


def owned(bench):
    """What the window says of pages: {slot: pages in order of position}."""
    found: dict[int, dict[int, int]] = {}
    for page, word in enumerate(bench.window.gpu["owner"].tolist()):
        if word not in (0, CACHED):
            found.setdefault(word >> 16, {})[(word & 0xFFFF) - 1] = page
    return {slot: [pages[n] for n in range(len(pages))] for slot, pages in found.items()}


@device
def show_alone(block, window, queue, plan, layers):
    show_step(window, queue, plan, layers)


@targets
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 2**33), min_size=sight.NUMBER, max_size=sight.NUMBER),
    st.integers(1, 2**20),
    st.integers(1, 40),
)
def test_a_record_holds_the_times_of_the_spec(target, gaps, number, layers):
    bench = Bench(small(), chosen(SMALL, target))
    stamps = np.cumsum(gaps)
    bench.plan.stamp[: sight.NUMBER] = stamps
    bench.plan.stamp[sight.NUMBER] = number
    bench.plan.count[:2] = 9, 3
    bench.plan.count[state.CHUNKS] = 3
    bench.plan.count[state.DECODING] = 2
    simt.launch(show_alone, 1, 1, bench.view, bench.queue, bench.plan, layers, target=target)
    record = records(bench)[number % HISTORY]
    assert record[STEP_NUMBER] == number
    assert record[[STEP_DECODE, STEP_PREFILL, STEP_SAMPLES]].tolist() == [2, 7, 3]
    assert record[STEP_NS : STEP_PHASES + len(PHASES)].tolist() == sight.record_spec(stamps.tolist(), layers)


@targets
def test_each_step_leaves_a_record_of_its_rows_in_order(target):
    bench = Bench(small(), chosen(SMALL, target, rows=8, running=4))
    bench.desk.ring(0, range(1, 12), 3, ignore_eos=True)
    bench.run()
    seen = records(bench)[1 : bench.steps + 1]
    assert seen[:, STEP_NUMBER].tolist() == [1, 2, 3, 4]
    assert seen[:, STEP_PREFILL].tolist() == [8, 3, 0, 0]
    assert seen[:, STEP_DECODE].tolist() == [0, 0, 1, 1]
    assert seen[:, STEP_SAMPLES].tolist() == [0, 1, 1, 1]
    assert (seen[:, STEP_NS : STEP_PHASES + len(PHASES)] > 0).all()


@targets
def test_a_page_is_shown_as_its_slots_from_when_it_is_taken_to_the_end_and_then_as_cached(target):
    bench = Bench(small(), chosen(SMALL, target, page_size=16))
    bench.desk.ring(3, range(1, 20), 5, ignore_eos=True)
    bench.desk.ring(1, range(2, 7), 30, ignore_eos=True)
    for _ in range(4):
        bench.run(steps=1)
        assert owned(bench) == {slot: bench.held_pages(slot) for slot in bench.running()}
    bench.desk.cancel(1)
    bench.run()
    cached = np.flatnonzero(bench.window.gpu["owner"] == CACHED).tolist()
    assert cached == sorted(bench.unused_pages())
    assert cached, "a full page stays"
    assert not bench.window.gpu["owner"][bench.free_pages()].any()
    bench.check()


def test_positions_follow_what_is_in_the_cache():
    bench = Bench(small(), chosen(SMALL, rows=8, running=4))
    bench.desk.ring(2, range(1, 12), 3, ignore_eos=True)
    bench.run(steps=2)
    bench.run(steps=1)  # publishes the second
    assert bench.window.gpu["position"][2] == 11


def test_owner_words_can_name_every_slot_and_every_page_of_a_request():
    layout = Layout()
    assert layout.slots <= 2**16
    assert layout.context <= 2**16 - 1


def test_the_layer_that_is_timed_moves_on_with_every_step():
    bench = Bench(small(), chosen(SMALL))
    bench.desk.ring(0, [1, 2, 3], 5, ignore_eos=True)
    timed = []
    for _ in range(4):
        bench.run(steps=1)
        timed.append(int(bench.plan.count[state.TIMED]))
    assert timed == [step % SMALL.layers for step in range(1, 5)]
