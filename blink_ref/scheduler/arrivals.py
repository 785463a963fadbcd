"""Arrivals: doorbells become waiting requests, and cancel words and deadlines become ends.

Who goes first is one number, fixed at arrival: the count of arrivals so far, moved back by LATER for each step
of priority, and forward by SOONER for an urgent request. So requests of one priority are served in order
of arrival, and none starves: a request of priority p is overtaken by LATER * p later arrivals of priority 0
at most, and a best-effort request by SOONER later urgent ones.
"""

from ..kvcache.pages import pages_for
from ..ring.device import urgent_rung, worker_of
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
    BLOCK,
    SYSTEM,
    acquire_fence,
    atomic_add,
    barrier,
    block_threads,
    clock_ns,
    f32,
    f32_of_bits,
    i32,
    i64,
    lane_id,
    load_relaxed,
    load_relaxed_four,
    relax,
    thread_id,
    u32,
    warp_id,
    warps,
)
from .rehearsal import REHEARSAL, begin_rehearsal, may_rehearse, pretend, record_of
from .state import (
    ARRIVED,
    ENDING,
    IN_RUNNING,
    OLDER,
    PAUSED,
    REHEARSING,
    RUNG,
    RUNNING,
    STOPPING,
    TRACED,
    TRACING,
    URGENT_HEARD,
    URGENT_RUNG,
    WAITING,
)
from .trace import event

LATER, SOONER = 256, 1 << 14
MOST_PRIORITY = 1 << 20
"""Priorities above it count as it."""
MOST = i64(2**31 - 1)
"""Numbers above it count as it."""

COLDEST = f32(1e-5)
"""A temperature below it is greedy, as in vLLM: a logit divided by it might overflow."""

MOST_PENALTY = f32(1e6)
"""For the same reason. What users may ask for is far below, and checked by the NIC."""

MS = 1_000_000

FEW = 8
"""Of so many requests that ring at once, the prompts are copied at once, too."""

PATIENT = 16
"""Of so many turns in which there is nothing to do, one looks at more than the doorbells."""

MOST_TURNS = (1 << 30) - 1
"""Turns are counted up to it, and then from 0 again."""


def scan_spec(doorbell: list[int], taken: list[int]) -> list[int]:
    """The slots that have rung since they were last taken (in any order)."""
    return [slot for slot, (rung, seen) in enumerate(zip(doorbell, taken, strict=True)) if rung != seen]


def order_spec(arrival: int, priority: int, urgent: bool, slot: int) -> int:
    """The order of a slot's request, the smallest first."""
    return (arrival + LATER * min(priority, MOST_PRIORITY) - SOONER * urgent) << 16 | slot


@device
def listen(window, slots, queue, cache, turns, patience):
    """While there is nothing to do, look at the doorbells and at nothing else. All lanes of one block.

    Between two turns of the scheduler. Returns how many turns there have been, each look one of them, and whether
    a doorbell has rung: then the slots are listed. It returns in any case when the window's other words are due,
    or `patience` is over.
    """
    idle, heard = nothing_to_do(queue), False
    rehearses = idle and may_rehearse(slots, queue, cache)
    while True:
        relax(turns)
        turns = i32((turns + 1) & MOST_TURNS)
        barrier()  # all have seen that none has rung
        if not idle or turns & (PATIENT - 1) == 0 or turns == patience:
            break
        if rehearses and turns == REHEARSAL:
            begin_rehearsal(window, slots, queue)
            heard = True
            break
        scan(window, slots, queue)
        barrier()
        if queue.count[RUNG] > 0:
            heard = True
            break
    return turns, heard


@device
def look_around(window, slots, queue, sampling, cache, context, vocab, turns, heard):
    """Take in what has rung, and mark what is to end. All lanes of one block; lane 0 is the last.

    Returns whether there is anything to do, or may be, as in the first of the `turns` that the scheduler spins.
    `heard` = :func:`listen` has listed what has rung.
    """
    if not heard:
        look_at_all(window, slots, queue)
        if turns > 0 and nothing_to_do(queue):
            barrier()  # all have seen it
            return False
    take_requests(window, slots, queue, sampling, vocab)
    barrier()
    if queue.count[REHEARSING] == 1:
        pretend(window, slots, sampling, cache, context)
    n = i64(thread_id())
    while n < queue.count[RUNG]:
        judge(window, slots, queue, sampling, cache, context, i64(queue.rung[n]))
        n += block_threads()
    if queue.count[RUNG] <= FEW:  # while the first lanes judge, those from the middle on copy
        for place in range(queue.count[RUNG]):
            copy_prompt(window, slots, sampling, i64(queue.rung[place]), vocab)
    barrier()
    if thread_id() == 0:
        queue.count[OLDER] = queue.count[WAITING]
        queue.count[ARRIVED] += queue.count[RUNG]
        queue.count[WAITING] += queue.count[RUNG]
        if queue.count[TRACING] == 1:
            for place in range(queue.count[RUNG]):
                slot = i64(queue.rung[place])
                event(window, queue, EVENT_ARRIVE, slot, slots.prompt_len[slot])
    return True


