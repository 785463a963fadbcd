"""Twice as many requests as the engine can serve: nothing wedges, nothing leaks, and it serves as much as ever.

Windows of two kinds take turns in one run. In one there are always a few more requests than run at a time: that
is the peak. In the other they arrive by chance (Poisson) at twice the rate at which they ended at the peak, and
those for which there is no slot are turned away. Lengths are mixed, some prompts begin alike, some requests are
urgent, some are cancelled, and the pages do not suffice for all that run, so that requests are preempted. The
engine has one block; the NIC polls on another core.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from blink_ref.engine.persistent import serve
from blink_ref.nic.client import Busy, Handle, Nic
from blink_ref.ring.layout import BEAT_FOUND, BEAT_PREEMPTED, BEAT_RUNNING, BEAT_WAITING
from blink_ref.scheduler import state
from blink_ref.simt import start
from tests.engine_bench import Bench, chosen, load

pytestmark = pytest.mark.timeout(600)

SLOTS, RUNNING, PAGES = 128, 32, 64
AT_THE_PEAK = RUNNING + 16
"""requests outstanding"""
OVERLOAD = 2.0
"""times the rate of the peak"""
BAR = 0.85
"""Least tokens a second in overload, of those at the peak."""
WHOLE = 10.0, 6
SHORT = 1.0, 3
"""Seconds of a window, and windows of overload."""
PATIENCE = 10.0
"""Seconds without a record after which the engine is taken to stand still."""
LONGEST_PROMPT, LONGEST_ANSWER, COMMON = 64, 48, 40
CANCELLED, SHARED, URGENT = 0.1, 0.25, 0.05
"""Fractions of the requests."""


@contextmanager
def engine() -> Iterator[Bench]:
    """The tiny model, serving; its arrays are whole when the context is left."""
    model = load("tiny")
    made = Bench(model, chosen(model[0], blocks=1, slots=SLOTS, running=RUNNING, pages=PAGES, context=256))
    s, no_bounds = made.settings, (0, 0)
    running = start(serve, s.blocks, s.lanes, *made.args, *no_bounds, target="cpu", shared=s.shared)
    try:
        yield made
    finally:
        made.window.nic["stop"][0] = 1
        running.wait()


class Crowd:
    """Clients of one NIC that polls without a pause."""

    def __init__(self, window, vocab: int) -> None:
        self._nic, self._vocab = Nic(window), vocab
        self._draw = np.random.default_rng(0)
        self._beginnings = [self._ids(COMMON) for _ in range(4)]
        self._open: dict[Handle, int] = {}
        """tokens after which a request is cancelled, less those that came"""
        self._last_record = time.perf_counter()
        self.tokens = self.ended = self.refused = self.cancelled = 0

    def at_the_peak(self, seconds: float) -> None:
        """A request for each that ends."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            while self._nic.running < AT_THE_PEAK:
                self._submit()
            self._poll()

    def in_overload(self, seconds: float, rate: float) -> None:
        """`rate` requests a second, whatever becomes of them."""
        now = time.perf_counter()
        end, due = now + seconds, now
        while now < end:
            while due < now:
                self._submit()
                due += self._draw.exponential(1 / rate)
            self._poll()
            now = time.perf_counter()

    def drain(self) -> None:
        """Until everybody has an END."""
        while self._open:
            self._poll()
        assert not self._nic.running

    def _submit(self) -> None:
        draw = self._draw
        prompt = self._ids(int(draw.integers(1, LONGEST_PROMPT + 1)))
        if draw.random() < SHARED:
            prompt = self._beginnings[draw.integers(len(self._beginnings))] + prompt
        answer = int(draw.integers(1, LONGEST_ANSWER + 1))
        urgent = bool(draw.random() < URGENT)
        patience = int(draw.integers(answer + 1)) if draw.random() < CANCELLED else LONGEST_ANSWER + 1
        try:
            handle = self._nic.submit(prompt, answer, ignore_eos=True, urgent=urgent)
        except Busy:
            self.refused += 1
            return
        self._open[handle] = patience
        self._cancel_if_tired(handle)

    def _cancel_if_tired(self, handle: Handle) -> None:
        if self._open[handle] == 0:
            self._nic.cancel(handle)
            self.cancelled += 1

    def _poll(self) -> None:
        now, events = time.perf_counter(), self._nic.poll()
        if events:
            self._last_record = now
        assert now - self._last_record < PATIENCE, f"no record for {PATIENCE} s, {len(self._open)} requests wait"
        for handle, token, *_ in events:
            if token is None:
                del self._open[handle]
                self.ended += 1
            else:
                self.tokens += 1
                self._open[handle] -= 1
                self._cancel_if_tired(handle)

    def _ids(self, n: int) -> list[int]:
        return self._draw.integers(3, self._vocab, n).tolist()


