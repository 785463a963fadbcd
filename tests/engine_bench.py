"""A bench for the engine: no other process, no file, and every launch is a bounded piece, called by hand.

:class:`Bench` is the GPU's side (the persistent kernel and its arrays), :class:`Desk` the NIC's side in its
plainest form: it writes what it is told, valid or not, and keeps every record that comes.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from blink_ref import simt
from blink_ref.engine import memory, settings
from blink_ref.engine.persistent import serve
from blink_ref.engine.settings import Settings
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import resolve
from blink_ref.model.weights import Weights
from blink_ref.ring.layout import END, IGNORE_EOS, LINE, TOKEN, Layout, unpack_record
from blink_ref.scheduler import state

TARGETS = ["cpu", "python", pytest.param("cuda", marks=pytest.mark.cuda)]
LANES = {"cpu": 1, "python": 4, "cuda": 64}
"""Lanes of a block in tests of single device functions."""

TINY = resolve("tiny")

SMALL = ModelConfig(
    name="small",
    vocab=61,
    hidden=32,
    ffn=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    context=48,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=True,
    bos_id=None,
    eos_ids=(3, 5, 7),
    dtype="bfloat16",
)


@functools.cache
def small() -> tuple[ModelConfig, Weights]:
    """A model of a few thousand random weights, whose steps take microseconds."""
    return SMALL, Weights.random(SMALL, seed=1, scale=0.3)


@functools.cache
def tiny() -> tuple[ModelConfig, Weights]:
    """The model in the package."""
    return load("tiny")


@functools.cache
def load(name: str) -> tuple[ModelConfig, Weights]:
    """A model by name."""
    path = resolve(name)
    config = ModelConfig.load(path)
    return config, Weights.load(path, config)


def chosen(config: ModelConfig, target: str = "cpu", **changes) -> Settings:
    """Settings for a model, with a window small enough to be made for every example of a test."""
    made = settings.choose(config, target, changes.pop("blocks", 2), cache_bytes=1 << 26)
    return replace(made, **{"slots": 16, **changes})


class Memory:
    """A window without a file."""

    engine_pid = 0

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.nic = np.zeros((), layout.nic_half)
        self.gpu = np.zeros((), layout.gpu_half)

    def alive(self) -> bool:
        """As of ring.window.Window."""
        return True


class Bench:
    """The persistent kernel and all it works on; what nothing may read is NaN."""

    def __init__(self, model: tuple[ModelConfig, Weights], chosen: Settings, **layout) -> None:
        config, weights = model
        self.config, self.settings = config, chosen
        self.window = Memory(replace(memory.window_layout(config, chosen), **layout))
        view = memory.device_window(self.window.nic, self.window.gpu, self.window.layout)
        self.args = memory.arguments(config, weights, chosen, view)
        self.view, self.slots, self.queue, self.plan, self.paused, self.sampling, self.cache, *_ = self.args
        self.model, self.act = self.args[-3:-1]
        for kept in (self.cache.keys, self.cache.values):
            kept.fill(np.nan)
        self.desks = [Desk(self.window, worker) for worker in range(self.window.layout.workers)]

    @property
    def desk(self) -> "Desk":
        """The first worker's."""
        return self.desks[0]

    def run(self, steps: int = 0, patience: int = 1) -> None:
        """Launch for up to `steps` steps (0 = as many as it takes), until there is nothing to do."""
        s = self.settings
        bounds = steps, patience
        simt.launch(serve, s.blocks, s.lanes, *self.args, *bounds, target=s.target, shared=s.shared)

    def stop(self) -> None:
        """Set the stop word, and let the kernel see it."""
        self.window.nic["stop"][0] = 1
        self.run()

    @property
    def steps(self) -> int:
        """Steps so far, by the heartbeat."""
        return int(self.window.gpu["heartbeat"][1])

    def running(self) -> list[int]:
        """The slots in the batch, in order."""
        return self.queue.running[: self.queue.count[state.RUNNING]].tolist()

    def waiting(self) -> list[int]:
        """The slots that wait to be admitted, in order."""
        head, tail = (int(self.queue.count[place]) for place in (state.WAITING_HEAD, state.WAITING_TAIL))
        return [int(self.queue.waiting[place % len(self.queue.waiting)]) for place in range(head, tail)]

    def free_pages(self) -> list[int]:
        """The pages on the free stack."""
        return self.cache.free[: self.cache.count[0]].tolist()

    def held_pages(self, slot: int) -> list[int]:
        """The pages of a slot, in order of position."""
        return self.cache.table[slot, : self.slots.pages[slot]].tolist()

    def poison(self) -> None:
        """NaN into free pages and all activations: what a step may not read before it has written it."""
        for kept in (self.cache.keys, self.cache.values):
            kept.reshape(self.config.layers, self.cache.pages, -1)[:, self.free_pages()] = np.nan
        for buffer in self.act:
            buffer.fill(np.nan)


