"""After a step: tokens go out, full pages are filed, requests end."""

from ..kvcache.pages import empty_limbo
from ..kvcache.prefix import file_page
from ..ring.device import outbox_room, worker_of, write_record
from ..ring.layout import (
    CANCEL,
    CANCELLED,
    DECODE,
    DONE,
    END,
    EVENT_FINISH,
    FAILED,
    FREE,
    LENGTH,
    MOST_LOGPROBS,
    PREFILL,
    STOP,
    TIME,
    TOKEN,
)
from ..simt import device
from ..simt.vocabulary import divide, i32, i64, rank_index, thread_id, u32
from .arrivals import mark_ending
from .residence import leave_batch, release_pages, show_free, show_page
from .sight import LOOKED, show_step, stamp
from .state import CHUNKS, ENDING, PAUSED, WAITING
from .trace import event


def end_spec(token: int, eos: tuple[int, ...], ignore_eos: bool, stops: tuple[int, ...], left: int) -> int:
    """Why a request ends with the token it has just got, when `left` more may come: STOP, LENGTH, or 0."""
    if token in stops or (token in eos and not ignore_eos):
        return STOP
    return 0 if left else LENGTH


@device
def end_reason(slots, sampling, eos, slot, token):
    """As :func:`end_spec`, for the newest token of a slot; one lane."""
    reason = i64(0)
    if slots.known[slot] - slots.prompt_len[slot] >= slots.limit[slot]:
        reason = i64(LENGTH)
    for n in range(sampling.stops[slot]):
        if token == sampling.stop[slot, n]:
            reason = i64(STOP)
    if slots.ignore_eos[slot] == 0:
        for n in range(eos.shape[0]):
            if token == eos[n]:
                reason = i64(STOP)
    return reason


@device
def publish(window, slots, queue, plan, cache, sampling, model, act):
    """Send the step's tokens, file the pages it filled, and mark the requests it ends. All lanes of one block.

    One lane does it, in the order of the chunks. The plan saw to it that the outboxes have room. What
    the step did for a request that has ended meanwhile is dropped. No barrier.
    """
    if thread_id() == 0 and plan.count[CHUNKS] > 0:
        show_step(window, queue, plan, model.layers)
        for chunk in range(plan.count[CHUNKS]):
            slot = i64(plan.chunk_slot[chunk])
            slots.flight[slot] = i32(0)
            running = slots.state[slot] == PREFILL or slots.state[slot] == DECODE
            if running and slots.taken[slot] == plan.chunk_taken[chunk]:
                land(window, slots, queue, plan, cache, sampling, model, act, chunk, slot)
        plan.count[CHUNKS] = i32(0)
        if queue.count[PAUSED] == 0:
            empty_limbo(cache)
    if thread_id() == 0:
        stamp(plan, LOOKED, True)


@device
def land(window, slots, queue, plan, cache, sampling, model, act, chunk, slot):
    """One lane: a chunk's positions are in the cache, and its sample, if it drew one, is a token."""
    size, before = i64(cache.page_size), i64(slots.done[slot])
    done = before + plan.chunk_rows[chunk]
    slots.done[slot] = i32(done)
    window.position[slot] = u32(done)
    if cache.sharing == 1:
        for page in range(divide(before, size)[0], divide(done, size)[0]):
            given_up = file_page(slots, cache, slot, page)
            if given_up >= 0:
                show_free(window, queue, cache, slot, given_up)
                show_page(window, queue, cache, slot, page)
    sample = i64(plan.chunk_sample[chunk])
    if sample >= 0:
        token = i64(rank_index(plan.best[sample]))
        send_token(window, slots, sampling, act, slot, sample, token)
        reason = end_reason(slots, sampling, model.eos, slot, token)
        if reason != 0:
            mark_ending(slots, queue, slot, reason)


@device
def send_token(window, slots, sampling, act, slot, sample, token):
    """One token of a slot into its worker's outbox, its log probabilities beside it. One lane."""
    worker = worker_of(window, slot)
    row = i64(window.written[worker]) & ((i64(1) << i64(window.outbox_bits)) - 1)
    row += worker << i64(window.outbox_bits)
    for n in range(sampling.logprobs[slot]):
        window.logprob[row, n] = act.chosen_logprob[sample * (1 + MOST_LOGPROBS) + n]
        if n > 0:
            window.likely[row, n - 1] = u32(act.likely[sample * MOST_LOGPROBS + n - 1])
    write_record(window, worker, slot, TOKEN, token)
    slots.token[slot, slots.known[slot]] = i32(token)
    slots.known[slot] += i32(1)
    slots.state[slot] = i32(DECODE)
    window.state[slot] = u32(DECODE)


@device
def end_requests(window, slots, queue, cache):
    """End the requests that are marked: their pages and places go at once, their slots with the END. One lane.

    A request whose worker's outbox is full stays marked.
    """
    kept = i64(0)
    for n in range(queue.count[ENDING]):
        slot = i64(queue.ended[n])
        if slots.state[slot] != DONE:
            if slots.state[slot] == PREFILL or slots.state[slot] == DECODE:
                release_pages(window, slots, queue, cache, slot)
                leave_batch(queue, slot)
            else:
                queue.count[WAITING] -= 1
            slots.state[slot] = i32(DONE)
        if not send_end(window, slots, queue, slot):
            queue.ended[kept] = i32(slot)
            kept += 1
    queue.count[ENDING] = kept


@device
def send_end(window, slots, queue, slot):
    """The END of a slot's request, if there is room for it: then the slot is free. One lane."""
    worker, reason = worker_of(window, slot), i64(slots.ending[slot])
    if outbox_room(window, worker) < 1:
        return False
    write_record(window, worker, slot, END, reason)
    event(window, queue, EVENT_FINISH, slot, reason)
    slots.state[slot] = i32(FREE)
    seen = DONE
    if reason in (CANCEL, TIME):
        seen = CANCELLED
    elif reason > CANCEL:
        seen = FAILED
    window.state[slot] = u32(seen)
    return True
