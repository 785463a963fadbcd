"""The little of SVG that the picture needs, and painted panels as few rectangles."""

from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

INK, PALE, EMPTY, WHITE = "#24292f", "#6a737d", "#f4f5f6", "#ffffff"
FONT = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
STYLE = (
    f"text{{font:12px {FONT};fill:{INK}}}.pale{{fill:{PALE};font-size:11px}}"
    ".title{font-size:17px;font-weight:600}.head{font-size:13px;font-weight:600}.small{font-size:10px}"
    ".end{text-anchor:end}.mid{text-anchor:middle}.in{font-size:10px;text-anchor:middle;fill:#fff}"
)


class Run(NamedTuple):
    """A rectangle of equal values in a panel."""

    value: int
    line: int
    lines: int
    column: int
    columns: int


def runs(panel: np.ndarray, tall: bool) -> Iterator[Run]:
    """The rectangles that a panel, int [lines, columns], consists of; several lines high only if `tall`."""
    growing: dict[tuple[int, int, int], int] = {}
    for line, values in enumerate(panel):
        begins = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
        widths = np.diff(begins, append=len(values))
        here = set(zip(values[begins].tolist(), begins.tolist(), widths.tolist(), strict=True))
        for run in [run for run in growing if run not in here or not tall]:
            first = growing.pop(run)
            yield Run(run[0], first, line - first, *run[1:])
        for run in here:
            growing.setdefault(run, line)
    for run, first in growing.items():
        yield Run(run[0], first, len(panel) - first, *run[1:])


def rectangle(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    """A filled rectangle; `tip` shows where a mouse rests on it."""
    shape = f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}" fill="{fill}"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text whose baseline begins, or as `kind` (classes of STYLE) says, ends at a point."""
    return f'<text x="{x:.6g}" y="{y:.6g}" class="{kind}">{escape(words)}</text>'


def circle(x: float, y: float, radius: float, tip: str = "") -> str:
    """A white one with a dark line."""
    shape = f'<circle cx="{x:.6g}" cy="{y:.6g}" r="{radius:.3g}" fill="{WHITE}" stroke="{INK}" stroke-width="1.5"'
    return f"{shape}><title>{escape(tip)}</title></circle>"


def arrow(x: float, y: float, fill: str, tip: str = "") -> str:
    """A small triangle that points down to a point."""
    shape = f'<path d="M{x:.6g} {y:.6g}l-4.5 -7h9z" fill="{fill}"'
    return f"{shape}><title>{escape(tip)}</title></path>"


def line(x: float, top: float, bottom: float, colour: str = "#e1e4e8") -> str:
    """A thin vertical line."""
    return f'<path d="M{x:.6g} {top:.6g}V{bottom:.6g}" stroke="{colour}"/>'
