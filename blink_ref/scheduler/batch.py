"""Batching: the plan of one step, so many rows for each of the running.

Requests join and leave between steps (continuous batching: Yu et al., 2022), and a prompt is computed in
chunks beside the others' decode rows (chunked prefill: Agrawal et al., 2023). To the plan there is one kind
of request: it has tokens that it knows and positions that it has computed, and wants the rows between.
Decoding is the case of one row; a preempted request wants all of them again. A row that is the last one
known draws a sample.
"""

from ..ring.device import worker_of, workers_of
from ..ring.layout import PAUSED as SHOWN_AS_PAUSED
from ..simt import device
from ..simt.vocabulary import barrier, block_threads, i32, i64, thread_id, u32
from .arrivals import counted_from_the_middle
from .pause import bring_back, known_soon, urgent_first
from .residence import RECORDS_A_SAMPLE, secure
from .state import (
    ASIDE,
    CHUNKS,
    DEALING,
    DECODING,
    DRAFTING,
    FILTERED,
    IN_PAUSED,
    NEXT,
    PAUSED,
    PREEMPTIBLE,
    ROWS,
    RUNNING,
    SAMPLES,
    SCORED,
    SHORT,
    STREAK,
    URGENT_RUNG,
    URGENT_SEEN,
    plan_of,
)


