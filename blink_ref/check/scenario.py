"""A small engine with a NIC beside it, made to go through all that an engine does within a few dozen steps.

Prompts in chunks beside decode rows, more staged rows than the arena holds, pages shared, evicted and taken
from others, an urgent request between two layers, every filter, cancelled requests, refused ones and one out of
time, slots used again at once, a small outbox, and the stop word at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..engine import memory
from ..engine.persistent import serve
from ..engine.settings import Settings
from ..kernels import attention, deal, flash, flash_decoding, flash_items, staging, stream, tiles, work_list
from ..model.config import ModelConfig
from ..model.weights import Weights
from ..ring.layout import BEAT_EVENTS, BEAT_STATE, END, STOPPED, TOKEN, URGENT, unpack_record
from ..scheduler import arrivals
from ..simt import vocabulary
from ..simt.checker import Count, check
from ..simt.vocabulary import DOTS_ROWS, HEADS, SYSTEM, load_acquire, relax, store_release

MODEL = ModelConfig(
    name="smallest",
    vocab=13,
    hidden=32,
    ffn=80,
    layers=2,
    heads=3,
    kv_heads=1,
    head_dim=16,
    context=24,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=True,
    bos_id=None,
    eos_ids=(),
    dtype="bfloat16",
)

LANES, WARPS, PAGE_SIZE = 7, 2, 4

IN_TILES = 2
"""Rows above which a step is computed in tiles, and up to which from the stream, with half of the seeds."""

CHUNK, PART = 8, 4
"""Positions of an item of attention, and those that a warp takes at a time."""

STAGED = 4
"""Rows that the arena holds at once, of the 5 in a step; of the wide ones in the MLP it holds one."""

SETTINGS = Settings(
    target="python",
    blocks=2,
    lanes=LANES,
    shared=max(staging.arena(STAGED, MODEL.hidden, WARPS), attention.arena(MODEL.head_dim, PAGE_SIZE, WARPS)),
    rows=5,
    running=3,
    slots=16,
    context=MODEL.context,
    page_size=PAGE_SIZE,
    pages=7,
    reserved=1,
    rehearsals=True,
)

OUTBOX = 8

PATIENCE = 2000
"""Turns of an idle scheduler after which it leaves: by then the NIC must have said so."""


@dataclass(frozen=True)
class Request:
    """What the NIC asks for."""

    slot: int
    prompt_len: int
    max_tokens: int
    fields: dict[str, float] = field(default_factory=dict)
    """of its record, beside those above; what is left out is 0"""
    stops: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()
    cancelled: bool = False
    """as soon as its first token has come"""


FILTERS = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "logprobs": 3}
PENALTIES = {"repetition": 1.3, "presence": 0.5, "frequency": 0.25, "min_tokens": 1}

REQUESTS = [
    Request(0, 7, 2),
    Request(15, 20, 20),  # too long
    Request(1, 2, 3, FILTERS),
    Request(9, 3, 8, cancelled=True),
    Request(5, 9, 3, {"leader": 1, "leader_generation": 1}),
    Request(1, 5, 4, PENALTIES, stops=(5,), biases=((1, 9.0), (3, -0.5))),  # token 1 is in prompt and answer
    Request(10, 3, 2, {"flags": URGENT}),
    Request(9, 1, 2, {"temperature": 0.7, "seed": 9}),
    Request(4, 2, 20, {"time_ms": 1}),
    Request(9, 3, 0),  # not valid
    Request(10, 2, 1, {"flags": URGENT}),
    Request(0, 22, 1, {"priority": 1}),  # more pages than a warp has lanes
    *[Request(slot, 1, 1) for slot in (1, 2, 9, 10) for _ in range(2)],
]
"""Rung in this order, each as soon as its slot is free: so that an END meets the slot's next request."""


LATER = [Request(2, 2, 9), *[Request(10, 1, 1, {"flags": URGENT})] * 4]
"""Rung after a silence: a request of one row a step, and urgent ones that interrupt such steps."""

