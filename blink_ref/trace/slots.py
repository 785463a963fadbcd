"""From events to what became of each slot's requests: spans of time in one state, and marks.

Columns count the steps recorded: column c is the c-th of them. What happens between two steps counts to the
later one.
"""

from dataclasses import dataclass
from typing import NamedTuple

from blink_ref.ring.layout import (
    EVENT_ADMIT,
    EVENT_ARRIVE,
    EVENT_FINISH,
    EVENT_PAUSE,
    EVENT_PREEMPT,
    EVENT_RESUME,
    EVENT_STEP,
)

from .record import Event
from .steps import Step

WAITING, PREFILL, DECODE, PAUSED, PREEMPTED, ADMITTED = range(6)
STATES = ("waiting", "prefill", "decode", "paused", "preempted")
"""PAUSED: admitted, but without rows in the step that runs. ADMITTED is over before anyone sees it."""


@dataclass
class Span:
    """A slot's request in one state."""

    slot: int
    state: int
    begin: int
    """ns"""
    column: int
    """of the first step"""
    first: int = 0
    """position of its first row"""
    rows: int = 0
    """of the steps that begin in it"""
    end: int = 0
    """ns"""
    after: int = 0
    """column after the last step"""


class Mark(NamedTuple):
    """One of the events ADMIT, PREEMPT, FINISH, PAUSE or RESUME."""

    ns: int
    column: int
    event: Event

    @property
    def of_a_slot(self) -> bool:
        """Whether it happened to a request, and not to a step."""
        return self.event.kind not in (EVENT_PAUSE, EVENT_RESUME)


class Slots:
    """Follows the events of a part, beginning at ns ``begin`` with the step of column ``column``."""

    def __init__(self, steps: list[Step], begin: int, column: int) -> None:
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.column = column
        """of the step to come"""
        self.requests = 0
        """seen"""
        self._steps, self._paused = iter(steps), list[Step]()
        self._step = Step()
        """the one that runs"""
        self._begin, self._first_column = begin, column
        self._now = begin
        self._open: dict[int, Span] = {}
        self._known: dict[int, int] = {}
        """tokens that a slot's request has before it decodes, where known"""

    @property
    def running(self) -> int:
        """Requests that have been admitted and not ended."""
        return sum(span.state not in (WAITING, PREEMPTED) for span in self._open.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a place, for the first time or again."""
        return len(self._open) - self.running

    def take(self, event: Event) -> None:
        """The next event."""
        self._now = max(self._now, event.ns)
        kind, slot = event.kind, event.slot
        if kind == EVENT_ARRIVE:
            self._enter(slot, WAITING)
            self._known[slot] = event.value
        elif kind == EVENT_ADMIT:
            if slot not in self._open:  # it was waiting when the record began
                self.requests += 1
                self._open[slot] = Span(slot, WAITING, self._begin, self._first_column)
            self._enter(slot, ADMITTED)
        elif kind == EVENT_PREEMPT:
            self._enter(slot, PREEMPTED)
            self._known[slot] = event.value
        elif kind == EVENT_FINISH:
            self.requests += slot not in self._open  # it ran when the record began, and has had no row since
            self._leave(slot)
            self._known.pop(slot, None)
        elif kind == EVENT_STEP:
            step = next(self._steps)
            self._run(step)
            step.decode = sum(self._open[slot].state == DECODE for slot in step.rows)
            self.column += 1
        elif kind == EVENT_PAUSE:
            self._pause()
        elif kind == EVENT_RESUME and self._paused:
            self._run(self._paused.pop(), again=True)
        if kind in (EVENT_ADMIT, EVENT_PREEMPT, EVENT_FINISH, EVENT_PAUSE, EVENT_RESUME):
            self.marks.append(Mark(self._now, self.column, event))

    def finish(self) -> None:
        """The record ends, or has a gap."""
        for slot in list(self._open):
            self._leave(slot)

    def _run(self, step: Step, again: bool = False) -> None:
        """A step begins or, `again`, goes on: its rows have been counted then."""
        self._step = step
        admitted = [slot for slot, span in self._open.items() if span.state not in (WAITING, PREEMPTED)]
        for slot in admitted:
            if slot not in step.rows:
                self._enter(slot, PAUSED)
        for slot, (first, rows) in step.rows.items():
            known = self._known.get(slot, 0 if rows == 1 else first + rows)
            self._enter(slot, PREFILL if first < known else DECODE, first, 0 if again else rows)

    def _pause(self) -> None:
        """The step that runs gives way."""
        self._paused.append(self._step)
        for slot in self._step.rows:
            if slot in self._open:
                self._enter(slot, PAUSED)

    def _enter(self, slot: int, state: int, first: int = 0, rows: int = 0) -> None:
        """A slot's request is in a state from now on. Spans of decode and pause grow, others follow each other."""
        span = self._open.get(slot)
        if span and span.state == ADMITTED:
            span.state, span.first, span.rows = state, first, rows
        elif span and span.state == state and state in (DECODE, PAUSED):
            span.rows += rows
        else:
            self._leave(slot)
            self.requests += span is None
            self._open[slot] = Span(slot, state, self._now, self.column, first, rows)

    def _leave(self, slot: int) -> None:
        span = self._open.pop(slot, None)
        if span and span.state != ADMITTED:
            span.end, span.after = self._now, self.column
            self.spans.append(span)
