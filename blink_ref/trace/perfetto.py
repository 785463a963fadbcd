"""A timeline as Chrome trace events in JSON, which https://ui.perfetto.dev opens.

The format is the "Trace Event Format" of Chrome's about:tracing, as far as Perfetto reads it: metadata (ph M),
slices (B and E, which have to nest on a thread), instants (i) and counters (C), at times in microseconds. Slices
are begun and ended by events of their own: begin and duration as two fractions may be rounded until two
slices overlap, which Perfetto then drops.
"""

from collections.abc import Iterator
from typing import Any

from blink_ref.ring.layout import EVENT_ADMIT, EVENT_FINISH, EVENTS, PHASES, REASONS

from .slots import STATES, Mark, Span
from .steps import Step
from .timeline import Timeline

Record = dict[str, Any]

SCHEDULER, SLOTS = 1, 2
"""Processes of the trace."""
STEPS: Record = {"pid": SCHEDULER, "tid": 1}
"""The thread on which the scheduler's steps are."""


def trace_events(timeline: Timeline, title: str) -> Record:
    """The whole JSON object. ``title`` says what ran where."""
    records = [*_steps(timeline), *_slots(timeline), *_counters(timeline)]
    # A stable sort: on each thread ends and begins at one time stay in their order.
    records.sort(key=lambda record: record["ts"])
    for record in records:
        record["ts"] = (record["ts"] - timeline.begin) / 1000
    return {
        "traceEvents": [*_names(timeline, title), *records],
        "displayTimeUnit": "ns",
        "otherData": {"title": title, "steps": len(timeline.steps), "events lost": timeline.lost},
    }


def _names(timeline: Timeline, title: str) -> Iterator[Record]:
    processes = [({"pid": SCHEDULER}, f"scheduler of {title}"), ({"pid": SLOTS}, "slots")]
    threads = [(STEPS, "steps"), *((_slot(slot), f"slot {slot}") for slot in timeline.slots)]
    for kind, named in (("process", processes), ("thread", threads)):
        for place, (where, name) in enumerate(named):
            yield {"ph": "M", "name": f"{kind}_name", "args": {"name": name}, **where}
            yield {"ph": "M", "name": f"{kind}_sort_index", "args": {"sort_index": place}, **where}


def _slice(where: Record, begin: int, end: int, name: str, inside: list[Record], args: Record) -> list[Record]:
    """A slice, and between its begin and its end those inside it."""
    return [
        {"ph": "B", "name": name, "ts": begin, "args": args, **where},
        *inside,
        {"ph": "E", "name": name, "ts": end, **where},
    ]


def _instant(where: Record, ns: int, name: str) -> Record:
    return {"ph": "i", "s": "t", "name": name, "ts": ns, **where}


def _slot(slot: int) -> Record:
    # A thread with the number of its process would count as its main thread, and come first.
    return {"pid": SLOTS, "tid": 100 + slot}


def _steps(timeline: Timeline) -> Iterator[Record]:
    pieces = [piece for step in timeline.steps for piece in _pieces(step)]
    for _, records in sorted(pieces, key=lambda piece: piece[0]):
        yield from records
    for mark in timeline.marks:
        if not mark.of_a_slot:
            name = f"{EVENTS[mark.event.kind]}, {mark.event.value} layers done"
            yield _instant(STEPS, mark.ns, name)
    for column in timeline.gaps:
        if column < len(timeline.steps):
            yield _instant(STEPS, timeline.steps[column].begin, "events were lost before")


def _pieces(step: Step) -> Iterator[tuple[tuple[int, int], list[Record]]]:
    """(begin, end), and a slice with the phases in it, of each piece of a step."""
    phases = step.laid_out()
    args = {"rows of decode": step.decode, "rows of prefill": step.prefill, "requests": len(step.rows)}
    for n, (begin, end) in enumerate(step.pieces):
        inside = []
        for index, first, last in phases:
            if begin <= first and last <= end:
                inside += _slice(STEPS, first, last, PHASES[index], [], {})
        name = f"step {step.number}" + ", going on" * (n > 0)
        yield (begin, end), _slice(STEPS, begin, end, name, inside, args)


def _slots(timeline: Timeline) -> Iterator[Record]:
    for span in timeline.spans:
        yield from _slice(_slot(span.slot), span.begin, span.end, STATES[span.state], [], _args(span))
    for mark in timeline.marks:
        if mark.of_a_slot:
            yield _instant(_slot(mark.event.slot), mark.ns, _mark(mark))


def _args(span: Span) -> Record:
    return {"first position": span.first, "rows": span.rows} if span.rows else {}


def _mark(mark: Mark) -> str:
    kind, value = mark.event.kind, mark.event.value
    if kind == EVENT_FINISH:
        return f"finish: {REASONS.get(value, value)}"
    if kind == EVENT_ADMIT:
        return f"admit, {value} positions found in the cache" if value else "admit"
    return f"preempt, {value} tokens known"


def _counters(timeline: Timeline) -> Iterator[Record]:
    for level in timeline.levels:
        yield _counter(level.ns, "pages", level.pages._asdict())
        yield _counter(level.ns, "requests", {"running": level.running, "waiting": level.waiting})
    for step in timeline.steps:
        yield _counter(step.begin, "rows of the step", {"decode": step.decode, "prefill": step.prefill})
    for level in timeline.levels:
        if level.running == 0:
            yield _counter(level.ns, "rows of the step", {"decode": 0, "prefill": 0})


def _counter(ns: int, name: str, args: Record) -> Record:
    return {"ph": "C", "name": name, "pid": SCHEDULER, "ts": ns, "args": args}
