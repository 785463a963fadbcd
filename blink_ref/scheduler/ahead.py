"""With a block of its own, the scheduler works while the others compute: it drafts the next step meanwhile.

Of most steps everything but their tokens is known before the step before has ended: who decodes goes on, by a row.
So while the others compute a step, block 0 sends what the step before has brought, takes arrivals in,
admits, and deals the next step's rows, as if no request ended (what vLLM and SGLang do on the host, as
asynchronous and overlapped scheduling). What is left to do between the two steps is to take the tokens in and to
put them into their rows. A request that ended after all has one row computed for nothing, and it is dropped.

What cannot be known ahead is left to the time between the steps: who gives its pages away when there are too few,
urgent requests, log probabilities to be sent, and the end of all.
"""

from ..ring.device import worker_of
from ..simt import device
from ..simt.vocabulary import (
    SYSTEM,
    atomic_add,
    barrier,
    block_threads,
    i32,
    i64,
    load_relaxed,
    rank_index,
    thread_id,
)
from .pause import copy_plan
from .residence import RECORDS_A_SAMPLE
from .sight import begin_step
from .state import CHUNKS, FIRST_LAYER, GO, IN_RUNNING, PAUSED, ROWS, RUN, SCORED


@device
def may_draft(window, queue, plan, wanted):
    """1, or 0 where the next step has to be planned when this one has ended. One lane."""
    stopped = load_relaxed(window.stop, 0, SYSTEM) != 0
    return i64(wanted and not (stopped or queue.count[PAUSED] == 1 or plan.count[SCORED] > 0))


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
def issue(window, queue, plan, ahead, layers):
    """The draft becomes the plan, now that its tokens are known. All lanes of one block; lane 0 is the last."""
    draft = ahead.draft
    if draft.count[GO] == RUN:
        chunk = i64(thread_id())
        while chunk < draft.count[CHUNKS]:
            source = i64(ahead.source[chunk])
            if source >= 0 and draft.count[FIRST_LAYER] == 0:
                draft.token[draft.chunk_row[chunk]] = i32(rank_index(plan.best[source]))
            chunk += block_threads()
        barrier()
        copy_plan(draft, plan)
    barrier()
    if thread_id() == 0:
        plan.count[GO] = draft.count[GO]
        draft.count[ROWS] = i32(0)
        if plan.count[GO] == RUN and plan.count[FIRST_LAYER] == 0:
            begin_step(window, queue, plan, layers)
