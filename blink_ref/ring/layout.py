"""The window: the only memory that the NIC and the GPU share. Every offset in it comes from here.

Two page-aligned halves, split by writer, so that each word has one writing side:

- the NIC's half: header, stop word, doorbells, cancel words, consumed counts, requests, prompt arena;
- the GPU's half: heartbeat, one outbox ring for each NIC worker, log probabilities beside it, and the
  sight: slot states, owners of pages, the last steps and events, for people to see.

A request lives in a slot. The NIC puts the prompt into its worker's arena and fills in the request,
then *rings* the slot's doorbell: it stores the slot's next generation number with release. The GPU scans
the doorbells, and a word that differs from the generation it last took is a new request. After a
latency-sensitive request's doorbell the NIC also counts its worker's *urgent* word up: the one word that
the GPU looks at in the middle of a step. Tokens come
back through the worker's outbox as self-validating 8-byte records: a record is complete when its tag is
the number of the lap that the reader is on. The last record of a request is an END; only then may
the NIC use the slot and the arena space again.

Pure NumPy: this is what a NIC imports, and it needs no numba and no GPU.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MAGIC = int.from_bytes(b"BLINKREF", "little")
VERSION = 4
PAGE = 4096
LINE = 64
"""Bytes in a cache line; words of different workers lie on different ones."""

# Slot states: a part of the sight, which is for people to see; nothing synchronises on it.
FREE, READY, PREFILL, DECODE, PAUSED, DONE, FAILED, CANCELLED = range(8)
STATES = ("FREE", "READY", "PREFILL", "DECODE", "PAUSED", "DONE", "FAILED", "CANCELLED")

# Request flags: go on after an end token; preempt best-effort requests between two layers.
IGNORE_EOS, URGENT = 1, 2

# Most of what a request can carry.
MOST_STOPS, MOST_BIASES, MOST_LOGPROBS = 16, 300, 20

# Outbox record kinds; the value of an END is one of the reasons below.
TOKEN, END = 1, 2

# Why a request ended.
STOP, LENGTH, CANCEL, TOO_LONG, NO_PAGES, BAD_REQUEST, SHUTDOWN, TIME = range(1, 9)
REASONS = {
    STOP: "stop",
    LENGTH: "length",
    CANCEL: "cancelled",
    TOO_LONG: "failed: prompt and max_tokens exceed the context",
    NO_PAGES: "failed: the KV cache can never hold it",
    BAD_REQUEST: "failed: the request record is not valid",
    SHUTDOWN: "failed: the engine is shutting down",
    TIME: "out of time",
}

# Words of the heartbeat. From BEAT_PREEMPTED on they are counts since the start.
BEATS, BEAT_STEPS, BEAT_STATE, BEAT_RUNNING, BEAT_WAITING = range(5)
BEAT_PREEMPTED, BEAT_PAUSED, BEAT_FOUND, BEAT_EVICTED, BEAT_EVENTS = range(5, 10)
"""Beats, steps, what the engine does, requests in the batch, requests that wait for a place in it; requests
preempted, steps paused, positions found in the cache, cached pages evicted, events written."""

STARTING, SERVING, STOPPED = range(3)
"""What the engine does: word BEAT_STATE of the heartbeat."""

# The sight's record of a step, STEP_WORDS words; step n is record n % HISTORY. It is read without an
# order: a record whose number is not the expected one is being written, or has not been.
HISTORY, STEP_WORDS = 128, 16
STEP_NUMBER, STEP_DECODE, STEP_PREFILL, STEP_SAMPLES, STEP_NS, STEP_PHASES = range(6)
"""Step number from 1 on, rows by kind, samples, ns of the step (waiting left out), from here on ns by phase."""
PHASES = ("schedule", "embed", "project", "attend", "output", "gate, up", "down", "logits")
"""What a step is made of. Those within a layer are timed in one layer, in turn, and multiplied by the layers."""

CACHED = 0xFFFFFFFF
"""In `owner`: no request holds the page, but it is kept for those whose prompt begins with its tokens."""

# Events: what happened, in the order in which it happened, while the NIC's `trace` word is 1. Two words
# each: ns of the GPU's clock; kind 8, slot 16, value 40. Event n is number n % `events`.
EVENT_ARRIVE, EVENT_ADMIT, EVENT_PREEMPT, EVENT_FINISH, EVENT_ROWS, EVENT_STEP = range(1, 7)
EVENT_PHASE, EVENT_PAUSE, EVENT_RESUME, EVENT_HOLD, EVENT_RELEASE, EVENT_EVICT = range(7, 13)
EVENTS = {
    EVENT_ARRIVE: "arrive",  # a doorbell was seen; value: tokens of the prompt
    EVENT_ADMIT: "admit",  # value: positions found in the cache
    EVENT_PREEMPT: "preempt",  # it gave its pages and its place away; value: tokens known so far
    EVENT_FINISH: "finish",  # value: the reason
    EVENT_ROWS: "rows",  # it has rows in the step that begins; value: first position << 20 | rows
    EVENT_STEP: "step",  # a step has been planned; value: its number
    EVENT_PHASE: "phase",  # one of PHASES has ended; value: its index << 32 | ns that it took
    EVENT_PAUSE: "pause",  # the step gives way to an urgent one; value: layers done
    EVENT_RESUME: "resume",  # and goes on; value: layers done
    EVENT_HOLD: "hold",  # the slot holds the page, shared or not; value: place in its page table << 20 | page
    EVENT_RELEASE: "release",  # the slot lets the page go; value: 1 << 20 if it stays cached | page
    EVENT_EVICT: "evict",  # a cached page is free again; value: page
}

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("slots", "<u4"),
        ("workers", "<u4"),
        ("arena", "<u4"),  # tokens per worker
        ("outbox", "<u4"),  # records per worker, a power of two
        ("context", "<u4"),  # most tokens of prompt and answer together
        ("vocab", "<u4"),
        ("engine_pid", "<u4"),
        ("pages", "<u4"),  # of the KV cache
        ("page_size", "<u4"),  # positions in a page
        ("events", "<u4"),  # kept, a power of two
        ("unused", "<u4", (LINE - 52) // 4),
    ]
)
"""Written once by the engine's host before anything else runs."""

