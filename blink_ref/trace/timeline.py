"""A recording made ready for drawing: steps, spans, marks, owners of pages, and counts over time."""

from dataclasses import dataclass, field
from typing import NamedTuple

from .pages import Change, Counts, Pages
from .record import Event, Part, Recording
from .slots import Mark, Slots, Span
from .steps import Step, steps_of


class Level(NamedTuple):
    """How things stand from ``ns`` on."""

    ns: int
    pages: Counts
    running: int
    waiting: int


@dataclass
class Timeline:
    """What happened. Step n of ``steps`` is column n."""

    pages: int
    lost: int
    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    """columns before which events were lost"""
    requests: int = 0
    """seen; after a gap they count again"""
    begin: int = 0
    """ns of the first event"""
    end: int = 0
    """ns of the last"""

    @property
    def slots(self) -> list[int]:
        """Those that something happened to, in order."""
        marked = {mark.event.slot for mark in self.marks if mark.of_a_slot}
        return sorted(marked | {span.slot for span in self.spans})


def timeline(recording: Recording) -> Timeline:
    """Follow all events of a recording."""
    whole = Timeline(len(recording.parts[0].page_slot), recording.lost)
    for part in recording.parts:
        if events := part.events:
            _follow(whole, part, events)
    return whole


def _follow(whole: Timeline, part: Part, events: list[Event]) -> None:
    now = min(event.ns for event in events)
    if whole.end:
        now = max(now, whole.end)
        whole.gaps.append(len(whole.steps))
    whole.begin = whole.begin or now
    steps = steps_of(events, now)
    slots, pages = Slots(steps, now, len(whole.steps)), Pages(part.page_slot)
    whole.changes += pages.beginning(now, slots.column)
    for event in events:
        now = max(now, event.ns)
        slots.take(event)
        if change := pages.take(event, slots.column):
            whole.changes.append(change)
        level = Level(now, pages.counts, slots.running, slots.waiting)
        if not whole.levels or level[1:] != whole.levels[-1][1:]:
            whole.levels.append(level)
    slots.finish()
    whole.end = now
    whole.requests += slots.requests
    whole.steps += steps
    whole.spans += slots.spans
    whole.marks += slots.marks
