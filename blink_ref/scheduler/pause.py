"""A best-effort step gives way to an urgent request between two layers, and goes on later where it was.

All that a step carries from one layer to the next is its plan and its residual stream. Both are put aside, the
urgent step has another plan and is run like any other, and the paused one is brought back. (After QLLM, 2025,
which preempts best-effort jobs in the middle of a forward pass.) While a step is paused its requests keep their
pages, are dealt no rows, and are nobody's victims.
"""

from ..ring.device import urgent_rung, worker_of
from ..ring.layout import EVENT_PAUSE, EVENT_RESUME
from ..simt import device, first_of_share
from ..simt.vocabulary import block_copy, clock_ns, i32, i64, u32
from .residence import RECORDS_A_SAMPLE, forget_reserved
from .sight import LAYERS, NUMBER
from .state import (
    CHUNKS,
    FIRST_LAYER,
    IN_PAUSED,
    INTERRUPTED,
    PAUSED,
    PAUSES,
    PREEMPTIBLE,
    RUNG_LATE,
    RUNNING,
    STREAK,
    URGENT_RUNG,
    URGENT_SEEN,
)
from .trace import event

MOST_STREAK = 64
"""Urgent steps in a row, while there is other work, after which the other work has its turn: a step."""


@device
def urgent_first(slots, queue):
    """Whether the next step is for urgent requests only. One lane.

    It is as long as one of them has no token yet, but not for ever while others wait.
    """
    waits, others = False, False
    for n in range(queue.count[RUNNING]):
        slot = i64(queue.running[n])
        if slots.urgent[slot] == 0:
            others = True
        elif slots.known[slot] == slots.prompt_len[slot] and slots.flight[slot] != IN_PAUSED:
            waits = waits or known_soon(slots, slot) == slots.known[slot]
    return waits and not (others and queue.count[STREAK] >= MOST_STREAK)


@device
def known_soon(slots, slot):
    """Tokens that a slot knows when the step that other blocks compute has ended. One lane."""
    known, ahead, done = i64(slots.known[slot]), i64(slots.ahead[slot]), i64(slots.done[slot])
    return known + i64(ahead > 0 and done + ahead == known)


@device
def watch(window, plan, layer, layers):
    """Before `layer`: interrupt the step if an urgent request has rung. One lane of the grid.

    A grid barrier shows it to all. Before one layer a step is interrupted once, so it gets on. Behind the last one
    there is nothing to interrupt, but a next step that was drafted before would come first.
    """
    if plan.count[PREEMPTIBLE] == 1 and urgent_rung(window) != u32(plan.count[URGENT_SEEN]):
        if layer < layers:
            plan.count[INTERRUPTED] = i32(layer)
        else:
            plan.count[RUNG_LATE] = i32(1)


@device
def put_aside(window, slots, queue, plan):
    """The plan was interrupted: it is for later, and so are its requests. One lane."""
    layer = i64(plan.count[INTERRUPTED])
    plan.count[FIRST_LAYER] = i32(layer)
    plan.count[INTERRUPTED] = i32(0)
    plan.stamp[LAYERS] = clock_ns()
    forget_reserved(window)
    for chunk in range(plan.count[CHUNKS]):
        slot = i64(plan.chunk_slot[chunk])
        slots.flight[slot] = i32(IN_PAUSED)
        slots.ahead[slot] = i32(0)
        if plan.chunk_sample[chunk] >= 0:
            window.reserved[worker_of(window, slot)] += RECORDS_A_SAMPLE
    queue.count[PAUSED] = 1
    queue.count[PAUSES] += 1
    event(window, queue, EVENT_PAUSE, i64(0), layer)


@device
def bring_back(window, queue, plan):
    """The plan that was put aside goes on. One lane."""
    away = i64(clock_ns()) - plan.stamp[LAYERS]
    for place in range(NUMBER):
        plan.stamp[place] += away  # as if no time had passed
    forget_reserved(window)
    plan.count[URGENT_SEEN] = i32(queue.count[URGENT_RUNG])
    if queue.count[STREAK] >= MOST_STREAK:
        plan.count[PREEMPTIBLE] = i32(0)
    queue.count[STREAK] = 0
    queue.count[PAUSED] = 0
    event(window, queue, EVENT_RESUME, i64(0), plan.count[FIRST_LAYER])


@device
def copy_stream(block, x, at, kept, n):
    """``kept[:n] = x[at:at+n]``: a residual stream of n floats, put aside or brought back. All blocks share it."""
    quads = i64(n) >> 2
    first = first_of_share(quads, i64(block.id), i64(block.blocks)) * 4
    end = first_of_share(quads, i64(block.id) + 1, i64(block.blocks)) * 4
    block_copy(kept, first, x, at + first, end - first)
