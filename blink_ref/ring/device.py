"""The GPU's side of the window: seeing doorbells, writing outbox records, beating."""

from typing import Any, NamedTuple

from ..simt import device
from ..simt.vocabulary import SYSTEM, divide, i64, load_acquire, store_release, u32, u64
from .layout import LINE

WORDS_IN_LINE = LINE // 4


class Window(NamedTuple):
    """The window's arrays as the kernel sees them; fields as in :mod:`.layout`, but for the last two."""

    stop: Any
    doorbell: Any
    cancel: Any
    consumed: Any
    request: Any
    arena: Any
    heartbeat: Any
    state: Any
    outbox: Any
    position: Any
    owner: Any
    history: Any
    written: Any
    """int64 [workers], in the GPU's own memory: records written so far to each worker's outbox"""
    room: Any
    """int64 [workers], in the GPU's own memory: records that still fit, as of this step's plan"""
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
    """Records that fit into a worker's outbox now. One lane."""
    consumed = load_acquire(window.consumed, worker * WORDS_IN_LINE, SYSTEM)
    unread = i64(u32(u64(window.written[worker]) & u64(0xFFFFFFFF)) - consumed) & i64(0xFFFFFFFF)
    return (i64(1) << i64(window.outbox_bits)) - unread


@device
def write_record(window, worker, index, slot, kind, value):
    """Write record number `index` of a worker's outbox: one 8-byte store, whole once its tag is. One lane."""
    size = i64(1) << i64(window.outbox_bits)
    tag = ((index >> i64(window.outbox_bits)) + 1) & i64(0xFFFF)
    word = (tag << i64(48)) | (i64(slot) << i64(32)) | (i64(kind) << i64(24)) | i64(value)
    store_release(window.outbox, worker * size + (index & (size - 1)), u64(word), SYSTEM)


@device
def beat(window, place, value):
    """Set a word of the heartbeat. One lane of the scheduler's block."""
    store_release(window.heartbeat, place, u64(value), SYSTEM)
