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
from ..simt.vocabulary import barrier, i32, i64, thread_id, warp_width
from .admit import admit
from .ahead import issue, may_draft, take_off, third_plan
from .arrivals import listen, look_around, mark_ending
from .batch import make_draft
from .pause import put_aside
from .rehearsal import end_rehearsal
from .residence import forget_reserved, measure_room
from .retire import end_requests, file_landed, move_pages, take_in, tell
from .sight import LOOKED, begin_step, show_begin, show_counts, show_step, stamp
from .state import (
    AHEAD,
    ASIDE,
    BESIDE,
    DRAFTED,
    DRAFTING,
    ENDING,
    FILTERED,
    FIRST_LAYER,
    GO,
    IDLE,
    INTERRUPTED,
    LEAVE,
    LEFT,
    MOVES,
    NEXT,
    NOW,
    OUTCOME,
    PAUSED,
    REHEARSING,
    ROWS,
    RUN,
    RUNG_LATE,
    SPARE,
    STEPS,
    STOPPING,
    TAKEN_IN,
    TRACED,
    TRACING,
    TURNS,
    plan_of,
)
from .trace import heed_tracer, publish_events

BEAT_TURNS = 64
"""Turns between two beats of the heart, times the lanes of a warp. A GPU's turns take microseconds; and what it
reads of the window waits for what it has written before."""


@device
def schedule(window, slots, queue, plans, sampling, cache, model, act, context, patience, beside):
    """See to the step that has ended, and have the next one planned. All lanes of the scheduler's block.

    Between two steps (`beside` = 0) it ends with ``queue.count[GO]`` = RUN and plan number NOW, LEAVE when the
    stop word is set, or IDLE after `patience` turns without a plan (0 = never); the caller's grid barrier shows it
    to the other blocks. Beside a step (1) it ends with a draft of the next one, if it may have one.
    """
    now, draft = i32(queue.count[NOW]), i32(queue.count[SPARE])
    third = i32(third_plan(now, draft))
    interrupted, drafted, at_once, nothing_more = False, False, True, False
    if beside == 0:  # all is read at the same time: no branch is between
        layer, late, filtered = (
            plans.count[now, INTERRUPTED],
            plans.count[now, RUNG_LATE],
            plans.count[draft, FILTERED],
        )
        ahead, moves, tracing = queue.count[AHEAD], queue.count[MOVES], queue.count[TRACING]
        interrupted = layer > 0
        drafted = (layer == 0) & (ahead == 1) & (late == 0)
        at_once = (drafted == 0) | (filtered > 0)  # filters look at all of a request's tokens
        nothing_more = (at_once == 0) & (moves == 0) & (tracing == 0)
    landed = now
    if beside == 1:
        landed = draft
    elif interrupted:
        landed = third
    barrier()  # all have seen what there is
    if nothing_more:
        if thread_id() == 0:
            hand_over(queue, plans, now, draft, model.layers)
        return
    if thread_id() == 0:
        if beside == 1:
            begin_beside(window, queue, plan_of(plans, now))
        else:
            queue.count[AHEAD] = 0  # the draft is used now, or never
            stamp(plan_of(plans, draft), LOOKED, True)
            move_pages(window, slots, queue, cache)
            queue.count[ASIDE] = third
        if interrupted:
            put_aside(window, slots, queue, plan_of(plans, now))
            queue.count[ASIDE] = now
    if at_once:
        take_in(slots, queue, plan_of(plans, landed), sampling, model.eos)
        barrier()
    if beside == 1 and queue.count[PAUSED] == 0:
        take_off(window, slots, plan_of(plans, now))
    if thread_id() == 0:
        if at_once:
            plans.count[landed, TAKEN_IN] = i32(1)
        if not drafted or queue.count[TRACING] == 1:
            show_step(window, queue, plan_of(plans, landed), model.layers)
    if not drafted and (beside == 0 or queue.count[PAUSED] == 0):
        rest = context, patience, beside
        plan_next(window, slots, queue, plans, landed, draft, sampling, cache, model, act, *rest)
    if thread_id() == 0:
        queue.count[DRAFTED] += i64(drafted)
        if beside == 0:
            issue(queue, plans, model.layers)
            plan = plan_of(plans, queue.count[NOW])
            if queue.count[TRACING] == 1 and queue.count[GO] == RUN and plan.count[FIRST_LAYER] == 0:
                show_begin(window, queue, plan)
        else:
            queue.count[BESIDE] = 0
        if beside == 1 or (not drafted and queue.count[GO] == RUN):
            beat(window, BEAT_STEPS, queue.count[STEPS])