def chunks_spec(running: list[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Chunks (index into `running`, rows) for running requests (tokens known, positions done), in plan order:
    every one that wants one row has it, and the others share what is left, first come, first served."""
    wanted = [known - done for known, done in running]
    left = rows - wanted.count(1)
    chunks = []
    for n, want in enumerate(wanted):
        given = want if want == 1 else min(want, left)
        left -= given if want > 1 else 0
        if given:
            chunks.append((n, given))
    return chunks


@device
def make_draft(window, slots, queue, plans, draft, sampling, cache, beside):
    """Draft one step, if there is anything to do: plan `draft`, or the one put aside, as NEXT says.

    All lanes of the scheduler's block; no barrier at the end.
    """
    if thread_id() == 0:
        queue.count[NEXT] = choose_work(window, slots, queue, plans, draft, sampling, cache, beside)
    barrier()
    if queue.count[NEXT] == draft:
        for chunk in range(plans.count[draft, CHUNKS]):
            fill_rows(slots, plan_of(plans, draft), chunk)


@device
def choose_work(window, slots, queue, plans, draft, sampling, cache, beside):
    """Deal rows: of an urgent step, else of none if a paused one can go on, else of everybody's. One lane.

    Beside a step that is being computed, only the last, and only if there are pages for all; else of none. Returns
    the number of the plan that is next.
    """
    forget_rows(plans, draft)
    urgent, rows = urgent_first(slots, queue), i64(0)
    if beside == 0 and urgent:
        deal_rows(window, slots, queue, plans, draft, sampling, cache, True)
        rows = i64(plans.count[draft, ROWS])
        queue.count[STREAK] += 1
    if beside == 0 and rows == 0 and queue.count[PAUSED] == 1:
        bring_back(window, queue, plan_of(plans, queue.count[ASIDE]))
        return queue.count[ASIDE]
    everybody = beside == 1 and queue.count[DRAFTING] == 1 and not urgent
    everybody = everybody or (beside == 0 and rows == 0)
    if everybody:
        queue.count[STREAK] = 0
        deal_rows(window, slots, queue, plans, draft, sampling, cache, False)
        if beside == 1 and queue.count[SHORT] > 0:
            forget_rows(plans, draft)
    return i64(draft)


@device
def forget_rows(plans, n):
    """There is nothing in the plan. One lane."""
    plans.count[n, ROWS] = plans.count[n, CHUNKS] = i32(0)


@device
def deal_rows(window, slots, queue, plans, draft, sampling, cache, urgent_only):
    """Give the running their rows, by their order, and the pages for them. One lane."""
    for place in range(plans.count.shape[1]):
        plans.count[draft, place] = i32(0)
    plans.count[draft, URGENT_SEEN] = i32(queue.count[URGENT_RUNG])
    queue.count[SHORT] = 0
    left = i64(plans.slot.shape[1])
    for n in range(queue.count[RUNNING]):
        slot = i64(queue.running[n])
        left -= i64(wanted_rows(slots, slot, urgent_only) == 1)
    for worker in range(workers_of(window)):
        window.dealt[worker] = 0
    queue.count[DEALING] = 0
    while queue.count[DEALING] < queue.count[RUNNING]:
        slot = i64(queue.running[queue.count[DEALING]])
        want = wanted_rows(slots, slot, urgent_only)
        n = want
        if want > 1:
            n = min(want, left)
        if n > 0:
            if not may_send(window, slot):
                window.state[slot] = u32(SHOWN_AS_PAUSED)
            else:
                held = secure(window, slots, queue, cache, slot, n)
                queue.count[SHORT] += i64(held < n)
                n = held
                if n > 0:
                    add_chunk(window, slots, queue, plan_of(plans, draft), sampling, slot, n)
                if want > 1:
                    left -= n
        queue.count[DEALING] += 1
    queue.count[DEALING] = -1


@device
def wanted_rows(slots, slot, urgent_only):
    """Rows that a running slot wants of the step; none if it has some in a paused one. One lane.

    While it has rows in a step that other blocks compute: what it will want then, unless it ends with it.
    """
    flight, urgent, limit = slots.flight[slot], slots.urgent[slot], i64(slots.limit[slot])
    length, done, ahead = i64(slots.prompt_len[slot]), i64(slots.done[slot]), i64(slots.ahead[slot])
    known, soon = i64(slots.known[slot]), known_soon(slots, slot)
    if flight == IN_PAUSED or (urgent_only and urgent == 0) or (soon > known and soon - length >= limit):
        return i64(0)
    return soon - done - ahead


@device
def may_send(window, slot):
    """Whether its outbox has room for one more sample in this plan. One lane."""
    worker = worker_of(window, slot)
    return window.room[worker] - window.dealt[worker] >= RECORDS_A_SAMPLE


@device
def add_chunk(window, slots, queue, plan, sampling, slot, n):
    """Add n rows of a slot to the plan. One lane; all is read before anything is written."""
    chunk, row, sample = i64(plan.count[CHUNKS]), i64(plan.count[ROWS]), i64(plan.count[SAMPLES])
    decoding, filtered, scored = plan.count[DECODING], plan.count[FILTERED], plan.count[SCORED]
    first, length = i64(slots.done[slot]) + slots.ahead[slot], slots.prompt_len[slot]
    taken, urgent, state, soon = slots.taken[slot], slots.urgent[slot], slots.state[slot], known_soon(slots, slot)
    temperature, seed, logprobs = sampling.temperature[slot], sampling.seed[slot], sampling.logprobs[slot]
    filtered = i32(filtered + sampling.filtered[slot])
    plan.chunk_slot[chunk] = i32(slot)
    plan.chunk_taken[chunk] = taken
    plan.chunk_row[chunk] = i32(row)
    plan.chunk_rows[chunk] = i32(n)
    plan.chunk_first[chunk] = i32(first)
    plan.chunk_sample[chunk] = i32(-1)
    plan.count[CHUNKS] = i32(chunk + 1)
    plan.count[ROWS] = i32(row + n)
    plan.count[DECODING] = i32(decoding + (first >= length))
    window.state[slot] = u32(state)
    if urgent == 0:
        plan.count[PREEMPTIBLE] = i32(queue.layer_preemption)
    if first + n == soon:
        plan.chunk_sample[chunk] = i32(sample)
        plan.sample_row[sample] = i32(row + n - 1)
        plan.sample_slot[sample] = i32(slot)
        plan.draw[sample] = first + n
        plan.temperature[sample] = temperature
        plan.seed[sample] = seed
        plan.count[SAMPLES] = i32(sample + 1)
        plan.count[FILTERED] = filtered
        plan.count[SCORED] = i32(scored + (logprobs > 0))
        window.dealt[worker_of(window, slot)] += RECORDS_A_SAMPLE


@device
def fill_rows(slots, draft, chunk):
    """Slot, position and token of each row of a drafted chunk. All lanes share out the rows, the first warp last.

    Of a token that is not known yet: which sample of the running step it is.
    """
    slot, row, first = i64(draft.chunk_slot[chunk]), i64(draft.chunk_row[chunk]), i64(draft.chunk_first[chunk])
    n = counted_from_the_middle(i64(thread_id()))
    while n < draft.chunk_rows[chunk]:
        draft.slot[row + n] = i32(slot)
        draft.position[row + n] = i32(first + n)
        if first + n < slots.known[slot]:
            draft.token[row + n] = slots.token[slot, first + n]
            draft.source[row + n] = i32(-1)
        else:
            draft.source[row + n] = slots.sample[slot]
        n += block_threads()
