"""One turn of the scheduler: everything that happens between two steps, in the order it happens."""

from ..ring.device import beat
from ..ring.layout import SERVING, SHUTDOWN, STOPPED
from ..simt import device
from ..simt.vocabulary import SYSTEM, barrier, i32, i64, load_acquire, relax, thread_id
from .admit import admit
from .arrivals import cancel_running, scan, waiting_at
from .batch import make_plan
from .retire import finish, publish
from .sight import LOOKED, begin_step, stamp
from .state import CHUNKS, GO, IDLE, LEAVE, ROWS, RUN, RUNNING, WAITING_HEAD, WAITING_TAIL

BEATS, STEPS, STATE, RUN_COUNT, WAIT_COUNT = range(5)
"""Words of the window's heartbeat."""


@device
def schedule(block, window, slots, queue, plan, cache, model, context, patience):
    """Publish the step before, take arrivals in, admit, and plan the next step. All lanes of one block.

    Spins while there is nothing to do, or no room in the outboxes for what there is. Ends with
    ``plan.count[GO]`` = RUN and a plan, LEAVE when the stop word is set, or IDLE after `patience` turns
    without a plan (0 = never); the caller's grid barrier shows it to the other blocks.
    """
    publish(block, window, slots, queue, plan, cache, model)
    turns = i64(0)
    while True:
        scan(window, slots, queue)
        barrier()
        if thread_id() == 0:
            cancel_running(window, slots, queue, cache)
        admit(block, window, slots, queue, cache, context, model.vocab)
        make_plan(block, window, slots, queue, plan, model.vocab)
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
        beat(window, RUN_COUNT, queue.count[RUNNING])
        beat(window, WAIT_COUNT, queue.count[WAITING_TAIL] - queue.count[WAITING_HEAD])
        beat(window, STATE, SERVING)
    if load_acquire(window.stop, 0, SYSTEM) != 0:
        queue.count[CHUNKS] = 0  # the step planned just now is not run
        say_goodbye(window, slots, queue, cache)
        return LEAVE
    if plan.count[ROWS] > 0:
        step = i64(window.heartbeat[STEPS]) + 1
        beat(window, STEPS, step)
        begin_step(plan, step, layers)
        return RUN
    if patience > 0 and turns >= patience:
        return IDLE
    return -1


@device
def say_goodbye(window, slots, queue, cache):
    """End every request, running or waiting, with SHUTDOWN, as far as the outboxes have room. One lane."""
    while queue.count[RUNNING] > 0:
        if not finish(window, slots, queue, cache, i64(queue.running[0]), SHUTDOWN):
            break
    while queue.count[WAITING_HEAD] < queue.count[WAITING_TAIL]:
        if not finish(window, slots, queue, cache, waiting_at(queue, queue.count[WAITING_HEAD]), SHUTDOWN):
            break
        queue.count[WAITING_HEAD] += 1
    beat(window, STATE, STOPPED)
