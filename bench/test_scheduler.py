"""What scheduling on the device costs: seconds from a doorbell to the step that it starts, and a step's share.

The bars are for a GPU, at a 1B shape, whose weights pass through the caches in each step as a serving engine's do.
On the CPU the same is done with the tiny model, and nothing is asked of the figures.
"""

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest

from blink_ref.engine import memory
from blink_ref.model.config import ModelConfig
from blink_ref.ring.layout import BEAT_STEPS, HISTORY, STEP_NS, STEP_NUMBER, STEP_PHASES, STEP_WORDS, Layout
from blink_ref.ring.window import Window
from blink_ref.simt import device, start
from blink_ref.simt.vocabulary import SYSTEM, load_acquire, store_release, thread_id, u32, u64
from tests.engine_bench import Desk

from .serving import serving, sizes

pytestmark = pytest.mark.timeout(1200)

PROMPT = 128
ROWS = 512
SLOTS, RUNNING = (256, 1024, 4096), (1, 16, 64, 256)
ROUND_TRIP_BAR, STEP_BAR = 20.0, 5.0
"""Microseconds."""
SILENCE = 0.001
"""Most seconds between two requests."""

draws = map(np.random.default_rng, itertools.count())


@device
def echo(block, window, times):
    """Say in the heartbeat what the doorbell says, so many times. One lane."""
    if block.id == 0 and thread_id() == 0:
        for turn in range(times):
            while load_acquire(window.doorbell, 0, SYSTEM) != u32(turn + 1):
                pass
            store_release(window.heartbeat, BEAT_STEPS, u64(turn + 1), SYSTEM)


def ping_pong(target: str, times: int) -> list[float]:
    """Seconds from a doorbell to the answer of a kernel that does nothing else."""
    window = Window.create(Layout(slots=64, arena=1024))
    args: tuple = (memory.device_window(window.nic, window.gpu, window.layout),)
    if target == "cuda":
        from blink_ref.engine import cuda_memory

        args = cuda_memory.place(args, window)
    running = start(echo, 1, 32, *args, times, target=target, shared=0)
    seen = []
    for turn in range(times):
        time.sleep(SILENCE if turn % 64 == 0 else 0)
        seen.append(seconds_to_beat(window, lambda turn=turn: ring_only(window, turn + 1)))
    running.wait()
    window.unlink()
    return seen


def ring_only(window: Window, generation: int) -> None:
    """The first slot's doorbell, and nothing else."""
    window.nic["doorbell"][0] = generation


def seconds_to_beat(window: Window, ring: Callable[[], None]) -> float:
    """Seconds from the end of `ring`, which rings a doorbell last, to the next step in the heartbeat.

    Of a few instructions of Python's after the doorbell nothing is seen: a tenth of a microsecond.
    """
    steps = window.gpu["heartbeat"][BEAT_STEPS:]
    before = int(steps[0])
    ring()
    begin = time.perf_counter()
    while int(steps[0]) == before:
        pass
    return time.perf_counter() - begin


def ask(desk: Desk, slot: int, config: ModelConfig, prompt: int, tokens: int) -> None:
    """A request with a new prompt, which no cache holds."""
    desk.ring(slot, next(draws).integers(3, config.vocab, prompt).tolist(), tokens, ignore_eos=True)


def drain(desk: Desk) -> None:
    """Until all requests have ended."""
    while desk.busy():
        desk.read()


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    return {f"p{q}": float(np.percentile(seconds, q)) * 1e6 for q in (50, 90, 99)}


