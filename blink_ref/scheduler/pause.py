"""A best-effort step gives way to an urgent request between two layers, and goes on later where it was.

All that a step carries from one layer to the next is its plan and its residual stream. Both are put aside, the
urgent step is planned and run like any other, and the paused one is brought back. (After QLLM, 2025, which
preempts best-effort jobs in the middle of a forward pass.) While a step is paused its requests keep their pages,
are dealt no rows, and are nobody's victims.
"""

from ..ring.device import urgent_rung, worker_of
from ..ring.layout import EVENT_PAUSE, EVENT_RESUME
from ..simt import device, first_of_share
from ..simt.vocabulary import barrier, block_copy, block_threads, clock_ns, i32, i64, thread_id
from .residence import RECORDS_A_SAMPLE
from .sight import LAYERS, LOOKED, NUMBER, stamp
from .state import (
    CHUNKS,
    FIRST_LAYER,
    INTERRUPTED,
    PAUSED,
    PAUSES,
    PREEMPTIBLE,
    ROWS,
    RUNNING,
    SAMPLES,
    STREAK,
    URGENT_RUNG,
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
        elif slots.known[slot] == slots.prompt_len[slot]:
            waits = waits or slots.flight[slot] == 0
    return waits and not (others and queue.count[STREAK] >= MOST_STREAK)


@device
def watch(window, queue, plan, layer, layers):
    """Before `layer`: interrupt the step if an urgent request has rung. One lane of the grid.

    A grid barrier shows it to all. Before one layer a step is interrupted once, so it gets on.
    """
    if layer < layers and plan.count[PREEMPTIBLE] == 1 and i64(urgent_rung(window)) != queue.count[URGENT_RUNG]:
        plan.count[INTERRUPTED] = i32(layer)


@device
def put_aside(window, slots, queue, plan, paused):
    """The plan was interrupted: keep it for later. All lanes of the scheduler's block; lane 0 is the last."""
    copy_plan(plan, paused.plan)
    barrier()
    if thread_id() == 0:
        kept = paused.plan
        kept.count[FIRST_LAYER] = plan.count[INTERRUPTED]
        kept.count[INTERRUPTED] = i32(0)
        kept.stamp[LAYERS] = clock_ns()
        for chunk in range(plan.count[CHUNKS]):
            slot = i64(plan.chunk_slot[chunk])
            slots.flight[slot] = i32(1)
            if plan.chunk_sample[chunk] >= 0:
                window.reserved[worker_of(window, slot)] += RECORDS_A_SAMPLE
        plan.count[CHUNKS] = i32(0)
        queue.count[PAUSED] = 1
        queue.count[PAUSES] += 1
        event(window, queue, EVENT_PAUSE, i64(0), plan.count[INTERRUPTED])
        stamp(plan, LOOKED, True)


@device
def bring_back(window, queue, plan, paused):
    """The paused plan goes on. All lanes of the scheduler's block; lane 0 is the last."""
    copy_plan(paused.plan, plan)
    barrier()
    if thread_id() == 0:
        away = i64(clock_ns()) - plan.stamp[LAYERS]
        for place in range(NUMBER):
            plan.stamp[place] += away  # as if no time had passed
        for worker in range(window.workers):
            window.reserved[worker] = 0
        if queue.count[STREAK] >= MOST_STREAK:
            plan.count[PREEMPTIBLE] = i32(0)
        queue.count[STREAK] = 0
        queue.count[PAUSED] = 0
        event(window, queue, EVENT_RESUME, i64(0), plan.count[FIRST_LAYER])


@device
def copy_plan(source, target):
    """All of one plan into another. All lanes of one block; no barrier."""
    copy_words(source.count, target.count, source.count.shape[0])
    copy_words(source.stamp, target.stamp, source.stamp.shape[0])
    rows, chunks, samples = source.count[ROWS], source.count[CHUNKS], source.count[SAMPLES]
    copy_words(source.slot, target.slot, rows)
    copy_words(source.token, target.token, rows)
    copy_words(source.position, target.position, rows)
    copy_words(source.chunk_slot, target.chunk_slot, chunks)
    copy_words(source.chunk_taken, target.chunk_taken, chunks)
    copy_words(source.chunk_row, target.chunk_row, chunks)
    copy_words(source.chunk_rows, target.chunk_rows, chunks)
    copy_words(source.chunk_first, target.chunk_first, chunks)
    copy_words(source.chunk_sample, target.chunk_sample, chunks)
    copy_words(source.sample_row, target.sample_row, samples)
    copy_words(source.sample_slot, target.sample_slot, samples)
    copy_words(source.draw, target.draw, samples)
    copy_words(source.temperature, target.temperature, samples)
    copy_words(source.seed, target.seed, samples)
    copy_words(source.best, target.best, samples)


@device
def copy_words(source, target, n):
    """``target[:n] = source[:n]``. All lanes of one block; no barrier."""
    i = i64(thread_id())
    while i < n:
        target[i] = source[i]
        i += block_threads()


@device
def copy_stream(block, x, kept, n):
    """``kept[:n] = x[:n]``: a residual stream of n floats, put aside or brought back. All blocks; no barrier."""
    quads = i64(n) >> 2
    first = first_of_share(quads, i64(block.id), i64(block.blocks)) * 4
    end = first_of_share(quads, i64(block.id) + 1, i64(block.blocks)) * 4
    block_copy(kept, first, x, first, end - first)
