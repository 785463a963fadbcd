"""With a block of its own, the scheduler works while the others compute: it drafts the next step meanwhile.

Of most steps everything but their tokens is known before the step before has ended: who decodes goes on, by a row.
So while the others compute a step, block 0 sends what the step before has brought, takes arrivals in,
admits, and deals the next step's rows, as if no request ended (what vLLM and SGLang do on the host, as
asynchronous and overlapped scheduling). What is left to do between the two steps is :func:`commit`: to put the
tokens in their rows. A request that ended after all has one row computed for nothing, and it is dropped.

What cannot be known ahead is left to :func:`.schedule.turn`, between the steps: who gives its pages away when
there are too few, urgent requests, log probabilities to be sent, and the end of all.
"""

from ..kvcache.pages import empty_limbo
from ..ring.device import beat, worker_of
from ..ring.layout import BEAT_STATE, BEAT_STEPS, BEATS, SERVING
from ..simt import device
from ..simt.vocabulary import (
    SYSTEM,
    atomic_add,
    barrier,
    block_threads,
    clock_ns,
    i32,
    i64,
    load_relaxed,
    rank_index,
    thread_id,
)
from .admit import admit
from .arrivals import look_around
from .batch import deal_rows, fill_rows
from .pause import copy_plan, urgent_first
from .residence import RECORDS_A_SAMPLE, forget_reserved, measure_room
from .retire import end_requests, file_landed, move_pages, take_in, tell
from .sight import LOOKED, begin_step, show_counts, show_step
from .state import (
    CHUNKS,
    DRAFTED,
    DRAFTING,
    GO,
    IN_RUNNING,
    INTERRUPTED,
    PAUSED,
    ROWS,
    RUN,
    SCORED,
    SHORT,
    STEPS,
    STREAK,
    TRACING,
)
from .trace import publish_events


@device
def look_ahead(window, slots, queue, plan, ahead, sampling, cache, model, act, context, last):
    """While the other blocks compute the plan: tell of the step before it, and draft the step after.

    All lanes of block 0; a grid barrier before and after. Nothing is drafted in the `last` step of a launch, nor
    while a step is paused.
    """
    if thread_id() == 0:
        queue.count[DRAFTING] = may_draft(window, queue, plan, last)
        if queue.count[PAUSED] == 0:
            forget_reserved(window)
    barrier()
    if queue.count[PAUSED] == 0:
        take_off(window, slots, plan)
        if thread_id() == 0:
            tell(window, slots, queue, ahead.landed, sampling, act, model.layers)
            empty_limbo(cache)
        look_around(window, slots, queue, sampling, cache, context, model.vocab)
        if thread_id() == 0:
            file_landed(window, slots, queue, cache, ahead)
            end_requests(window, slots, queue, cache)
            measure_room(window)
    if queue.count[DRAFTING] == 1:
        admit(window, slots, queue, cache, sampling, model.vocab)
        draft_step(window, slots, queue, ahead, sampling, cache)
    if thread_id() == 0:
        beat(window, BEATS, window.heartbeat[BEATS] + 1)
        beat(window, BEAT_STATE, SERVING)
        beat(window, BEAT_STEPS, queue.count[STEPS])
        show_counts(window, queue)
        publish_events(window, queue)


@device
def may_draft(window, queue, plan, last):
    """1, or 0 where the next step has to be planned when this one has ended. One lane."""
    stopped = load_relaxed(window.stop, 0, SYSTEM) != 0
    return i64(not (last or stopped or queue.count[PAUSED] == 1 or plan.count[SCORED] > 0))


@device
def take_off(window, slots, plan):
    """Write down what is in flight: rows and samples of the plan. All lanes of one block; no barrier."""
    chunk = i64(thread_id())
    while chunk < plan.count[CHUNKS]:
        slot = i64(plan.chunk_slot[chunk])
        slots.flight[slot] = i32(IN_RUNNING)
        slots.ahead[slot] = plan.chunk_rows[chunk]
        slots.sample[slot] = plan.chunk_sample[chunk]
        if plan.chunk_sample[chunk] >= 0:
            atomic_add(window.reserved, worker_of(window, slot), i64(RECORDS_A_SAMPLE))
        chunk += block_threads()


@device
def draft_step(window, slots, queue, ahead, sampling, cache):
    """Deal the next step's rows, if there are pages for all. All lanes of one block; no barrier at the end."""
    if thread_id() == 0:
        ahead.draft.count[ROWS] = ahead.draft.count[CHUNKS] = i32(0)
        if not urgent_first(slots, queue):
            deal_rows(window, slots, queue, ahead.draft, ahead, sampling, cache, False)
            if queue.count[SHORT] > 0:
                ahead.draft.count[ROWS] = ahead.draft.count[CHUNKS] = i32(0)
    barrier()
    for chunk in range(ahead.draft.count[CHUNKS]):
        fill_rows(slots, ahead.draft, chunk)


@device
def commit(window, slots, queue, plan, ahead, sampling, model):
    """The step has ended, and the drafted one follows, now that its tokens are known. All lanes of one block.

    Lane 0 is the last.
    """
    began = i64(clock_ns())
    take_in(slots, queue, plan, ahead.landed, sampling, model.eos)
    chunk = i64(thread_id())
    while chunk < ahead.draft.count[CHUNKS]:
        source = i64(ahead.source[chunk])
        if source >= 0:
            ahead.draft.token[ahead.draft.chunk_row[chunk]] = i32(rank_index(plan.best[source]))
        chunk += block_threads()
    barrier()
    copy_plan(ahead.draft, plan)
    barrier()
    if thread_id() == 0:
        if queue.count[TRACING] == 1:
            show_step(window, queue, ahead.landed, model.layers)
        ahead.draft.count[ROWS] = ahead.draft.count[CHUNKS] = i32(0)
        queue.count[STREAK] = 0
        queue.count[DRAFTED] += 1
        plan.stamp[LOOKED] = began
        begin_step(window, queue, plan, model.layers)
        plan.count[GO] = i32(RUN)


@device
def come_down(window, slots, queue, plan, ahead, cache):
    """The launch ends with this step: nothing is in flight any more. All lanes of block 0.

    But for a step that was interrupted, which the next launch puts aside.
    """
    if queue.count[PAUSED] == 0:
        chunk = i64(thread_id())
        while chunk < plan.count[CHUNKS]:
            slots.flight[plan.chunk_slot[chunk]] = slots.ahead[plan.chunk_slot[chunk]] = i32(0)
            chunk += block_threads()
        if thread_id() == 0:
            forget_reserved(window)
            move_pages(window, slots, queue, cache, ahead)
            if plan.count[INTERRUPTED] == 0:
                empty_limbo(cache)