SILENCE = 300
"""Turns of the NIC in which it does nothing, while the scheduler has nothing to do."""

AT_FIRST = 60
"""The same, before anything else: the scheduler rehearses, and may not be done when the doorbells ring."""


class Nic:
    """The NIC's side of the window in the fewest words, as an agent that the checker watches."""

    __name__ = "nic"

    def __init__(self) -> None:
        self._taken = self._events = self._urgent = 0
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}

    def __call__(self, window: Any, *_: Any) -> None:
        for n in range(AT_FIRST):
            relax(n)
        store_release(window.trace, 0, np.uint32(1), SYSTEM)
        spins = 0
        for requests in (REQUESTS, LATER):
            self._waiting = list(requests)
            self._submit(window)
            while self._running:
                self._poll(window)
                self._look_at_events(window)
                relax(spins)
                spins += 1
            for n in range(SILENCE):
                relax(spins + n)
        store_release(window.stop, 0, np.uint32(1), SYSTEM)
        while load_acquire(window.heartbeat, BEAT_STATE, SYSTEM) != STOPPED:
            relax(spins)
            spins += 1

    def _submit(self, window: Any) -> None:
        """Ring all whose slots are free."""
        for request in list(self._waiting):
            if request.slot not in self._running:
                self._waiting.remove(request)
                self._running[request.slot] = request
                self._ring(window, request)

    def _ring(self, window: Any, request: Request) -> None:
        slot, at = request.slot, request.slot * MODEL.context
        biases = np.array([(token, np.float32(bias).view(np.uint32)) for token, bias in request.biases], np.uint32)
        prompt = 1 + 3 * (np.arange(request.prompt_len) % 4)
        words = [*prompt, *request.stops, *biases.reshape(-1)]
        window.arena[at : at + len(words)] = words
        record = window.request[slot]
        values = dict.fromkeys(record, 0) | {
            "prompt_at": at,
            "prompt_len": request.prompt_len,
            "max_tokens": request.max_tokens,
            "stops": len(request.stops),
            "biases": len(request.biases),
            **request.fields,
        }
        for name, value in values.items():
            record[name] = value
        store_release(window.cancel, slot, np.uint32(0), SYSTEM)
        generation = load_acquire(window.doorbell, slot, SYSTEM) + np.uint32(1)
        store_release(window.doorbell, slot, generation, SYSTEM)
        if request.fields.get("flags", 0) == URGENT:
            self._urgent += 1
            store_release(window.urgent, 0, np.uint32(self._urgent), SYSTEM)

    def _poll(self, window: Any) -> None:
        """Take the records that have come."""
        size = 1 << window.outbox_bits
        while record := self._record(window, size):
            slot, kind, _ = record
            if kind == TOKEN and self._running[slot].fields.get("logprobs"):
                assert np.all(np.array(window.logprob[self._taken % size]) <= 0)
                assert np.all(np.array(window.likely[self._taken % size]) < MODEL.vocab)
            self._taken += 1
            store_release(window.consumed, 0, np.uint32(self._taken), SYSTEM)
            if kind == END:
                del self._running[slot]
                self._submit(window)
            elif self._running[slot].cancelled:
                store_release(window.cancel, slot, load_acquire(window.doorbell, slot, SYSTEM), SYSTEM)

    def _record(self, window: Any, size: int) -> Any:
        return unpack_record(int(load_acquire(window.outbox, self._taken % size, SYSTEM)), self._taken, size)

    def _look_at_events(self, window: Any) -> None:
        events = int(load_acquire(window.heartbeat, BEAT_EVENTS, SYSTEM))
        for n in range(self._events, events):
            assert np.array(window.event[n % len(window.event)])[1]
        self._events = events