class Answer(NamedTuple):
    """What came for one request; the reason is 0 while it runs."""

    tokens: list[int]
    reason: int


class Desk:
    """One NIC worker that owns a fixed piece of its arena for each of its slots.

    Raises AssertionError when a record comes for a slot whose request has ended.
    """

    def __init__(self, window: Memory, worker: int = 0) -> None:
        layout = window.layout
        self.window, self.worker = window, worker
        share = layout.slots // layout.workers
        self.slots = range(worker * share, (worker + 1) * share)
        self.room = layout.arena // share
        self.index = 0
        self.answers: dict[int, Answer] = {}
        """by slot: its last request"""

    def ring(
        self,
        slot: int,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
        overwrite: Mapping[str, float] | None = None,
    ) -> None:
        """Put a request into a slot and ring its doorbell; `overwrite` has the last word on the record."""
        assert len(prompt) <= self.room
        assert slot not in self.answers or self.answers[slot].reason, f"slot {slot} is busy"
        nic = self.window.nic
        at = (slot - self.slots[0]) * self.room
        start = self.worker * self.window.layout.arena + at
        nic["arena"][start : start + len(prompt)] = prompt
        record = {
            "prompt_at": at,
            "prompt_len": len(prompt),
            "max_tokens": max_tokens,
            "flags": IGNORE_EOS * ignore_eos,
            "temperature": temperature,
            "seed": seed,
        }
        for name, value in {**record, **(overwrite or {})}.items():
            nic["request"][slot][name] = value
        self.answers[slot] = Answer([], 0)
        nic["doorbell"][slot] = (int(nic["doorbell"][slot]) + 1) & 0xFFFFFFFF or 1

    def cancel(self, slot: int) -> None:
        """Ask for the end of a slot's request."""
        self.window.nic["cancel"][slot] = self.window.nic["doorbell"][slot]

    def read(self, most: int = 1 << 30) -> int:
        """Take up to `most` records out of the outbox; returns how many there were."""
        size = self.window.layout.outbox
        ring = self.window.gpu["outbox"][self.worker * size : (self.worker + 1) * size]
        n = 0
        while n < most and (record := unpack_record(int(ring[self.index % size]), self.index, size)):
            slot, kind, value = record
            tokens, reason = self.answers[slot]
            assert not reason, f"slot {slot} got {record} after its END"
            assert kind in (TOKEN, END)
            if kind == TOKEN:
                tokens.append(value)
            else:
                self.answers[slot] = Answer(tokens, value)
            self.index += 1
            n += 1
        self.window.nic["consumed"][self.worker * LINE // 4] = self.index & 0xFFFFFFFF
        return n

    def busy(self) -> list[int]:
        """Slots whose request has not ended, as far as has been read."""
        return [slot for slot, answer in self.answers.items() if not answer.reason]


class Request(NamedTuple):
    """What decides an answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


def answers_alone(bench: Bench) -> Callable[[Request], Answer]:
    """A function that says what a request gets when nothing else runs on `bench`, which stays its own."""

    @functools.cache
    def alone(request: Request) -> Answer:
        bench.desk.ring(0, *request)
        while bench.desk.busy():
            bench.run()
            bench.desk.read()
        return bench.desk.answers[0]

    return alone


def answers_together(bench: Bench, requests: Sequence[Request]) -> list[Answer]:
    """What each request gets when all are rung before the first step."""
    for slot, request in zip(bench.desk.slots, requests, strict=False):
        bench.desk.ring(slot, *request)
    while bench.desk.busy():
        bench.run()
        assert bench.desk.read(), "the engine stands still"
    return [bench.desk.answers[slot] for slot in bench.desk.slots[: len(requests)]]


def mixed_requests(config: ModelConfig, n: int, longest: int, max_tokens: int) -> list[Request]:
    """`n` requests of mixed lengths, every other one sampled, some that end with an end token."""
    draw = np.random.default_rng(7)
    return [
        Request(
            tuple(draw.integers(0, config.vocab, draw.integers(1, longest + 1)).tolist()),
            int(draw.integers(1, max_tokens + 1)),
            0.9 * (k % 2),
            int(draw.integers(2**64, dtype=np.uint64)),
            k % 4 < 2,
        )
        for k in range(n)
    ]
