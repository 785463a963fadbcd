"""A small engine with a NIC beside it, made to go through all that an engine does within a few dozen steps.

Prompts in chunks beside decode rows, more staged rows than the arena holds, pages that lack, a cancelled
request, refused ones, a slot used again, and the stop word at the end.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import memory
from ..engine.persistent import serve
from ..engine.settings import Settings
from ..kernels import attention, staging
from ..model.config import ModelConfig
from ..model.weights import Weights
from ..ring.layout import END, STOPPED, unpack_record
from ..simt.checker import Count, check
from ..simt.vocabulary import SYSTEM, load_acquire, relax, store_release

MODEL = ModelConfig(
    name="smallest",
    vocab=13,
    hidden=16,
    ffn=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    context=24,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=True,
    bos_id=None,
    eos_ids=(),
    dtype="bfloat16",
)

LANES, WARPS, PAGE_SIZE = 6, 2, 4

STAGED = 2
"""Rows that the arena holds at once, of the 5 in a step."""

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
)

PATIENCE = 2000
"""Turns of an idle scheduler after which it leaves: by then the NIC must have said so."""


@dataclass(frozen=True)
class Request:
    """What the NIC asks for."""

    slot: int
    prompt_len: int
    max_tokens: int
    temperature: float = 0.0
    cancelled: bool = False
    """as soon as its first token has come"""


REQUESTS = [
    Request(0, 7, 2),
    Request(1, 2, 3, temperature=0.8),
    Request(9, 3, 8, cancelled=True),
    Request(5, 9, 2),  # waits for pages
    Request(1, 2, 1),
    Request(9, 1, 2),
    Request(1, 20, 20),  # too long
    Request(9, 3, 0),  # not valid
    *[Request(slot, 1, 1) for slot in (1, 2, 9, 10) for _ in range(2)],
]
"""Rung in this order, each as soon as its slot is free: so that an END meets the slot's next request."""


class Nic:
    """The NIC's side of the window in the fewest words, as an agent that the checker watches."""

    __name__ = "nic"

    def __init__(self) -> None:
        self._taken = 0
        self._waiting = list(REQUESTS)
        self._running: dict[int, Request] = {}

    def __call__(self, window: Any, *_: Any) -> None:
        self._submit(window)
        spins = 0
        while self._running:
            self._poll(window)
            relax(spins)
            spins += 1
        store_release(window.stop, 0, np.uint32(1), SYSTEM)
        while load_acquire(window.heartbeat, 2, SYSTEM) != STOPPED:
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
        window.arena[at : at + request.prompt_len] = np.arange(request.prompt_len) % MODEL.vocab
        record = window.request[slot]
        record["prompt_at"], record["prompt_len"], record["max_tokens"] = at, request.prompt_len, request.max_tokens
        record["flags"], record["priority"], record["seed"] = 0, 0, slot
        record["temperature"] = request.temperature
        store_release(window.cancel, slot, np.uint32(0), SYSTEM)
        generation = load_acquire(window.doorbell, slot, SYSTEM) + np.uint32(1)
        store_release(window.doorbell, slot, generation, SYSTEM)

    def _poll(self, window: Any) -> None:
        """Take the records that have come."""
        size = 1 << window.outbox_bits
        while record := unpack_record(
            int(load_acquire(window.outbox, self._taken % size, SYSTEM)), self._taken, size
        ):
            self._taken += 1
            store_release(window.consumed, 0, np.uint32(self._taken), SYSTEM)
            slot = record.slot
            if record.kind == END:
                del self._running[slot]
                self._submit(window)
            elif self._running[slot].cancelled:
                store_release(window.cancel, slot, load_acquire(window.doorbell, slot, SYSTEM), SYSTEM)


def run(seed: int) -> list[Count]:
    """The engine from its launch to its end, in the interleaving of a seed; raises the first finding."""
    layout = memory.window_layout(MODEL, SETTINGS)
    nic_half, gpu_half = np.zeros((), layout.nic_half), np.zeros((), layout.gpu_half)
    window = memory.device_window(nic_half, gpu_half, layout)
    args = memory.arguments(MODEL, Weights.random(MODEL, seed=1, scale=0.3), SETTINGS, window)
    *_, cache, _, activations, _ = args
    return check(
        serve,
        SETTINGS.blocks,
        SETTINGS.lanes,
        *args,
        0,
        PATIENCE,
        seed=seed,
        shared=SETTINGS.shared,
        outside=[Nic()],
        unwritten=[cache.keys, cache.values, *activations],
    )
