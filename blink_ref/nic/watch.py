"""``generate --watch``: the live view above the answer as it comes, on a terminal.

It draws in the terminal's ordinary lines, a few times a second. When it ends, however it ends, its last
picture stays, the whole answer stands below it, and the cursor is back.
"""

import sys
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from blink_ref.ring.window import Window

from .sight import look
from .view import HEIGHT, view

PERIOD = 0.125
"""Seconds between two pictures. On the `cpu` target each one takes its time from a core that computes."""
LEAST_WIDTH, LEAST_TEXT = 80, 3
"""Columns, and lines of text below the view, that a terminal has to have."""


def can_watch() -> bool:
    """Whether standard output is a terminal, and a large enough one, that can move its cursor."""
    console = Console()
    enough = console.width >= LEAST_WIDTH and console.height > HEIGHT + LEAST_TEXT
    return sys.stdout.isatty() and not console.is_dumb_terminal and enough


class Watch:
    """A context in which the window is shown and the answer's pieces are taken by :meth:`show`."""

    def __init__(self, window: Window, title: str) -> None:
        self._window, self._title = window, title
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._text = ""
        self._drawn = 0.0

    def show(self, piece: str) -> None:
        """Take a piece of the answer, perhaps an empty one, and draw if it is time to."""
        self._text += piece
        if time.monotonic() - self._drawn >= PERIOD:
            # One line is the cursor's.
            lines = self._console.height - HEIGHT - 1
            self._draw(Group(view(look(self._window), self._title), tail(self._text, lines, self._console)))

    def _draw(self, picture: Group) -> None:
        self._live.update(picture, refresh=True)
        self._drawn = time.monotonic()

    def __enter__(self) -> "Watch":
        self._live.start()
        self.show("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._draw(Group(view(look(self._window), self._title)))
        finally:
            self._live.stop()
        sys.stdout.write(self._text)
        sys.stdout.flush()


def tail(text: str, lines: int, console: Console) -> Text:
    """The last `lines` lines of a text, wrapped to the console and padded to so many."""
    # A model may say an escape sequence; here it would break the picture.
    plain = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
    wrapped = [line.plain for line in Text(plain).wrap(console, console.width)]
    return Text("\n".join((wrapped + [""] * lines)[:lines] if len(wrapped) < lines else wrapped[-lines:]))
