"""Admission: whoever goes first of those that wait, as long as places and pages last.

A request gets a place when there are pages for all the tokens it knows and one more, those that it finds in
the cache left out. An urgent one gets it in any case: it takes pages from others when it needs them. The
queue does not pass by a request that does not fit, so it is not starved by smaller ones; but urgent requests
do not wait for one of best effort. Who waits for its client to read the outbox is not admitted, and when places
are short it gives its own to whom can go on.
"""

from ..kvcache.pages import NOWHERE, pages_for, spare_pages
from ..kvcache.prefix import found_pages, look_up
from ..ring.layout import (
    BAD_REQUEST,
    EVENT_ADMIT,
    NO_PAGES,
    PREFILL,
    READY,
    TOO_LONG,
)
from ..simt import device
from ..simt.vocabulary import (
    BLOCK,
    atomic_max,
    barrier,
    block_threads,
    i32,
    i64,
    thread_id,
    u32,
)
from .arrivals import copy_prompt, mark_ending
from .residence import join_batch, preempt, share_page, stalls
from .state import DEALING, DECISION, FOUND, OLDER, RUNG, RUNNING, WAITING
from .trace import event

LATEST = i64(-(2**63))
"""Behind every order, negated."""

NOBODY, URGENT_ONLY, ANYBODY = range(3)
"""Values of DECISION: whom there is a place for."""


def refusal_spec(prompt_len: int, limit: int, context: int, pages: int, page_size: int) -> int:
    """Why a well-formed request can never run: TOO_LONG, NO_PAGES, or 0."""
    if prompt_len + limit > context:
        return TOO_LONG
    return NO_PAGES if -(-(prompt_len + limit) // page_size) > pages else 0


@device
def admit(window, slots, queue, cache, sampling, vocab):
    """Give places in the batch to those that wait. All lanes of the scheduler's block."""
    if thread_id() == 0:
        queue.count[DEALING] = -1
        queue.count[DECISION] = places_for(window, slots, queue)
        begin_choice(queue)
    barrier()
    while queue.count[DECISION] != NOBODY:
        slot, known = choose(window, slots, queue, queue.count[DECISION] == URGENT_ONLY), i64(0)
        if slot >= 0:
            known = i64(slots.known[slot])
            if known == 0:
                copy_prompt(window, slots, sampling, slot, vocab)
                barrier()
                known = i64(slots.prompt_len[slot])
            look_up(slots, cache, slot, known)
        if thread_id() == 0:
            queue.count[DECISION] = decide(window, slots, queue, cache, slot, known)
        barrier()


@device
def places_for(window, slots, queue):
    """ANYBODY, URGENT_ONLY or NOBODY, by the places left and by whether anybody waits. One lane."""
    if queue.count[WAITING] == 0:
        return NOBODY
    places, taken, ordinary = i64(queue.running.shape[0]), i64(0), i64(0)
    for n in range(queue.count[RUNNING]):
        slot = i64(queue.running[n])
        if not gives_place(window, slots, slot):
            taken += 1
            ordinary += 1 - i64(slots.urgent[slot])
    if taken == places:
        return NOBODY
    if ordinary >= places - queue.reserved:
        return URGENT_ONLY
    return ANYBODY


@device
def gives_place(window, slots, slot):
    """Whether a running slot has to give its place to whom can go on. One lane."""
    return slots.flight[slot] == 0 and stalls(window, slot)


@device
def begin_choice(queue):
    """Nobody has been looked at. One lane, before a barrier and :func:`choose`."""
    queue.first[0] = LATEST


@device
def choose(window, slots, queue, urgent_only):
    """Who goes first of those that can, or -1. All lanes; a barrier before, and one at the end if it is nobody.

    Where nobody waits but those that have just rung, only they are looked at; and if it is one, all lanes look at
    it, and need not agree.
    """
    first, all_new = LATEST, queue.count[OLDER] == 0
    those = i64(slots.state.shape[0])
    if all_new:
        those = i64(queue.count[RUNG])
    alone, n = those == 1, i64(thread_id())
    if alone:
        n = i64(0)
    while n < those:
        slot = n
        if all_new:
            slot = i64(queue.rung[n])
        if all_new or slots.state[slot] == READY:  # of the new ones all is read at the same time
            state, order = slots.state[slot], i64(slots.order[slot])
            if can_start(window, slots, slot, urgent_only) and state == READY:
                first = max(first, -order)
        n += block_threads()
    if not alone and first > LATEST:
        atomic_max(queue.first, 0, first, BLOCK)
    if not alone or first == LATEST:
        barrier()
    if not alone:
        first = i64(queue.first[0])
    return i64(-1) if first == LATEST else -first & i64(0xFFFF)


@device
def can_start(window, slots, slot, urgent_only):
    """Whether nothing holds a waiting request back. One lane.

    A step in flight may still use the page table of the slot's last request; and who shares a
    prompt with an earlier request waits until that has computed it.
    """
    ending, flight, urgent = slots.ending[slot], slots.flight[slot], slots.urgent[slot]
    leader, stalled = i64(slots.leader[slot]) - 1, stalls(window, slot)
    if ending != 0 or flight != 0 or stalled or (urgent_only and urgent == 0):
        return False
    if leader < 0:
        return True
    if slots.taken[leader] != slots.leader_generation[slot]:
        # its doorbell had rung when this one's was seen: it has been taken and has ended, or will be taken soon
        return i32(slots.leader_generation[slot] - slots.taken[leader]) < 0
    computing = slots.state[leader] == READY or slots.state[leader] == PREFILL
    return not (computing and slots.order[leader] < slots.order[slot])


@device
def decide(window, slots, queue, cache, slot, known):
    """Admit the chosen slot or not, its pages looked up; returns whom to look for next. One lane."""
    if slot < 0:
        return NOBODY
    decision, strange = queue.count[DECISION], slots.strange[slot]
    spare, urgent = spare_pages(cache), slots.urgent[slot]
    found, unused = found_pages(cache, slot, known), i64(0)
    for n in range(found):
        unused += i64(cache.older[cache.table[slot, n]] != NOWHERE)
    slots.known[slot] = i32(known)
    begin_choice(queue)
    if strange > 0:
        mark_ending(slots, queue, slot, BAD_REQUEST)
        return decision
    if pages_for(known + 1, cache.page_size) - found > spare - unused and urgent == 0:
        if decision == ANYBODY:
            return URGENT_ONLY
        return NOBODY
    start(window, slots, queue, cache, slot, found)
    return places_for(window, slots, queue)


@device
def start(window, slots, queue, cache, slot, found):
    """One lane: a slot joins the batch, if need be in the place of one that stalls, with the pages found."""
    if queue.count[RUNNING] == queue.running.shape[0]:
        last = i64(queue.count[RUNNING]) - 1
        while not gives_place(window, slots, i64(queue.running[last])):
            last -= 1
        preempt(window, slots, queue, cache, i64(queue.running[last]))
    slots.pages[slot] = i32(0)
    for _ in range(found):
        share_page(window, slots, queue, cache, slot)
    done = found * i64(cache.page_size)
    slots.done[slot] = i32(done)
    slots.state[slot] = i32(PREFILL)
    window.state[slot] = u32(PREFILL)
    window.position[slot] = u32(done)
    queue.count[FOUND] += done
    queue.count[WAITING] -= 1
    event(window, queue, EVENT_ADMIT, slot, done)
    join_batch(slots, queue, slot)
