"""The GPU's side of the window: seeing doorbells, writing outbox records, beating."""

from typing import Any, NamedTuple

from ..simt import device
from ..simt.vocabulary import (
    SYSTEM,
    i64,
    load_acquire,
    load_relaxed,
    opaque,
    store_relaxed,
    store_release,
    u32,
    u64,
)
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
    read: Any
    """uint32 [workers], in the GPU's own memory: records that the worker had taken when last looked"""
    room: Any
    """int64 [workers], in the GPU's own memory: records that fit, as seen when this turn began"""
    dealt: Any
    """int64 [workers], in the GPU's own memory: records of them that the plan's samples may take"""
    reserved: Any
    """int64 [workers], in the GPU's own memory: records kept for what a paused step will send"""
    workers: int
    share_bits: int
    """log2 of the slots that a worker owns"""
    outbox_bits: int
    """log2 of the records in one worker's ring"""
    arena_size: int
    """tokens in one worker's arena"""


@device
def worker_of(window, slot):
    """The NIC worker that owns a slot."""
    return i64(slot) >> i64(window.share_bits)


@device
def workers_of(window):
    """How many workers the NIC has; not known at the kernel's start, where loops over them would be prepared."""
    return opaque(i64(window.workers))


@device
def outbox_room(window, worker, wanted):
    """Records that fit into a worker's outbox, beside those reserved. One lane.

    What has been read is looked up only if fewer than `wanted` fit as last looked: it takes a microsecond.
    """
    room = room_as_seen(window, worker)
    if room < wanted:
        look_what_is_read(window, worker)
        room = room_as_seen(window, worker)
    return room


@device
def room_as_seen(window, worker):
    """Records that fit into a worker's outbox, as last looked, beside those reserved. One lane."""
    unread = i64(u32(u64(window.written[worker]) & u64(0xFFFFFFFF)) - window.read[worker]) & i64(0xFFFFFFFF)
    return (i64(1) << i64(window.outbox_bits)) - unread - window.reserved[worker]


@device
def look_what_is_read(window, worker):
    """Note how many records a worker has taken; what is free then can be written again. One lane."""
    window.read[worker] = load_acquire(window.consumed, worker * WORDS_IN_LINE, SYSTEM)


@device
def urgent_rung(window):
    """Urgent requests that the workers have rung so far, modulo 2**32: a hint, that orders nothing. One lane."""
    rung, worker = u32(0), i64(0)
    while worker < workers_of(window):
        rung = u32(rung + load_relaxed(window.urgent, worker * WORDS_IN_LINE, SYSTEM))
        worker = opaque(worker) + 1
    return rung


@device
def write_record(window, worker, slot, kind, value, last):
    """Write a worker's next outbox record: one 8-byte store, whole once its tag is. One lane.

    With `last` it comes after all that the kernel has to do with the request or writes beside the record. Such a
    store waits for those before it to cross PCIe, which takes microseconds.
    """
    index, size = i64(window.written[worker]), i64(1) << i64(window.outbox_bits)
    tag = ((index >> i64(window.outbox_bits)) + 1) & i64(0xFFFF)
    word = (tag << i64(48)) | (i64(slot) << i64(32)) | (i64(kind) << i64(24)) | i64(value)
    at = worker * size + (index & (size - 1))
    if last:
        store_release(window.outbox, at, u64(word), SYSTEM)
    else:
        store_relaxed(window.outbox, at, u64(word), SYSTEM)
    window.written[worker] = index + 1


@device
def beat(window, place, value):
    """Set a word of the heartbeat, which orders nothing. One lane of the scheduler's block."""
    store_relaxed(window.heartbeat, place, u64(value), SYSTEM)


@device
def beat_last(window, place, value):
    """Set a word of the heartbeat; all that was written before is visible with it. One lane, as :func:`beat`."""
    store_release(window.heartbeat, place, u64(value), SYSTEM)