REQUEST = np.dtype(
    [
        ("prompt_at", "<u4"),  # index of the first prompt token in the arena of the slot's worker
        ("prompt_len", "<u4"),  # tokens, at least 1
        ("max_tokens", "<u4"),  # tokens to generate, at least 1
        ("flags", "<u4"),
        ("temperature", "<f4"),  # 0 = greedy
        ("priority", "<u4"),  # smaller goes first
        ("seed", "<u8"),
        ("min_tokens", "<u4"),  # no end token and no stop token before so many; at most max_tokens
        ("time_ms", "<u4"),  # from the GPU's first sight of it to its END; 0 = no limit
        ("top_k", "<u4"),  # draw from so many of the likeliest tokens; 0 = from all
        ("top_p", "<f4"),  # draw from the likeliest whose probabilities reach it; 0 = from all
        ("min_p", "<f4"),  # draw from those at least so likely as the likeliest times it; 0 = from all
        ("repetition", "<f4"),  # divide (multiply below 0) logits of prompt and answer tokens; 0 = 1 = off
        ("presence", "<f4"),  # subtract from the logits of the answer's tokens; 0 = off
        ("frequency", "<f4"),  # the same, as often as they occur; 0 = off
        ("stops", "<u4"),  # stop tokens, which lie in the arena behind the prompt
        ("biases", "<u4"),  # logit biases: behind the stop tokens, (token, float32 bits) each
        ("logprobs", "<u4"),  # 0 = none; 1 + n = of the token and of the n likeliest
        ("leader", "<u4"),  # 0 = none; 1 + a slot that was rung before, with the same prompt: wait for its pages
        ("leader_generation", "<u4"),
        ("unused", "<u4", (2 * LINE - 84) // 4),
    ],
    align=True,  # says that it is: of a record that may not be, compiled code reads each byte by itself
)


REHEARSED_PAGES = 2
"""Whole pages of the prompt of a rehearsal."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a window. Worker w owns slots w*slots/workers and on.

    Raises ValueError unless `slots`, `outbox` and `events` are powers of two, and `workers` divides `slots`.
    """

    slots: int = 4096
    workers: int = 1
    arena: int = 1 << 20
    outbox: int = 1 << 13
    context: int = 2048
    vocab: int = 0
    pages: int = 1024
    page_size: int = 16
    events: int = 1 << 14

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("outbox", 2), ("events", 1)):  # a token and an END have to fit
            if (n := getattr(self, name)) < least or n & (n - 1):
                raise ValueError(f"{name} is a power of two from {least} on, not {n}")
        if self.slots % self.workers:
            raise ValueError(f"{self.workers} workers cannot share {self.slots} slots evenly")

    @property
    def nic_half(self) -> np.dtype:
        """The half that only the NIC's side writes."""
        return _paged(
            [
                ("header", HEADER),
                ("stop", "<u4", LINE // 4),  # word 0: 1 asks the kernel to leave; written by the CPU side
                ("doorbell", "<u4", self.slots),  # a slot's generation; 0 = never rung
                ("cancel", "<u4", self.slots),  # the generation that is no longer wanted
                ("consumed", "<u4", self.workers * LINE // 4),  # [w*16]: records taken, modulo 2**32
                ("urgent", "<u4", self.workers * LINE // 4),  # [w*16]: URGENT requests rung, modulo 2**32
                ("trace", "<u4", LINE // 4),  # word 0: 1 asks for events
                ("request", REQUEST, self.slots + 1),  # the last one is of no slot: for rehearsals
                ("arena", "<u4", self.workers * self.arena + self.rehearsal),  # the prompt of those at the end
            ]
        )

    @property
    def gpu_half(self) -> np.dtype:
        """The half that only the GPU writes."""
        return _paged(
            [
                ("heartbeat", "<u8", 2 * LINE // 8),  # words: see BEATS
                ("state", "<u4", self.slots),
                ("outbox", "<u8", self.workers * self.outbox),
                # beside the outbox: the record's token, then the likeliest; a row is whole when the record is
                ("logprob", "<f4", (self.workers * self.outbox, 1 + MOST_LOGPROBS)),
                ("likely", "<u4", (self.workers * self.outbox, MOST_LOGPROBS)),  # their ids
                ("position", "<u4", self.slots),  # positions of a slot's request in the KV cache so far
                ("owner", "<u4", self.pages),  # 0 = free, CACHED, or slot << 16 | 1 + place in its page table
                ("history", "<u4", HISTORY * STEP_WORDS),
                ("event", "<u8", (self.events, 2)),
            ]
        )

    @property
    def rehearsal(self) -> int:
        """Tokens of the prompt that an idle scheduler rehearses with, which nobody writes."""
        return REHEARSED_PAGES * self.page_size + 1

    @property
    def size(self) -> int:
        """Bytes of the whole window."""
        return self.nic_half.itemsize + self.gpu_half.itemsize


class Record(NamedTuple):
    """One outbox record."""

    slot: int
    kind: int
    value: int


def pack_record(index: int, outbox: int, slot: int, kind: int, value: int) -> int:
    """The 64-bit record number `index` of a ring of `outbox` records: tag 16, slot 16, kind 8, value 24."""
    tag = (index // outbox + 1) & 0xFFFF
    return tag << 48 | slot << 32 | kind << 24 | value


def unpack_record(word: int, index: int, outbox: int) -> Record | None:
    """Record number `index`, or None while the GPU has not written it yet."""
    if word >> 48 != (index // outbox + 1) & 0xFFFF:
        return None
    return Record(word >> 32 & 0xFFFF, word >> 24 & 0xFF, word & 0xFFFFFF)


def _paged(fields: list[tuple]) -> np.dtype:
    """A structured dtype of `fields`, each at a multiple of LINE bytes, the whole a multiple of PAGE."""
    names, formats, offsets, end = [], [], [], 0
    for name, *form in fields:
        dtype = np.dtype((form[0], form[1])) if len(form) == 2 else np.dtype(form[0])
        names.append(name)
        formats.append(dtype)
        offsets.append(end)
        end += -(-dtype.itemsize // LINE) * LINE
    size = -(-end // PAGE) * PAGE
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
