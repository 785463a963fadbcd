"""Admission: first come, first served, as long as there are pages for the whole of a request.

Since every page a request may need is set aside when it is admitted, no running request ever waits
for one. (Allocation on demand, with preemption, is for a later scheduler.)
"""

from ..kvcache.pages import FREE as FREE_PAGES
from ..kvcache.pages import pages_for, take_pages
from ..ring.device import worker_of
from ..ring.layout import BAD_REQUEST, CANCEL, IGNORE_EOS, NO_PAGES, PREFILL, TOO_LONG
from ..simt import device
from ..simt.vocabulary import barrier, f32, i32, i64, thread_id, u32
from .arrivals import cancelled, waiting_at
from .retire import finish
from .sight import show_pages_taken
from .state import CANDIDATE, DECISION, NEED, RUNNING, WAITING_HEAD, WAITING_TAIL

NOBODY, ADMIT, REFUSED = range(3)
"""Values of DECISION: what lane 0 found at the head of the waiting ring."""


def refusal_spec(prompt_len: int, limit: int, context: int, pages: int, page_size: int) -> int:
    """Why a well-formed request can never run: TOO_LONG, NO_PAGES, or 0."""
    if prompt_len + limit > context:
        return TOO_LONG
    return NO_PAGES if -(-(prompt_len + limit) // page_size) > pages else 0


@device
def admit(block, window, slots, queue, cache, context, vocab):
    """Admit from the head of the waiting ring while places and pages last. All lanes of the scheduler's block."""
    while True:
        if thread_id() == 0:
            queue.count[DECISION] = decide(window, slots, queue, cache, context, vocab)
        barrier()
        decision, slot, need = queue.count[DECISION], queue.count[CANDIDATE], queue.count[NEED]
        if decision == ADMIT:
            take_pages(cache, slot, need)
        barrier()
        if decision == NOBODY:
            break
        if thread_id() == 0 and decision == ADMIT:
            start(window, slots, queue, cache, slot, need)


@device
def decide(window, slots, queue, cache, context, vocab):
    """Look at the head of the waiting ring: ADMIT it, REFUSED it, or NOBODY can be admitted now. One lane."""
    head = i64(queue.count[WAITING_HEAD])
    if head == queue.count[WAITING_TAIL]:
        return NOBODY
    slot = waiting_at(queue, head)
    if cancelled(window, slots, slot):
        reason = i64(CANCEL)
    else:
        reason = take_request(window, slots, slot, context, vocab, cache)
    if reason != 0:
        if not finish(window, slots, queue, cache, slot, reason):
            return NOBODY
        queue.count[WAITING_HEAD] = head + 1
        return REFUSED
    need = pages_for(i64(slots.prompt_len[slot]) + i64(slots.limit[slot]), cache.page_size)
    if queue.count[RUNNING] == queue.running.shape[0] or need > cache.count[FREE_PAGES]:
        return NOBODY
    queue.count[CANDIDATE] = slot
    queue.count[NEED] = need
    return ADMIT


@device
def take_request(window, slots, slot, context, vocab, cache):
    """Copy a slot's request out of the window, once, and judge the copy. One lane.

    Returns why it can never run, or 0. The window is never read for these fields again, so what is
    judged is what is used.
    """
    request = window.request[slot]
    at, length, limit = i64(request["prompt_at"]), i64(request["prompt_len"]), i64(request["max_tokens"])
    temperature = f32(request["temperature"])
    slots.seed[slot] = request["seed"]
    slots.ignore_eos[slot] = i32(i64(request["flags"]) & i64(IGNORE_EOS))
    valid = length >= 1 and limit >= 1 and at + length <= window.arena_size
    # also false for NaN
    valid = valid and f32(0.0) <= temperature and temperature < f32(1e30)
    if not valid:
        return i64(BAD_REQUEST)
    if length + limit > context:
        return i64(TOO_LONG)
    if pages_for(length + limit, cache.page_size) > cache.pages:
        return i64(NO_PAGES)
    slots.prompt_at[slot] = worker_of(window, slot) * window.arena_size + at
    slots.prompt_len[slot] = i32(length)
    slots.limit[slot] = i32(limit)
    slots.temperature[slot] = temperature
    return i64(0)


@device
def start(window, slots, queue, cache, slot, need):
    """One lane: an admitted slot, its pages in its table, joins the running."""
    cache.count[FREE_PAGES] -= i32(need)
    slots.pages[slot] = i32(need)
    slots.done[slot] = i32(0)
    slots.produced[slot] = i32(0)
    slots.state[slot] = i32(PREFILL)
    window.state[slot] = u32(PREFILL)
    window.position[slot] = u32(0)
    show_pages_taken(window, cache, slot, need)
    queue.running[queue.count[RUNNING]] = i32(slot)
    queue.count[RUNNING] += 1
    queue.count[WAITING_HEAD] += 1
