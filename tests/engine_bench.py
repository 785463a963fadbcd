"""A bench for the engine: no other process, no file, and every launch is a bounded piece, called by hand.

:class:`Bench` is the GPU's side (the persistent kernel and its arrays), :class:`Desk` the NIC's side in its
plainest form: it writes what it is told, valid or not, and keeps every record that comes.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from blink_ref import simt
from blink_ref.engine import memory, settings
from blink_ref.engine.persistent import serve
from blink_ref.engine.settings import Settings
from blink_ref.kvcache import pages
from blink_ref.kvcache.pages import pages_spec
from blink_ref.model.config import ModelConfig
from blink_ref.model.reference import Reference
from blink_ref.model.store import resolve
from blink_ref.model.weights import Weights
from blink_ref.ring.layout import (
    CACHED,
    DECODE,
    DONE,
    END,
    FREE,
    IGNORE_EOS,
    LINE,
    PREFILL,
    READY,
    TOKEN,
    URGENT,
    Layout,
    unpack_record,
)
from blink_ref.scheduler import pause, state
from blink_ref.simt import device
from blink_ref.simt.vocabulary import i32, u32

TARGETS = ["cpu", "python", pytest.param("cuda", marks=pytest.mark.cuda)]
ENDLESS = 100_000
"""More steps than any test needs."""

LANES = {"cpu": 1, "python": 4, "cuda": 64}
"""Lanes of a block in tests of single device functions."""

NAN = {"float32": np.nan, "uint16": 0x7FC0}
"""As keys and values are stored."""

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
    """Settings for a model, with a window small enough to be made for every example of a test.

    Tokens do not depend on the batch, unless `tiles` are asked for; keys and values are float32,
    unless `kv_dtype` is.
    """
    sizes = {"cache_bytes": 1 << 26, "batch_invariant": True, "kv_dtype": "float32"}
    made = settings.choose(config, target, changes.pop("blocks", 2), **sizes)
    reserved = changes.get("running", made.running) // 8
    return replace(made, **{"slots": 16, "reserved": reserved, **changes})


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

    seed: int | None = None
    """for the `python` target: run under the checker, with this seed"""

    def __init__(self, model: tuple[ModelConfig, Weights], chosen: Settings, **layout) -> None:
        config, weights = model
        self.config, self.settings = config, chosen
        self.window = Memory(replace(memory.window_layout(config, chosen), **layout))
        view = memory.device_window(self.window.nic, self.window.gpu, self.window.layout)
        self.args = memory.arguments(config, weights, chosen, view)
        self.view, self.slots, self.queue, self.plans, self.sampling, *rest = self.args
        self.cache, self.model, self.act, _ = rest
        for kept in (self.cache.keys, self.cache.values):
            kept.fill(NAN[kept.dtype.name])
        self.desks = [Desk(self.window, worker) for worker in range(self.window.layout.workers)]

    @property
    def plan(self) -> state.Plan:
        """What runs, or ran last."""
        return state.plan_of(self.plans, self.queue.count[state.NOW])

    @property
    def draft(self) -> state.Plan:
        """What ran before it, or has been drafted."""
        return state.plan_of(self.plans, self.queue.count[state.SPARE])

    @property
    def desk(self) -> "Desk":
        """The first worker's."""
        return self.desks[0]

    def run(self, steps: int = 0, patience: int = 1) -> None:
        """Launch for up to `steps` steps (0 = as many as it takes), until there is nothing to do."""
        s, before = self.settings, self.steps
        bounds = steps or ENDLESS, patience
        options = {"check": True, "seed": self.seed} if self.seed is not None else {}
        simt.launch(serve, s.blocks, s.lanes, *self.args, *bounds, target=s.target, shared=s.shared, **options)
        assert steps or self.steps < before + ENDLESS, "step after step, and no end"

    def interrupt(self, *layers: int) -> None:
        """From now on, interrupt best-effort steps before these layers (see :func:`interruptible`)."""
        self.window.nic["trace"][1] = sum(1 << layer for layer in layers)

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
        """The slots that wait for a place in the batch, whoever goes first first."""
        ready = [slot for slot in range(len(self.slots.state)) if self.slots.state[slot] == READY]
        return sorted(ready, key=lambda slot: self.slots.order[slot])

    def free_pages(self) -> list[int]:
        """The pages on the free stack."""
        return self.cache.free[: self.cache.count[pages.FREE]].tolist()

    def unused_pages(self) -> list[int]:
        """The pages that are cached and held by nobody, the one to be evicted first first."""
        found, page = [], int(self.cache.newer[self.cache.pages])
        while page != self.cache.pages:
            found.append(page)
            page = int(self.cache.newer[page])
        return found

    def limbo(self) -> list[int]:
        """The pages that a paused step will still write to, for a request that has ended."""
        return self.cache.limbo[: self.cache.count[pages.LIMBO]].tolist()

    def held_pages(self, slot: int) -> list[int]:
        """The pages of a slot, in order of position."""
        return self.cache.table[slot, : self.slots.pages[slot]].tolist()

    def check(self) -> None:
        """Whatever has happened: pages are conserved, counted and filed, and the lists agree with the slots."""
        check_pages(self)
        check_slots(self)

    def poison(self) -> None:
        """NaN into free pages and all activations: what a step may not read before it has written it."""
        for kept in (self.cache.keys, self.cache.values):
            by_page = kept.reshape(self.config.layers, self.cache.pages, -1)
            by_page[:, self.free_pages()] = NAN[kept.dtype.name]
        for buffer in self.act:
            of_floats = isinstance(buffer, np.ndarray) and buffer.dtype == np.float32
            if of_floats and buffer is not self.act.aside:
                buffer.fill(np.nan)


