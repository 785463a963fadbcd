"""Arrivals: doorbells become waiting requests, and cancel words and deadlines become ends.

Who goes first is one number, fixed at arrival: the count of arrivals so far, moved back by LATER for each step
of priority, and forward by SOONER for an urgent request. So requests of one priority are served in order
of arrival, and none starves: a request of priority p is overtaken by LATER * p later arrivals of priority 0
at most, and a best-effort request by SOONER later urgent ones.
"""

from ..kvcache.pages import pages_for
from ..ring.device import urgent_seen, worker_of
from ..ring.layout import (
    BAD_REQUEST,
    CANCEL,
    EVENT_ARRIVE,
    FREE,
    IGNORE_EOS,
    MOST_BIASES,
    MOST_LOGPROBS,
    MOST_STOPS,
    NO_PAGES,
    READY,
    TIME,
    TOO_LONG,
    URGENT,
)
from ..simt import device
from ..simt.vocabulary import (
    SYSTEM,
    atomic_add,
    barrier,
    block_threads,
    clock_ns,
    f32,
    i32,
    i64,
    load_acquire,
    load_relaxed,
    thread_id,
    u32,
)
from .state import ARRIVED, ENDING, IN_RUNNING, RUNG, URGENT_RUNG, WAITING
from .trace import event, look_for_tracer

AT_ONCE = 4
"""Doorbells a lane reads before it looks at any: loads across PCIe take a microsecond, but overlap."""

LATER, SOONER = 256, 1 << 14
MOST_PRIORITY = 1 << 20
"""Priorities above it count as it."""

COLDEST = f32(1e-5)
"""A temperature below it is greedy, as in vLLM: a logit divided by it might overflow."""

MOST_PENALTY = f32(1e6)
"""For the same reason. What users may ask for is far below, and checked by the NIC."""

MS = 1_000_000


def scan_spec(doorbell: list[int], taken: list[int]) -> list[int]:
    """The slots that have rung since they were last taken (in any order)."""
    return [slot for slot, (rung, seen) in enumerate(zip(doorbell, taken, strict=True)) if rung != seen]


def order_spec(arrival: int, priority: int, urgent: bool, slot: int) -> int:
    """The order of a slot's request, the smallest first."""
    return (arrival + LATER * min(priority, MOST_PRIORITY) - SOONER * urgent) << 16 | slot


@device
def look_around(window, slots, queue, sampling, cache, context, vocab):
    """Take in what has rung, and mark what is to end. All lanes of one block; lane 0 is the last."""
    if thread_id() == 0:
        # before the doorbells: those that it counts have rung, and the scan sees them
        queue.count[URGENT_RUNG] = i64(urgent_seen(window))
        queue.count[RUNG] = 0
        look_for_tracer(window, queue)
    barrier()
    scan(window, slots, queue)
    barrier()
    n = i64(thread_id())
    while n < queue.count[RUNG]:
        arrive(window, slots, queue, sampling, cache, context, vocab, i64(queue.rung[n]))
        n += block_threads()
    barrier()
    if thread_id() == 0:
        queue.count[ARRIVED] += queue.count[RUNG]
        queue.count[WAITING] += queue.count[RUNG]
        for place in range(queue.count[RUNG]):
            slot = i64(queue.rung[place])
            window.state[slot] = u32(READY)
            event(window, queue, EVENT_ARRIVE, slot, slots.prompt_len[slot])


@device
def scan(window, slots, queue):
    """List the slots that have rung, and mark requests that were cancelled or are out of time. All lanes."""
    n, step, now = i64(window.doorbell.shape[0]), i64(block_threads()), i64(clock_ns())
    first = i64(thread_id())
    while first < n:
        s1, s2, s3 = min(first + step, n - 1), min(first + 2 * step, n - 1), min(first + 3 * step, n - 1)
        d0 = load_relaxed(window.doorbell, first, SYSTEM)
        d1 = load_relaxed(window.doorbell, s1, SYSTEM)
        d2 = load_relaxed(window.doorbell, s2, SYSTEM)
        d3 = load_relaxed(window.doorbell, s3, SYSTEM)
        look_at(window, slots, queue, first, d0, now)
        if first + step < n:
            look_at(window, slots, queue, s1, d1, now)
        if first + 2 * step < n:
            look_at(window, slots, queue, s2, d2, now)
        if first + 3 * step < n:
            look_at(window, slots, queue, s3, d3, now)
        first += AT_ONCE * step


@device
def look_at(window, slots, queue, slot, rung, now):
    """One lane: list a free slot whose doorbell differs from the generation last taken; see to a live one.

    A slot whose request has not ended is not taken again: its NIC breaks the protocol if it rings. Nor one
    that other blocks still compute a row for, which will be dropped: a step later.
    """
    if slots.state[slot] == FREE and slots.flight[slot] != IN_RUNNING:
        if rung != slots.taken[slot]:
            queue.rung[atomic_add(queue.count, RUNG, i64(1))] = i32(slot)
    elif slots.state[slot] != FREE and slots.ending[slot] == 0:
        if cancelled(window, slots, slot):
            mark_ending(slots, queue, slot, CANCEL)
        elif slots.deadline[slot] > 0 and slots.deadline[slot] <= now:
            mark_ending(slots, queue, slot, TIME)


@device
def cancelled(window, slots, slot):
    """Whether a slot's request is no longer wanted. One lane."""
    return load_relaxed(window.cancel, slot, SYSTEM) == slots.taken[slot]


