"""What the engine has counted, by name: for ``/health``, and for ``/metrics`` in the text form of Prometheus."""

from typing import NamedTuple

from blink_ref.ring.layout import (
    BEAT_EVICTED,
    BEAT_FOUND,
    BEAT_PAUSED,
    BEAT_PREEMPTED,
    BEAT_RUNNING,
    BEAT_STEPS,
    BEAT_WAITING,
)
from blink_ref.ring.window import Window


class Count(NamedTuple):
    """A word of the heartbeat; one that only grows ``totals``."""

    word: int
    totals: bool
    meaning: str


COUNTS = {
    "steps": Count(BEAT_STEPS, True, "Steps computed."),
    "running": Count(BEAT_RUNNING, False, "Requests in the batch."),
    "waiting": Count(BEAT_WAITING, False, "Requests that wait for a place in the batch."),
    "preempted": Count(BEAT_PREEMPTED, True, "Requests that gave pages and place away, to be resumed later."),
    "paused": Count(BEAT_PAUSED, True, "Steps that gave way between two layers to an urgent request."),
    "cached_positions": Count(BEAT_FOUND, True, "Positions of prompts that were found in the KV cache."),
    "evicted_pages": Count(BEAT_EVICTED, True, "Cached pages that were taken back for others."),
}


def read(window: Window) -> dict[str, int]:
    """The counts now."""
    beat = window.gpu["heartbeat"]
    return {name: int(beat[count.word]) for name, count in COUNTS.items()}


def prometheus(window: Window) -> str:
    """The counts as ``/metrics`` says them."""
    lines = []
    for name, value in read(window).items():
        count = COUNTS[name]
        full = f"blink_ref_{name}{'_total' if count.totals else ''}"
        kind = "counter" if count.totals else "gauge"
        lines += [f"# HELP {full} {count.meaning}", f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"
