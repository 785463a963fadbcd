"""With a block of its own, the scheduler works while the others compute: it drafts the next step meanwhile.

Of most steps everything but their tokens is known before the step before has ended: who decodes goes on, by a row.
So while the others compute a step, block 0 takes in and sends what the step before has brought, takes arrivals in,
admits, and deals the next step's rows, as if no request ended (what vLLM and SGLang do on the host, as
asynchronous and overlapped scheduling). What is left to do between the two steps is to put the tokens into their
rows, and the draft in the plan's place. A request that ended after all has one row computed for nothing, and it is
dropped.

What cannot be known ahead is left to the time between the steps: who gives its pages away when there are too few,
urgent requests, log probabilities to be sent, and the end of all.
"""

from ..ring.device import worker_of
from ..simt import device
from ..simt.vocabulary import (
    BLOCK,
    atomic_add,
    barrier,
    block_threads,
    i32,
    i64,
    rank_index,
    thread_id,
)
from .pause import copy_chunk, copy_counts, copy_row, copy_sample
from .residence import RECORDS_A_SAMPLE
from .sight import begin_step
from .state import CHUNKS, FIRST_LAYER, GO, IN_RUNNING, PAUSED, ROWS, RUN, SAMPLES, SCORED, STOPPING


@device
def may_draft(queue, plan, wanted):
    """1, or 0 where the next step has to be planned when this one has ended. One lane."""
    stopped, paused = queue.count[STOPPING] == 1, queue.count[PAUSED] == 1
    return i64(wanted and not (stopped or paused or plan.count[SCORED] > 0))


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
def hand_over(plan, ahead):
    """What the step that has ended has done lands, and what has been drafted becomes the plan, but for its counts.

    All lanes of one block; no barrier. There is time for no more than one load after another: half of the lanes
    take the chunks, and the other half rows and samples, at the same time.
    """
    landed, draft = ahead.landed, ahead.draft
    ended, chunks, rows, samples = plan.count[CHUNKS], draft.count[CHUNKS], draft.count[ROWS], draft.count[SAMPLES]
    copy_counts(plan, landed)
    chunk = i64(thread_id())
    while chunk < max(ended, chunks):
        if chunk < ended:
            copy_chunk(plan, landed, chunk)
            sample = i64(plan.chunk_sample[chunk])
            if sample >= 0:
                landed.token[chunk] = i32(rank_index(plan.best[sample]))
        if chunk < chunks:
            copy_chunk(draft, plan, chunk)
        chunk += block_threads()
    row = half_a_turn(i64(thread_id()))
    while row < rows:
        copy_row(draft, plan, row)
        source = i64(ahead.source[row])
        if source >= 0:
            plan.token[row] = i32(rank_index(plan.best[source]))
        if row < samples:
            copy_sample(draft, plan, row)
        row += block_threads()


@device
def drop_draft(ahead):
    """There is no draft. One lane."""
    ahead.draft.count[ROWS] = ahead.draft.count[CHUNKS] = i32(0)


@device
def half_a_turn(lane):
    """The number of a lane when they are counted from the middle on."""
    threads = i64(block_threads())
    lane += threads >> 1
    return lane - threads if lane >= threads else lane


@device
def issue(window, queue, plan, ahead, layers):
    """The plan's counts are the draft's, and its step begins, if one is to be run. All lanes of one block; lane 0 is
    the last."""
    draft = ahead.draft
    if draft.count[GO] == RUN:
        copy_counts(draft, plan)
    barrier()
    if thread_id() == 0:
        drop_draft(ahead)
        if draft.count[GO] != RUN:
            plan.count[GO] = draft.count[GO]
            plan.count[CHUNKS] = i32(0)
        elif plan.count[FIRST_LAYER] == 0:
            begin_step(window, queue, plan, layers)
