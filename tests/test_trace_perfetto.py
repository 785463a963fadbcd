"""The JSON that Perfetto opens."""

import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_history import rich_history

from blink_ref.trace.perfetto import trace_events
from blink_ref.trace.record import Part, Recording
from blink_ref.trace.timeline import timeline

ONLY = {
    "B": {"name", "args"},
    "E": {"name"},
    "i": {"name", "s"},
    "C": {"name", "args"},
    "M": {"name", "args"},
}
"""What an event of each kind has, besides when and where it is."""


def read(recording):
    """The trace as it is read again, checked, and its slices: {thread: [(depth, name, begin, end)]}."""
    trace = json.loads(json.dumps(trace_events(timeline(recording), "tiny on cpu")))
    named = {e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    open_slices, slices = defaultdict(list), defaultdict(list)
    last = 0.0
    for event in trace["traceEvents"]:
        kind, thread = event["ph"], event.get("tid")
        assert set(event) - {"ph", "ts", "pid", "tid"} == ONLY[kind], event
        if kind == "M":
            continue
        assert event["ts"] >= last, "the events are sorted"
        last = event["ts"]
        assert (thread in named) == (kind != "C")
        if kind == "B":
            open_slices[thread].append(event)
        elif kind == "E":
            begun = open_slices[thread].pop()
            assert begun["name"] == event["name"], "slices nest"
            slices[thread].append((len(open_slices[thread]), event["name"], begun["ts"], event["ts"]))
        elif kind == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
    assert not any(open_slices.values()), "what has begun ends"
    return trace, slices


def names(trace, kind):
    return {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == kind}


@pytest.mark.parametrize("rows_first", [True, False])
def test_there_is_a_track_of_steps_with_their_phases_and_one_for_each_slot(rows_first):
    history = rich_history(rows_first)
    trace, slices = read(history.recording())
    assert names(trace, "process_name") == {"scheduler of tiny on cpu", "slots"}
    assert names(trace, "thread_name") == {"steps", *(f"slot {slot}" for slot in range(13))}
    steps = [name for depth, name, *_ in slices[1] if depth == 0]
    assert steps[:3] == ["step 1", "step 2", "step 3"]
    assert sum(name.endswith(", going on") for name in steps) == 1
    assert {name for depth, name, *_ in slices[1] if depth == 1} >= {"schedule", "attend", "gate, up", "logits"}
    states = {name for thread, found in slices.items() if thread != 1 for depth, name, *_ in found if depth == 0}
    assert states == {"waiting", "prefill", "decode", "paused", "preempted"}


def test_what_happens_at_one_moment_is_an_instant():
    trace, _ = read(rich_history().recording())
    said = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert said.count("finish: length") == 13
    assert "admit, 96 positions found in the cache" in said
    assert any(name.startswith("preempt, ") for name in said)
    assert {"pause, 3 layers done", "resume, 3 layers done"} <= set(said)


def test_counters_tell_of_pages_requests_and_rows():
    trace, _ = read(rich_history().recording())
    counters = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    assert {sum(pages.values()) for pages in counters["pages"]} == {96}
    assert counters["pages"][-1]["held"] == 0 < counters["pages"][-1]["cached"]
    assert counters["requests"][-1] == {"running": 0, "waiting": 0}
    assert max(rows["decode"] + rows["prefill"] for rows in counters["rows of the step"]) == 32
    assert counters["rows of the step"][-1] == {"decode": 0, "prefill": 0}


def test_times_are_microseconds_since_the_first_event():
    history = rich_history()
    trace, _ = read(history.recording())
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert min(times) == 0
    assert max(times) == pytest.approx((history.events[-1].ns - history.events[0].ns) / 1000)


@settings(max_examples=40)
@given(st.integers(0, 2016), st.integers(0, 2016), st.booleans())
def test_a_trace_cut_at_both_ends_is_whole(one, other, rows_first):
    read(rich_history(rows_first).recording(min(one, other), max(one, other)))


@settings(max_examples=20)
@given(st.integers(0, 2016), st.integers(0, 2016))
def test_a_trace_with_a_gap_says_so(one, other):
    words, nothing = rich_history().words(), np.full(96, -1)
    first, last = min(one, other), max(one, other)
    parts = [Part(nothing, [words[:first]]), Part(nothing, [words[last:]])]
    trace, _ = read(Recording(parts, last - first))
    assert trace["otherData"]["events lost"] == last - first


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 12), st.integers(0, 3), st.integers(0, 2**40 - 1))))
def test_events_that_make_no_sense_still_give_a_trace_that_opens(events):
    words = np.array([(ns, kind << 56 | slot << 40 | value) for ns, kind, slot, value in events], np.uint64)
    read(Recording([Part(np.full(8, -1), [words.reshape(-1, 2)])], 0))
