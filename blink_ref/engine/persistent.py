"""THE kernel: launched once, it serves until it is told to stop. Start reading here.

A token's way: the NIC writes a prompt and rings a doorbell (nic/client.py); block 0 sees it, admits the
request and plans a step (scheduler/schedule.py); all blocks compute the step (engine/forward.py, kernels/);
block 0 writes the token drawn into the NIC's outbox (scheduler/retire.py) and plans the next step. No
host code runs in between.
"""

from ..scheduler.ahead import come_down, look_ahead
from ..scheduler.schedule import schedule
from ..scheduler.sight import DRAWN, stamp
from ..scheduler.state import GO, INTERRUPTED, RUN
from ..simt import device, grid_barrier, team_of
from ..simt.vocabulary import i64, thread_id
from .forward import forward


@device
def serve(
    block, window, slots, queue, plan, paused, ahead, sampling, cache, model, act, context, max_steps, patience
):
    """Serve the window's requests. All lanes of all blocks.

    Returns when the window's stop word is set, after `max_steps` steps (0 = no limit), or after the
    scheduler has turned `patience` times without finding a step to run (0 = it waits for ever). The
    state it leaves in its arrays is whole: launched again, it goes on.
    """
    step, alone = i64(0), i64(queue.own_block)
    team = team_of(block, alone)  # those who compute: all, or all but the scheduler
    while max_steps == 0 or step < max_steps:
        if block.id == 0:
            schedule(window, slots, queue, plan, paused, ahead, sampling, cache, model, act, context, patience)
        grid_barrier(block)
        if plan.count[GO] != RUN:
            break
        step += 1
        if block.id < alone:
            last = step == max_steps
            look_ahead(window, slots, queue, plan, ahead, sampling, cache, model, act, context, last)
        else:
            forward(team, window, slots, plan, paused, sampling, cache, model, act)
        grid_barrier(block)
        stamp(plan, DRAWN, block.id == 0 and thread_id() == 0 and plan.count[INTERRUPTED] == 0)
    if block.id < alone and plan.count[GO] == RUN:
        come_down(window, slots, queue, plan, ahead, cache)
