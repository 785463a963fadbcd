"""What the scheduler keeps between steps, and the plan it makes for one step."""

from typing import Any, NamedTuple

import numpy as np

from ..kernels.tensors import Sampling
from ..ring.layout import MOST_BIASES, MOST_STOPS
from ..simt import device
from ..simt.vocabulary import opaque, u32, u64

RUNG, WAITING, RUNNING, ENDING, ARRIVED, URGENT_RUNG, PAUSED, TRACING = range(8)
"""Places in :attr:`Queue.count`: slots that have rung since the last look; requests that wait, that run, that
are to end; arrivals so far; urgent ones among what has rung and been seen; 1 = a step is paused; 1 = events are
wanted."""
DECISION, DEALING, STREAK = range(9, 12)
"""What admission decides; the place among the running that is dealt rows; urgent steps in a row while others
wait."""
STEPS, PREEMPTED, PAUSES, FOUND, EVICTED, EVENTS = range(14, 20)
"""What has happened since the start, for the heartbeat."""
DRAFTING, SHORT, MOVES, DRAFTED = range(20, 24)
"""1 = the next step is to be drafted; running slots that lack pages for what they want; places in
:attr:`Queue.moved`; steps so far that had been drafted."""
STOPPING, TRACED, URGENT_HEARD, OLDER, TURNS = range(24, 29)
"""As last looked: 1 = the stop word is set; 1 = somebody wants events; what the urgent words said; how many of
those that wait had not just rung. And beats of the heart so far."""
GO, NOW, SPARE, ASIDE, OUTCOME, NEXT, AHEAD, LEFT, BESIDE, REHEARSING = range(29, 39)
"""What all blocks do next: RUN plan number NOW, or leave. The plan that ran before it and becomes the one after
it; the one that is aside, if a step is paused. What the scheduler's turn has come to: the next GO, and the plan
that it is about; 1 = SPARE has been drafted meanwhile. How many steps the launch may still begin or go on with,
negative if it may run for ever. 1 = the scheduler's own block is to draft beside the step, or does. 1 = the turn
is a rehearsal."""
PLANS = 3
"""NOW, SPARE, and a third one that is put aside, or unused."""

ROWS, SAMPLES, TIMED, CHUNKS, DECODING, FIRST_LAYER, INTERRUPTED, FILTERED, PREEMPTIBLE = range(9)
SCORED, URGENT_SEEN, TAKEN_IN, RUNG_LATE = range(9, 13)
"""Places in :attr:`Plan.count`. FIRST_LAYER is 0 but for a step that goes on after a pause; INTERRUPTED is the
layer before which the step was paused, 0 if it was not. SCORED are the samples with log probabilities;
URGENT_SEEN is what the urgent words said when the step was planned; TAKEN_IN is 1 for a landed step whose tokens
are known to their slots; RUNG_LATE is 1 if an urgent request had rung when the last layer was done."""

IN_PAUSED, IN_RUNNING = 1, 2
"""Values of :attr:`Slots.flight`."""

IDLE, RUN, LEAVE = range(3)
"""Values of GO."""


class Slots(NamedTuple):
    """Each slot's request, as taken from the window; arrays over slots. Only the scheduler's block writes it."""

    taken: Any
    """uint32: the generation last taken from the doorbell"""
    state: Any
    """int32: FREE, READY, PREFILL, DECODE of ring.layout; DONE while its END waits for room in the outbox"""
    ending: Any
    """int32: why the request is to end, 0 = it is not"""
    order: Any
    """int64: who goes first, the smallest; its arrival's number, moved by its priority"""
    urgent: Any
    """int32: 1 = latency-sensitive, 0 = best effort"""
    deadline: Any
    """int64: ns of the clock at which its time is over; 0 = never"""
    leader: Any
    """int32: 1 + the slot whose prompt it shares, 0 = none"""
    leader_generation: Any
    """uint32"""
    prompt_at: Any
    """int64: where the prompt begins in the window's arenas"""
    prompt_len: Any
    """int32"""
    strange: Any
    """int32: tokens and biases that no NIC should send, of the request's"""
    limit: Any
    """int32: most tokens to generate"""
    known: Any
    """int32: tokens known, of the prompt and of the answer so far"""
    done: Any
    """int32: how many of them have keys and values in the cache"""
    pages: Any
    """int32: pages held"""
    hashed: Any
    """int32: pages whose hash is known"""
    flight: Any
    """int32: whether it has rows in the paused step, or in one that other blocks compute at this moment; 0 = no"""
    ahead: Any
    """int32: how many rows it has in the step that other blocks compute"""
    sample: Any
    """int32: the sample that they draw, -1 = none"""
    ignore_eos: Any
    """int32: 1 = do not end at an end token"""
    token: Any
    """int32 [slots, context]: the tokens known"""


