"""A test double of the engine: the same command line and the same side of the window, and no model.

It "generates" by saying the prompt again, round and round, or by a script of token ids. The environment
variable FAKE_ENGINE holds a JSON object of the fields of :class:`Script`.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.ring import layout as ring
from blink_ref.ring.layout import Layout, pack_record
from blink_ref.ring.window import Window
from blink_ref.trace.record import pack_event


@dataclass
class Script:
    """What a fake engine does; sizes are those of its window, times are seconds."""

    delay: float = 0.0  # a step
    startup: float = 0.0
    slots: int = 64
    arena: int = 4096
    outbox: int = 256
    answer: list[int] = field(default_factory=list)  # token ids to say in a cycle instead of the prompt
    refuse: int = 0  # the reason with which to end every request at once
    error: str = ""  # to print instead of serving
    noise: str = ""  # to print before the ready line
    stubborn: bool = False  # ignores the stop word, SIGTERM and the end of its standard input


@dataclass
class Row:
    """A request that runs."""

    prompt: list[int]
    max_tokens: int
    stops: set[int]
    min_tokens: int
    deadline: float  # seconds of the monotonic clock
    logprobs: int | None
    sent: int = 0
    reason: int = 0


def scores(token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """What it says of a token's log probabilities: the `n` likeliest are the ids from the token on, in turn."""
    return -token / 8, [(token + i, -i / 4) for i in range(n)]