def measured(crowd: Crowd, work, *args: float) -> tuple[float, float]:
    """Tokens and requests a second while a window lasts."""
    tokens, ended, begin = crowd.tokens, crowd.ended, time.perf_counter()
    work(*args)
    seconds = time.perf_counter() - begin
    return (crowd.tokens - tokens) / seconds, (crowd.ended - ended) / seconds


def in_turns(crowd: Crowd, seconds: float, windows: int) -> tuple[list[float], list[float]]:
    """Tokens a second in each window: of the peak, and of overload between two of those."""
    crowd.at_the_peak(seconds / 4)
    tokens, rate = measured(crowd, crowd.at_the_peak, seconds)
    peak, overload, rates = [tokens], [], [rate]
    for _ in range(windows):
        overload.append(measured(crowd, crowd.in_overload, seconds, OVERLOAD * float(np.mean(rates)))[0])
        tokens, rate = measured(crowd, crowd.at_the_peak, seconds)
        peak.append(tokens)
        rates.append(rate)
    return peak, overload


def check_that_nothing_leaked(made: Bench) -> None:
    """After the kernel has left: all pages are free or cached, nobody runs or waits, and the lists agree."""
    made.desk.index = int(made.window.nic["consumed"][0])
    assert made.desk.index == made.view.written[0]
    made.check()
    count = made.queue.count
    assert not count[[state.RUNNING, state.WAITING, state.ENDING, state.PAUSED]].any()
    assert not made.cache.references.any()
    assert len(made.free_pages()) + len(made.unused_pages()) == made.cache.pages
    assert not made.window.gpu["heartbeat"][[BEAT_RUNNING, BEAT_WAITING]].any()


def test_twice_the_capacity(benchmark, show):
    """6 s where only the workings are tested, else a minute of overload, and the peak's windows between."""
    seconds, windows = SHORT if benchmark.disabled else WHOLE
    with engine() as made:
        crowd = Crowd(made.window, made.config.vocab)
        peak, overload = benchmark.pedantic(in_turns, args=(crowd, seconds, windows), rounds=1)
        crowd.drain()
        beat = made.window.gpu["heartbeat"].copy()
    check_that_nothing_leaked(made)
    ratios = [2 * now / (before + after) for before, now, after in zip(peak, overload, peak[1:], strict=False)]
    ratio = float(np.median(ratios))
    counts = {
        "ended": crowd.ended,
        "refused": crowd.refused,
        "cancelled": crowd.cancelled,
        "preempted": int(beat[BEAT_PREEMPTED]),
        "positions_found": int(beat[BEAT_FOUND]),
    }
    benchmark.extra_info.update(
        seconds=seconds, peak=peak, overload=overload, ratios=ratios, ratio=ratio, **counts
    )
    show(
        f"tokens/s in windows of {seconds} s: peak {np.median(peak):.0f}, overload {np.median(overload):.0f}",
        f"  each beside its neighbours {' '.join(f'{r:.2f}' for r in ratios)}; {counts}",
    )
    assert min(counts["cancelled"], counts["preempted"], counts["positions_found"]) > 0
    if not benchmark.disabled:
        assert crowd.refused
        assert ratio >= BAR, f"in overload it serves {ratio:.2f} of the peak's tokens, under {BAR}"
