"""After a step: tokens go out, full pages are filed, requests end."""

from ..kvcache.pages import hold, let_go
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
from ..simt.vocabulary import block_threads, divide, i32, i64, rank_index, thread_id, u32
from .arrivals import mark_ending
from .residence import leave_batch, release_pages, show_free, show_page
from .state import CHUNKS, ENDING, MOVES, TAKEN_IN, WAITING
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
def take_in(slots, queue, landed, sampling, eos):
    """The landed step's tokens become known, its positions done, and the requests that it ends are marked.

    All lanes of one block share the chunks; no barrier. Once a step: the second time nothing is done. What the
    step did for a request that has ended meanwhile is dropped: its chunk is nobody's from now on.
    """
    chunks = i64(landed.count[CHUNKS]) * (1 - i64(landed.count[TAKEN_IN]))
    chunk = i64(thread_id())
    while chunk < chunks:
        slot = i64(landed.chunk_slot[chunk])
        slots.flight[slot] = slots.ahead[slot] = i32(0)
        running = slots.state[slot] == PREFILL or slots.state[slot] == DECODE
        if running and slots.taken[slot] == landed.chunk_taken[chunk]:
            land(slots, queue, landed, sampling, eos, chunk, slot)
        else:
            landed.chunk_slot[chunk] = i32(-1)
        chunk += block_threads()


@device
def land(slots, queue, landed, sampling, eos, chunk, slot):
    """One lane: a chunk's positions are in the cache, and its sample, if it drew one, is a token."""
    slots.done[slot] = landed.chunk_first[chunk] + landed.chunk_rows[chunk]
    if landed.chunk_sample[chunk] >= 0:
        token = i32(rank_index(landed.best[landed.chunk_sample[chunk]]))
        slots.token[slot, slots.known[slot]] = token
        slots.known[slot] += i32(1)
        slots.state[slot] = i32(DECODE)
        reason = end_reason(slots, sampling, eos, slot, token)
        if reason != 0:
            mark_ending(slots, queue, slot, reason)


@device
def tell(window, sampling, act, landed):
    """Send what has landed, in the order of the chunks; the plan saw to it that there is room. One lane."""
    for chunk in range(landed.count[CHUNKS]):
        slot = i64(landed.chunk_slot[chunk])
        if slot >= 0:
            window.position[slot] = u32(landed.chunk_first[chunk] + landed.chunk_rows[chunk])
            sample = i64(landed.chunk_sample[chunk])
            if sample >= 0:
                send_token(window, sampling, act, slot, sample, rank_index(landed.best[sample]))


@device
def file_landed(window, slots, queue, cache, landed):
    """File the pages that have been filled; nothing that has landed is in hand any more. One lane."""
    if cache.sharing == 1:
        for chunk in range(landed.count[CHUNKS]):
            slot, first = i64(landed.chunk_slot[chunk]), i64(landed.chunk_first[chunk])
            if slot >= 0:
                file_pages(window, slots, queue, cache, slot, first, first + landed.chunk_rows[chunk])
    landed.count[CHUNKS] = i32(0)


@device
def file_pages(window, slots, queue, cache, slot, begin, end):
    """File the pages of a slot that positions `begin` to `end` have filled. One lane.

    Where a page with the same text is filed already, the slot gives its own up for it: at once, or where
    other blocks are reading the slot's page table, when they have done so (:func:`move_pages`).
    """
    size = i64(cache.page_size)
    place, whole, parent = divide(begin, size)[0], divide(end, size)[0], i64(0)
    if place > 0:
        parent = i64(cache.table[slot, place - 1]) + 1
    while place < whole:
        page = file_page(slots, cache, slot, place, parent)
        if page != cache.table[slot, place]:
            if slots.flight[slot] == 0:
                hold(cache, page)
                move_page(window, slots, queue, cache, slot, place, page)
            elif slots.ending[slot] == 0:
                hold(cache, page)
                n = queue.count[MOVES]
                queue.moved[n, 0] = i32(slot)
                queue.moved[n, 1] = i32(place)
                queue.moved[n, 2] = i32(page)
                queue.count[MOVES] = n + 1
            else:
                break  # it lets go of its pages before they can be moved
        parent = page + 1
        place += 1


@device
def move_pages(window, slots, queue, cache):
    """Nobody reads the page tables now: do to them what was put off. One lane."""
    for n in range(queue.count[MOVES]):
        slot, place, page = i64(queue.moved[n, 0]), i64(queue.moved[n, 1]), i64(queue.moved[n, 2])
        move_page(window, slots, queue, cache, slot, place, page)
    queue.count[MOVES] = 0


@device
def move_page(window, slots, queue, cache, slot, place, page):
    """A page that the slot holds takes the place of its own with the same text, which it gives up. One lane."""
    own = i64(cache.table[slot, place])
    cache.table[slot, place] = i32(page)
    let_go(cache, own, 0)
    show_free(window, queue, cache, slot, own)
    show_page(window, queue, slot, place, page)


@device
def send_token(window, sampling, act, slot, sample, token):
    """One token of a slot into its worker's outbox, its log probabilities beside it. One lane."""
    worker = worker_of(window, slot)
    row = i64(window.written[worker]) & ((i64(1) << i64(window.outbox_bits)) - 1)
    row += worker << i64(window.outbox_bits)
    scored = i64(sampling.logprobs[slot])
    for n in range(scored):
        window.logprob[row, n] = act.chosen_logprob[sample * (1 + MOST_LOGPROBS) + n]
        if n > 0:
            window.likely[row, n - 1] = u32(act.likely[sample * MOST_LOGPROBS + n - 1])
    write_record(window, worker, slot, TOKEN, token, scored > 0)
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
    if outbox_room(window, worker, 1) < 1:
        return False
    write_record(window, worker, slot, END, reason, True)
    event(window, queue, EVENT_FINISH, slot, reason)
    slots.state[slot] = i32(FREE)
    seen = DONE
    if reason in (CANCEL, TIME):
        seen = CANCELLED
    elif reason > CANCEL:
        seen = FAILED
    window.state[slot] = u32(seen)
    return True
