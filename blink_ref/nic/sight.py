"""What the window shows of the engine: a copy of the GPU's half's sight, taken at one moment.

Nothing orders these words, so a copy may be a step old here and half a step new there: it is for people.
"""

from typing import NamedTuple

import numpy as np

from blink_ref.ring.layout import (
    BEAT_WAITING,
    CACHED,
    HISTORY,
    PHASES,
    STEP_DECODE,
    STEP_NS,
    STEP_NUMBER,
    STEP_PHASES,
    STEP_PREFILL,
    STEP_SAMPLES,
    STEP_WORDS,
)
from blink_ref.ring.window import Window

NO_SLOT, IN_CACHE = -1, -2
"""Instead of a page's slot: it is free; it is kept for prompts that begin with its tokens."""
RECENT = 32
"""Steps that a rate is taken from."""


class Step(NamedTuple):
    """A step that has ended; times in ns."""

    number: int
    decode: int
    """rows of requests that generate"""
    prefill: int
    """rows of prompts"""
    samples: int
    ns: int
    phases: tuple[int, ...]
    """by ring.layout.PHASES"""


class Sight(NamedTuple):
    """The engine at one moment."""

    state: np.ndarray
    """u32 [slots]: ring.layout.STATES"""
    page_slot: np.ndarray
    """int64 [pages]: the slot that owns a page (of a shared one, the last), NO_SLOT or IN_CACHE"""
    page_filled: np.ndarray
    """bool [pages]: whether the page holds a position yet"""
    steps: list[Step]
    """the last ones, oldest first"""
    waiting: int

    def rate(self) -> float | None:
        """Tokens per second of the last RECENT steps, waiting for requests left out; None before there are any."""
        recent = self.steps[-RECENT:]
        ns = sum(step.ns for step in recent)
        return sum(step.samples for step in recent) * 1e9 / ns if ns else None

    def step_ns(self) -> float | None:
        """Mean time of the last RECENT steps; None before there are any."""
        recent = self.steps[-RECENT:]
        return sum(step.ns for step in recent) / len(recent) if recent else None

    def shares(self) -> list[float]:
        """Share of the time of each phase in the steps shown; empty before there are any."""
        spent = np.array([step.phases for step in self.steps], float).reshape(-1, len(PHASES)).sum(axis=0)
        return (spent / spent.sum()).tolist() if spent.any() else []


def look(window: Window) -> Sight:
    """Copy what the window shows now."""
    gpu = window.gpu
    owner, position = gpu["owner"].astype(np.int64), gpu["position"].astype(np.int64)
    owned = (owner > 0) & (owner != CACHED)
    slot = np.where(owned, owner >> 16, np.where(owner == CACHED, IN_CACHE, NO_SLOT))
    begins = ((owner & 0xFFFF) - 1) * window.layout.page_size
    filled = owned & (begins < position[slot])
    waiting = int(gpu["heartbeat"][BEAT_WAITING])
    return Sight(gpu["state"].copy(), slot, filled, last_steps(window), waiting)


def last_steps(window: Window) -> list[Step]:
    """The last steps that have ended, oldest first: up to HISTORY."""
    records = window.gpu["history"].reshape(HISTORY, STEP_WORDS).copy()
    number = records[:, STEP_NUMBER].astype(np.int64)
    whole = (number > 0) & (number % HISTORY == np.arange(HISTORY))
    return [
        Step(
            number=int(record[STEP_NUMBER]),
            decode=int(record[STEP_DECODE]),
            prefill=int(record[STEP_PREFILL]),
            samples=int(record[STEP_SAMPLES]),
            ns=int(record[STEP_NS]),
            phases=tuple(record[STEP_PHASES : STEP_PHASES + len(PHASES)].tolist()),
        )
        for record in records[whole][np.argsort(number[whole])]
    ]