class FakeGpu:
    """The GPU's side of a window, one worker, in plain Python."""

    def __init__(self, window: Window, script: Script, eos_ids: tuple[int, ...] = ()) -> None:
        self.window, self.script, self.eos_ids = window, script, eos_ids
        self.size = window.layout.outbox
        self.index = int(window.nic["consumed"][0])
        self.taken = np.zeros(window.layout.slots, np.uint32)
        self.urgent = int(window.nic["urgent"][0])
        self.rows: dict[int, Row] = {}
        self.events = 0

    def step(self) -> None:
        """Take what has rung, and write one record for each running request that finds room."""
        doorbell, heartbeat = self.window.nic["doorbell"], self.window.gpu["heartbeat"]
        urgent = int(self.window.nic["urgent"][0])
        for slot in map(int, (doorbell != self.taken).nonzero()[0]):
            assert slot not in self.rows, f"slot {slot} was rung again before its END"
            self.taken[slot] = doorbell[slot]
            self.rows[slot] = self._take(slot)
            self._event(ring.EVENT_ARRIVE, slot, len(self.rows[slot].prompt))
            self._event(ring.EVENT_ADMIT, slot)
            self._event(ring.EVENT_HOLD, slot, slot)
        self._trace_step()
        assert (self.urgent - urgent) & 0xFFFFFFFF < 1 << 31, "a request was counted as urgent before it was rung"
        for slot, row in list(self.rows.items()):
            if self.window.nic["cancel"][slot] == self.taken[slot]:
                row.reason = ring.CANCEL
            elif time.monotonic() > row.deadline:
                row.reason = ring.TIME
            if row.reason == 0:
                self._say(slot, row)
            if row.reason and self._put(slot, ring.END, row.reason):
                del self.rows[slot]
                self._event(ring.EVENT_FINISH, slot, row.reason)
                self._event(ring.EVENT_RELEASE, slot, slot)
        heartbeat[ring.BEAT_EVENTS] = self.events
        heartbeat[ring.BEATS] += 1
        heartbeat[ring.BEAT_STEPS] += bool(self.rows)
        heartbeat[ring.BEAT_RUNNING] = len(self.rows)

    def serve(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set or the window's stop word is."""
        self.window.gpu["heartbeat"][ring.BEAT_STATE] = ring.SERVING
        while not (stop.is_set() or (self.window.nic["stop"][0] and not self.script.stubborn)):
            self.step()
            time.sleep(self.script.delay if self.rows else 0.0005)
        for slot in self.rows:
            self._put(slot, ring.END, ring.SHUTDOWN)
        self.window.gpu["heartbeat"][ring.BEAT_STATE] = ring.STOPPED

    def _trace_step(self) -> None:
        """The events of a step: each request has its prompt's rows at once, or one."""
        for slot, row in self.rows.items():
            first, rows = (len(row.prompt) + row.sent - 1, 1) if row.sent else (0, len(row.prompt))
            self._event(ring.EVENT_ROWS, slot, first << 20 | rows)
        if self.rows:
            self._event(ring.EVENT_STEP, value=int(self.window.gpu["heartbeat"][ring.BEAT_STEPS]) + 1)
            for phase in range(len(ring.PHASES)):
                self._event(ring.EVENT_PHASE, value=phase << 32 | 100)

    def _event(self, kind: int, slot: int = 0, value: int = 0) -> None:
        if self.window.nic["trace"][0]:
            ring_of_events = self.window.gpu["event"]
            words = pack_event(time.perf_counter_ns(), kind, slot, value)
            ring_of_events[self.events % len(ring_of_events)] = words
            self.events += 1

    def _take(self, slot: int) -> Row:
        request, arena = self.window.nic["request"][slot], self.window.nic["arena"]
        at, length, stops = (int(request[name]) for name in ("prompt_at", "prompt_len", "stops"))
        self.urgent += bool(request["flags"] & ring.URGENT)
        if leader := int(request["leader"]):
            rung = self.window.nic["doorbell"][leader - 1]
            assert rung == request["leader_generation"], "its leader was not rung before"
            self.window.gpu["heartbeat"][ring.BEAT_FOUND] += length
        eos = () if request["flags"] & ring.IGNORE_EOS else self.eos_ids
        return Row(
            prompt=arena[at : at + length].tolist(),
            max_tokens=int(request["max_tokens"]),
            stops={*eos, *arena[at + length : at + length + stops].tolist()},
            min_tokens=int(request["min_tokens"]),
            deadline=time.monotonic() + (int(request["time_ms"]) / 1000 or float("inf")),
            logprobs=int(request["logprobs"]) - 1 if request["logprobs"] else None,
            reason=self.script.refuse,
        )

    def _say(self, slot: int, row: Row) -> None:
        words = self.script.answer or row.prompt
        token = words[row.sent % len(words)]
        if not self._put(slot, ring.TOKEN, token, row.logprobs):
            return
        row.sent += 1
        if token in row.stops and row.sent >= row.min_tokens:
            row.reason = ring.STOP
        elif row.sent == row.max_tokens:
            row.reason = ring.LENGTH

    def _put(self, slot: int, kind: int, value: int, logprobs: int | None = None) -> bool:
        unread = (self.index - int(self.window.nic["consumed"][0])) & 0xFFFFFFFF
        assert unread <= self.size
        if unread == self.size:
            return False
        if logprobs is not None:
            at = self.index % self.size
            own, likeliest = scores(value, logprobs)
            self.window.gpu["logprob"][at] = np.nan
            self.window.gpu["logprob"][at, : 1 + logprobs] = [own, *(logprob for _, logprob in likeliest)]
            self.window.gpu["likely"][at, :logprobs] = [token for token, _ in likeliest]
        self.window.gpu["outbox"][self.index % self.size] = pack_record(self.index, self.size, slot, kind, value)
        self.index = (self.index + 1) & 0xFFFFFFFF
        return True


def main() -> int:
    """The engine's command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--target", choices=["auto", "cuda", "cpu", "python"], required=True)
    parser.add_argument("--sms", type=int, required=True)
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--scheduler-block", action=argparse.BooleanOptionalAction)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--kv-dtype")
    args = parser.parse_args()
    script = Script(**json.loads(os.environ.get("FAKE_ENGINE", "{}")))
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.stubborn else lambda *_: stop.set())
    if not script.stubborn:
        # os.read, for a daemon thread inside sys.stdin would crash the interpreter's end.
        threading.Thread(target=lambda: (os.read(0, 1), stop.set()), daemon=True).start()
    if stop.wait(script.startup):
        return 0
    if script.error:
        print(json.dumps({"error": script.error}))
        return 1
    config = ModelConfig.load(args.model)
    sizes = {"slots": script.slots, "arena": script.arena, "outbox": script.outbox}
    try:
        window = Window.create(Layout(context=config.context, vocab=config.vocab, **sizes))
    except BlinkError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    ready = {
        "window": str(window.path),
        "target": "python" if args.target == "auto" else args.target,
        "pid": os.getpid(),
        "bytes_per_token": 1000,
        "bandwidth": 1e6,
        "blocks": args.sms or 1,
        "context": config.context,
    }
    window.gpu["heartbeat"][ring.BEAT_STATE] = ring.SERVING
    print(script.noise + json.dumps(ready), flush=True)
    FakeGpu(window, script, config.eos_ids).serve(stop)
    window.unlink()
    window.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
