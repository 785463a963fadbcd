"""What the scheduler keeps between steps, and the plan it makes for one step."""

from typing import Any, NamedTuple

import numpy as np

WAITING_HEAD, WAITING_TAIL, RUNNING, CHUNKS, DECISION, CANDIDATE, NEED, DECODING = range(8)
"""Places in :attr:`Queue.count`."""

ROWS, SAMPLES, GO, TIMED = range(4)
"""Places in :attr:`Plan.count`."""

IDLE, RUN, LEAVE = range(3)
"""Values of the plan's GO."""


class Slots(NamedTuple):
    """Each slot's request, as taken from the window; arrays over slots. Only the scheduler's block writes it."""

    taken: Any
    """uint32: the generation last taken from the doorbell"""
    state: Any
    """int32: FREE, READY, PREFILL, DECODE of ring.layout"""
    prompt_at: Any
    """int64: where the prompt begins in the window's arenas"""
    prompt_len: Any
    """int32"""
    limit: Any
    """int32: most tokens to generate"""
    done: Any
    """int32: positions whose keys and values are in the cache"""
    produced: Any
    """int32: tokens generated so far"""
    last: Any
    """int32: the token generated last"""
    pages: Any
    """int32: pages held"""
    ignore_eos: Any
    """int32: 1 = do not end at an end token"""
    temperature: Any
    """float32"""
    seed: Any
    """uint64"""


class Queue(NamedTuple):
    """Who waits, who runs, and the chunks of the step being planned."""

    waiting: Any
    """int32 [slots], a ring: slots in order of arrival"""
    running: Any
    """int32 [most running]: slots with pages, in order of admission"""
    count: Any
    """int64 [8]: see the places above"""
    chunk_slot: Any
    """int32 [most running]: whose positions the chunk computes"""
    chunk_row: Any
    """int32: its first row in the plan"""
    chunk_rows: Any
    """int32: how many rows"""
    chunk_first: Any
    """int32: the position of its first row"""


class Plan(NamedTuple):
    """One step's work: up to T rows, each one position of one slot. Written by the scheduler's block,
    read by all after a grid barrier."""

    count: Any
    """int32 [4]: rows, samples, whether to go on, and the layer whose phases are timed"""
    stamp: Any
    """int64 [16]: ns of the clock at the places of scheduler/sight.py"""
    slot: Any
    """int32 [T]"""
    token: Any
    """int32 [T]"""
    position: Any
    """int32 [T]"""
    sample_row: Any
    """int32 [S]: the row whose logits the sample is drawn from"""
    draw: Any
    """int64 [S]: the position of the token to be drawn, which keys its noise"""
    temperature: Any
    """float32 [S]"""
    seed: Any
    """uint64 [S]"""
    best: Any
    """int64 [S]: rank key of the token drawn, a maximum over all warps"""


def allocate(slots: int, rows: int, running: int) -> tuple[Slots, Queue, Plan]:
    """Empty state for `slots` slots, steps of up to `rows` rows, and at most `running` requests at a time."""
    if running > rows:
        raise ValueError(f"{running} running requests need at least as many rows a step, not {rows}")

    def i32(n):
        return np.zeros(n, np.int32)

    table = Slots(
        taken=np.zeros(slots, np.uint32),
        state=i32(slots),
        prompt_at=np.zeros(slots, np.int64),
        prompt_len=i32(slots),
        limit=i32(slots),
        done=i32(slots),
        produced=i32(slots),
        last=i32(slots),
        pages=i32(slots),
        ignore_eos=i32(slots),
        temperature=np.zeros(slots, np.float32),
        seed=np.zeros(slots, np.uint64),
    )
    queue = Queue(
        i32(slots), i32(running), np.zeros(8, np.int64), i32(running), i32(running), i32(running), i32(running)
    )
    plan = Plan(
        count=i32(4),
        stamp=np.zeros(16, np.int64),
        slot=i32(rows),
        token=i32(rows),
        position=i32(rows),
        sample_row=i32(running),
        draw=np.zeros(running, np.int64),
        temperature=np.zeros(running, np.float32),
        seed=np.zeros(running, np.uint64),
        best=np.zeros(running, np.int64),
    )
    return table, queue, plan
