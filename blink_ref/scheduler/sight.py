"""What the kernel lets people see: owners of pages, rows and times of steps. Nothing synchronises on it.

Plain stores, a few dozen words a step; owners of pages only as they change. Where the time goes is told
by stamps of the clock between the phases of a step. Each step times one of its layers, the next step the
next one: so it is eleven looks at the clock, however many layers there are.
"""

from ..ring.layout import (
    BEAT_EVICTED,
    BEAT_FOUND,
    BEAT_PAUSED,
    BEAT_PREEMPTED,
    BEAT_RUNNING,
    BEAT_WAITING,
    EVENT_PHASE,
    EVENT_ROWS,
    EVENT_STEP,
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
from ..simt import device
from ..simt.vocabulary import clock_ns, divide, i32, i64, thread_id, u32, u64
from .state import (
    CHUNKS,
    DECODING,
    EVICTED,
    FOUND,
    PAUSES,
    PREEMPTED,
    ROWS,
    RUNNING,
    SAMPLES,
    STEPS,
    TIMED,
    TRACING,
    WAITING,
)
from .trace import event

LOOKED, PLANNED, EMBEDDED, LAYER, PROJECTED, ATTENDED, OUTPUT, GATED, LOWERED, LAYERS, DRAWN, NUMBER = range(12)
"""Places in :attr:`Plan.stamp`: when a turn of the scheduler began, when the plan was made, when phases
ended (LAYER: the layer before the timed one; LAYERS: all of them), and the step's number."""

MOST_NS = 2**32 - 1


def record_spec(stamp: list[int], layers: int) -> list[int]:
    """ns of the step, and of each of its ring.layout.PHASES, of a step with these stamps."""
    ends = stamp[PLANNED], stamp[EMBEDDED], *stamp[PROJECTED : LOWERED + 1], stamp[DRAWN]
    begins = stamp[LOOKED], stamp[PLANNED], *stamp[LAYER:LOWERED], stamp[LAYERS]
    times = [1, 1, *[layers] * 5, 1]
    spent = [n * (end - begin) for n, end, begin in zip(times, ends, begins, strict=True)]
    return [min(ns, MOST_NS) for ns in (stamp[DRAWN] - stamp[LOOKED], *spent)]


@device
def begin_step(queue, plan, number, layers):
    """A step begins: its number, the layer that it times, and its first stamp. One lane."""
    queue.count[STEPS] = number
    plan.stamp[NUMBER] = number
    plan.count[TIMED] = i32(divide(number, i64(layers))[1])
    plan.stamp[PLANNED] = clock_ns()


@device
def show_begin(window, queue, plan):
    """Events for a step that has begun, and for its rows. One lane."""
    for chunk in range(plan.count[CHUNKS]):
        rows = i64(plan.chunk_first[chunk]) << 20 | plan.chunk_rows[chunk]
        event(window, queue, EVENT_ROWS, i64(plan.chunk_slot[chunk]), rows)
    event(window, queue, EVENT_STEP, i64(0), queue.count[STEPS])


@device
def timed_layer(block, plan):
    """The layer whose phases the calling lane is to stamp; -1 for all lanes but one."""
    if block.id == 0 and thread_id() == 0:
        return i32(plan.count[TIMED])
    return i32(-1)


@device
def stamp(plan, place, now):
    """Write down the time at a place, if it is wanted now. At most one lane wants it."""
    if now:
        plan.stamp[place] = clock_ns()


@device
def show_step(window, queue, plan, layers):
    """The record of a step that has ended, as :func:`record_spec`, once. One lane."""
    if plan.count[CHUNKS] == 0 or plan.stamp[NUMBER] == 0:
        return
    at = (plan.stamp[NUMBER] & (HISTORY - 1)) * STEP_WORDS
    spent = at + STEP_PHASES
    window.history[at + STEP_NUMBER] = u32(plan.stamp[NUMBER])
    window.history[at + STEP_DECODE] = u32(plan.count[DECODING])
    window.history[at + STEP_PREFILL] = u32(i64(plan.count[ROWS]) - i64(plan.count[DECODING]))
    window.history[at + STEP_SAMPLES] = u32(plan.count[SAMPLES])
    window.history[at + STEP_NS] = between(plan, LOOKED, DRAWN, 1)
    window.history[spent] = between(plan, LOOKED, PLANNED, 1)
    window.history[spent + 1] = between(plan, PLANNED, EMBEDDED, 1)
    for phase in range(LOWERED - LAYER):
        window.history[spent + 2 + phase] = between(plan, LAYER + phase, LAYER + phase + 1, layers)
    window.history[spent + 2 + LOWERED - LAYER] = between(plan, LAYERS, DRAWN, 1)
    if queue.count[TRACING] == 1:
        show_phases(window, queue, spent)
    plan.stamp[NUMBER] = 0


@device
def show_counts(window, queue):
    """What the batch and the pages have come to, into the heartbeat. One lane."""
    window.heartbeat[BEAT_RUNNING] = u64(queue.count[RUNNING])
    window.heartbeat[BEAT_WAITING] = u64(queue.count[WAITING])
    window.heartbeat[BEAT_PREEMPTED] = u64(queue.count[PREEMPTED])
    window.heartbeat[BEAT_PAUSED] = u64(queue.count[PAUSES])
    window.heartbeat[BEAT_FOUND] = u64(queue.count[FOUND])
    window.heartbeat[BEAT_EVICTED] = u64(queue.count[EVICTED])


@device
def show_phases(window, queue, spent):
    """An event for each phase of the step. One lane."""
    for phase in range(len(PHASES)):
        event(window, queue, EVENT_PHASE, i64(0), phase << 32 | i64(window.history[spent + phase]))


@device
def between(plan, begin, end, times):
    """ns between two stamps, so many times; at most what a word holds. One lane."""
    return u32(min((plan.stamp[end] - plan.stamp[begin]) * i64(times), i64(MOST_NS)))
