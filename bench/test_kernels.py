"""The two things that all kernels are made of: reading weights, and waiting for the other blocks."""

import numpy as np
import pytest

from blink_ref.engine.settings import CUDA_LANES
from blink_ref.roofline import ceilings
from blink_ref.simt import aligned, device, first_of_share, grid_barrier, launch
from blink_ref.simt.vocabulary import i64, load_acquire, relax, row_dot, store_release, u32

from .report import report

WIDTH = 576
ROWS = (1 << 27) // WIDTH
"""Of 16-bit weights: 256 MiB, which is more than a cache holds."""
MEETINGS = 20_000
GPU_BAR_NS = 1000
"""Of a barrier of all multiprocessors."""
LINE = 32
"""Words of 32 bits that no two cores' words share a cache line within."""

threads = pytest.mark.parametrize("threads", [1, 2])


@device
def dots(block, weights, x, width, out):
    """``out[r] = weights[r] . x`` for this block's share of the rows."""
    rows = i64(out.shape[0])
    for r in range(first_of_share(rows, block.id, block.blocks), first_of_share(rows, block.id + 1, block.blocks)):
        out[r] = row_dot(weights, r * width, x, 0, width)


@device
def meet(block, times):
    """Barriers and nothing else."""
    for _ in range(times):
        grid_barrier(block)


@device
def ping_pong(block, words, times):
    """Two blocks answer each other: no barrier between two cores can be faster than a way there and back."""
    mine, other = i64(block.id) * LINE, (1 - i64(block.id)) * LINE
    for turn in range(times):
        if block.id == 0:
            store_release(words, mine, u32(turn + 1))
        spins = i64(0)
        while load_acquire(words, other) != u32(turn + 1):
            relax(spins)
            spins += 1
        if block.id == 1:
            store_release(words, mine, u32(turn + 1))


@pytest.fixture(scope="module")
def weights():
    """Random bfloat16 between -2 and 2, in memory that has been touched."""
    some = np.random.default_rng(0).standard_normal(WIDTH, np.float32).view(np.uint32) >> 16
    array = aligned(ROWS * WIDTH, np.uint16)
    array.reshape(-1, some.size)[:] = some
    return array


@threads
def test_row_dot(benchmark, weights, threads):
    x, out = aligned(WIDTH, np.float32), aligned(ROWS, np.float32)
    x.fill(1)

    def work():
        launch(dots, threads, 1, weights, x, WIDTH, out, target="cpu")

    benchmark.pedantic(work, rounds=10, warmup_rounds=1)
    cost = weights.nbytes + x.nbytes + out.nbytes, 2 * weights.size
    report(benchmark, cost, ceilings.measure(weights, threads))


@pytest.mark.parametrize(
    ("target", "blocks"), [("cpu", 1), ("cpu", 2), pytest.param("cuda", 0, marks=pytest.mark.cuda)]
)
def test_grid_barrier(benchmark, target, blocks):
    """On a GPU with as many threads as the engine has, on all multiprocessors."""
    lanes = 1
    if target == "cuda":
        from blink_ref.simt import on_cuda

        blocks, lanes = on_cuda.limits().sms, CUDA_LANES

    def work():
        launch(meet, blocks, lanes, MEETINGS, target=target)

    benchmark.pedantic(work, rounds=10, warmup_rounds=1)
    benchmark.extra_info.update(meetings=MEETINGS, blocks=blocks, lanes=lanes)
    if benchmark.stats is not None:
        ns = benchmark.stats["median"] / MEETINGS * 1e9
        benchmark.extra_info["ns_per_barrier"] = ns
        assert target == "cpu" or ns < GPU_BAR_NS


def test_way_there_and_back_between_two_cores(benchmark):
    words = np.zeros(2 * LINE, np.uint32)

    def work():
        words.fill(0)
        launch(ping_pong, 2, 1, words, MEETINGS, target="cpu")

    benchmark.pedantic(work, rounds=10, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_there_and_back"] = benchmark.stats["median"] / MEETINGS * 1e9
