"""Arrivals: doorbells become waiting requests, and cancel words become ends."""

from ..ring.layout import CANCEL, READY
from ..simt import device
from ..simt.vocabulary import (
    SYSTEM,
    atomic_add,
    block_threads,
    i32,
    i64,
    load_acquire,
    load_relaxed,
    thread_id,
    u32,
)
from .retire import finish
from .state import RUNNING, WAITING_TAIL

AT_ONCE = 4
"""Doorbells a lane reads before it looks at any: loads across PCIe take a microsecond, but overlap."""


def scan_spec(doorbell: list[int], taken: list[int]) -> list[int]:
    """The slots that have rung since they were last taken (in any order)."""
    return [slot for slot, (rung, seen) in enumerate(zip(doorbell, taken, strict=True)) if rung != seen]


@device
def scan(window, slots, queue):
    """Put every slot whose doorbell has changed at the end of the waiting ring. All lanes of one block."""
    n, step = i64(window.doorbell.shape[0]), block_threads()
    first = i64(thread_id())
    while first < n:
        s1, s2, s3 = min(first + step, n - 1), min(first + 2 * step, n - 1), min(first + 3 * step, n - 1)
        d0 = load_relaxed(window.doorbell, first, SYSTEM)
        d1 = load_relaxed(window.doorbell, s1, SYSTEM)
        d2 = load_relaxed(window.doorbell, s2, SYSTEM)
        d3 = load_relaxed(window.doorbell, s3, SYSTEM)
        take_if_rung(window, slots, queue, first, d0)
        if first + step < n:
            take_if_rung(window, slots, queue, s1, d1)
        if first + 2 * step < n:
            take_if_rung(window, slots, queue, s2, d2)
        if first + 3 * step < n:
            take_if_rung(window, slots, queue, s3, d3)
        first += AT_ONCE * step


@device
def take_if_rung(window, slots, queue, slot, rung):
    """One lane: a doorbell that differs from the generation last taken is a new request.

    A slot whose request has not ended is left alone: its NIC breaks the protocol if it rings again.
    """
    if rung != slots.taken[slot] and slots.state[slot] == 0:
        # once more, to acquire: the request and prompt written before the doorbell are now visible
        slots.taken[slot] = u32(load_acquire(window.doorbell, slot, SYSTEM))
        slots.state[slot] = i32(READY)
        window.state[slot] = u32(READY)
        place = atomic_add(queue.count, WAITING_TAIL, i64(1))
        queue.waiting[place & (i64(queue.waiting.shape[0]) - 1)] = i32(slot)


@device
def cancel_running(window, slots, queue, cache):
    """End running requests whose cancel word names their generation. One lane."""
    n = i64(0)
    while n < queue.count[RUNNING]:
        slot = i64(queue.running[n])
        if cancelled(window, slots, slot) and finish(window, slots, queue, cache, slot, CANCEL):
            continue  # the next one has moved here
        n += 1


@device
def cancelled(window, slots, slot):
    """Whether a slot's request is no longer wanted. One lane."""
    return load_relaxed(window.cancel, slot, SYSTEM) == slots.taken[slot]


@device
def waiting_at(queue, place):
    """The slot at a place of the waiting ring. One lane."""
    return i64(queue.waiting[place & (i64(queue.waiting.shape[0]) - 1)])