class Queue(NamedTuple):
    """Who runs, who is to end, and how the scheduler is set."""

    running: Any
    """int32 [most running]: slots in the batch, by their order"""
    rung: Any
    """int32 [slots]: slots that have rung since the last look, `count[RUNG]` of them"""
    ended: Any
    """int32 [slots]: slots that are to end, `count[ENDING]` of them"""
    first: Any
    """int64 [1]: the smallest order that a lane has seen, negated: a maximum over lanes"""
    moved: Any
    """int32 [T + C, 3]: (slot, place in its page table, page that has the same text and is to be there)"""
    count: Any
    """int64 [40]: see the places above"""
    kept: Any
    """int64 [3]: generation, state and position of the slot that a rehearsal uses"""
    reserved: int
    """places in the batch that best-effort requests leave free"""
    layer_preemption: int
    """1 = an urgent request may interrupt a best-effort step between two layers, 0 = only between steps"""
    own_block: int
    """1 = block 0 schedules and does nothing else, 0 = it also computes"""
    rehearses: int
    """1 = it rehearses when there is nothing else to do (:mod:`.rehearsal`)"""


class Plan(NamedTuple):
    """One step's work: up to T rows, each one position of one slot, in chunks of consecutive positions.

    Written by the scheduler's block, read by all after a grid barrier. There are PLANS of them: one that is
    computed, one that was and becomes the next, and one that was put aside for an urgent request.
    """

    count: Any
    """int32 [16]: see the places above"""
    stamp: Any
    """int64 [16]: ns of the clock at the places of scheduler/sight.py"""
    slot: Any
    """int32 [T]"""
    token: Any
    """int32 [T]"""
    source: Any
    """int32 [T]: the sample of the step before that is the row's token, -1 = the token was known"""
    position: Any
    """int32 [T]"""
    chunk_slot: Any
    """int32 [C]: whose positions the chunk computes"""
    chunk_taken: Any
    """uint32 [C]: the slot's generation"""
    chunk_row: Any
    """int32 [C]: its first row in the plan"""
    chunk_rows: Any
    """int32 [C]: how many rows"""
    chunk_first: Any
    """int32 [C]: the position of its first row"""
    chunk_sample: Any
    """int32 [C]: its sample, -1 = it draws none"""
    sample_row: Any
    """int32 [S]: the row whose logits the sample is drawn from"""
    sample_slot: Any
    """int32 [S]"""
    draw: Any
    """int64 [S]: the position of the token to be drawn, which keys its noise"""
    temperature: Any
    """float32 [S]"""
    seed: Any
    """uint64 [S]"""
    best: Any
    """int64 [S]: rank key of the token drawn, a maximum over all warps; the step's blocks begin it anew"""