@device
def copy_prompt(window, slots, sampling, slot, vocab):
    """The prompt, stop tokens and biases out of the window's arena. All lanes share them; no barrier.

    A token outside the vocabulary or a bias that is no number, which no well-behaved NIC writes, makes the request
    a strange one.
    """
    at, length = i64(slots.prompt_at[slot]), i64(slots.prompt_len[slot])
    stops, biases = i64(sampling.stops[slot]), i64(sampling.biases[slot])
    n = counted_from_the_middle(i64(thread_id()))
    while n < length + stops + biases:
        if n < length + stops:
            token = i64(window.arena[at + n])
        else:
            token = i64(window.arena[at + n + (n - length - stops)])
        if token >= vocab:
            atomic_add(slots.strange, slot, i32(1), BLOCK)
            token = i64(0)
        if n < length:
            slots.token[slot, n] = i32(token)
        elif n < length + stops:
            sampling.stop[slot, n - length] = i32(token)
        else:
            bias = n - length - stops
            sampling.bias_token[slot, bias] = i32(token)
            value = f32_of_bits(window.arena[at + n + bias + 1])
            sampling.bias[slot, bias] = value
            if not abs(value) <= MOST_PENALTY:
                atomic_add(slots.strange, slot, i32(1), BLOCK)
        n += block_threads()


@device
def look_at_all(window, slots, queue):
    """See all that the NIC may have written. All lanes of one block; ends with a barrier.

    What is read of the window is read at the same time, as far as one does not depend on the other: its way across
    PCIe takes a microsecond.
    """
    if thread_id() == 0:
        queue.count[RUNG] = 0
    barrier()
    stop, trace, urgent = u32(0), u32(0), u32(0)
    if has_job(0):
        stop = load_relaxed(window.stop, 0, SYSTEM)
    if has_job(1):
        trace = load_relaxed(window.trace, 0, SYSTEM)
    if has_job(2):
        urgent = urgent_rung(window)
    scan(window, slots, queue)
    if is_anybody_live(queue):
        scan_live(window, slots, queue)
    if has_job(0):
        queue.count[STOPPING] = i64(stop != 0)
    if has_job(1):
        queue.count[TRACED] = i64(trace == 1)
    if has_job(2):
        # what was heard before the doorbells were looked at: of those, the scan sees all
        queue.count[URGENT_RUNG] = queue.count[URGENT_HEARD]
        queue.count[URGENT_HEARD] = i64(urgent)
    barrier()


@device
def nothing_to_do(queue):
    """Whether nobody has rung, waits, runs or is to end."""
    somebody = queue.count[RUNG] > 0 or is_anybody_live(queue)
    return not somebody and queue.count[ENDING] == 0 and queue.count[PAUSED] == 0


@device
def is_anybody_live(queue):
    """Whether a request waits or runs."""
    return queue.count[WAITING] > 0 or queue.count[RUNNING] > 0


@device
def has_job(n):
    """Whether the n-th of some jobs is this lane's; one lane of each warp has one, and the last warp the rest."""
    return lane_id() == 0 and warp_id() == min(n, warps() - 1)


@device
def scan(window, slots, queue):
    """List the slots that have rung. All lanes: eight doorbells each at once, of up to 4,096 with 512 lanes."""
    n, step = i32(window.doorbell.shape[0]), i32(4 * block_threads())
    slot = i32(4 * thread_id())
    while slot + 3 < n:
        other = min(i32(slot + step), i32(n - 4))
        here = load_relaxed_four(window.doorbell, slot, SYSTEM)
        there = load_relaxed_four(window.doorbell, other, SYSTEM)
        list_rung(slots, queue, slot, which_differ(here, load_relaxed_four(slots.taken, slot, BLOCK)))
        if other == slot + step:
            list_rung(slots, queue, other, which_differ(there, load_relaxed_four(slots.taken, other, BLOCK)))
        slot = i32(slot + 2 * step)
    while slot < n:  # where there are less than four slots, which lane 0 sees to
        list_rung(slots, queue, slot, i32(load_relaxed(window.doorbell, slot, SYSTEM) != slots.taken[slot]))
        slot = i32(slot + 1)


@device
def which_differ(four, others):
    """Bits: which of four words differ from four others."""
    low = i32(four[0] != others[0]) + 2 * i32(four[1] != others[1])
    return i32(low + 4 * i32(four[2] != others[2]) + 8 * i32(four[3] != others[3]))