@device
def hand_over(queue, plans, now, draft, layers):
    """The draft is the plan now, and that is all there is to do between two steps. One lane.

    As :func:`.ahead.issue`, apart from all that may have to be done besides: so its instructions are few, and side
    by side.
    """
    stamp(plan_of(plans, draft), LOOKED, True)
    drafted, left, number = queue.count[DRAFTED] + 1, queue.count[LEFT] - 1, queue.count[STEPS] + 1
    queue.count[AHEAD] = 0
    queue.count[DRAFTED] = drafted
    queue.count[GO] = RUN
    queue.count[LEFT] = left
    queue.count[BESIDE] = i64(left != 0)
    queue.count[NOW] = draft
    queue.count[SPARE] = now
    queue.count[ASIDE] = third_plan(now, draft)
    begin_step(queue, plan_of(plans, draft), number, layers)


@device
def begin_beside(window, queue, running):
    """What was in flight has landed, and what may be drafted is known. One lane."""
    queue.count[AHEAD] = 0
    queue.count[DRAFTING] = may_draft(queue, running)
    if queue.count[PAUSED] == 0:
        forget_reserved(window)


@device
def plan_next(window, slots, queue, plans, landed, draft, sampling, cache, model, act, context, patience, beside):
    """Tell of what has landed, take arrivals in, admit, and draft the next step. All lanes of one block.

    Between steps it spins while there is nothing to do, or no room in the outboxes for what there is.
    """
    if thread_id() == 0:
        if beside == 0 and queue.count[PAUSED] == 0:
            forget_reserved(window)
        tell(window, sampling, act, plan_of(plans, landed))
    turns, heard = i32(0), False
    while True:
        if look_around(window, slots, queue, sampling, cache, context, model.vocab, turns, heard):
            if thread_id() == 0:
                if turns == 0:
                    file_landed(window, slots, queue, cache, plan_of(plans, landed))
                    if queue.count[PAUSED] == 0:
                        empty_limbo(cache)
                ends = queue.count[ENDING] > 0 and queue.count[REHEARSING] == 0
                if not heard or ends:  # else nothing has been written since the room was measured
                    end_requests(window, slots, queue, cache)
                    measure_room(window)
            admit(window, slots, queue, cache, sampling, model.vocab)
            make_draft(window, slots, queue, plans, draft, sampling, cache, beside)
        if queue.count[REHEARSING] == 1:
            barrier()  # all have filled their rows
            end_rehearsal(window, slots, queue, plans, draft, cache)
        if thread_id() == 0:
            rows = i64(plans.count[queue.count[NEXT], ROWS])
            queue.count[OUTCOME] = what_now(window, slots, queue, rows, cache, turns, patience, beside)
            if beside == 1:
                queue.count[AHEAD] = i64(queue.count[OUTCOME] == RUN)
        barrier()
        if beside == 1 or queue.count[OUTCOME] >= 0:
            break
        turns, heard = listen(window, slots, queue, cache, turns, patience)
        stamp(plan_of(plans, draft), LOOKED, thread_id() == 0)


@device
def what_now(window, slots, queue, rows, cache, turns, patience, beside):
    """RUN, LEAVE, IDLE, or -1 to look again; beats the heart. One lane."""
    if turns & (BEAT_TURNS * warp_width() - 1) == 0:
        queue.count[TURNS] += 1
        beat(window, BEATS, queue.count[TURNS])
        beat(window, BEAT_STATE, SERVING)
        show_counts(window, queue)
    if beside == 0 and queue.count[STOPPING] == 1:
        say_goodbye(window, slots, queue, cache)  # the step planned just now is not run
        return LEAVE
    if queue.count[TRACING] != queue.count[TRACED] or queue.count[TRACED] == 1:
        heed_tracer(window, queue)
    if rows > 0:
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