def run(seed: int) -> list[Count]:
    """The engine from its launch to its end, in the interleaving of a seed; raises the first finding.

    Where the seed is odd, the scheduler has a block of its own; where half of it is odd, steps of more than
    IN_TILES rows are computed in tiles, and others from the stream of packed weights; of those, every other keeps
    keys and values as bfloat16, and cuts the attention of single rows in chunks.
    """
    own, in_tiles = seed % 2, IN_TILES if seed // 2 % 2 else 0
    in_chunks = in_tiles > 0 and (seed + seed // 4) % 2 == 0
    kv_dtype = "bfloat16" if in_chunks else "float32"
    settings = replace(SETTINGS, blocks=SETTINGS.blocks + own, scheduler_block=own == 1, kv_dtype=kv_dtype)
    if in_tiles:  # a block that computes alone has more than one tile
        parts = flash_items.arena(MODEL.head_dim, MODEL.heads, WARPS) - flash_items.WEIGHTS
        few = stream.arena(IN_TILES, WARPS, MODEL.head_dim, PAGE_SIZE, halves=False) + parts
        shared = max(tiles.arena(MODEL.head_dim, halves=False), few)
        settings = replace(settings, blocks=SETTINGS.blocks, shared=shared, stream_rows=IN_TILES)
    layout = replace(memory.window_layout(MODEL, settings), outbox=OUTBOX, events=1 << 11)
    nic_half, gpu_half = np.zeros((), layout.nic_half), np.zeros((), layout.gpu_half)
    window = memory.device_window(nic_half, gpu_half, layout)
    args = memory.arguments(MODEL, Weights.random(MODEL, seed=1, scale=0.3), settings, window)
    *most, cache, model, act, context = args
    pieces = memory.poisoned(settings.blocks * DOTS_ROWS * DOTS_ROWS)
    act = act._replace(pieces=pieces, met=np.zeros(2 * settings.blocks, np.int32))
    if in_chunks:
        rows, chunks = max(SETTINGS.running, IN_TILES), -(-MODEL.context // CHUNK)
        awaited = MODEL.layers * flash_items.MOST_AWAITED * settings.blocks
        given = max(rows * chunks * flash_items.units_of(MODEL), awaited)
        partial = memory.poisoned(given * flash_items.of_chunk(MODEL.head_dim, MODEL.heads))
        act = act._replace(partial=partial, arrived=np.zeros(rows * HEADS, np.int32), most_chunks=chunks)
    args = *most, cache, model._replace(tiles=in_tiles), act, context
    noted, turns = (3, 1) if seed > 3 else (1, 0)  # two buffers are used again, or others are always noted
    with narrow_pieces(noted, turns):
        return check(
            serve,
            settings.blocks,
            settings.lanes,
            *args,
            0,
            PATIENCE,
            seed=seed,
            shared=settings.shared,
            outside=[Nic()],
            unwritten=[
                cache.keys,
                cache.values,
                *act._replace(counts=act.x, arrived=act.x, met=act.x, most_chunks=act.x, of_layer=act.x),
            ],
        )


@contextmanager
def narrow_pieces(most_noted: int, most_turns: int) -> Iterator[None]:
    """Tiles of this model, too, are cut in pieces, its strips, its texts; and two strips' sums wait at most."""
    changes = [
        (deal, "LEAST_STEPS", 1),
        (arrivals, "FEW", 1),  # more that ring at once have their prompts copied at admission
        (stream, "PIECE", 1),
        (stream, "MOST_SLOTS", 2),
        (work_list, "CHUNK", CHUNK),
        (flash_items, "CHUNK", CHUNK),
        *((module, "PART", PART) for module in (flash_items, flash_decoding)),
        *((module, "HALF", PART // 2) for module in (flash_items, flash_decoding)),
        (flash_items, "MOST_NOTED", most_noted),
        (flash_decoding, "MOST_NOTED", most_noted),
        (flash_items, "MOST_TURNS", most_turns),
        (flash, "COLUMNS", CHUNK),
        (flash, "TILE_POSITIONS", CHUNK),  # so that tiles go through several stages
        (vocabulary, "TILE_POSITIONS", CHUNK),
    ]
    before = [getattr(module, name) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)
