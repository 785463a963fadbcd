"""Steps of a running engine, timed by itself: what the window tells of them, gathered while requests run.

Nothing is launched for it. It is the engine that serves, with scheduler and ring, and its own stamps of the clock
between the phases of a step (scheduler/sight.py).
"""

import time
from typing import NamedTuple

import numpy as np

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.nic.client import Nic
from blink_ref.nic.sight import Step, last_steps
from blink_ref.ring.layout import DECODE, HISTORY, PHASES, PREFILL
from blink_ref.ring.window import Window

from . import costs
from .ceilings import Ceilings

PROMPT = 16
"""Tokens of a prompt of those that are to generate: what comes after it is measured."""
SHORTEST, LONGEST = 0.0005, 0.05
"""Seconds between two looks."""
ROUNDS = 3
"""How often each layer's phases are timed at least: a step times one layer."""


class Work(NamedTuple):
    """What is asked of the engine: so many requests at once that generate, or (0) one long prompt at a time."""

    requests: int
    tokens: int
    """tokens that each generates when all do; or of the prompt"""

    @property
    def name(self) -> str:
        """For people."""
        if not self.requests:
            return f"prompts of {self.tokens} tokens"
        return f"{self.requests} request{'s' * (self.requests > 1)}, a token each a step"


class Phase(NamedTuple):
    """A phase of a step, or the whole step; of one step."""

    name: str
    seconds: float
    """the median of the steps"""
    bytes: int
    flops: int

    def fraction(self, most: Ceilings) -> float:
        """The least time that the ceilings allow, over the time."""
        return most.seconds(self.bytes, self.flops) / self.seconds


class Figures(NamedTuple):
    """What was measured of a kind of work."""

    work: Work
    steps: int
    rows: int
    positions: int
    """that a row sees, on average"""
    phases: list[Phase]
    step: Phase


def works(config: ModelConfig, context: int, batches: list[int], prompt: int) -> list[Work]:
    """The kinds of work that an engine of this context can do."""
    steps = ROUNDS * config.layers
    room = context - PROMPT
    decoding = [Work(n, min(steps, room // 2)) for n in batches]
    return [*decoding, Work(0, min(prompt, context - 1))]


def measure(window: Window, config: ModelConfig, work: Work, kv_bytes: int = 4) -> Figures:
    """Have it done, and see how long its steps took. `kv_bytes`: of a number of the KV cache.

    Steps of several kinds of rows, in which some still have their prompts computed, do not count.
    """
    nic, draw = Nic(window), np.random.default_rng(work.requests)
    seen: dict[int, tuple[Step, float]] = {}
    first = max((step.number for step in last_steps(window)), default=0)

    def prompt(tokens: int) -> list[int]:
        return draw.integers(0, config.vocab, tokens).tolist()

    def watch() -> None:
        while nic.running:
            time.sleep(_gather(window, seen, first))
            nic.poll()
        _gather(window, seen, first)

    if work.requests:
        # the first begin while the prompts of the last are computed
        tokens = min(work.tokens + work.requests * PROMPT, window.layout.context - PROMPT)
        for _ in range(work.requests):
            nic.submit(prompt(PROMPT), tokens, ignore_eos=True)
        watch()
    else:
        for _ in range(1 + ROUNDS):
            nic.submit(prompt(work.tokens), 1, ignore_eos=True)
            watch()
    return _figures(config, work, list(seen.values()), kv_bytes)


def _gather(window: Window, seen: dict[int, tuple[Step, float]], first: int) -> float:
    """Remember new steps, with how far the requests had come; returns the seconds until the next look.

    On a CPU each look takes time from the engine, so they are as rare as the window's memory of steps allows.
    """
    steps = last_steps(window)
    busy = np.isin(window.gpu["state"], (PREFILL, DECODE))
    at = float(window.gpu["position"][busy].mean()) if busy.any() else 0.0
    for step in steps:
        if step.number > first:
            seen.setdefault(step.number, (step, at))
    last = steps[-1].ns / 1e9 if steps else 0.0
    return min(max(last * HISTORY / 4, SHORTEST), LONGEST)


def _figures(config: ModelConfig, work: Work, seen: list[tuple[Step, float]], kv_bytes: int = 4) -> Figures:
    if work.requests:
        rows = work.requests
        kept = [(step, at) for step, at in seen if step.decode == rows and not step.prefill]
        positions = int(np.mean([at for _, at in kept if at] or [PROMPT]))
    else:
        rows = max(step.prefill for step, _ in seen)
        kept = [(step, at) for step, at in seen if step.prefill == rows and not step.samples]
        kept = kept or [(step, at) for step, at in seen if step.prefill == rows]
        positions = (work.tokens // rows * rows + 1) // 2
    if not kept:
        raise BlinkError(f"no step did {work.name} alone; ask for fewer with --requests")
    samples = int(np.median([step.samples for step, _ in kept]))
    known = costs.phases(config, rows, samples, positions, work.requests or 1, kv_bytes)
    ns = np.median([step.phases for step, _ in kept], 0)
    phases = [Phase(name, t / 1e9, *known.get(name, (0, 0))) for name, t in zip(PHASES, ns, strict=True)]
    whole = float(np.median([step.ns for step, _ in kept])) / 1e9
    step = Phase("step", whole, *costs.total(list(known.values())))
    return Figures(work, len(kept), rows, positions, phases, step)
