"""Who has pages and a place in the batch: taking, giving back, and being preempted.

Pages are taken as positions are computed, not set aside. When there is none left, whoever goes last gives
all of its pages back and waits again (preemption by recompute: vLLM). Its whole pages stay cached for
as long as nobody needs the room, so what it computes again is often little. Whoever goes first can take
the pages of all others, and the pool holds any single request, so there is always somebody who gets on.
"""

from ..kvcache.pages import FREE, free_page, hold, leave_stack, let_go, pages_for, spare_pages
from ..kvcache.prefix import evict_oldest
from ..ring.device import outbox_room, worker_of, workers_of
from ..ring.layout import (
    CACHED,
    EVENT_EVICT,
    EVENT_HOLD,
    EVENT_PREEMPT,
    EVENT_RELEASE,
    READY,
)
from ..simt import device
from ..simt.vocabulary import i32, i64, u32
from .state import DEALING, EVICTED, OLDER, PREEMPTED, RUNNING, WAITING
from .trace import event

RECORDS_A_SAMPLE = 2
"""A sample sends a token, and maybe the END."""


def victim_spec(running: list[tuple[int, bool]], mine: int) -> int | None:
    """Who of the running gives way to number `mine`: the last one behind it, or who stalls; None = nobody.

    `running` are (order, whether its client does not read), by order.
    """
    able = [n for n, (_, stalled) in enumerate(running) if n > mine or (stalled and n != mine)]
    return max(able, default=None)


@device
def take_pages(window, slots, queue, cache, slot, place, n):
    """n pages more for a slot that holds `place`; there are as many spare ones. One lane."""
    top = i64(cache.count[FREE]) - 1
    for i in range(n):
        if i <= top:
            page = free_page(cache, top - i)
        else:
            page = evict_oldest(cache)
            queue.count[EVICTED] += 1
            event(window, queue, EVENT_EVICT, i64(0), page)
        cache.table[slot, place + i] = i32(page)
        show_page(window, queue, slot, place + i, page)
    leave_stack(cache, min(n, top + 1))
    slots.pages[slot] = i32(place + n)


@device
def share_page(window, slots, queue, cache, slot):
    """The slot holds the cached page that is next in its table. One lane."""
    place = i64(slots.pages[slot])
    page = i64(cache.table[slot, place])
    hold(cache, page)
    slots.pages[slot] = i32(place + 1)
    show_page(window, queue, slot, place, page)


@device
def show_page(window, queue, slot, place, page):
    """The page at a place of the slot's table has it for an owner, as far as one can see. One lane."""
    window.owner[page] = u32(slot << 16 | (place + 1))
    event(window, queue, EVENT_HOLD, slot, place << 20 | page)


@device
def show_free(window, queue, cache, slot, page):
    """The slot has let go of a page. One lane."""
    if cache.references[page] == 0:
        window.owner[page] = u32(CACHED * i64(cache.filed[page]))
    event(window, queue, EVENT_RELEASE, slot, i64(cache.filed[page]) << 20 | page)


@device
def release_pages(window, slots, queue, cache, slot):
    """The slot lets go of its pages, the last one first, so that it is reused first. One lane."""
    place = i64(slots.pages[slot]) - 1
    while place >= 0:
        page = i64(cache.table[slot, place])
        let_go(cache, page, slots.flight[slot])
        show_free(window, queue, cache, slot, page)
        place -= 1
    slots.pages[slot] = i32(0)


@device
def secure(window, slots, queue, cache, slot, n):
    """Pages for the slot's next n positions, if need be from others; for how many it has them now. One lane."""
    size, held, spare = i64(cache.page_size), i64(slots.pages[slot]), spare_pages(cache)
    first = i64(slots.done[slot]) + slots.ahead[slot]
    missing = pages_for(first + n, size) - held
    while missing > spare:
        victim = find_victim(window, slots, queue)
        if victim < 0:
            break
        preempt(window, slots, queue, cache, victim)
        spare = spare_pages(cache)
    taken = min(missing, spare)
    if taken > 0:
        take_pages(window, slots, queue, cache, slot, held, taken)
        held += taken
    return max(i64(0), min(n, held * size - first))


@device
def find_victim(window, slots, queue):
    """Who gives way to the slot being dealt (see :func:`victim_spec`), or -1. One lane.

    Not who has rows in flight, nor, what would be in vain, who has no pages.
    """
    mine = queue.count[DEALING]
    n = i64(queue.count[RUNNING]) - 1
    while n >= 0:
        slot = i64(queue.running[n])
        able = n != mine and slots.flight[slot] == 0 and slots.pages[slot] > 0
        if able and (n > mine or stalls(window, slot)):
            return slot
        n -= 1
    return i64(-1)


@device
def measure_room(window):
    """See how much the outboxes have room for. One lane, before anybody asks who stalls."""
    half = max(i64(RECORDS_A_SAMPLE), (i64(1) << i64(window.outbox_bits)) >> 1)
    for worker in range(workers_of(window)):
        window.room[worker] = outbox_room(window, worker, half)


@device
def forget_reserved(window):
    """Nothing is in flight any more that will be sent. One lane."""
    for worker in range(workers_of(window)):
        window.reserved[worker] = 0


@device
def stalls(window, slot):
    """Whether the slot's worker had no room for a sample's records when the turn began. One lane.

    What the plan's own samples will take does not count: whoever has rows in the plan is not one that stalls.
    """
    return window.room[worker_of(window, slot)] < RECORDS_A_SAMPLE


@device
def preempt(window, slots, queue, cache, slot):
    """A running slot gives its pages and its place away, and waits again with the tokens it knows. One lane."""
    event(window, queue, EVENT_PREEMPT, slot, slots.known[slot])
    release_pages(window, slots, queue, cache, slot)
    leave_batch(queue, slot)
    slots.done[slot] = i32(0)
    slots.state[slot] = i32(READY)
    window.state[slot] = u32(READY)
    window.position[slot] = u32(0)
    queue.count[WAITING] += 1
    queue.count[OLDER] += 1
    queue.count[PREEMPTED] += 1


@device
def join_batch(slots, queue, slot):
    """A slot takes its place among the running, by its order. One lane."""
    n = i64(queue.count[RUNNING])
    while n > 0 and slots.order[queue.running[n - 1]] > slots.order[slot]:
        queue.running[n] = queue.running[n - 1]
        n -= 1
    queue.running[n] = i32(slot)
    queue.count[RUNNING] += 1


@device
def leave_batch(queue, slot):
    """Close the gap that a running slot leaves. One lane."""
    running, kept = i64(queue.count[RUNNING]), i64(0)
    for n in range(running):
        if queue.running[n] == slot:
            if n < queue.count[DEALING]:
                queue.count[DEALING] -= 1
        else:
            queue.running[kept] = queue.running[n]
            kept += 1
    queue.count[RUNNING] = kept
