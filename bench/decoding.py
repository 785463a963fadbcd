"""Decoding as a NIC sees it: the time of a step in which so many requests of one length all get a token."""

import time
from typing import NamedTuple

import numpy as np

from blink_ref.engine.settings import Settings
from blink_ref.model.config import ModelConfig
from blink_ref.nic.client import Nic
from blink_ref.ring.window import Window

from .serving import sizes

SIXTEEN_BITS = 2


class Case(NamedTuple):
    """A kind of decoding."""

    config: ModelConfig
    batch: int
    context: int
    """tokens of each prompt"""
    bar: float
    """the fraction of the copy bandwidth that is asked for"""
    tokens: int = 256
    """of each request, while all are there"""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.config.name}, batch {self.batch}, context {self.context}"

    def steps_before(self, rows: int) -> int:
        """Steps of so many rows until all prompts are computed; those that have begun take some of the rows."""
        return -(-self.batch * self.context // (rows - self.batch)) + self.batch

    def bytes(self) -> int:
        """That a step must read, half-way: 16-bit weights once, and each request's keys and values in 16 bits."""
        c = self.config
        return SIXTEEN_BITS * (c.parameters - (0 if c.tied else c.vocab * c.hidden)) + self.cache_bytes()

    def cache_bytes(self) -> int:
        """Of those, the keys and values."""
        c = self.config
        position = 2 * c.layers * c.kv_heads * c.head_dim
        return SIXTEEN_BITS * self.batch * (self.context + self.tokens // 2) * position


def sizes_for(case: Case, target: str, rows: int) -> Settings:
    """An engine with room for the case: places in the batch, positions, pages."""
    chosen = sizes(case.config, target)
    context = case.context + case.tokens + case.steps_before(rows) + 16
    running = case.batch + case.batch // 4 + 1  # an eighth is kept for urgent requests
    pages = (case.batch + 1) * -(-context // chosen.page_size)
    changes = {"rows": rows, "context": context, "running": running, "reserved": running // 8, "pages": pages}
    return sizes(case.config, target, slots=256, **changes)


def prompts_of(case: Case) -> list[list[int]]:
    """Random ones, the same each time."""
    draw = np.random.default_rng(0)
    return draw.integers(0, case.config.vocab, (case.batch, case.context)).tolist()


def seconds_a_step(window: Window, case: Case, prompts: list[list[int]], rows: int) -> float:
    """From the first token of whoever began last to the last one while all still generate, by steps."""
    nic = Nic(window)
    most = case.tokens + case.steps_before(rows)
    handles = [nic.submit(prompt, most, ignore_eos=True) for prompt in prompts]
    came: dict = {handle: [] for handle in handles}
    while nic.running == case.batch:
        events, now = nic.poll(), time.perf_counter()
        for handle, token, *_ in events:
            if token is not None:
                came[handle].append(now)
    for handle in handles:
        nic.cancel(handle)
    while nic.running:
        nic.poll()
    last = min(came.values(), key=len)
    assert len(last) >= case.tokens, f"all were there for {len(last)} steps only"
    return (last[-1] - last[0]) / (len(last) - 1)
