"""The NIC's side of the ring: requests into slots, tokens out of the outbox."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blink_ref.errors import BlinkError
from blink_ref.ring.layout import BEAT_STATE, END, LINE, STOPPED, unpack_record
from blink_ref.ring.window import Window

from .arena import Arena
from .parameters import BadParameter, Parameters

MASK = 0xFFFFFFFF
CHECK_EVERY = 0.1
"""Seconds between two looks at whether the engine lives, while waiting."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0002, 0.002


class Busy(BlinkError):
    """All slots, or all of the prompt arena, are taken; one END record later there is room again."""


class EngineGone(BlinkError):
    """The engine died or was stopped; nothing more will come."""


@dataclass(eq=False, slots=True)
class Piece:
    """An interval of the arena, a prompt and what lies behind it, and how many requests still read it."""

    at: int
    length: int
    users: int


@dataclass(eq=False, slots=True)
class Handle:
    """A request in flight: its slot, the generation it rang, and its place in the arena."""

    slot: int
    generation: int
    piece: Piece
    logprobs: int | None
    """as in Parameters"""


class Logprobs(NamedTuple):
    """Log probabilities at one place of an answer: natural logarithms."""

    token: float
    """of the token that was drawn"""
    likeliest: list[tuple[int, float]]
    """(token id, log probability) of as many as were asked for, the likeliest first"""


class Event(NamedTuple):
    """What came for a request: a token, or, once and last, the reason why it ended."""

    handle: Handle
    token: int | None
    reason: int | None
    logprobs: Logprobs | None = None
    """of a token, if the request asked for them"""


