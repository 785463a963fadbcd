"""A timeline as one SVG: above, what each slot does in each step; below, whose each page is.

It is written by hand, so that it needs no library. Each panel is first painted into a small array, a line a slot
or a page, a column a step, and equal neighbours become one rectangle.
"""

from .frame import BOTTOM, LEFT, TOP, WIDTH, Frame, frame
from .gantt import gantt
from .page_map import page_map
from .svg import STYLE, WHITE, line, text
from .timeline import Timeline


def picture(timeline: Timeline, title: str) -> str:
    """The SVG's text. ``title`` says what ran where. Raises ValueError: there is no step in the timeline."""
    if not timeline.steps:
        raise ValueError("there is no step to draw")
    place = frame(timeline)
    height = place.map_bottom + BOTTOM
    size = f'width="{WIDTH}" height="{height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" {size}>',
        f"<style>{STYLE}</style>",
        f'<rect {size} fill="{WHITE}"/>',
        text(LEFT, 30, title, "title"),
        text(LEFT, 50, _summary(place), "pale"),
        *gantt(place),
        *page_map(place),
        *_gaps(place),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _summary(place: Frame) -> str:
    timeline = place.timeline
    words = [
        f"{timeline.requests} requests in {len(timeline.slots)} slots",
        f"{len(timeline.steps)} steps in {(timeline.end - timeline.begin) / 1e9:.3g} s",
    ]
    if place.columns < len(timeline.steps):
        words.append(f"{len(timeline.steps) / place.columns:.2g} steps share a column")
    if timeline.lost:
        words.append(f"{timeline.lost} events were lost, between the steps at the red lines")
    return "; ".join(words)


def _gaps(place: Frame) -> list[str]:
    return [line(place.x(column), TOP, place.map_bottom, "#d6453d") for column in place.timeline.gaps]
