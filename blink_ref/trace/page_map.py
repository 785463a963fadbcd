"""The lower panel: a line a page, a column a step."""

import numpy as np

from .frame import LEFT, Frame, ticks
from .gantt import slot_colour
from .pages import CACHED, FREE
from .svg import EMPTY, INK, line, rectangle, runs, text

CACHED_COLOUR = "#b9bfc6"
SHARED = 1 << 20
"""Added to a page's slot where others hold the page too."""
PATTERN = (
    '<defs><pattern id="shared" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2.5" height="6" fill="#fff" fill-opacity="0.75"/></pattern></defs>'
)


def page_map(place: Frame) -> list[str]:
    """The panel's parts, with its legend."""
    parts = [PATTERN, *_legend(place)]
    parts.append(rectangle(LEFT, place.map_top, place.right - LEFT, place.map_bottom - place.map_top, EMPTY))
    for n in ticks(place):
        middle = place.x(n + 0.5)
        parts.append(line(middle, place.map_top, place.map_bottom))
        parts.append(text(middle, place.map_bottom + 14, str(place.timeline.steps[n].number), "pale mid"))
    parts.append(text(LEFT - 8, place.map_bottom + 14, "step", "pale end"))
    for value, at, lines, column, columns in runs(_paint(place), tall=True):
        if value != FREE:
            parts += _block(place, value, at, lines, column, columns)
    return parts + _labels(place)


def _legend(place: Frame) -> list[str]:
    top, parts = place.map_top - 38, []
    what = "Whose each page of the KV cache is"
    if place.pages_a_line > 1:
        what += f" (one page in {place.pages_a_line} is drawn)"
    parts.append(text(LEFT, top, what, "head"))
    x, y = float(LEFT), top + 10
    for n, slot in enumerate(place.slots[:3]):
        parts.append(rectangle(x + 10 * n, y, 8, 11, slot_colour(place, slot)))
    parts.append(text(x + 36, y + 10, "a slot's: the colour beside its name above"))
    x += 312
    swatch = slot_colour(place, place.slots[0]) if place.slots else INK
    parts += [rectangle(x, y, 16, 11, swatch), rectangle(x, y, 16, 11, "url(#shared)")]
    parts.append(text(x + 22, y + 10, "held by several slots"))
    x += 160
    parts += [rectangle(x, y, 11, 11, CACHED_COLOUR), text(x + 17, y + 10, "cached: nobody's, but kept")]
    x += 200
    return [*parts, rectangle(x, y, 11, 11, EMPTY), text(x + 17, y + 10, "free")]


def _paint(place: Frame) -> np.ndarray:
    """int32 [lines, columns]: FREE, CACHED, or a slot, plus SHARED where others hold the page too."""
    panel = np.full((place.lines, place.columns), FREE, np.int32)
    for change in place.timeline.changes:
        at, rest = divmod(change.page, place.pages_a_line)
        if rest == 0 and at < place.lines and change.column < place.steps:
            panel[at, place.column(change.column) :] = change.owner + SHARED * change.shared
    return panel


def _block(place: Frame, value: int, at: int, lines: int, column: int, columns: int) -> list[str]:
    x, y = place.column_x(column), place.map_top + at * place.page_height
    size = place.column_x(column + columns) - x, lines * place.page_height
    first, last = at * place.pages_a_line, (at + lines) * place.pages_a_line - 1
    pages = f"page {first}" if first == last else f"pages {first}-{last}"
    if value == CACHED:
        return [rectangle(x, y, *size, CACHED_COLOUR, f"{pages}: cached, {place.said(column, columns)}")]
    slot, shared = value % SHARED, value >= SHARED
    tip = f"{pages}: slot {slot}{' and others' * shared}, {place.said(column, columns)}"
    parts = [rectangle(x, y, *size, slot_colour(place, slot), tip)]
    return parts + [rectangle(x, y, *size, "url(#shared)", tip)] * shared


def _labels(place: Frame) -> list[str]:
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n * place.page_height >= 16)
    parts = []
    for at in range(0, place.lines, every):
        y = place.map_top + (at + 0.5) * place.page_height + 4
        parts.append(text(LEFT - 8, y, f"page {at * place.pages_a_line}", "end small"))
    unused = place.timeline.pages - place.lines * place.pages_a_line
    if unused > 0:
        note = f"pages {place.timeline.pages - unused}-{place.timeline.pages - 1} were never used"
        parts.append(text(place.right, place.map_top - 38, note, "pale end"))
    return parts
