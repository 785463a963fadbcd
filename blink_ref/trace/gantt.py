"""The upper panel: a line a slot, a column a step."""

import numpy as np

from blink_ref.ring.layout import EVENT_ADMIT, EVENT_FINISH, EVENT_PAUSE, LENGTH, REASONS, STOP

from .frame import LEFT, MOST_SLOTS, TOP, Frame, ticks
from .slots import DECODE, PAUSED, PREEMPTED, PREFILL, STATES, WAITING, Mark
from .svg import EMPTY, INK, arrow, circle, line, rectangle, runs, text

NOTHING = -1
COLOURS = {
    WAITING: "#cfd4da",
    PREFILL: "#3d8bd4",
    DECODE: "#4cae5a",
    PAUSED: "#f2a33a",
    PREEMPTED: "#d6453d",
}
WORDS = {
    WAITING: "waiting for a place",
    PREFILL: "prefill (number: rows)",
    DECODE: "decode, a row a step",
    PAUSED: "paused: no row in the step",
    PREEMPTED: "preempted",
}
GIVES_WAY = "#8250df"
SLOT_COLOURS = (
    *(
        "#4e79a7",
        "#f28e2b",
        "#59a14f",
        "#e15759",
        "#76b7b2",
        "#edc948",
        "#b07aa1",
        "#ff9da7",
        "#9c755f",
        "#1f9fb5",
    ),
    *(
        "#a0cbe8",
        "#ffbe7d",
        "#8cd17d",
        "#d37295",
        "#499894",
        "#f1ce63",
        "#d4a6c8",
        "#d7b5a6",
        "#5b6abf",
        "#b6992d",
    ),
)
"""Of pages, by whose they are; told apart for twenty slots, then they begin again."""
SEPARATE, LABELLED = 5, 17
"""Pixels of a step from which on chunks of a prompt are drawn apart, and say how many rows they are."""


def slot_colour(place: Frame, slot: int) -> str:
    """The colour of a slot's pages."""
    rank = place.slots.index(slot) if slot in place.slots else slot
    return SLOT_COLOURS[rank % len(SLOT_COLOURS)]


def gantt(place: Frame) -> list[str]:
    """The panel's parts, with its legend."""
    height = place.slots_bottom - TOP
    return [
        *_legend(),
        rectangle(LEFT, TOP, place.right - LEFT, height, EMPTY),
        *_axes(place),
        *_states(place),
        *_chunks(place),
        *dict.fromkeys(_mark(place, mark) for mark in place.timeline.marks),
        *_labels(place),
    ]


def _legend() -> list[str]:
    x, parts = float(LEFT), [text(LEFT, 74, "What each slot does in each step", "head")]
    for state, words in WORDS.items():
        parts += [rectangle(x, 84, 11, 11, COLOURS[state]), text(x + 16, 94, words)]
        x += 34 + 6.1 * len(words)
    parts += [circle(x + 5, 89.5, 4), text(x + 16, 94, "prefix found in cache")]
    x += 34 + 6.1 * 21
    parts += [rectangle(x + 4, 84, 2.5, 12, INK), text(x + 14, 94, "end")]
    x += 54
    return [*parts, arrow(x + 5, 94, GIVES_WAY), text(x + 16, 94, "a step gives way")]


def _axes(place: Frame) -> list[str]:
    parts, steps, begin = [], place.timeline.steps, place.timeline.begin
    for n in ticks(place):
        middle = place.x(n + 0.5)
        parts += [
            line(middle, TOP, place.slots_bottom),
            text(middle, place.slots_bottom + 14, str(steps[n].number), "pale mid"),
            text(middle, place.slots_bottom + 28, f"{(steps[n].begin - begin) / 1e6:.4g}", "pale mid"),
        ]
    names = [("step", 14), ("ms", 28)]
    return parts + [text(LEFT - 8, place.slots_bottom + down, name, "pale end") for name, down in names]


def _states(place: Frame) -> list[str]:
    panel = np.full((len(place.slots), place.columns), NOTHING, np.int8)
    lines = {slot: n for n, slot in enumerate(place.slots)}
    for span in sorted(place.timeline.spans, key=lambda span: span.begin):
        if span.after > span.column and span.slot in lines:
            panel[lines[span.slot], place.column(span.column) : place.column(span.after - 1) + 1] = span.state
    parts = []
    for value, at, _, column, columns in runs(panel, tall=False):
        if value != NOTHING:
            x, width = place.column_x(column), place.column_x(column + columns) - place.column_x(column)
            tip = f"slot {place.slots[at]}: {STATES[value]}, {place.said(column, columns)}"
            y = TOP + at * place.slot_height + 1
            parts.append(rectangle(x, y, width, place.slot_height - 2, COLOURS[value], tip))
    return parts


def _chunks(place: Frame) -> list[str]:
    """Where a prompt's chunks begin, and how long they are, as far as there is room."""
    parts = []
    for span in place.timeline.spans:
        if span.state == PREFILL and span.rows and span.slot in place.slots and place.step_width >= SEPARATE:
            y = TOP + place.slots.index(span.slot) * place.slot_height
            parts.append(line(place.x(span.column), y + 1, y + place.slot_height - 1, "#fff"))
            if place.step_width >= LABELLED and place.slot_height >= 12:
                middle = y + place.slot_height / 2 + 3.5
                parts.append(text(place.x(span.column + 0.5), middle, str(span.rows), "in"))
    return parts


def _mark(place: Frame, mark: Mark) -> str:
    kind, slot, value = mark.event.kind, mark.event.slot, mark.event.value
    x = place.x(mark.column)
    if kind == EVENT_PAUSE:
        return arrow(x, TOP - 1, GIVES_WAY, f"a step gives way after {value} layers")
    if slot not in place.slots:
        return ""
    y = TOP + place.slots.index(slot) * place.slot_height
    if kind == EVENT_ADMIT and value:
        return circle(x, y + place.slot_height / 2, 4, f"slot {slot}: {value} positions found in the cache")
    if kind == EVENT_FINISH:
        colour = INK if value in (STOP, LENGTH) else COLOURS[PREEMPTED]
        return rectangle(x - 1.25, y, 2.5, place.slot_height, colour, f"slot {slot}: {REASONS.get(value, value)}")
    return ""


def _labels(place: Frame) -> list[str]:
    parts, every = [], 1 if place.slot_height >= 11 else 2
    for n, slot in enumerate(place.slots):
        y = TOP + n * place.slot_height
        parts.append(rectangle(LEFT - 14, y + 1, 8, place.slot_height - 2, slot_colour(place, slot)))
        if n % every == 0:
            parts.append(text(LEFT - 20, y + place.slot_height / 2 + 4, f"slot {slot}", "end"))
    if more := len(place.timeline.slots) - len(place.slots):
        note = f"the first {MOST_SLOTS} slots; {more} more are not drawn"
        parts.append(text(place.right, 74, note, "pale end"))
    return parts
