"""From events to steps: which rows a step had, what it spent its time on, and when it ran.

A step may give way to urgent ones between two layers and go on after them; so it runs in one piece or in several.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from blink_ref.ring.layout import EVENT_PAUSE, EVENT_PHASE, EVENT_RESUME, EVENT_ROWS, EVENT_STEP

from .record import Event


@dataclass
class Step:
    """A step of the engine; times in ns of the GPU's clock."""

    number: int = 0
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    """slot: (first position, rows)"""
    decode: int = 0
    """rows of requests that generate; the others are of prompts. Known once slots.py has followed it"""
    phases: list[tuple[int, int]] = field(default_factory=list)
    """(index into ring.layout.PHASES, ns that it took)"""
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """[begin, end) of the times in which it ran: several, where it gave way"""

    @property
    def prefill(self) -> int:
        """Rows of prompts."""
        return sum(rows for _, rows in self.rows.values()) - self.decode

    @property
    def begin(self) -> int:
        """When its planning began."""
        return self.pieces[0][0]

    @property
    def end(self) -> int:
        """When its last phase ended, or when it was last heard of."""
        return self.pieces[-1][1]

    def laid_out(self) -> list[tuple[int, int, int]]:
        """Its phases as (index, begin, end), laid end to end into the pieces.

        What is known of a phase is how long it took; those within a layer were timed in one layer and
        multiplied. Where all together would not fit, all are shortened in proportion.
        """
        room, wanted = sum(end - begin for begin, end in self.pieces), sum(ns for _, ns in self.phases)
        whole = max(room, wanted, 1)
        laid, done = [], 0
        for index, ns in self.phases:
            first, done = done, done + ns
            laid += [(index, *part) for part in self._cut(first * room // whole, done * room // whole)]
        return laid

    def _cut(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """When it had run for [first, last) ns."""
        before = 0
        for begin, end in self.pieces:
            low, high = max(first - before, 0), min(last - before, end - begin)
            if low < high:
                yield begin + low, begin + high
            before += end - begin


def steps_of(events: list[Event], begin: int) -> list[Step]:
    """The steps of events without a gap, in the order in which they were planned: one for each EVENT_STEP.

    None begins before ``begin`` (ns).
    """
    finder = _Finder(begin)
    for event in events:
        finder.take(event)
    return finder.finish(max((event.ns for event in events), default=begin))


class _Finder:
    """A reader of events; it does not mind whether a step's rows, and its first phase, come before it or after."""

    def __init__(self, begin: int) -> None:
        self.begin = self.now = begin
        self.steps: list[Step] = []
        self.paused: list[Step] = []
        self.running: Step | None = None
        self.since = begin
        """when the running step began to run, or went on"""
        self.computed = 0
        """when its last known phase ended; 0 before one beyond its planning is known"""
        self.next = Step()
        """what is known of the step to come"""

    def take(self, event: Event) -> None:
        here = self.running if self.running and not self.computed else self.next
        if event.kind == EVENT_ROWS:
            here.rows[event.slot] = event.pair
        elif event.kind == EVENT_PHASE:
            self._phase(here, event)
        elif event.kind in (EVENT_STEP, EVENT_PAUSE, EVENT_RESUME):
            self.now = max(self.now, event.ns)
            self._switch(event)

    def _switch(self, event: Event) -> None:
        """Another step runs from now on, or none."""
        if event.kind == EVENT_STEP:
            self._stop()
            self.next.number = event.value
            self.steps.append(self.next)
            self._go_on(self.next)
            self.next = Step()
        elif event.kind == EVENT_PAUSE and self.running:
            self.paused.append(self.running)
            self.computed = 0
            self._stop()
        elif event.kind == EVENT_RESUME and self.paused:
            self._stop()
            self._go_on(self.paused.pop())

    def _phase(self, here: Step, event: Event) -> None:
        if event.pair[0] == 0:
            here.phases.append(event.pair)
        elif self.running:
            self.running.phases.append(event.pair)
            self.computed = max(self.computed, event.ns)

    def _go_on(self, step: Step) -> None:
        self.running, self.since, self.computed = step, self.now, 0

    def _stop(self) -> None:
        """The running step, if any, has ended by now, or with its last phase if that is known."""
        if self.running:
            end = min(self.computed or self.now, self.now)
            self.running.pieces.append((self.since, max(end, self.since)))
        self.running = None

    def finish(self, ns: int) -> list[Step]:
        """The steps, when the last event was at ``ns``."""
        self.now = max(self.now, ns)
        self._stop()
        ends = sorted(end for step in self.steps for _, end in step.pieces)
        for step in self.steps:
            begin, end = step.pieces[0]
            before = ends[n - 1] if (n := bisect_right(ends, begin)) else self.begin
            planning = sum(spent for index, spent in step.phases if index == 0)
            step.pieces[0] = max(begin - planning, before), end
        return self.steps
