"""What becomes of events: steps, spans of slots, and owners of pages."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trace_history import History, Request, rich_history

from blink_ref.ring.layout import EVENT_ADMIT, EVENT_FINISH, EVENT_PREEMPT, EVENT_RELEASE, PHASES
from blink_ref.trace.pages import CACHED, FREE
from blink_ref.trace.record import Part, Recording
from blink_ref.trace.slots import DECODE, PAUSED, PREEMPTED, PREFILL, WAITING
from blink_ref.trace.timeline import timeline


@pytest.fixture(params=[True, False], ids=["rows before their step", "rows after it"])
def rows_first(request):
    return request.param


def spans_of(whole, slot):
    return [(span.state, span.column, span.after, span.rows) for span in whole.spans if span.slot == slot]


def test_a_request_waits_computes_its_prompt_in_chunks_and_decodes(rows_first):
    history = History(rows_first=rows_first, running=1)
    history.arrive(0, prompt=70, answer=4)
    history.arrive(1, prompt=10, answer=2)
    history.run(8)
    whole = timeline(history.recording())
    assert spans_of(whole, 0) == [
        (WAITING, 0, 0, 0),
        (PREFILL, 0, 1, 32),
        (PREFILL, 1, 2, 32),
        (PREFILL, 2, 3, 6),
        (DECODE, 3, 6, 3),
    ]
    assert spans_of(whole, 1) == [(WAITING, 0, 6, 0), (PREFILL, 6, 7, 10), (DECODE, 7, 8, 1)]
    assert [(step.number, step.prefill, step.decode) for step in whole.steps[1:5]] == [
        (2, 32, 0),
        (3, 6, 0),
        (4, 0, 1),
        (5, 0, 1),
    ]
    assert whole.requests == 2


def test_a_request_without_rows_in_a_step_is_paused(rows_first):
    history = History(rows_first=rows_first)
    history.arrive(0, prompt=64, answer=2)
    history.arrive(1, prompt=8, answer=2)
    history.run(4)
    assert spans_of(timeline(history.recording()), 1)[1:] == [
        (PAUSED, 0, 2, 0),
        (PREFILL, 2, 3, 8),
        (DECODE, 3, 4, 1),
    ]


def test_a_step_that_gives_way_runs_in_two_pieces_with_the_others_between(rows_first):
    history = History(rows_first=rows_first)
    history.arrive(0, prompt=8, answer=5)
    history.run(2)
    history.step(Request(3, prompt=5, answer=2, known=5))
    history.run(2)
    whole = timeline(history.recording())
    paused, first, second, after = whole.steps[2:6]
    assert [len(step.pieces) for step in whole.steps[2:6]] == [2, 1, 1, 1]
    times = [*paused.pieces[0], *first.pieces[0], *second.pieces[0], *paused.pieces[1], *after.pieces[0]]
    assert times == sorted(times)
    assert {index for index, *_ in paused.laid_out()} == set(range(len(PHASES)))
    decode = [(DECODE, 1, 3, 2), (PAUSED, 3, 5, 0), (DECODE, 5, 7, 2)]
    assert spans_of(whole, 0)[2:] == decode
    assert spans_of(whole, 3)[1:] == [(PREFILL, 3, 4, 5), (DECODE, 4, 5, 1)]


def test_a_preempted_request_is_seen_to_compute_what_it_knew_again():
    history = History()
    history.arrive(0, prompt=8, answer=6)
    history.run(3)
    history.preempt(history.running[0])
    history.run(5)
    assert [span[0] for span in spans_of(timeline(history.recording()), 0)] == [
        WAITING,
        PREFILL,
        DECODE,
        PREEMPTED,
        PREFILL,
        DECODE,
    ]


def test_phases_lie_end_to_end_in_their_step_shortened_if_they_do_not_fit():
    whole = timeline(rich_history().recording())
    for step in whole.steps:
        laid = step.laid_out()
        assert [index for index, *_ in laid] == sorted(index for index, *_ in laid)
        times = [time for _, begin, end in laid for time in (begin, end)]
        assert times == sorted(times)
        assert step.begin == times[0]
        assert times[-1] <= step.end
    step.phases = [(index, 10 * ns) for index, ns in step.phases]
    assert step.laid_out()[-1][2] == step.end


def test_pages_are_followed_from_hold_to_hold():
    history = rich_history()
    whole = timeline(history.recording())
    owner = dict.fromkeys(range(history.pages), FREE)
    for change in whole.changes:
        owner[change.page] = change.owner
    assert sorted(page for page in owner if owner[page] == CACHED) == sorted(history.cache)
    assert sorted(page for page in owner if owner[page] == FREE) == sorted(history.free)
    assert any(change.shared for change in whole.changes)
    for level in whole.levels:
        assert sum(level.pages) == history.pages
    assert whole.levels[-1].pages == (0, len(history.cache), len(history.free))
    assert (whole.levels[-1].running, whole.levels[-1].waiting) == (0, 0)


def test_a_record_that_begins_in_the_middle_knows_what_was_held_before():
    history = rich_history()
    first = next(n for n, event in enumerate(history.events) if event.kind == EVENT_RELEASE)
    page = history.events[first].pair[1]
    held = np.full(history.pages, FREE)
    held[page] = history.events[first].slot
    whole = timeline(Recording([Part(held, [history.words()[first:]])], 0))
    mine = [change for change in whole.changes if change.page == page]
    assert mine[0].owner == history.events[first].slot
    assert mine[1].owner != mine[0].owner


def check(whole):
    """What is true of every timeline."""
    pieces = sorted(piece for step in whole.steps for piece in step.pieces)
    times = [time for piece in pieces for time in piece]
    assert times == sorted(times)
    for slot in whole.slots:
        mine = [span for span in whole.spans if span.slot == slot]
        times = [time for span in mine for time in (span.begin, span.end)]
        assert times == sorted(times)
        columns = [column for span in mine for column in (span.column, span.after)]
        assert columns == sorted(columns)
        assert all(whole.begin <= time <= whole.end for time in times)
    assert all(0 <= change.column <= len(whole.steps) for change in whole.changes)
    kinds = [mark.event.kind for mark in whole.marks]
    assert kinds.count(EVENT_FINISH) <= whole.requests
    assert kinds.count(EVENT_ADMIT) <= whole.requests + kinds.count(EVENT_PREEMPT)


@settings(max_examples=40)
@given(st.integers(0, 2016), st.integers(0, 2016), st.booleans())
def test_a_record_may_begin_and_end_anywhere(one, other, rows_first):
    history = rich_history(rows_first)
    check(timeline(history.recording(min(one, other), max(one, other))))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2016), min_size=2, max_size=6))
@example([0, 832])  # one of its parts begins before a request ends, and after its last row
def test_a_record_may_have_gaps(cuts):
    words = rich_history().words()
    cuts = sorted(cuts)
    ranges = list(zip([0, *cuts], [*cuts, len(words)], strict=True))[::2]
    parts = [Part(np.full(96, FREE), [words[first:last]] if last > first else []) for first, last in ranges]
    whole = timeline(Recording(parts, 1))
    check(whole)
    assert len(whole.gaps) == max(sum(bool(part.events) for part in parts) - 1, 0)
