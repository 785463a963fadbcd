"""From events to who has which page: a replay of hold, release and evict."""

from typing import NamedTuple

import numpy as np

from blink_ref.nic.sight import IN_CACHE, NO_SLOT
from blink_ref.ring.layout import EVENT_EVICT, EVENT_HOLD, EVENT_RELEASE

from .record import Event

FREE, CACHED = NO_SLOT, IN_CACHE


class Change(NamedTuple):
    """A page has another owner."""

    ns: int
    column: int
    """of the first step in which it has"""
    page: int
    owner: int
    """the slot that has held it longest, FREE or CACHED, which are no slots"""
    shared: bool
    """whether other slots hold it too"""


class Counts(NamedTuple):
    """How many pages are what."""

    held: int
    cached: int
    free: int


class Pages:
    """The pages as they are after the events so far; they begin as ``page_slot`` says."""

    def __init__(self, page_slot: np.ndarray) -> None:
        self._holders: list[list[int]] = [[slot] if slot >= 0 else [] for slot in page_slot.tolist()]
        self._cached: list[bool] = (page_slot == CACHED).tolist()
        self._shown = [self._owner(page) for page in range(len(page_slot))]
        owners = [owner for owner, _ in self._shown]
        self._free, self._kept = owners.count(FREE), owners.count(CACHED)

    @property
    def counts(self) -> Counts:
        """Of all pages."""
        return Counts(len(self._shown) - self._free - self._kept, self._kept, self._free)

    def beginning(self, ns: int, column: int) -> list[Change]:
        """How things stand, as changes."""
        return [Change(ns, column, page, *shown) for page, shown in enumerate(self._shown)]

    def take(self, event: Event, column: int) -> Change | None:
        """The next event; returns what it changes, if anything."""
        if event.kind not in (EVENT_HOLD, EVENT_RELEASE, EVENT_EVICT):
            return None
        high, page = event.pair
        if page >= len(self._shown):  # a damaged record
            return None
        holders = self._holders[page]
        if event.kind == EVENT_HOLD:
            holders += [event.slot] * (event.slot not in holders)
            self._cached[page] = False
        elif event.kind == EVENT_RELEASE:
            if event.slot in holders:
                holders.remove(event.slot)
            self._cached[page] = bool(high)
        else:
            self._cached[page] = False
        return self._show(event.ns, column, page)

    def _owner(self, page: int) -> tuple[int, bool]:
        holders = self._holders[page]
        if holders:
            return holders[0], len(holders) > 1
        return (CACHED if self._cached[page] else FREE), False

    def _show(self, ns: int, column: int, page: int) -> Change | None:
        before, after = self._shown[page], self._owner(page)
        if before == after:
            return None
        self._shown[page] = after
        self._free += (after[0] == FREE) - (before[0] == FREE)
        self._kept += (after[0] == CACHED) - (before[0] == CACHED)
        return Change(ns, column, page, *after)
