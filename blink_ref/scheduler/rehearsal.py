"""Rehearsals: when there is nothing to do, the scheduler goes the way of a request that nobody has sent.

A GPU's instructions come from memory through caches, the last of them before L2 of some 128 KB, shared by
neighbouring SMs. A step of the model takes more than that: when it has ended, the scheduler's own instructions are
gone, and each jump to one that has not been fetched lately takes 290 clocks (H200). An idle scheduler has time to
fetch them, and they are fetched by being run: it takes a request out of a free slot, admits it, gives it pages and
drafts its step. Then all is put back, and no step is run.

The slot is the last one. Its record, which the NIC may be writing, is not read, but one that is nobody's; and if
its doorbell rings meanwhile, that is seen afterwards. Of a rehearsal one can see the slot's word of state alone.
"""

from ..kvcache.pages import FREE as FREE_PAGES
from ..ring.device import workers_of
from ..ring.layout import FREE, PREFILL, REHEARSED_PAGES
from ..simt import device
from ..simt.vocabulary import barrier, i32, i64, thread_id, u32
from .residence import leave_batch, release_pages
from .state import ARRIVED, CHUNKS, ENDING, FOUND, REHEARSING, ROWS, RUNG, TRACING, WAITING

REHEARSAL = 2
"""The turn that is one, of those in which there is nothing to do."""

MANY = 256
"""Pages of a cache in which a few are not missed."""

TAKEN, STATE, POSITION = range(3)
"""Places in :attr:`Queue.kept`."""


@device
def may_rehearse(slots, queue, cache):
    """Whether a rehearsal would disturb nobody: no event tells of it, and no cached page gives way to it.

    Or of MANY pages those that are unused for longest, once: they are free afterwards, for the next one, too.
    """
    enough = cache.count[FREE_PAGES] > REHEARSED_PAGES or cache.pages >= MANY
    free = slots.state[rehearsing_slot(slots)] == FREE and slots.flight[rehearsing_slot(slots)] == 0
    return queue.rehearses == 1 and free and enough and queue.count[TRACING] == 0


@device
def rehearsing_slot(slots):
    """The slot that rehearsals use."""
    return i64(slots.state.shape[0]) - 1


@device
def record_of(window, queue, slot):
    """The place of a slot's record; that of a rehearsal is the last. One lane."""
    if queue.count[REHEARSING] == 1:
        return i64(window.request.shape[0]) - 1
    return slot


@device
def begin_rehearsal(window, slots, queue):
    """As if the last slot had rung. All lanes; ends with a barrier."""
    if thread_id() == 0:
        slot = rehearsing_slot(slots)
        state, position = window.state[slot], window.position[slot]
        queue.kept[TAKEN] = i64(slots.taken[slot])
        queue.kept[STATE] = i64(state)
        queue.kept[POSITION] = i64(position)
        queue.rung[0] = i32(slot)
        queue.count[RUNG] = 1
        queue.count[REHEARSING] = 1
    barrier()


@device
def pretend(window, slots, sampling, cache, context):
    """What was taken out of the slot is a plain request for one token. All lanes; ends with a barrier."""
    if thread_id() == 0:
        slot = rehearsing_slot(slots)
        length = min(REHEARSED_PAGES * i64(cache.page_size) + 1, context - 1)
        slots.ending[slot] = slots.urgent[slot] = slots.leader[slot] = i32(0)
        slots.deadline[slot] = i64(0)
        slots.prompt_at[slot] = i64(workers_of(window)) * window.arena_size
        slots.known[slot] = slots.prompt_len[slot] = i32(length)
        slots.limit[slot] = i32(1)
        sampling.valid[slot] = i32(1)
        sampling.min_tokens[slot] = sampling.stops[slot] = sampling.biases[slot] = i32(0)
        sampling.logprobs[slot] = sampling.filtered[slot] = i32(0)
    barrier()


@device
def end_rehearsal(window, slots, queue, plans, draft, cache):
    """Put back what the rehearsal has changed. All lanes; lane 0 is the last."""
    if thread_id() == 0:
        slot = rehearsing_slot(slots)
        if slots.state[slot] == PREFILL:
            queue.count[FOUND] -= i64(slots.done[slot])
            release_pages(window, slots, queue, cache, slot)
            leave_batch(queue, slot)
        else:
            queue.count[WAITING] -= 1
        queue.count[ENDING] = 0  # it was 0, and nobody else is here
        queue.count[ARRIVED] -= 1
        queue.count[REHEARSING] = 0
        plans.count[draft, ROWS] = plans.count[draft, CHUNKS] = i32(0)
        slots.state[slot] = i32(FREE)
        slots.ending[slot] = i32(0)
        slots.taken[slot] = u32(queue.kept[TAKEN])
        window.state[slot] = u32(queue.kept[STATE])
        window.position[slot] = u32(queue.kept[POSITION])