@device
def list_rung(slots, queue, slot, bits):
    """One lane: list those of the slots from `slot` on whose bit is set, and which are free.

    A slot whose request has not ended is not taken again: its NIC breaks the protocol if it rings. Nor one
    that other blocks still compute a row for, which will be dropped: a step later.
    """
    while bits > 0:
        if bits & 1 and slots.state[slot] == FREE and slots.flight[slot] != IN_RUNNING:
            acquire_fence(SYSTEM)  # the request and prompt written before the doorbell are now visible
            queue.rung[atomic_add(queue.count, RUNG, i64(1), BLOCK)] = i32(slot)
        bits = i32(bits >> 1)
        slot = i32(slot + 1)


@device
def scan_live(window, slots, queue):
    """Mark the requests that were cancelled or are out of time. All lanes."""
    n, step, now = i64(slots.state.shape[0]), 4 * i64(block_threads()), i64(clock_ns())
    slot = 4 * i64(thread_id())
    while slot + 3 < n:
        state = load_relaxed_four(slots.state, slot, BLOCK)
        if state[0] != FREE or state[1] != FREE or state[2] != FREE or state[3] != FREE:
            cancel = load_relaxed_four(window.cancel, slot, SYSTEM)
            see_to(slots, queue, slot, cancel[0], now)
            see_to(slots, queue, slot + 1, cancel[1], now)
            see_to(slots, queue, slot + 2, cancel[2], now)
            see_to(slots, queue, slot + 3, cancel[3], now)
        slot += step
    while slot < n:
        see_to(slots, queue, slot, load_relaxed(window.cancel, slot, SYSTEM), now)
        slot += 1


@device
def see_to(slots, queue, slot, cancel, now):
    """One lane: a slot's request, if there is one, ends when it is no longer wanted, or its time is over."""
    if slots.state[slot] != FREE and slots.ending[slot] == 0:
        if cancel == slots.taken[slot]:
            mark_ending(slots, queue, slot, CANCEL)
        elif slots.deadline[slot] > 0 and slots.deadline[slot] <= now:
            mark_ending(slots, queue, slot, TIME)


@device
def mark_ending(slots, queue, slot, reason):
    """A request is to end. One lane of any, once a request."""
    slots.ending[slot] = i32(reason)
    queue.ended[atomic_add(queue.count, ENDING, i64(1), BLOCK)] = i32(slot)


@device
def take_requests(window, slots, queue, sampling, vocab):
    """Copy what has rung out of the window. All lanes of one block; no barrier.

    It takes two ways across PCIe, one after the other, for the doorbell and for the request; so half of the lanes
    take one part of a request, while the other half takes the other one.
    """
    n = i64(thread_id())
    while n < queue.count[RUNG]:
        take_request(window, slots, queue, sampling, i64(queue.rung[n]))
        n += block_threads()
    n = counted_from_the_middle(i64(thread_id()))
    while n < queue.count[RUNG]:
        take_sampling(window, queue, sampling, i64(queue.rung[n]), vocab)
        n += block_threads()


@device
def counted_from_the_middle(lane):
    """A lane's number, if the one in the middle of the block is the first."""
    threads = i64(block_threads())
    lane += threads >> 1
    return lane - threads if lane >= threads else lane


