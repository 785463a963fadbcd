"""After a step: tokens go out, requests end, pages come back."""

from ..kvcache.pages import return_pages
from ..ring.device import outbox_room, worker_of, write_record
from ..ring.layout import CANCEL, CANCELLED, DECODE, DONE, END, FAILED, FREE, LENGTH, STOP, TOKEN
from ..simt import device
from ..simt.vocabulary import barrier, i32, i64, rank_index, thread_id, u32
from .sight import LOOKED, show_pages_free, show_step, stamp
from .state import CHUNKS, RUNNING


def end_spec(token: int, eos: tuple[int, ...], ignore_eos: bool, produced: int, limit: int) -> int:
    """Why a request ends with the token it has just got: STOP, LENGTH, or 0 if it goes on."""
    if token in eos and not ignore_eos:
        return STOP
    return LENGTH if produced >= limit else 0


@device
def end_reason(token, eos, ignore_eos, produced, limit):
    """As :func:`end_spec`; one lane."""
    reason = i64(0)
    if produced >= limit:
        reason = i64(LENGTH)
    if ignore_eos == 0:
        for n in range(eos.shape[0]):
            if token == eos[n]:
                reason = i64(STOP)
    return reason


@device
def publish(block, window, slots, queue, plan, cache, model):
    """Send the step's tokens, and end the requests they end. All lanes of the scheduler's block.

    One lane does it, in the order of the chunks: a request's END follows its last token. The plan
    saw to it that the outboxes have room.
    """
    if thread_id() == 0:
        if queue.count[CHUNKS] > 0:
            show_step(window, queue, plan, model.layers)
        stamp(plan, LOOKED, True)
        sample = i64(0)
        for chunk in range(queue.count[CHUNKS]):
            slot = i64(queue.chunk_slot[chunk])
            slots.done[slot] += queue.chunk_rows[chunk]
            window.position[slot] = u32(slots.done[slot])
            if slots.done[slot] >= slots.prompt_len[slot]:
                token = rank_index(plan.best[sample])
                sample += 1
                send_token(window, slots, slot, token)
                produced, limit = slots.produced[slot], slots.limit[slot]
                reason = end_reason(token, model.eos, slots.ignore_eos[slot], produced, limit)
                if reason != 0:
                    finish(window, slots, queue, cache, slot, reason)
        queue.count[CHUNKS] = 0
    barrier()


@device
def send_token(window, slots, slot, token):
    """One token of a slot into its worker's outbox. One lane."""
    worker = worker_of(window, slot)
    write_record(window, worker, window.written[worker], slot, TOKEN, token)
    window.written[worker] += 1
    slots.last[slot] = i32(token)
    slots.produced[slot] += i32(1)
    if slots.state[slot] != DECODE:
        slots.state[slot] = i32(DECODE)
        window.state[slot] = u32(DECODE)


@device
def finish(window, slots, queue, cache, slot, reason):
    """End a request: its END record, its pages, its place among the running. One lane.

    Returns whether there was room for the END; without it nothing is changed.
    """
    worker = worker_of(window, slot)
    if outbox_room(window, worker) < 1:
        return False
    write_record(window, worker, window.written[worker], slot, END, reason)
    window.written[worker] += 1
    show_pages_free(window, cache, slot, i64(slots.pages[slot]))
    return_pages(cache, slot, i64(slots.pages[slot]))
    slots.pages[slot] = i32(0)
    slots.state[slot] = i32(FREE)
    seen = DONE
    if reason == CANCEL:
        seen = CANCELLED
    elif reason > CANCEL:
        seen = FAILED
    window.state[slot] = u32(seen)
    leave_running(queue, slot)
    return True


@device
def leave_running(queue, slot):
    """Close the gap that a slot leaves among the running, if it is there. One lane."""
    running, kept = i64(queue.count[RUNNING]), i64(0)
    for n in range(running):
        if queue.running[n] != slot:
            queue.running[kept] = queue.running[n]
            kept += 1
    queue.count[RUNNING] = kept