@device
def mark_ending(slots, queue, slot, reason):
    """A request is to end. One lane of any, once a request."""
    slots.ending[slot] = i32(reason)
    queue.ended[atomic_add(queue.count, ENDING, i64(1))] = i32(slot)


@device
def arrive(window, slots, queue, sampling, cache, context, vocab, slot):
    """One lane: a slot that has rung becomes a waiting request; one that can never run is to end."""
    # once more, to acquire: the request and prompt written before the doorbell are now visible
    slots.taken[slot] = u32(load_acquire(window.doorbell, slot, SYSTEM))
    slots.state[slot] = i32(READY)
    slots.ending[slot] = slots.known[slot] = slots.done[slot] = slots.hashed[slot] = i32(0)
    reason = take_request(window, slots, sampling, slot, context, vocab, cache)
    priority = min(i64(window.request[slot]["priority"]), i64(MOST_PRIORITY))
    arrival = queue.count[ARRIVED] + LATER * priority - SOONER * i64(slots.urgent[slot])
    slots.order[slot] = (arrival << 16) | slot
    if reason == 0 and cancelled(window, slots, slot):
        reason = i64(CANCEL)
    if reason != 0:
        mark_ending(slots, queue, slot, reason)


@device
def take_request(window, slots, sampling, slot, context, vocab, cache):
    """Copy a slot's request out of the window, once, and judge the copy. One lane.

    Returns why it can never run, or 0. The window is never read for these fields again, so what is
    judged is what is used; the prompt itself is copied at admission.
    """
    request = window.request[slot]
    at, length, limit = i64(request["prompt_at"]), i64(request["prompt_len"]), i64(request["max_tokens"])
    flags, least, time_ms = i64(request["flags"]), i64(request["min_tokens"]), i64(request["time_ms"])
    stops, biases, leader = i64(request["stops"]), i64(request["biases"]), i64(request["leader"])
    slots.leader_generation[slot] = request["leader_generation"]
    slots.urgent[slot] = i32((flags & URGENT) != 0)
    slots.ignore_eos[slot] = i32((flags & IGNORE_EOS) != 0)
    slots.deadline[slot] = i64(0)
    if time_ms > 0:
        slots.deadline[slot] = i64(clock_ns()) + time_ms * MS
    valid = length >= 1 and limit >= 1 and least <= limit and leader <= slots.state.shape[0]
    valid = valid and stops <= MOST_STOPS and biases <= MOST_BIASES
    valid = valid and at + length + stops + 2 * biases <= window.arena_size
    valid = take_sampling(request, sampling, slot, vocab) and valid
    if not valid:
        return i64(BAD_REQUEST)
    if length + limit > context:
        return i64(TOO_LONG)
    if pages_for(length + limit, cache.page_size) > cache.pages:
        return i64(NO_PAGES)
    slots.prompt_at[slot] = worker_of(window, slot) * window.arena_size + at
    slots.prompt_len[slot] = i32(length)
    slots.limit[slot] = i32(limit)
    slots.leader[slot] = i32(0)
    if leader > 0 and load_relaxed(window.doorbell, leader - 1, SYSTEM) == slots.leader_generation[slot]:
        slots.leader[slot] = i32(leader)
    return i64(0)


@device
def take_sampling(request, sampling, slot, vocab):
    """Copy how a request's tokens are drawn; whether all of it is valid, which no NaN is. One lane."""
    temperature, top_p, min_p = f32(request["temperature"]), f32(request["top_p"]), f32(request["min_p"])
    repetition, presence = f32(request["repetition"]), f32(request["presence"])
    frequency, top_k, logprobs = f32(request["frequency"]), i64(request["top_k"]), i64(request["logprobs"])
    least, stops, biases = i64(request["min_tokens"]), i64(request["stops"]), i64(request["biases"])
    if temperature < COLDEST:
        temperature = min(temperature, f32(0.0))  # greedy, if it is not below 0
    if repetition == f32(1.0):
        repetition = f32(0.0)
    if top_p == f32(1.0):
        top_p = f32(0.0)
    if top_k >= vocab:
        top_k = i64(0)
    filtered = top_k > 0 or top_p != f32(0.0) or min_p != f32(0.0) or repetition != f32(0.0)
    filtered = filtered or presence != f32(0.0) or frequency != f32(0.0)
    filtered = filtered or least > 0 or biases > 0 or logprobs > 0
    sampling.temperature[slot] = temperature
    sampling.seed[slot] = request["seed"]
    sampling.filtered[slot] = i32(filtered)
    sampling.top_k[slot] = i32(top_k)
    sampling.top_p[slot] = top_p
    sampling.min_p[slot] = min_p
    sampling.repetition[slot] = repetition
    sampling.presence[slot] = presence
    sampling.frequency[slot] = frequency
    sampling.min_tokens[slot] = i32(min(least, i64(MOST_PRIORITY)))
    sampling.stops[slot] = i32(min(stops, i64(MOST_STOPS)))
    sampling.biases[slot] = i32(min(biases, i64(MOST_BIASES)))
    sampling.logprobs[slot] = i32(min(logprobs, i64(1 + MOST_LOGPROBS)))
    valid = f32(0.0) <= temperature and temperature < f32(1e30) and logprobs <= 1 + MOST_LOGPROBS
    valid = valid and f32(0.0) <= top_p and top_p <= f32(1.0) and f32(0.0) <= min_p and min_p <= f32(1.0)
    valid = valid and (repetition == f32(0.0) or (f32(1e-3) <= repetition and repetition <= f32(1e3)))
    return valid and abs(presence) <= MOST_PENALTY and abs(frequency) <= MOST_PENALTY
