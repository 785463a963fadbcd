"""THE kernel: launched once, it serves until it is told to stop. Start reading here.

A token's way: the NIC writes a prompt and rings a doorbell (nic/client.py); block 0 sees it, admits the
request and plans a step (scheduler/schedule.py); all blocks compute the step (engine/forward.py, kernels/);
block 0 writes the token drawn into the NIC's outbox (scheduler/retire.py) and plans the next step. No
host code runs in between.
"""

from ..scheduler.schedule import schedule
from ..scheduler.sight import DRAWN, stamp
from ..scheduler.state import GO, INTERRUPTED, NOW, RUN, plan_of
from ..simt import device, grid_barrier, team_of
from ..simt.vocabulary import i32, i64, thread_id
from .forward import forward

MOST_STEPS = 2**31 - 1


@device
def serve(block, window, slots, queue, plans, sampling, cache, model, act, context, max_steps, patience):
    """Serve the window's requests. All lanes of all blocks.

    Returns when the window's stop word is set, after `max_steps` steps (0 = no limit), or after the
    scheduler has turned `patience` times without finding a step to run (0 = it waits for ever). The
    state it leaves in its arrays is whole: launched again, it goes on.
    """
    step, beside = i32(0), i32(0)  # half the registers
    team = team_of(block, queue.own_block)  # those who compute: all, or all but the scheduler
    while True:
        if block.id == 0:
            turn = patience, beside, step + 1 != max_steps
            schedule(window, slots, queue, plans, sampling, cache, model, act, context, *turn)
        if beside == 0:
            grid_barrier(block)
            if queue.count[GO] != RUN:
                break
            step = one_more(step)
            beside = i32(block.id < queue.own_block and step != max_steps)
        else:
            beside = i32(0)
        if beside == 0:
            if block.id >= queue.own_block:
                forward(team, window, slots, queue, plans, i32(queue.count[NOW]), sampling, cache, model, act)
            grid_barrier(block)
            if block.id == 0 and thread_id() == 0:
                plan = plan_of(plans, queue.count[NOW])
                stamp(plan, DRAWN, plan.count[INTERRUPTED] == 0)
            if step == max_steps:
                break


@device
def one_more(step):
    """One step more than `step`; MOST_STEPS stands for all numbers from it on, so that 0 never comes again."""
    return i32(min(i64(step) + 1, i64(MOST_STEPS)))
