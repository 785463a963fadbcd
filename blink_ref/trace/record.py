"""Reading events out of a window while its kernel writes them.

The kernel writes event n over event n - `events` of its ring, and counts them once a turn of its scheduler. It
waits for nobody, so a reader that is too slow loses events. It knows which: it copies first and looks at the count
again afterwards. What may have been overwritten meanwhile is dropped, and counted as lost. Half of the ring is
left to what the kernel has written and not counted yet: more events than that in one turn would be misread.

Pure NumPy: this runs in a NIC's process.
"""

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import numpy as np

from blink_ref.nic.sight import look
from blink_ref.ring.layout import BEAT_EVENTS, EVENT_PHASE
from blink_ref.ring.window import Window

KIND_AT, SLOT_AT, PAIR_AT, PHASE_AT = 56, 40, 20, 32
VALUE = (1 << SLOT_AT) - 1


class Event(NamedTuple):
    """Something that happened on the GPU: an ``EVENT_*`` of ring.layout, which also says what ``value`` is."""

    ns: int
    """of the GPU's clock, whose zero is arbitrary"""
    kind: int
    slot: int
    value: int

    @property
    def pair(self) -> tuple[int, int]:
        """The two numbers that a ``value`` of rows, hold, release or phase holds, high bits first."""
        at = PHASE_AT if self.kind == EVENT_PHASE else PAIR_AT
        return self.value >> at, self.value & ((1 << at) - 1)


def pack_event(ns: int, kind: int, slot: int, value: int) -> tuple[int, int]:
    """An event as its two words; ``value`` is under 2**40."""
    return ns, kind << KIND_AT | slot << SLOT_AT | value


def unpack_events(words: np.ndarray) -> list[Event]:
    """The events of u64 [n, 2] words."""
    ns, word = words[:, 0].tolist(), words[:, 1].tolist()
    return [Event(t, w >> KIND_AT, w >> SLOT_AT & 0xFFFF, w & VALUE) for t, w in zip(ns, word, strict=True)]


@dataclass
class Part:
    """Events without a gap, and who had the pages when they began."""

    page_slot: np.ndarray
    """int64 [pages]: as in nic.sight.Sight; by some events later than the first, never earlier"""
    blocks: list[np.ndarray] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """All of them, in the order in which they were written."""
        return [event for block in self.blocks for event in unpack_events(block)]


@dataclass
class Recording:
    """What a recorder has seen. A new part begins where events were lost."""

    parts: list[Part]
    lost: int

    @property
    def count(self) -> int:
        """Events in it."""
        return sum(len(block) for part in self.parts for block in part.blocks)


class Recorder:
    """A context that asks the kernel for events, and takes what it has counted at each :meth:`poll`.

    The word that asks is put back as it was: one who came second leaves the first one's events coming.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._before = 0
        self._next = 0
        self.recording = Recording([], 0)

    def __enter__(self) -> "Recorder":
        self._before = int(self._window.nic["trace"][0])
        self._next = self._written()
        self._window.nic["trace"][0] = 1
        self._begin_part()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._window.nic["trace"][0] = self._before
        self.poll()

    def poll(self) -> int:
        """Take the events since the last call, and return how many; never waits.

        To lose none, call it before the kernel has written half of what the window's ring holds.
        """
        ring = self._window.gpu["event"]
        safe = len(ring) // 2
        first, end = self._next, self._written()
        self._next = end
        kept = max(first, end - safe)
        copy = ring[np.arange(kept, end) & (len(ring) - 1)]
        _order_loads()
        whole = min(max(kept, self._written() - safe), end)
        lost = whole - first
        if lost:
            self.recording.lost += lost
            self._begin_part()
        if end > whole:
            self.recording.parts[-1].blocks.append(copy[whole - kept :])
        return end - whole

    def _begin_part(self) -> None:
        parts = self.recording.parts
        if parts and not parts[-1].blocks:
            parts.pop()
        # Looked at after the first event that counts, so that a replay of the events ends right.
        parts.append(Part(look(self._window).page_slot))

    def _written(self) -> int:
        count = int(self._window.gpu["heartbeat"][BEAT_EVENTS])
        _order_loads()
        return count


_fence = threading.Lock()


def _order_loads() -> None:
    """No load below is done before those above: nic/client.py says why two turns of a lock are a fence."""
    with _fence:
        pass
    with _fence:
        pass