def check_pages(made: Bench) -> None:
    """Each page is in one place, its references are the slots that hold it, and what is filed can be found."""
    cache, slots, size = made.cache, made.slots, made.cache.page_size
    held = collections.Counter(page for slot in range(len(slots.pages)) for page in made.held_pages(slot))
    assert cache.references.tolist() == [held[page] for page in range(cache.pages)]
    resting = made.free_pages() + made.unused_pages() + made.limbo()
    assert sorted([*held, *resting]) == list(range(cache.pages)), "each page is in one place"
    assert len(made.unused_pages()) == cache.count[pages.UNUSED]
    in_buckets = []
    for head in cache.bucket.tolist():
        while head:
            in_buckets.append(head - 1)
            head = int(cache.following[head - 1])
    assert sorted(in_buckets) == np.flatnonzero(cache.filed).tolist()
    assert not cache.filed[made.free_pages()].any()
    assert cache.filed[made.unused_pages()].all()
    for page in in_buckets:
        parent = int(cache.parent[page]) - 1
        assert parent < 0 or cache.filed[parent], "a filed page's parent is filed"
    for slot in range(len(slots.pages)):
        for place, page in enumerate(made.held_pages(slot)):
            whole = (place + 1) * size <= slots.done[slot]
            if cache.filed[page]:
                assert whole, "a page is filed, and so shared, when it is full"
                assert cache.token[page].tolist() == slots.token[slot, place * size :][:size].tolist()
                assert cache.parent[page] == (1 + made.held_pages(slot)[place - 1] if place else 0)
            else:
                assert held[page] == 1, "only filed pages are shared"
                assert not (whole and cache.sharing)
    shown = made.window.gpu["owner"]
    assert (shown[made.free_pages()] == 0).all()
    assert (shown[made.unused_pages()] == CACHED).all()
    for page in held:
        slot, place = int(shown[page]) >> 16, (int(shown[page]) & 0xFFFF) - 1
        assert place >= 0
        # of a page that has been shared it may be one who has let go, while another has not
        assert made.held_pages(slot)[place : place + 1] == [page] or cache.filed[page] or slots.flight.any()


