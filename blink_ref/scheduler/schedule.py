"""One turn of the scheduler: everything that happens between two steps, in the order it happens.

With a block of its own the scheduler drafts the next step while the others compute (:mod:`.ahead`). Then hardly
anything of this is left to do between the two.
"""

from ..ring.device import beat
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
from ..simt.vocabulary import SYSTEM, barrier, i32, i64, load_acquire, relax, thread_id
from .admit import admit
from .ahead import commit
from .arrivals import look_around, mark_ending
from .batch import make_plan
from .pause import put_aside
from .residence import measure_room
from .retire import end_requests, move_pages, publish
from .sight import LOOKED, begin_step, show_counts, stamp
from .state import (
    CHUNKS,
    FIRST_LAYER,
    GO,
    IDLE,
    INTERRUPTED,
    LEAVE,
    ROWS,
    RUN,
    STEPS,
)
from .trace import publish_events


@device
def schedule(window, slots, queue, plan, paused, ahead, sampling, cache, model, act, context, patience):
    """See to the step before, and have the next one planned. All lanes of one block.

    Ends with ``plan.count[GO]`` = RUN and a plan, LEAVE when the stop word is set, or IDLE after `patience` turns
    without a plan (0 = never); the caller's grid barrier shows it to the other blocks.
    """
    if thread_id() == 0:
        move_pages(window, slots, queue, cache, ahead)
    barrier()  # lane 0 has stamped the plan that all lanes read now
    if ahead.draft.count[ROWS] > 0 and plan.count[INTERRUPTED] == 0:
        commit(window, slots, queue, plan, ahead, sampling, model)
    else:
        turn(window, slots, queue, plan, paused, ahead, sampling, cache, model, act, context, patience)


@device
def turn(window, slots, queue, plan, paused, ahead, sampling, cache, model, act, context, patience):
    """Publish the step before, take arrivals in, admit, and plan the next step. All lanes of one block.

    Spins while there is nothing to do, or no room in the outboxes for what there is.
    """
    if plan.count[INTERRUPTED] > 0:
        put_aside(window, slots, queue, plan, paused)
        if thread_id() == 0:
            ahead.draft.count[ROWS] = i32(0)
    else:
        publish(window, slots, queue, plan, ahead, cache, sampling, model, act)
    turns = i64(0)
    while True:
        look_around(window, slots, queue, sampling, cache, context, model.vocab)
        if thread_id() == 0:
            end_requests(window, slots, queue, cache)
            measure_room(window)
        admit(window, slots, queue, cache, sampling, model.vocab)
        make_plan(window, slots, queue, plan, paused, ahead, sampling, cache)
        if thread_id() == 0:
            plan.count[GO] = i32(what_now(window, slots, queue, plan, cache, model.layers, turns, patience))
        barrier()
        if plan.count[GO] >= 0:
            break
        relax(turns)
        turns += 1
        stamp(plan, LOOKED, thread_id() == 0)


@device
def what_now(window, slots, queue, plan, cache, layers, turns, patience):
    """RUN, LEAVE, IDLE, or -1 to look again; beats the heart. One lane."""
    if turns & 63 == 0:
        beat(window, BEATS, window.heartbeat[BEATS] + 1)
        beat(window, BEAT_STATE, SERVING)
        show_counts(window, queue)
    if load_acquire(window.stop, 0, SYSTEM) != 0:
        plan.count[CHUNKS] = i32(0)  # the step planned just now is not run
        say_goodbye(window, slots, queue, cache)
        return LEAVE
    publish_events(window, queue)
    if plan.count[ROWS] > 0:
        if plan.count[FIRST_LAYER] == 0:
            begin_step(window, queue, plan, layers)
        beat(window, BEAT_STEPS, queue.count[STEPS])
        return RUN
    if patience > 0 and turns >= patience:
        return IDLE
    return -1


@device
def say_goodbye(window, slots, queue, cache):
    """End every request, running or waiting, with SHUTDOWN, as far as the outboxes have room. One lane."""
    for worker in range(window.workers):
        window.reserved[worker] = 0
    for slot in range(slots.state.shape[0]):
        if slots.state[slot] != FREE and slots.ending[slot] == 0:
            mark_ending(slots, queue, slot, SHUTDOWN)
    end_requests(window, slots, queue, cache)
    show_counts(window, queue)
    publish_events(window, queue)
    beat(window, BEAT_STATE, STOPPED)
