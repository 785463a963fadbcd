"""Which line of device code an access stands on, and which way a lane came to where it waits.

An access is made in a frame of device code, or in the body of a word that device code calls; then the
line is the caller's.
"""

import linecache
import os
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .. import vocabulary

WORDS = vars(vocabulary)
"""The globals of a frame that runs a word's body."""


class Line(NamedTuple):
    """A line of source."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        near = os.path.relpath(self.file)
        return f"{self.file if near.startswith('..') else near}:{self.number} in {self.function}"


class Lines:
    """The places met in one run, numbered, so that shadow memory can keep them as integers."""

    def __init__(self, *own: dict[str, Any]) -> None:
        """`own` are the globals of modules that stand between device code and the checker."""
        self._skipped = {id(WORDS), *map(id, own)}
        self._numbers: dict[tuple[int, int], int] = {}
        self._places: list[tuple[CodeType, int]] = []

    def number(self, frame: FrameType | None) -> int:
        """The number of the innermost place in device code."""
        while frame is not None and id(frame.f_globals) in self._skipped:
            frame = frame.f_back
        assert frame is not None
        key = id(frame.f_code), frame.f_lasti
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._places)
            self._places.append((frame.f_code, frame.f_lineno))
        return found

    def __getitem__(self, number: int) -> Line:
        code, line = self._places[number]
        return Line(code.co_filename, line, code.co_name)

    def parting(self, one: FrameType | None, other: FrameType | None) -> tuple[Line, Line] | None:
        """Where the ways to two frames part, seen from the launch; None if they are one way."""
        if _same_way(one, other):
            return None
        ways = zip(_from_the_start(one), _from_the_start(other), strict=False)
        frames = next(((a, b) for a, b in ways if not _same_place(a, b)), (one, other))
        first, second = (self[self.number(frame)] for frame in frames)
        return first, second


def _same_place(one: FrameType, other: FrameType) -> bool:
    # by line, where CPython's compiler has copied a call
    return one.f_code is other.f_code and (one.f_lasti == other.f_lasti or one.f_lineno == other.f_lineno)


def _same_way(one: FrameType | None, other: FrameType | None) -> bool:
    while one is not None and other is not None:
        if not _same_place(one, other):
            return False
        one, other = one.f_back, other.f_back
    return one is other


def _from_the_start(frame: FrameType | None) -> list[FrameType]:
    way = []
    while frame is not None:
        way.append(frame)
        frame = frame.f_back
    return way[::-1]
