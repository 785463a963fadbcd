"""The NIC's side of the ring: requests into slots, tokens out of the outbox."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blink_ref.errors import BlinkError
from blink_ref.ring.layout import END, IGNORE_EOS, LINE, STOPPED, unpack_record
from blink_ref.ring.window import Window

from .arena import Arena

MASK = 0xFFFFFFFF
MAX_TEMPERATURE = 1e6
"""Hotter than this is uniform sampling, and float32 would overflow in the division."""
CHECK_EVERY = 0.1
"""Seconds between two looks at whether the engine lives, while waiting."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0002, 0.002


class Busy(BlinkError):
    """All slots, or all of the prompt arena, are taken; one END record later there is room again."""


class EngineGone(BlinkError):
    """The engine died or was stopped; nothing more will come."""


@dataclass(eq=False, slots=True)
class Handle:
    """A request in flight: its slot, the generation it rang, and its prompt's place in the arena."""

    slot: int
    generation: int
    prompt_at: int
    prompt_len: int


class Event(NamedTuple):
    """What came for a request: a token, or, once and last, the reason why it ended."""

    handle: Handle
    token: int | None
    reason: int | None


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
        self._consumed = window.nic["consumed"][worker * LINE // 4 :][:1]
        self._index = int(self._consumed[0])
        self._last_event = self._last_check = time.monotonic()

    @property
    def running(self) -> int:
        """Requests whose END has not been seen."""
        return len(self._running)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
        priority: int = 0,
    ) -> Handle:
        """Put a request into a free slot and ring its doorbell. Returns at once.

        ``prompt`` are token ids, ``temperature`` 0 is greedy, of two ``priority`` the smaller goes first.

        Raises BlinkError: an argument is out of its range (see :func:`check_request`). Busy: there is no
        room now.
        """
        check_request(prompt, max_tokens, temperature, seed, self.context, self._window.layout.vocab)
        if not self._free:
            raise Busy(f"all {len(self._running)} request slots are taken; try again later")
        prompt_at = self._arena.take(len(prompt))
        if prompt_at is None:
            raise Busy(
                f"the prompt of {len(prompt)} tokens does not fit into what is left of the arena of "
                f"{self._window.layout.arena} tokens; try again later"
            )
        slot = self._free.pop()
        nic = self._window.nic
        generation = next_generation(int(nic["doorbell"][slot]))
        handle = Handle(slot, generation, prompt_at, len(prompt))
        if not self._running:
            self._last_event = time.monotonic()
        self._running[slot] = handle
        self._prompts[prompt_at : prompt_at + len(prompt)] = prompt
        request = nic["request"][slot]
        request["prompt_at"], request["prompt_len"] = prompt_at, len(prompt)
        request["max_tokens"] = max_tokens
        request["flags"] = IGNORE_EOS if ignore_eos else 0
        request["temperature"] = temperature
        request["priority"] = priority
        request["seed"] = seed
        # A cancel word from 2**32 requests ago could name this generation.
        nic["cancel"][slot] = 0
        _publish(nic["doorbell"], slot, generation)
        return handle

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
        """Seconds to sleep before the next :meth:`poll`: a sixteenth of the silence so far, within bounds.

        So a token is seen late by a few per cent of the time it took, and a slow engine that shares
        the cores with its NIC is not disturbed thousands of times for each of its tokens.
        """
        silence = time.monotonic() - self._last_event
        return min(max(silence / 16, SHORTEST_PAUSE), LONGEST_PAUSE)

    def _take(self) -> list[Event]:
        events, size = [], len(self._outbox)
        while record := unpack_record(int(self._outbox[self._index % size]), self._index, size):
            self._index = (self._index + 1) & MASK
            handle = self._running.get(record.slot)
            if handle is None:  # rung by an earlier Nic of this worker
                continue
            if record.kind == END:
                self._release(handle)
                events.append(Event(handle, None, record.value))
            else:
                events.append(Event(handle, record.value, None))
        # The GPU may overwrite what was consumed. No fence: how far to go was computed from the records
        # themselves, and a store that depends on a load cannot pass it.
        self._consumed[0] = self._index
        return events

    def _release(self, handle: Handle) -> None:
        del self._running[handle.slot]
        self._free.append(handle.slot)
        self._arena.give(handle.prompt_at, handle.prompt_len)

    def _engine_gone(self) -> str:
        pid = self._window.engine_pid
        if self._window.gpu["heartbeat"][2] == STOPPED:
            return f"the engine (process {pid}) has stopped; start it again"
        if not self._window.alive():
            return f"the engine (process {pid}) died; look above for its last words and start it again"
        return ""


def check_request(
    prompt: Sequence[int], max_tokens: int, temperature: float, seed: int, context: int, vocab: int
) -> None:
    """Refuse what no engine with this ``context`` (tokens) and ``vocab`` can serve.

    Raises BlinkError: which names the argument, its value and its limit.
    """
    if not prompt:
        raise BlinkError("the prompt is empty; send at least one token")
    stranger = next((token for token in prompt if not 0 <= token < vocab), None)
    if stranger is not None:
        raise BlinkError(f"token id {stranger} in the prompt is outside the vocabulary of {vocab}")
    if max_tokens < 1:
        raise BlinkError(f"max_tokens is {max_tokens}; it must be at least 1")
    if len(prompt) + max_tokens > context:
        raise BlinkError(
            f"the prompt of {len(prompt)} tokens and max_tokens {max_tokens} exceed the context of {context}; "
            "shorten the prompt or ask for fewer tokens"
        )
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise BlinkError(f"temperature is {temperature}; it must be between 0 (greedy) and {MAX_TEMPERATURE:g}")
    if not 0 <= seed < 2**64:
        raise BlinkError(f"seed is {seed}; it must be between 0 and 2**64 - 1")


def next_generation(generation: int) -> int:
    """The generation after ``generation``: 32 bits, and never 0, which means 'never rung'."""
    return (generation + 1) & MASK or 1


_fence = threading.Lock()


def _publish(words: np.ndarray, at: int, value: int) -> None:
    """Store ``words[at] = value`` after all stores before it, as the GPU sees them.

    x86 keeps stores in order; Arm64 does not, and Python has no fence. A lock has: its release is a
    store-release and its acquisition a load-acquire, and Arm orders a release before a later acquire
    (Arm Architecture Reference Manual, B2.3, barrier-ordered-before). So: everything above, the first
    release, the second acquisition, the store below. One pair alone would let both sides move into it.
    """
    with _fence:
        pass
    with _fence:
        pass
    words[at] = value
