"""THE kernel: launched once, it serves until it is told to stop. Start reading here.

A token's way: the NIC writes a prompt and rings a doorbell (nic/client.py); block 0 sees it, admits the
request and plans a step (scheduler/schedule.py); all blocks compute the step (engine/forward.py, kernels/);
block 0 writes the token drawn into the NIC's outbox (scheduler/retire.py) and plans the next step. No
host code runs in between.
"""

from ..scheduler.schedule import schedule
from ..scheduler.state import GO, RUN
from ..simt import device, grid_barrier
from ..simt.vocabulary import i64
from .forward import forward


@device
def serve(block, window, slots, queue, plan, paused, sampling, cache, model, act, context, max_steps, patience):
    """Serve the window's requests. All lanes of all blocks.

    Returns when the window's stop word is set, after `max_steps` steps (0 = no limit), or after the
    scheduler has turned `patience` times without finding a step to run (0 = it waits for ever). The
    state it leaves in its arrays is whole: launched again, it goes on.
    """
    step = i64(0)
    while max_steps == 0 or step < max_steps:
        if block.id == 0:
            schedule(window, slots, queue, plan, paused, sampling, cache, model, act, context, patience)
        grid_barrier(block)
        if plan.count[GO] != RUN:
            break
        forward(block, window, slots, queue, plan, paused, sampling, cache, model, act)
        step += 1