@device
def take_request(window, slots, queue, sampling, slot):
    """What is wanted, by whom, and how much of it. One lane.

    The window is never read for these fields again, so what is judged is what is used. All is read before anything
    is written: so all that is read crosses PCIe at the same time. The prompt is copied next where FEW have rung,
    else at admission: it is not `known` before.
    """
    arrived, few = i64(queue.count[ARRIVED]), i32(queue.count[RUNG] <= FEW)
    most = i64(slots.token.shape[1])
    taken = u32(load_relaxed(window.doorbell, slot, SYSTEM))
    request = window.request[record_of(window, queue, slot)]
    at, length, limit, flags = request["prompt_at"], request["prompt_len"], request["max_tokens"], request["flags"]
    least, time_ms, stops, biases = request["min_tokens"], request["time_ms"], request["stops"], request["biases"]
    leader, leader_generation, priority = request["leader"], request["leader_generation"], request["priority"]
    unwanted = load_relaxed(window.cancel, slot, SYSTEM)
    ending = i32(CANCEL * (unwanted == taken))
    words = i64(at) + i64(length) + i64(stops) + 2 * i64(biases)
    if stops > MOST_STOPS or biases > MOST_BIASES or words > window.arena_size:
        length = stops = biases = u32(0)  # there is nothing to be copied
        ending = i32(BAD_REQUEST)
    # what was put aside may still have a row of the slot's last request: its loops stay within their arrays
    length = i32(min(i64(length), most))
    slots.taken[slot] = taken
    slots.state[slot] = i32(READY)
    slots.ending[slot] = ending
    slots.known[slot] = length * few
    slots.done[slot] = slots.hashed[slot] = slots.strange[slot] = i32(0)
    slots.prompt_at[slot] = i64(at) + worker_of(window, slot) * window.arena_size
    slots.prompt_len[slot] = length
    slots.limit[slot] = i32(min(i64(limit), MOST))
    urgent = i32((flags & u32(URGENT)) != 0)
    slots.urgent[slot] = urgent
    slots.ignore_eos[slot] = i32((flags & u32(IGNORE_EOS)) != 0)
    arrived += LATER * min(i64(priority), i64(MOST_PRIORITY))
    slots.order[slot] = ((arrived - SOONER * i64(urgent)) << 16) | slot
    slots.deadline[slot] = i64(0)
    if time_ms > 0:
        slots.deadline[slot] = i64(clock_ns()) + i64(time_ms) * MS
    slots.leader[slot] = i32(min(i64(leader), MOST))
    slots.leader_generation[slot] = leader_generation
    sampling.min_tokens[slot] = i32(min(i64(least), MOST))
    sampling.stops[slot] = i32(stops)
    sampling.biases[slot] = i32(biases)


@device
def judge(window, slots, queue, sampling, cache, context, slot):
    """A slot's request waits from now on; one that can never run is to end. One lane.

    All is read before the first branch: each read after one would wait for those before it.
    """
    biases, least = sampling.biases[slot], sampling.min_tokens[slot]
    leader, generation, unwanted = i64(slots.leader[slot]), slots.leader_generation[slot], i64(slots.ending[slot])
    reason = refusal(slots, sampling, cache, context, slot)
    window.state[slot] = u32(READY)
    if biases > 0 or least > 0:
        sampling.filtered[slot] = i32(1)
    if reason == 0 and leader > 0 and load_relaxed(window.doorbell, leader - 1, SYSTEM) != generation:
        slots.leader[slot] = i32(0)
    if reason == 0:
        reason = unwanted  # it may have been cancelled
    if reason != 0:
        mark_ending(slots, queue, slot, reason)


@device
def refusal(slots, sampling, cache, context, slot):
    """Why the request that was taken can never run, or 0. One lane."""
    length, limit, least = i64(slots.prompt_len[slot]), i64(slots.limit[slot]), i64(sampling.min_tokens[slot])
    valid, leader, ending = sampling.valid[slot] == 1, i64(slots.leader[slot]), i64(slots.ending[slot])
    valid = valid and length >= 1 and limit >= 1 and least <= limit
    if not valid or leader > slots.state.shape[0] or ending == BAD_REQUEST:
        return i64(BAD_REQUEST)
    if length + limit > context:
        return i64(TOO_LONG)
    if pages_for(length + limit, cache.page_size) > cache.pages:
        return i64(NO_PAGES)
    return i64(0)


@device
def take_sampling(window, queue, sampling, slot, vocab):
    """How a request's tokens are drawn, and whether all of it is valid, which no NaN is. One lane."""
    request = window.request[record_of(window, queue, slot)]
    temperature, top_p, min_p = f32(request["temperature"]), f32(request["top_p"]), f32(request["min_p"])
    repetition, presence = f32(request["repetition"]), f32(request["presence"])
    frequency, top_k, logprobs = f32(request["frequency"]), i64(request["top_k"]), i64(request["logprobs"])
    seed = request["seed"]
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
    filtered = filtered or logprobs > 0
    sampling.temperature[slot] = temperature
    sampling.seed[slot] = seed
    sampling.filtered[slot] = i32(filtered)
    sampling.top_k[slot] = i32(top_k)
    sampling.top_p[slot] = top_p
    sampling.min_p[slot] = min_p
    sampling.repetition[slot] = repetition
    sampling.presence[slot] = presence
    sampling.frequency[slot] = frequency
    sampling.logprobs[slot] = i32(min(logprobs, i64(1 + MOST_LOGPROBS)))
    valid = f32(0.0) <= temperature and temperature < f32(1e30) and logprobs <= 1 + MOST_LOGPROBS
    valid = valid and f32(0.0) <= top_p and top_p <= f32(1.0) and f32(0.0) <= min_p and min_p <= f32(1.0)
    valid = valid and (repetition == f32(0.0) or (f32(1e-3) <= repetition and repetition <= f32(1e3)))
    valid = valid and abs(presence) <= MOST_PENALTY and abs(frequency) <= MOST_PENALTY
    sampling.valid[slot] = i32(valid)
