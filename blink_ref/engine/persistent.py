"""THE kernel: launched once, it serves until it is told to stop. Start reading here.

A token's way: the NIC writes a prompt and rings a doorbell (nic/client.py); block 0 sees it, admits the
request and plans a step (scheduler/schedule.py); all blocks compute the step (engine/forward.py, kernels/);
block 0 writes the token drawn into the NIC's outbox (scheduler/retire.py) and plans the next step. No
host code runs in between.
"""

from ..kernels.stream import set_up
from ..scheduler.schedule import schedule
from ..scheduler.sight import DRAWN, stamp
from ..scheduler.state import BESIDE, GO, INTERRUPTED, LEFT, NOW, RUN, plan_of
from ..simt import device, grid_barrier, team_of
from ..simt.vocabulary import i32, thread_id
from .forward import forward


@device
def serve(block, window, slots, queue, plans, sampling, cache, model, act, context, max_steps, patience):
    """Serve the window's requests. All lanes of all blocks.

    Returns when the window's stop word is set, after `max_steps` steps or parts of them (0 = no limit), or
    after the scheduler has turned `patience` times without finding a step to run (0 = it waits for ever). The
    state it leaves in its arrays is whole: launched again, it goes on.
    """
    if block.id == 0 and thread_id() == 0:
        queue.count[LEFT] = max_steps
    team = team_of(block, queue.own_block)  # those who compute: all, or all but the scheduler
    set_up(team, model)
    while True:
        beside = i32(0)
        if block.id == 0:
            beside = i32(queue.count[BESIDE])
            schedule(window, slots, queue, plans, sampling, cache, model, act, context, patience, beside)
        if beside == 0:
            grid_barrier(block)
            if queue.count[GO] != RUN:
                break
            beside = i32(i32(block.id) < i32(queue.own_block) and queue.count[BESIDE] == 1)
        else:
            beside = i32(0)
        if beside == 0:
            if i32(block.id) >= i32(queue.own_block):
                forward(team, window, slots, queue, plans, i32(queue.count[NOW]), sampling, cache, model, act)
            last = queue.count[LEFT] == 0
            grid_barrier(block)
            if block.id == 0 and thread_id() == 0:
                plan = plan_of(plans, queue.count[NOW])
                stamp(plan, DRAWN, plan.count[INTERRUPTED] == 0)
            if last:
                break
