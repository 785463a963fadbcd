"""Batching: the plan of one step, decode rows first, then chunks of prompts as far as the rows go.

Requests join and leave between steps (continuous batching: Yu et al., 2022), and a prompt is computed in
chunks beside the others' decode rows (chunked prefill: Agrawal et al., 2023).
"""

from ..ring.device import outbox_room, worker_of
from ..simt import device
from ..simt.vocabulary import barrier, block_threads, i32, i64, thread_id
from .state import CHUNKS, DECODING, ROWS, RUNNING, SAMPLES

BEST_OF_NONE = i64(-(2**63))

RECORDS_A_SAMPLE = 2
"""A sample sends a token, and maybe the END."""


def chunks_spec(running: list[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Chunks (index into `running`, rows) for running requests (prompt length, positions done), in plan order."""
    chunks = [(n, 1) for n, (prompt, done) in enumerate(running) if done >= prompt]
    left = rows - len(chunks)
    for n, (prompt, done) in enumerate(running):
        if done < prompt and left > 0:
            chunks.append((n, min(left, prompt - done)))
            left -= chunks[-1][1]
    return chunks


@device
def make_plan(block, window, slots, queue, plan, vocab):
    """Fill the plan for one step. All lanes of the scheduler's block; ends with a barrier."""
    if thread_id() == 0:
        for worker in range(window.workers):
            window.room[worker] = outbox_room(window, worker)
        deal_rows(window, slots, queue, plan)
    barrier()
    for chunk in range(queue.count[CHUNKS]):
        fill_rows(window, slots, queue, plan, chunk, vocab)
    barrier()


@device
def deal_rows(window, slots, queue, plan):
    """Give each running request its rows: one if it decodes, else what is left of the step. One lane."""
    queue.count[CHUNKS] = 0
    plan.count[ROWS] = i32(0)
    plan.count[SAMPLES] = i32(0)
    most = i64(plan.slot.shape[0])
    for prefill in range(2):
        for n in range(queue.count[RUNNING]):
            slot = i64(queue.running[n])
            left = i64(slots.prompt_len[slot]) - i64(slots.done[slot])
            if (left > 0) == (prefill == 1):
                add_chunk(window, slots, queue, plan, slot, min(max(left, i64(1)), most - i64(plan.count[ROWS])))
        if prefill == 0:
            queue.count[DECODING] = i64(plan.count[ROWS])


@device
def add_chunk(window, slots, queue, plan, slot, n):
    """Add n rows of a slot to the plan; a slot whose worker's outbox is full is left out. One lane."""
    worker, chunk = worker_of(window, slot), i64(queue.count[CHUNKS])
    if n == 0 or window.room[worker] < RECORDS_A_SAMPLE:
        return
    row, first = plan.count[ROWS], slots.done[slot]
    queue.chunk_slot[chunk] = i32(slot)
    queue.chunk_row[chunk] = row
    queue.chunk_rows[chunk] = i32(n)
    queue.chunk_first[chunk] = first
    queue.count[CHUNKS] = chunk + 1
    plan.count[ROWS] = i32(row + n)
    if first + n >= slots.prompt_len[slot]:
        sample = i64(plan.count[SAMPLES])
        plan.sample_row[sample] = i32(row + n - 1)
        plan.draw[sample] = first + n
        plan.temperature[sample] = slots.temperature[slot]
        plan.seed[sample] = slots.seed[slot]
        plan.best[sample] = BEST_OF_NONE
        plan.count[SAMPLES] = i32(sample + 1)
        window.room[worker] -= RECORDS_A_SAMPLE


@device
def fill_rows(window, slots, queue, plan, chunk, vocab):
    """Slot, position and token of each row of a chunk. All lanes share out the rows.

    A prompt token outside the vocabulary, which no well-behaved NIC writes, counts as token 0.
    """
    slot, row, first = i64(queue.chunk_slot[chunk]), i64(queue.chunk_row[chunk]), i64(queue.chunk_first[chunk])
    prompt_at, prompt_len = i64(slots.prompt_at[slot]), i64(slots.prompt_len[slot])
    n = i64(thread_id())
    while n < queue.chunk_rows[chunk]:
        position = first + n
        token = i64(slots.last[slot])
        if position < prompt_len:
            token = i64(window.arena[prompt_at + position])
            if token >= vocab:
                token = i64(0)
        plan.slot[row + n] = i32(slot)
        plan.position[row + n] = i32(position)
        plan.token[row + n] = i32(token)
        n += block_threads()