def test_doorbell_to_the_start_of_a_step(benchmark, show, target, model):
    """An idle engine of 4,096 slots and a prompt of 128 tokens, less the way there and back of a bare word."""
    config, weights = model
    times = 20 if benchmark.disabled else 500
    chosen = sizes(config, target, rows=ROWS, slots=max(SLOTS), context=256)
    pause = np.random.default_rng(0)

    def doorbells(desk: Desk) -> list[float]:
        seen = []
        for n in range(times):
            slot = n % len(desk.slots)
            seen.append(seconds_to_beat(desk.window, lambda slot=slot: ask(desk, slot, config, PROMPT, 1)))
            drain(desk)
            time.sleep(pause.uniform(0, SILENCE))
        return seen

    bare = percentiles(ping_pong(target, times))
    with serving(config, weights, chosen) as window:
        desk = Desk(window)
        ask(desk, 0, config, PROMPT, 1)
        drain(desk)
        whole = percentiles(benchmark.pedantic(doorbells, args=(desk,), rounds=1))
    net = {name: us - bare["p50"] for name, us in whole.items()}
    benchmark.extra_info.update(target=target, whole_us=whole, bare_us=bare, net_us=net)
    show(
        f"{target}: from a doorbell",
        *(
            f"  {name:15} {'  '.join(f'{q} {us:.1f} us' for q, us in of.items())}"
            for name, of in (("to a step", whole), ("bare word", bare), ("less its median", net))
        ),
    )
    if target == "cuda" and not benchmark.disabled:
        assert net["p99"] <= ROUND_TRIP_BAR, f"p99 is {net['p99']:.1f} us, over {ROUND_TRIP_BAR}"


def added_to_a_step(desk: Desk, config: ModelConfig, running: int, steps: int) -> dict[str, float]:
    """Microseconds of a decode step of `running` requests: all of it, and what is not the model's.

    What the scheduler does between two steps is the first phase of a step; the rest of what is not the model's,
    the barrier before and after among it, is what the steps do not account for.
    """
    window = desk.window
    for slot in range(running):
        ask(desk, slot, config, 4, 200)
    while min(len(answer.tokens) for answer in desk.answers.values()) < 2:
        desk.read()
    beat = window.gpu["heartbeat"]
    first, begin = wait_for_step(desk, int(beat[BEAT_STEPS]) + 1)
    last, end = wait_for_step(desk, first + steps)
    record = window.gpu["history"].reshape(HISTORY, STEP_WORDS).astype(np.int64)
    for slot in range(running):
        desk.cancel(slot)
    drain(desk)
    record = record[(record[:, STEP_NUMBER] >= first) & (record[:, STEP_NUMBER] < last)]
    assert len(record) >= steps - 2
    whole = (end - begin) / (last - first) * 1e6
    step, plan = (float(record[:, word].mean()) / 1e3 for word in (STEP_NS, STEP_PHASES))
    return {"step": whole, "scheduling": plan, "rest": whole - step, "added": whole - step + plan}


def wait_for_step(desk: Desk, number: int) -> tuple[int, float]:
    """Read records until step `number` begins; the number of the step that has begun, and when."""
    steps = desk.window.gpu["heartbeat"][BEAT_STEPS:]
    while int(steps[0]) < number:
        desk.read(most=8)
    return int(steps[0]), time.perf_counter()


@pytest.mark.parametrize("own_block", [False, True], ids=["shared block", "own block"])
@pytest.mark.parametrize("slots", SLOTS)
def test_time_added_to_a_step(benchmark, show, target, model, slots, own_block):
    """Over the running requests; the bar is for the largest numbers of both, with a block for the scheduler."""
    config, weights = model
    steps = 8 if benchmark.disabled or target == "cpu" else 64
    room = {"running": max(RUNNING), "reserved": 0, "slots": slots, "context": 256, "pages": 4096}
    if own_block and target == "cpu":
        room["blocks"] = 2
    chosen = sizes(config, target, rows=ROWS, scheduler_block=own_block, **room)

    def curve(desk: Desk) -> dict[int, dict[str, float]]:
        return {running: added_to_a_step(desk, config, running, steps) for running in RUNNING}

    with serving(config, weights, chosen) as window:
        seen = benchmark.pedantic(curve, args=(Desk(window),), rounds=1)
    benchmark.extra_info.update(target=target, slots=slots, own_block=own_block, us_by_running=seen)
    show(
        f"{target}, {slots} slots{', own block' * own_block}: us of a decode step",
        *(f"  {n:3} running: {'  '.join(f'{k} {v:.1f}' for k, v in of.items())}" for n, of in seen.items()),
    )
    added = seen[max(RUNNING)]["added"]
    if target == "cuda" and own_block and slots == max(SLOTS) and not benchmark.disabled:
        assert added <= STEP_BAR, f"scheduling adds {added:.1f} us to a step, over {STEP_BAR}"
