"""With a block of its own, the scheduler works while the others compute: it drafts the next step meanwhile.

Of most steps everything but their tokens is known before the step before has ended: who decodes goes on, by a row.
So while the others compute a step, block 0 takes in and sends what the step before has brought, takes arrivals in,
admits, and deals the next step's rows, as if no request ended (what vLLM and SGLang do on the host, as
asynchronous and overlapped scheduling). Two plans take turns: the one that is computed, and the one that was,
which becomes the next. A drafted row says which sample of the step before is its token, and whoever embeds it
looks there; so between two steps there is nothing to do but to say that the next one begins. A request that ended
after all has one row computed for nothing, and it is dropped.

What cannot be known ahead is left to the time between the steps: who gives its pages away when there are too few,
urgent requests, log probabilities to be sent, and the end of all.
"""

from ..ring.device import worker_of
from ..simt import device
from ..simt.vocabulary import BLOCK, atomic_add, block_threads, i32, i64, thread_id
from .residence import RECORDS_A_SAMPLE
from .sight import begin_step
from .state import (
    ASIDE,
    BESIDE,
    CHUNKS,
    FIRST_LAYER,
    GO,
    IN_RUNNING,
    LEFT,
    NEXT,
    NOW,
    OUTCOME,
    PAUSED,
    RUN,
    SCORED,
    SPARE,
    STEPS,
    STOPPING,
    plan_of,
)


@device
def may_draft(queue, plan):
    """1, or 0 where the next step has to be planned when this one has ended. One lane.

    Of a launch's last step nothing is left in flight.
    """
    stopped, paused = queue.count[STOPPING] == 1, queue.count[PAUSED] == 1
    return i64(queue.count[LEFT] != 1 and not (stopped or paused or plan.count[SCORED] > 0))


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
            atomic_add(window.reserved, worker_of(window, slot), i64(RECORDS_A_SAMPLE), BLOCK)
        chunk += block_threads()


@device
def issue(queue, plans, layers):
    """All blocks do next what the turn has come to. One lane, when all have seen what NOW and SPARE were.

    The plans change places: the next one is the spare one, or the third. What ran last is spare from now on, or,
    if it was put aside, the third.
    """
    go, left, aside = queue.count[OUTCOME], queue.count[LEFT], i64(queue.count[ASIDE])
    now, spare, following = i64(queue.count[NOW]), i64(queue.count[SPARE]), i64(queue.count[NEXT])
    begins, number = plans.count[following, FIRST_LAYER] == 0, queue.count[STEPS] + 1
    left -= i64(go == RUN)
    queue.count[GO] = go
    queue.count[LEFT] = left
    queue.count[BESIDE] = i64(go == RUN and queue.own_block == 1 and left != 0)
    if go == RUN:
        queue.count[NOW] = following
        if aside == now:
            queue.count[SPARE] = third_plan(now, spare)
        elif following == spare:
            queue.count[SPARE] = now
        if begins:
            begin_step(queue, plan_of(plans, following), number, layers)


@device
def third_plan(now, spare):
    """The number of the plan that is neither."""
    return 3 - now - spare