def check_slots(made: Bench) -> None:
    """States, counts and lists of the scheduler agree."""
    slots, count, running = made.slots, made.queue.count, made.running()
    assert len(set(running)) == len(running) <= made.settings.running
    assert [slots.order[slot] for slot in running] == sorted(slots.order[slot] for slot in running)
    assert count[state.WAITING] == len(made.waiting())
    ended = made.queue.ended[: count[state.ENDING]].tolist()
    assert len(set(ended)) == len(ended)
    for slot in range(len(slots.state)):
        known, done, prompt = (int(a[slot]) for a in (slots.known, slots.done, slots.prompt_len))
        if slot in running:
            assert slots.state[slot] == (DECODE if known > prompt else PREFILL) or known > prompt
            assert 0 <= done < known < prompt + slots.limit[slot]
            needed = pages_spec(done, made.cache.page_size)
            most = known + int(made.queue.own_block)  # for a step that was drafted and then not run
            assert needed <= slots.pages[slot] <= pages_spec(most, made.cache.page_size)
        else:
            assert slots.pages[slot] == 0
            assert slots.state[slot] in (FREE, READY, DONE)
            assert (slots.state[slot] == DONE) <= (slot in ended)
    interrupted = made.plan.count[state.FIRST_LAYER] or made.plan.count[state.INTERRUPTED]
    if not count[state.PAUSED] and not (made.plan.count[state.CHUNKS] and interrupted):
        assert not slots.flight.any()
        assert not made.cache.count[pages.LIMBO]
        assert not made.view.reserved.any()
    for chunk in range(made.plan.count[state.CHUNKS]):
        slot = int(made.plan.chunk_slot[chunk])
        if slots.taken[slot] == made.plan.chunk_taken[chunk] and slots.state[slot] in (READY, PREFILL, DECODE):
            computed = int(made.plan.chunk_first[chunk] + made.plan.chunk_rows[chunk])
            assert slots.pages[slot] >= pages_spec(computed, made.cache.page_size), "its rows have their pages"
    for worker, desk in enumerate(made.desks):
        assert 0 <= made.view.written[worker] - desk.index <= made.window.layout.outbox


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
        stops: Sequence[int] = (),
        biases: Mapping[int, float] | None = None,
        urgent: bool = False,
        **fields: float,
    ) -> None:
        """Put a request into a slot and ring its doorbell; `overwrite` has the last word on the record."""
        pairs = [word for token, bias in (biases or {}).items() for word in (token, bits_of(bias))]
        words = [*prompt, *stops, *pairs]
        assert len(words) <= self.room
        assert slot not in self.answers or self.answers[slot].reason, f"slot {slot} is busy"
        nic = self.window.nic
        at = (slot - self.slots[0]) * self.room
        start = self.worker * self.window.layout.arena + at
        nic["arena"][start : start + len(words)] = words
        record = {
            "prompt_at": at,
            "prompt_len": len(prompt),
            "max_tokens": max_tokens,
            "flags": IGNORE_EOS * ignore_eos | URGENT * urgent,
            "temperature": temperature,
            "seed": seed,
            "stops": len(stops),
            "biases": len(biases or {}),
        }
        nic["request"][slot] = np.zeros((), nic["request"].dtype)
        for name, value in {**record, **fields, **(overwrite or {})}.items():
            nic["request"][slot][name] = value
        self.answers[slot] = Answer([], 0)
        nic["doorbell"][slot] = (int(nic["doorbell"][slot]) + 1) & 0xFFFFFFFF or 1
        if urgent:
            self.count_urgent()

    def count_urgent(self) -> None:
        """Say that an urgent request has rung."""
        self.window.nic["urgent"][self.worker * LINE // 4] += 1

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


def bits_of(bias: float) -> int:
    """A float32's bits."""
    return int(np.float32(bias).view(np.uint32))


class Request(NamedTuple):
    """What decides an answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    filters: tuple[tuple[str, float], ...] = ()
    """fields of the request record, by name"""
    stops: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()

    def ring(self, desk: "Desk", slot: int, **others: Any) -> None:
        """Ring for it; `others` are what an answer must not depend on."""
        options = {"stops": self.stops, "biases": dict(self.biases), **dict(self.filters), **others}
        desk.ring(slot, self.prompt, self.max_tokens, self.temperature, self.seed, self.ignore_eos, **options)


def answers_alone(bench: Bench) -> Callable[[Request], Answer]:
    """A function that says what a request gets when nothing else runs on `bench`, which stays its own."""

    @functools.cache
    def alone(request: Request) -> Answer:
        request.ring(bench.desk, 0)
        while bench.desk.busy():
            bench.run()
            bench.desk.read()
        return bench.desk.answers[0]

    return alone


def answers_together(bench: Bench, requests: Sequence[Request]) -> list[Answer]:
    """What each request gets when all are rung before the first step."""
    for slot, request in zip(bench.desk.slots, requests, strict=False):
        request.ring(bench.desk, slot)
    while bench.desk.busy():
        bench.run()
        assert bench.desk.read(), "the engine stands still"
    return [bench.desk.answers[slot] for slot in bench.desk.slots[: len(requests)]]


def assert_greedy(
    model: tuple[ModelConfig, Weights], requests: Sequence[Request], answers: Sequence[Answer], close: float = 1e-3
) -> None:
    """Each token is the reference's likeliest, but for two logits so `close` that a rounding decides."""
    reference = Reference(*model)
    for request, (tokens, _) in zip(requests, answers, strict=True):
        logits = reference.logits([*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
        best, taken = logits.max(axis=1), logits[np.arange(len(tokens)), tokens]
        assert (best - taken < close).all()


@device
def interrupt_at(window, plan, layer, layers):
    """In the place of pause.watch: interrupt before the layers whose bits are set in word 1 of `trace`.

    The bit behind those of the layers: somebody has rung in the last one.
    """
    if plan.count[state.PREEMPTIBLE] == 1 and window.trace[1] >> u32(layer) & u32(1):
        if layer < layers:
            plan.count[state.INTERRUPTED] = i32(layer)
        else:
            plan.count[state.RUNG_LATE] = i32(1)


@pytest.fixture(scope="module")
def interruptible():
    """Within a module, steps are interrupted where :meth:`Bench.interrupt` says, and not when somebody rings."""
    with simt.swap(pause.watch, interrupt_at):
        yield


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
