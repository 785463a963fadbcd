"""Where things are in a picture: the scale of the steps, and the slots and pages that are shown.

Of more steps than MOST_COLUMNS several share a column; of more pages than MOST_LINES every second, third, ... is
drawn; of more slots than MOST_SLOTS the first ones are. So a picture stays readable, and its file small.
"""

from dataclasses import dataclass

from .pages import FREE
from .timeline import Timeline

WIDTH, LEFT, RIGHT = 1280, 78, 22
PLOT = WIDTH - LEFT - RIGHT
MOST_COLUMNS, WIDEST = PLOT // 2, 40
MOST_SLOTS, MOST_LINES = 64, 256
TOP, BETWEEN, BOTTOM = 118, 98, 46
"""Heights of title and legend, of what lies between the panels, and of what lies below them."""


@dataclass(frozen=True)
class Frame:
    """Where things are, in pixels."""

    timeline: Timeline
    steps: int
    columns: int
    slots: list[int]
    """those that are shown, from above"""
    slot_height: float
    pages_a_line: int
    lines: int
    """of the page map"""
    page_height: float

    @property
    def step_width(self) -> float:
        return min(PLOT / self.steps, WIDEST)

    @property
    def right(self) -> float:
        """Where the last step ends."""
        return self.x(self.steps)

    @property
    def slots_bottom(self) -> float:
        return TOP + len(self.slots) * self.slot_height

    @property
    def map_top(self) -> float:
        return self.slots_bottom + BETWEEN

    @property
    def map_bottom(self) -> float:
        return self.map_top + self.lines * self.page_height

    def x(self, step: float) -> float:
        """Where a step begins."""
        return LEFT + step * self.step_width

    def column(self, step: int) -> int:
        """The column that a step is drawn in."""
        return step * self.columns // self.steps

    def column_x(self, column: int) -> float:
        """Where a column begins."""
        return self.x(column * self.steps / self.columns)

    def said(self, column: int, columns: int) -> str:
        """The steps of some columns, in words."""
        steps, scale = self.timeline.steps, self.steps / self.columns
        first = steps[int(column * scale)].number
        last = steps[min(int((column + columns) * scale), self.steps) - 1].number
        return f"step {first}" if first >= last else f"steps {first}-{last}"


def frame(timeline: Timeline) -> Frame:
    """The measures of a timeline's picture."""
    steps, slots = max(len(timeline.steps), 1), timeline.slots[:MOST_SLOTS]
    used = max((change.page + 1 for change in timeline.changes if change.owner != FREE), default=1)
    pages_a_line = -(-used // MOST_LINES)
    lines = -(-used // pages_a_line)
    return Frame(
        timeline=timeline,
        steps=steps,
        columns=min(steps, MOST_COLUMNS),
        slots=slots,
        slot_height=min(max(400 / max(len(slots), 1), 8), 20),
        pages_a_line=pages_a_line,
        lines=lines,
        page_height=min(max(420 / lines, 1.75), 12),
    )


def ticks(place: Frame) -> list[int]:
    """Places of the steps that get a number: about ten, at round ones."""
    wanted = max(place.steps // 12, 1)
    apart = next(n * 10**power for power in range(9) for n in (1, 2, 5) if n * 10**power >= wanted)
    # A number of five digits needs some room.
    apart = max(apart, 2) if place.step_width < 24 else apart
    return [n for n, step in enumerate(place.timeline.steps) if step.number % apart == 0]
