"""A best-effort step gives way to an urgent request between two layers, and goes on later where it was.

All that a step carries from one layer to the next is its plan and its residual stream. Both are put aside, the
urgent step is planned and run like any other, and the paused one is brought back. (After QLLM, 2025, which
preempts best-effort jobs in the middle of a forward pass.) While a step is paused its requests keep their pages,
are dealt no rows, and are nobody's victims.
"""

from ..ring.device import urgent_rung, worker_of
from ..ring.layout import EVENT_PAUSE, EVENT_RESUME
from ..simt import device, first_of_share
from ..simt.vocabulary import barrier, block_copy, block_threads, clock_ns, i32, i64, thread_id, u32
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
    ROWS,
    RUNNING,
    SAMPLES,
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
    known = i64(slots.known[slot])
    if slots.ahead[slot] > 0:
        known += i64(slots.done[slot] + slots.ahead[slot] == known)
    return known


@device
def watch(window, plan, layer, layers):
    """Before `layer`: interrupt the step if an urgent request has rung. One lane of the grid.

    A grid barrier shows it to all. Before one layer a step is interrupted once, so it gets on.
    """
    if layer < layers and plan.count[PREEMPTIBLE] == 1 and urgent_rung(window) != u32(plan.count[URGENT_SEEN]):
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
        forget_reserved(window)
        for chunk in range(plan.count[CHUNKS]):
            slot = i64(plan.chunk_slot[chunk])
            slots.flight[slot] = i32(IN_PAUSED)
            slots.ahead[slot] = i32(0)
            if plan.chunk_sample[chunk] >= 0:
                window.reserved[worker_of(window, slot)] += RECORDS_A_SAMPLE
        plan.count[CHUNKS] = i32(0)
        queue.count[PAUSED] = 1
        queue.count[PAUSES] += 1
        event(window, queue, EVENT_PAUSE, i64(0), plan.count[INTERRUPTED])
        plan.count[INTERRUPTED] = i32(0)


@device
def bring_back(window, queue, plan, paused):
    """The paused plan goes on. All lanes of the scheduler's block; lane 0 is the last."""
    copy_plan(paused.plan, plan)
    barrier()
    if thread_id() == 0:
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
def copy_plan(source, target):
    """All of one plan into another, but for what has been drawn. All lanes of one block; no barrier."""
    copy_work(source, target)
    copy_counts(source, target)


@device
def copy_counts(source, target):
    """Counts and stamps of one plan into another. All lanes of one block; no barrier."""
    i = i64(thread_id())
    while i < source.count.shape[0]:
        count, ns = source.count[i], source.stamp[i]
        target.count[i], target.stamp[i] = count, ns
        i += block_threads()


@device
def copy_work(source, target):
    """Rows, chunks and samples of one plan into another. All lanes of one block; no barrier."""
    rows, chunks, samples = source.count[ROWS], source.count[CHUNKS], source.count[SAMPLES]
    i = i64(thread_id())
    while i < rows:  # there are no more chunks or samples than rows
        copy_row(source, target, i)
        if i < chunks:
            copy_chunk(source, target, i)
        if i < samples:
            copy_sample(source, target, i)
        i += block_threads()


@device
def copy_row(source, target, i):
    """One row of one plan into another. One lane."""
    slot, token, position = source.slot[i], source.token[i], source.position[i]
    target.slot[i], target.token[i], target.position[i] = slot, token, position


@device
def copy_chunk(source, target, i):
    """One chunk of one plan into another. One lane."""
    slot, taken, row = source.chunk_slot[i], source.chunk_taken[i], source.chunk_row[i]
    rows, first, sample = source.chunk_rows[i], source.chunk_first[i], source.chunk_sample[i]
    target.chunk_slot[i], target.chunk_taken[i], target.chunk_row[i] = slot, taken, row
    target.chunk_rows[i], target.chunk_first[i], target.chunk_sample[i] = rows, first, sample


@device
def copy_sample(source, target, i):
    """One sample of one plan into another. One lane."""
    row, slot, draw = source.sample_row[i], source.sample_slot[i], source.draw[i]
    temperature, seed = source.temperature[i], source.seed[i]
    target.sample_row[i], target.sample_slot[i], target.draw[i] = row, slot, draw
    target.temperature[i], target.seed[i] = temperature, seed


@device
def copy_stream(block, x, kept, n):
    """``kept[:n] = x[:n]``: a residual stream of n floats, put aside or brought back. All blocks; no barrier."""
    quads = i64(n) >> 2
    first = first_of_share(quads, i64(block.id), i64(block.blocks)) * 4
    end = first_of_share(quads, i64(block.id) + 1, i64(block.blocks)) * 4
    block_copy(kept, first, x, first, end - first)
