"""The scheduler: everything that is done between two steps, or beside one, in the order in which it is done.

Where all blocks compute, block 0 does it between two steps. With a block of its own the scheduler works while the
others compute: it tells of the step before and drafts the step after (:mod:`.ahead`), and between the two steps
there is little left to do.
"""

from ..kvcache.pages import empty_limbo
from ..ring.device import beat, beat_last
from ..ring.layout import (
    BEAT_STATE,
    BEAT_STEPS,
    BEATS,
    FREE,
    SERVING,
    SHUTDOWN,
    STOPPED,
)
from ..simt import device
from ..simt.vocabulary import barrier, i32, i64, relax, thread_id
from .admit import admit
from .ahead import drop_draft, hand_over, issue, may_draft, take_off
from .arrivals import look_around, mark_ending
from .batch import make_draft
from .pause import copy_work, put_aside
from .residence import forget_reserved, measure_room
from .retire import end_requests, file_landed, move_pages, take_in, tell
from .sight import LOOKED, NUMBER, show_counts, show_step, stamp
from .state import (
    CHUNKS,
    DRAFTED,
    DRAFTING,
    FILTERED,
    GO,
    IDLE,
    INTERRUPTED,
    LEAVE,
    PAUSED,
    ROWS,
    RUN,
    STEPS,
    STOPPING,
    TAKEN_IN,
    TRACING,
    TURNS,
)
from .trace import publish_events


@device
def schedule(
    window, slots, queue, plan, paused, ahead, sampling, cache, model, act, context, patience, beside, wanted
):
    """See to the step that has ended, and have the next one planned. All lanes of the scheduler's block.

    Between two steps (`beside` = 0) it ends with ``plan.count[GO]`` = RUN and a plan, LEAVE when the stop word is
    set, or IDLE after `patience` turns without a plan (0 = never); the caller's grid barrier shows it to the other
    blocks. Beside a step (1) it ends with a draft of the next one, if it is `wanted`: not of the last one of a
    launch, which leaves nothing in flight.
    """
    if beside == 1:
        begin_beside(window, queue, plan, wanted)
    else:
        begin_between(window, slots, queue, plan, paused, ahead, cache)
    drafted = ahead.draft.count[ROWS] > 0
    at_once = not drafted or ahead.draft.count[FILTERED] > 0  # filters look at all of a request's tokens
    if at_once:
        take_in(slots, queue, ahead.landed, sampling, model.eos)
        barrier()
    if beside == 1 and queue.count[PAUSED] == 0:
        take_off(window, slots, plan)
    if thread_id() == 0:
        landed = ahead.landed
        landed.count[TAKEN_IN] = i32(at_once)
        told_now = not drafted or queue.count[TRACING] == 1
        if told_now and landed.count[CHUNKS] > 0 and landed.stamp[NUMBER] > 0:
            show_step(window, queue, landed, model.layers)
    if not drafted and (beside == 0 or queue.count[PAUSED] == 0):
        plan_next(window, slots, queue, paused, ahead, sampling, cache, model, act, context, patience, beside)
        if beside == 0:
            copy_work(ahead.draft, plan)
    if beside == 0:
        issue(window, queue, plan, ahead, model.layers)
    if thread_id() == 0:
        queue.count[DRAFTED] += i64(drafted)
        if beside == 1 or (not drafted and plan.count[GO] == RUN):
            beat(window, BEAT_STEPS, queue.count[STEPS])


@device
def begin_between(window, slots, queue, plan, paused, ahead, cache):
    """Hand the step that has ended over, or put it aside. All lanes of one block; ends with a barrier."""
    stamp(ahead.draft, LOOKED, thread_id() == 0)
    barrier()  # lane 0 has stamped the plan that all lanes read now
    if thread_id() == 0:
        move_pages(window, slots, queue, cache, ahead)
    if plan.count[INTERRUPTED] > 0:
        put_aside(window, slots, queue, plan, paused)
        if thread_id() == 0:
            drop_draft(ahead)
    else:
        hand_over(plan, ahead)
    barrier()


@device
def begin_beside(window, queue, plan, wanted):
    """What was in flight has landed, and what may be drafted is known. One block; lane 0 does it; no barrier."""
    if thread_id() == 0:
        queue.count[DRAFTING] = may_draft(queue, plan, wanted)
        if queue.count[PAUSED] == 0:
            forget_reserved(window)


@device
def plan_next(window, slots, queue, paused, ahead, sampling, cache, model, act, context, patience, beside):
    """Tell of what has landed, take arrivals in, admit, and draft the next step. All lanes of one block.

    Between steps it spins while there is nothing to do, or no room in the outboxes for what there is.
    """
    if thread_id() == 0:
        if beside == 0 and queue.count[PAUSED] == 0:
            forget_reserved(window)
        tell(window, sampling, act, ahead.landed)
    turns = i64(0)
    while True:
        look_around(window, slots, queue, sampling, cache, context, model.vocab)
        if thread_id() == 0:
            file_landed(window, slots, queue, cache, ahead)
            if turns == 0 and queue.count[PAUSED] == 0:
                empty_limbo(cache)
            end_requests(window, slots, queue, cache)
            measure_room(window)
        admit(window, slots, queue, cache, sampling, model.vocab)
        make_draft(window, slots, queue, paused, ahead, sampling, cache, beside)
        if thread_id() == 0:
            ahead.draft.count[GO] = i32(what_now(window, slots, queue, ahead, cache, turns, patience, beside))
        barrier()
        if beside == 1 or ahead.draft.count[GO] >= 0:
            break
        relax(turns)
        turns += 1
        stamp(ahead.draft, LOOKED, thread_id() == 0)


@device
def what_now(window, slots, queue, ahead, cache, turns, patience, beside):
    """RUN, LEAVE, IDLE, or -1 to look again; beats the heart. One lane."""
    if turns & 63 == 0:
        queue.count[TURNS] += 1
        beat(window, BEATS, queue.count[TURNS])
        beat(window, BEAT_STATE, SERVING)
        show_counts(window, queue)
    if beside == 0 and queue.count[STOPPING] == 1:
        say_goodbye(window, slots, queue, cache)  # the step planned just now is not run
        return LEAVE
    publish_events(window, queue)
    if ahead.draft.count[ROWS] > 0:
        return RUN
    if patience > 0 and turns >= patience:
        return IDLE
    return -1


@device
def say_goodbye(window, slots, queue, cache):
    """End every request, running or waiting, with SHUTDOWN, as far as the outboxes have room. One lane."""
    forget_reserved(window)
    for slot in range(slots.state.shape[0]):
        if slots.state[slot] != FREE and slots.ending[slot] == 0:
            mark_ending(slots, queue, slot, SHUTDOWN)
    end_requests(window, slots, queue, cache)
    show_counts(window, queue)
    publish_events(window, queue)
    beat_last(window, BEAT_STATE, STOPPED)
