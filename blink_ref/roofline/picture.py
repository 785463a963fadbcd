"""The roofline (Williams, Waterman and Patterson, 2009) as one SVG: each phase of a step under what limits it."""

from math import ceil, floor, log10
from xml.sax.saxutils import escape

from blink_ref.ring.layout import PHASES
from blink_ref.trace.svg import INK, STYLE, WHITE, rectangle, text

from .ceilings import Ceilings
from .measure import Figures, Phase

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 1000, 560, 84, 84, 220, 64
COLOURS = dict(
    zip(
        [*PHASES, "step"],
        ["#9aa0a6", "#8c6bb1", "#2b6cb0", "#d6453d", "#2f9e8f", "#e08a1e", "#7a9a01", "#c2408c", INK],
        strict=True,
    )
)
GRID, ROOF = "#e1e4e8", "#6a737d"


class _Axes:
    """Logarithmic: FLOPs a byte to the right, FLOPs a second upwards, in whole decades around what is shown."""

    def __init__(self, points: list[tuple[float, float]], most: Ceilings) -> None:
        heights = [y for _, y in points] + [most.flops_per_s] * bool(most.flops_per_s)
        x, y = [log10(x) for x, _ in points], [log10(y) for y in heights]
        self.x0, self.x1 = floor(min(x)), ceil(max(x) + 0.2)
        self.y0, self.y1 = floor(min(y)), ceil(max(y) + 0.1)

    def x(self, intensity: float) -> float:
        """Pixels from the left."""
        part = (log10(intensity) - self.x0) / (self.x1 - self.x0)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(self, speed: float) -> float:
        """Pixels from above."""
        part = (log10(speed) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def picture(figures: list[Figures], most: Ceilings, title: str) -> str:
    """The SVG's text. A point's number is the place of its work in the list; what multiplies nothing has none."""
    shown = [
        (number, one, phase)
        for number, one in enumerate(figures, 1)
        for phase in [*one.phases, one.step]
        if phase.flops and phase.seconds
    ]
    axes = _Axes([_place(phase) for _, _, phase in shown], most)
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {size}>',
        f"<style>{STYLE}</style>",
        rectangle(0, 0, WIDTH, HEIGHT, WHITE),
        text(LEFT, 30, title, "title"),
        text(LEFT, 50, _roofs_in_words(most), "pale"),
        *_grid(axes),
        *_roof(axes, most),
        *(_point(axes, most, number, one, phase) for number, one, phase in shown),
        *_legend(figures, {phase.name for _, _, phase in shown}),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _place(phase: Phase) -> tuple[float, float]:
    return phase.flops / phase.bytes, phase.flops / phase.seconds


def _roofs_in_words(most: Ceilings) -> str:
    memory = f"memory {most.bytes_per_s / 1e9:.4g} GB/s"
    if not most.flops_per_s:
        return f"{memory}, measured; what the arithmetic units could do is not"
    return f"{memory}, multiply-adds {most.flops_per_s / 1e9:.4g} Gflop/s, measured in the same run"


def _grid(axes: _Axes) -> list[str]:
    parts, bottom, right = [], HEIGHT - BOTTOM, WIDTH - RIGHT
    for decade in range(axes.x0, axes.x1 + 1):
        x = axes.x(10.0**decade)
        parts += [_path(f"M{x:.6g} {TOP}V{bottom}", GRID), text(x, bottom + 18, f"{10.0**decade:g}", "mid")]
    for decade in range(axes.y0, axes.y1 + 1):
        y = axes.y(10.0**decade)
        parts += [
            _path(f"M{LEFT} {y:.6g}H{right}", GRID),
            text(LEFT - 8, y + 4, f"{10.0 ** (decade - 9):g}", "end"),
        ]
    middle = (LEFT + right) / 2
    return [*parts, text(middle, HEIGHT - 20, "flop a byte", "mid"), text(LEFT - 8, TOP - 12, "Gflop/s", "end")]


def _roof(axes: _Axes, most: Ceilings) -> list[str]:
    left, right = 10.0**axes.x0, 10.0**axes.x1
    top = most.flops_per_s or 10.0**axes.y1
    ridge = min(max(top / most.bytes_per_s, left), right)
    low = max(left, 10.0**axes.y0 / most.bytes_per_s)
    begin = f"M{axes.x(low):.6g} {axes.y(low * most.bytes_per_s):.6g}"
    slope = f"L{axes.x(ridge):.6g} {axes.y(ridge * most.bytes_per_s):.6g}"
    flat = f"H{axes.x(right):.6g}" if most.flops_per_s else ""
    return [_path(begin + slope + flat, ROOF, 2)]


def _point(axes: _Axes, most: Ceilings, number: int, one: Figures, phase: Phase) -> str:
    x, y = _place(phase)
    tip = f"{phase.name}, {one.work.name}: {phase.seconds * 1e6:.4g} us, {phase.fraction(most):.0%} of the roof"
    circle = f'<circle cx="{axes.x(x):.6g}" cy="{axes.y(y):.6g}" r="8" fill="{COLOURS[phase.name]}"/>'
    label = text(axes.x(x), axes.y(y) + 3.5, str(number), "in")
    return f"<g><title>{escape(tip)}</title>{circle}{label}</g>"


def _legend(figures: list[Figures], names: set[str]) -> list[str]:
    x, y, parts = WIDTH - RIGHT + 24, TOP + 8, []
    for name, colour in COLOURS.items():
        if name in names:
            parts += [f'<circle cx="{x}" cy="{y - 4}" r="6" fill="{colour}"/>', text(x + 14, y, name)]
            y += 20
    y += 14
    for number, one in enumerate(figures, 1):
        parts.append(text(x - 6, y, f"{number}: {one.work.name}", "small"))
        y += 16
    return parts


def _path(path: str, colour: str, width: int = 1) -> str:
    return f'<path d="{path}" stroke="{colour}" stroke-width="{width}" fill="none"/>'