class Nic:
    """One NIC worker: owner of its share of the slots, of its arena and of its outbox's ``consumed`` word.

    One Nic per worker and window, used by one thread. A request moves through :meth:`submit`, the events
    of :meth:`poll`, and perhaps :meth:`cancel`. ``context`` is the most tokens of prompt and answer.
    """

    def __init__(self, window: Window, worker: int = 0) -> None:
        layout = window.layout
        share = layout.slots // layout.workers
        self._window = window
        self.context = layout.context
        self._free = list(range((worker + 1) * share - 1, worker * share - 1, -1))
        self._running: dict[int, Handle] = {}
        self._arena = Arena(layout.arena)
        self._prompts = window.nic["arena"][worker * layout.arena :][: layout.arena]
        self._outbox = window.gpu["outbox"][worker * layout.outbox :][: layout.outbox]
        self._logprob = window.gpu["logprob"][worker * layout.outbox :][: layout.outbox]
        self._likely = window.gpu["likely"][worker * layout.outbox :][: layout.outbox]
        self._consumed = window.nic["consumed"][worker * LINE // 4 :][:1]
        self._urgent = window.nic["urgent"][worker * LINE // 4 :][:1]
        self._index = int(self._consumed[0])
        self._last_event = self._last_check = time.monotonic()
        self._intervals = 0.0, 0.0

    @property
    def running(self) -> int:
        """Requests whose END has not been seen."""
        return len(self._running)

    def submit(self, prompt: Sequence[int], max_tokens: int, *more: Any, **named: Any) -> Handle:
        """Put one request into a slot: :meth:`submit_samples` of ``Parameters(max_tokens, *more, **named)``."""
        return self.submit_samples(prompt, Parameters(max_tokens, *more, **named), 1)[0]

    def submit_samples(self, prompt: Sequence[int], parameters: Parameters, n: int) -> list[Handle]:
        """Put ``n`` requests for the same ``prompt`` (token ids) into free slots, and ring. Returns at once.

        Sample i has the seed of ``parameters`` + i, modulo 2**64. The prompt lies in the arena once; all but
        the first name the first as their leader, whose pages of the prompt the GPU lets them share.

        Raises BlinkError: an argument is out of its range (see :meth:`Parameters.check`). Busy: there is no
        room for all of them now, and none has been taken.
        """
        parameters.check(prompt, self.context, self._window.layout.vocab)
        self._refuse_if_busy(n)
        tail = parameters.tail()
        piece = self._take_piece(len(prompt), len(prompt) + len(tail), n)
        behind = piece.at + len(prompt)
        self._prompts[piece.at : behind] = prompt
        self._prompts[behind : behind + len(tail)] = tail
        values = parameters.record(self._window.layout.vocab)
        values |= {"prompt_at": piece.at, "prompt_len": len(prompt), "leader": 0, "leader_generation": 0}
        if not self._running:
            self._last_event, self._intervals = time.monotonic(), (0.0, 0.0)
        handles: list[Handle] = []
        for i in range(n):
            values["seed"] = (parameters.seed + i) & (2**64 - 1)
            handles.append(self._ring(values, piece, parameters))
            values |= {"leader": 1 + handles[0].slot, "leader_generation": handles[0].generation}
        return handles

    def cancel(self, handle: Handle) -> None:
        """Ask for the end of a request. Its END still comes, with reason CANCEL or, if it was faster, another."""
        if self._running.get(handle.slot) is handle:
            self._window.nic["cancel"][handle.slot] = handle.generation

    def poll(self) -> list[Event]:
        """What has come since the last call, in order; never waits.

        Raises EngineGone: all that came has been delivered, and no more will.
        """
        events = self._take()
        now = time.monotonic()
        if events:
            self._intervals = self._intervals[1], now - self._last_event
            self._last_event = now
        elif now - self._last_check > CHECK_EVERY:
            # Look first, then take once more: what the engine wrote before it died is not lost.
            gone = self._engine_gone()
            self._last_check = now
            events = self._take()
            if gone and not events:
                raise EngineGone(gone)
        return events

    def check(self) -> None:
        """Raises EngineGone: the engine died or was stopped."""
        if gone := self._engine_gone():
            raise EngineGone(gone)

    def pause(self) -> float:
        """Seconds to sleep before the next :meth:`poll`, within bounds.

        Until three quarters of the time that the shorter of the last two waits took, then a sixteenth of the
        silence so far. So a token is seen late by a few per cent of the time it took, and a slow engine that
        shares the cores with its NIC is not disturbed thousands of times for each of its tokens.
        """
        silence = time.monotonic() - self._last_event
        early = 0.75 * min(self._intervals) - silence
        return min(max(silence / 16, early, SHORTEST_PAUSE), LONGEST_PAUSE)

    def _refuse_if_busy(self, n: int) -> None:
        free, slots = len(self._free), len(self._free) + len(self._running)
        if not 1 <= n <= slots:
            raise BadParameter("n", f"is {n}; it must be between 1 and {slots}, the number of request slots")
        if not free:
            raise Busy(f"all {slots} request slots are taken; try again later")
        if n > free:
            raise Busy(f"{n} samples need as many request slots, and {free} are free; try again later")

    def _take_piece(self, prompt: int, length: int, users: int) -> Piece:
        size = self._window.layout.arena
        if length > size:
            raise BlinkError(
                f"the prompt with its stop tokens and biases takes {length} words of the {size} of the "
                "arena; shorten it"
            )
        at = self._arena.take(length)
        if at is None:
            raise Busy(
                f"the prompt of {prompt} tokens does not fit into what is left of the arena of {size} tokens; "
                "try again later"
            )
        return Piece(at, length, users)

    def _ring(self, values: dict[str, Any], piece: Piece, parameters: Parameters) -> Handle:
        """A free slot gets the request whose record has these values, and its doorbell rings."""
        nic, slot = self._window.nic, self._free.pop()
        generation = next_generation(int(nic["doorbell"][slot]))
        handle = self._running[slot] = Handle(slot, generation, piece, parameters.logprobs)
        request = nic["request"][slot]
        for name, value in values.items():
            request[name] = value
        # A cancel word from 2**32 requests ago could name this generation.
        nic["cancel"][slot] = 0
        _publish(nic["doorbell"], slot, generation)
        if parameters.urgent:
            # Behind the doorbell: who sees the count finds the request.
            _publish(self._urgent, 0, (int(self._urgent[0]) + 1) & MASK)
        return handle

    def _take(self) -> list[Event]:
        events, size, rows = [], len(self._outbox), 0
        while record := unpack_record(int(self._outbox[self._index % size]), self._index, size):
            handle = self._running.get(record.slot)
            if handle is None:  # rung by an earlier Nic of this worker
                pass
            elif record.kind == END:
                self._release(handle)
                events.append(Event(handle, None, record.value))
            elif handle.logprobs is None:
                events.append(Event(handle, record.value, None))
            else:
                events.append(Event(handle, record.value, None, self._read_row(handle.logprobs)))
                rows += 1
            self._index = (self._index + 1) & MASK
        if rows:
            _barrier()
        # The GPU may overwrite what was consumed. No fence but for rows: how far to go was computed from the
        # records themselves, and a store that depends on a load cannot pass it.
        self._consumed[0] = self._index
        return events

    def _read_row(self, n: int) -> Logprobs:
        """The log probabilities beside the record that was just seen."""
        _barrier()
        at = self._index % len(self._outbox)
        token, *likeliest = self._logprob[at, : 1 + n].tolist()
        return Logprobs(token, list(zip(self._likely[at, :n].tolist(), likeliest, strict=True)))

    def _release(self, handle: Handle) -> None:
        del self._running[handle.slot]
        self._free.append(handle.slot)
        handle.piece.users -= 1
        if not handle.piece.users:
            self._arena.give(handle.piece.at, handle.piece.length)

    def _engine_gone(self) -> str:
        pid = self._window.engine_pid
        if self._window.gpu["heartbeat"][BEAT_STATE] == STOPPED:
            return f"the engine (process {pid}) has stopped; start it again"
        if not self._window.alive():
            return f"the engine (process {pid}) died; look above for its last words and start it again"
        return ""


def next_generation(generation: int) -> int:
    """The generation after ``generation``: 32 bits, and never 0, which means 'never rung'."""
    return (generation + 1) & MASK or 1


_fence = threading.Lock()


def _publish(words: np.ndarray, at: int, value: int) -> None:
    """Store ``words[at] = value`` after all stores before it, as the GPU sees them."""
    _barrier()
    words[at] = value


def _barrier() -> None:
    """Nothing below it happens before anything above it.

    x86 keeps loads in order, and stores; Arm64 does not, and Python has no fence. A lock has: its release
    is a store-release and its acquisition a load-acquire, and Arm orders a release before a later acquire
    (Arm Architecture Reference Manual, B2.3, barrier-ordered-before). So: everything above, the first
    release, the second acquisition, everything below. One pair alone would let both sides move into it.
    """
    with _fence:
        pass
    with _fence:
        pass