def allocate(
    slots: int,
    running: int,
    context: int,
    reserved: int = 0,
    layer_preemption: bool = True,
    own_block: bool = False,
    rows: int = 0,
    rehearses: bool = False,
) -> tuple[Slots, Queue]:
    """Empty state for `slots` slots of up to `context` tokens, and at most `running` requests at a time.

    `reserved` of the `running` places are for urgent requests only. `rows` is the most rows of a step.
    """

    def i32(*shape):
        return np.zeros(shape, np.int32)

    def i64(*shape):
        return np.zeros(shape, np.int64)

    def u32(*shape):
        return np.zeros(shape, np.uint32)

    table = Slots(
        taken=u32(slots),
        state=i32(slots),
        ending=i32(slots),
        order=i64(slots),
        urgent=i32(slots),
        deadline=i64(slots),
        leader=i32(slots),
        leader_generation=u32(slots),
        prompt_at=i64(slots),
        prompt_len=i32(slots),
        strange=i32(slots),
        limit=i32(slots),
        known=i32(slots),
        done=i32(slots),
        pages=i32(slots),
        hashed=i32(slots),
        flight=i32(slots),
        ahead=i32(slots),
        sample=i32(slots),
        ignore_eos=i32(slots),
        token=i32(slots, context),
    )
    queue = Queue(
        running=i32(running),
        rung=i32(slots),
        ended=i32(slots),
        first=i64(1),
        moved=i32(rows + running, 3),
        count=i64(40),
        kept=i64(3),
        reserved=reserved,
        layer_preemption=int(layer_preemption),
        own_block=int(own_block),
        rehearses=int(rehearses),
    )
    queue.count[SPARE] = 1
    return table, queue


def allocate_plan(rows: int, running: int) -> Plan:
    """An empty plan of up to `rows` rows for `running` requests."""
    if running > rows:
        raise ValueError(f"{running} running requests need at least as many rows a step, not {rows}")

    def i32(n):
        return np.zeros(n, np.int32)

    return Plan(
        count=i32(16),
        stamp=np.zeros(16, np.int64),
        slot=i32(rows),
        token=i32(rows),
        source=np.full(rows, -1, np.int32),
        position=i32(rows),
        chunk_slot=i32(running),
        chunk_taken=np.zeros(running, np.uint32),
        chunk_row=i32(running),
        chunk_rows=i32(running),
        chunk_first=i32(running),
        chunk_sample=i32(running),
        sample_row=i32(running),
        sample_slot=i32(running),
        draw=np.zeros(running, np.int64),
        temperature=np.zeros(running, np.float32),
        seed=np.zeros(running, np.uint64),
        best=np.zeros(running, np.int64),
    )


def allocate_plans(rows: int, running: int) -> Plan:
    """PLANS empty plans, one after the other in each array; :func:`plan_of` tells them apart."""
    return Plan(*(np.stack([each] * PLANS) for each in allocate_plan(rows, running)))


@device
def plan_of(plans, n):
    """Plan number `n` of several.

    Where it is used: the addresses of all its arrays, kept, would fill the registers.
    """
    n = u64(u32(opaque(np.int64(n))))  # half the registers
    return Plan(
        plans.count[n],
        plans.stamp[n],
        plans.slot[n],
        plans.token[n],
        plans.source[n],
        plans.position[n],
        plans.chunk_slot[n],
        plans.chunk_taken[n],
        plans.chunk_row[n],
        plans.chunk_rows[n],
        plans.chunk_first[n],
        plans.chunk_sample[n],
        plans.sample_row[n],
        plans.sample_slot[n],
        plans.draw[n],
        plans.temperature[n],
        plans.seed[n],
        plans.best[n],
    )


def allocate_sampling(slots: int) -> Sampling:
    """How each slot's tokens are drawn: all greedy."""

    def i32(*shape):
        return np.zeros(shape, np.int32)

    def f32(*shape):
        return np.zeros(shape, np.float32)

    return Sampling(
        temperature=f32(slots),
        seed=np.zeros(slots, np.uint64),
        valid=i32(slots),
        filtered=i32(slots),
        top_k=i32(slots),
        top_p=f32(slots),
        min_p=f32(slots),
        repetition=f32(slots),
        presence=f32(slots),
        frequency=f32(slots),
        min_tokens=i32(slots),
        stops=i32(slots),
        stop=i32(slots, MOST_STOPS),
        biases=i32(slots),
        bias_token=i32(slots, MOST_BIASES),
        bias=f32(slots, MOST_BIASES),
        logprobs=i32(slots),
    )
