"""The live view as text with colours: ring, pages, batch and phases of a :class:`.sight.Sight`.

Meant for 80 columns. Letters and heights carry the meaning; colours only help.
"""

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blink_ref.ring.layout import CANCELLED, DONE, FAILED, FREE, PHASES, STATES

from .sight import IN_CACHE, NO_SLOT, Sight, Step

COLUMNS = 64
"""Cells in a row: slots, pages, or steps."""
PAGE_LINES, BATCH_LINES = 2, 4
HEIGHT = 15
"""Lines of the whole view."""
EIGHTHS = " ▁▂▃▄▅▆▇█"
LEAST_SCALE = 8
"""Rows of a step that fill the batch's picture, at least: one row should look like one."""

STATE_LETTERS = "·rpd!✓✗c"
STATE_STYLES = ("dim", "yellow", "cyan", "green", "red", "dim green", "red", "yellow")
PHASE_STYLES = ("white", "blue", "cyan", "yellow", "bright_blue", "magenta", "bright_magenta", "green")
DECODE_STYLE, PREFILL_STYLE = "green", "cyan"
SLOT_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
SLOT_STYLES = ("green", "cyan", "yellow", "magenta", "blue", "red")
FREE_PAGE, CACHED_PAGE = "·", "▒"


def view(sight: Sight, title: str) -> RenderableType:
    """A panel of HEIGHT lines, 80 columns wide."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", width=5)
    table.add_column(width=COLUMNS, no_wrap=True)
    table.add_row("ring", Group(_slots(sight), _states(sight)))
    table.add_row("pages", Group(*_page_map(sight), _page_counts(sight)))
    table.add_row("batch", Group(*_batch(sight.steps), _batch_legend(sight.steps)))
    table.add_row("step", Group(_phase_bar(sight.shares()), *_phase_legend(sight.shares())))
    rate, ns = sight.rate(), sight.step_ns()
    speed = f"{rate:.1f} tokens/s, {ns / 1e6:.2f} ms a step" if rate and ns else "no token yet"
    return Panel(
        table,
        box=ROUNDED,
        width=80,
        title=Text.assemble(("blink_ref", "bold"), f" {title}"),
        title_align="left",
        subtitle=Text(speed, "bold"),
        subtitle_align="right",
        border_style="dim",
    )


def _slots(sight: Sight) -> Text:
    line = Text()
    for state in sight.state[:COLUMNS].tolist():
        line.append(STATE_LETTERS[state], STATE_STYLES[state])
    return line


def _states(sight: Sight) -> Text:
    """How many slots are in which state; those that have ended share one word, for the line is short."""
    line, ended = Text(f"of {len(sight.state)}", "dim"), Text()
    for state, name in enumerate(STATES):
        n = int((sight.state == state).sum())
        if n and state in (DONE, FAILED, CANCELLED):
            ended.append(f" {STATE_LETTERS[state]} {n}", STATE_STYLES[state])
        elif n and state != FREE:
            line.append(f"  {STATE_LETTERS[state]} {n} {name.lower()}", STATE_STYLES[state])
    if ended:
        line.append(" ").append_text(ended).append(" ended", "dim")
    return line


def _page_map(sight: Sight) -> list[Text]:
    """A cell a page: its slot's letter, bright once it holds something; a shared page has its last owner's."""
    lines = []
    for first in range(0, PAGE_LINES * COLUMNS, COLUMNS):
        line, here = Text(), slice(first, first + COLUMNS)
        for slot, filled in zip(sight.page_slot[here].tolist(), sight.page_filled[here].tolist(), strict=True):
            letter, style = SLOT_LETTERS[slot % len(SLOT_LETTERS)], SLOT_STYLES[slot % len(SLOT_STYLES)]
            if slot == NO_SLOT:
                line.append(FREE_PAGE, "dim")
            elif slot == IN_CACHE:
                line.append(CACHED_PAGE, "dim")
            else:
                line.append(letter, f"reverse {style}" if filled else style)
        lines.append(line)
    return lines


def _page_counts(sight: Sight) -> Text:
    pages, owned = len(sight.page_slot), int((sight.page_slot >= 0).sum())
    shown = min(pages, PAGE_LINES * COLUMNS)
    filled, cached = int(sight.page_filled.sum()), int((sight.page_slot == IN_CACHE).sum())
    text = f"0-{shown - 1} of {pages}: {owned} taken, {filled} in use; {CACHED_PAGE} {cached} cached"
    return Text(text, "dim")


def _batch(steps: list[Step]) -> list[Text]:
    """A column a step, as high as it has rows: decode at the bottom, prefill on it."""
    shown = steps[-COLUMNS:]
    scale = max([LEAST_SCALE, *(step.decode + step.prefill for step in shown)])
    lines = []
    for floor in range(BATCH_LINES - 1, -1, -1):
        line = Text()
        for step in shown:
            line.append_text(_cell(step, scale, floor * 8))
        lines.append(line)
    return lines


def _cell(step: Step, scale: int, floor: int) -> Text:
    """The part of a step's column that lies in the line which begins at `floor` eighths."""

    def level(rows: int) -> int:
        return min(max(-(-rows * BATCH_LINES * 8 // scale) - floor, 0), 8)

    decode, both = level(step.decode), level(step.decode + step.prefill)
    if decode == both:
        return Text(EIGHTHS[both], DECODE_STYLE)
    if decode == 0:
        return Text(EIGHTHS[both], PREFILL_STYLE)
    return Text(EIGHTHS[decode], f"{DECODE_STYLE} on {PREFILL_STYLE}")


def _batch_legend(steps: list[Step]) -> Text:
    line = Text("rows of the last steps: ", "dim")
    last = steps[-1] if steps else Step(0, 0, 0, 0, 0, ())
    line.append(f"█ {last.decode} decode", DECODE_STYLE)
    line.append(f"  █ {last.prefill} prefill", PREFILL_STYLE)
    line.append(f"  in step {last.number}", "dim")
    return line


def _phase_bar(shares: list[float]) -> Text:
    """COLUMNS cells, dealt to the phases by their share of the time; a phase's cells show its first letter."""
    line, done = Text(), 0.0
    for share, name, style in zip(shares, PHASES, PHASE_STYLES, strict=False):
        line.append(name[0] * (round((done + share) * COLUMNS) - round(done * COLUMNS)), f"reverse {style}")
        done += share
    return line


def _phase_legend(shares: list[float]) -> list[Text]:
    lines, half = [], len(PHASES) // 2
    for first in (0, half):
        line = Text()
        for n in range(first, first + half):
            share = f"{shares[n]:4.0%}" if shares else "   -"
            line.append(PHASES[n][0], f"reverse {PHASE_STYLES[n]}").append(f"{PHASES[n][1:]:8}{share}   ")
        lines.append(line)
    return lines
