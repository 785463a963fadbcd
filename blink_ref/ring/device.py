"""The GPU's side of the window: seeing doorbells, writing outbox records, beating."""

from typing import Any, NamedTuple

from ..simt import device
from ..simt.vocabulary import SYSTEM, divide, i64, load_acquire, load_relaxed, store_release, u32, u64
from .layout import LINE

WORDS_IN_LINE = LINE // 4


class Window(NamedTuple):
    """The window's arrays as the kernel sees them; fields as in :mod:`.layout`, but for the last ones."""

    stop: Any
    doorbell: Any
    cancel: Any
    consumed: Any
    urgent: Any
    trace: Any
    request: Any
    arena: Any
    heartbeat: Any
    state: Any
    outbox: Any
    logprob: Any
    likely: Any
    position: Any
    owner: Any
    history: Any
    event: Any
    written: Any
    """int64 [workers], in the GPU's own memory: records written so far to each worker's outbox"""
    room: Any
    """int64 [workers], in the GPU's own memory: records that fit, as seen when this turn began"""
    dealt: Any
    """int64 [workers], in the GPU's own memory: records of them that the plan's samples may take"""
    reserved: Any
    """int64 [workers], in the GPU's own memory: records kept for what a paused step will send"""
    workers: int
    outbox_bits: int
    """log2 of the records in one worker's ring"""
    arena_size: int
    """tokens in one worker's arena"""


@device
def worker_of(window, slot):
    """The NIC worker that owns a slot."""
    return divide(i64(slot) * i64(window.workers), i64(window.doorbell.shape[0]))[0]


@device
def outbox_room(window, worker):
    """Records that fit into a worker's outbox now, beside those reserved. One lane."""
    consumed = load_acquire(window.consumed, worker * WORDS_IN_LINE, SYSTEM)
    unread = i64(u32(u64(window.written[worker]) & u64(0xFFFFFFFF)) - consumed) & i64(0xFFFFFFFF)
    return (i64(1) << i64(window.outbox_bits)) - unread - window.reserved[worker]


@device
def urgent_rung(window):
    """Urgent requests that the workers have rung so far, modulo 2**32: a hint, that orders nothing. One lane."""
    rung = u32(0)
    for worker in range(window.workers):
        rung = u32(rung + load_relaxed(window.urgent, worker * WORDS_IN_LINE, SYSTEM))
    return rung


@device
def urgent_seen(window):
    """As :func:`urgent_rung`; the doorbells of those that it counts are visible after. One lane."""
    rung = u32(0)
    for worker in range(window.workers):
        rung = u32(rung + load_acquire(window.urgent, worker * WORDS_IN_LINE, SYSTEM))
    return rung


@device
def write_record(window, worker, slot, kind, value):
    """Write a worker's next outbox record: one 8-byte store, whole once its tag is. One lane."""
    index, size = i64(window.written[worker]), i64(1) << i64(window.outbox_bits)
    tag = ((index >> i64(window.outbox_bits)) + 1) & i64(0xFFFF)
    word = (tag << i64(48)) | (i64(slot) << i64(32)) | (i64(kind) << i64(24)) | i64(value)
    store_release(window.outbox, worker * size + (index & (size - 1)), u64(word), SYSTEM)
    window.written[worker] = index + 1


@device
def beat(window, place, value):
    """Set a word of the heartbeat. One lane of the scheduler's block."""
    store_release(window.heartbeat, place, u64(value), SYSTEM)
