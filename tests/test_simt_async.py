"""Asynchronous copies: a ring of stages on every target, what is refused, and what it becomes on GPUs."""

import numba
import numpy as np
import pytest

from blink_ref.simt import device, launch, mbarrier
from blink_ref.simt.vocabulary import (
    arena_view,
    async_fence,
    barrier,
    block_threads,
    copy_async,
    f32,
    i64,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mbarriers,
    thread_id,
    widen,
)

STAGES, SIZE, ROUNDS = 3, 64, 10


@device
def stream(block, x, out, size, stages):
    """One lane of each block streams every blocks-th part of x through a ring of stages; all lanes add it up."""
    full = mbarriers(block.shared, 0, stages)
    empty = mbarriers(block.shared, 2 * stages, stages)
    ring = arena_view(block.shared, 64, stages * size, x)
    if thread_id() == 0:
        for s in range(stages):
            mbarrier_init(full, s, 1)
            mbarrier_init(empty, s, block_threads())
    barrier()
    rounds = x.shape[0] // (size * block.blocks)
    total, r = f32(0.0), i64(1 - stages)
    while r < rounds:
        ahead = r + stages - 1
        if thread_id() == 0 and ahead < rounds:
            s = ahead % stages
            mbarrier_wait(empty, s, (ahead // stages & 1) ^ 1)
            mbarrier_expect_bytes(full, s, size * x.itemsize)
            copy_async(ring, s * size, x, (ahead * block.blocks + block.id) * size, size, full, s)
        if r >= 0:
            s = r % stages
            mbarrier_wait(full, s, r // stages & 1)
            k = thread_id()
            while k < size:
                total += widen(ring[s * size + k])
                k += block_threads()
            mbarrier_arrive(empty, s)
        r += 1
    out[block.id * block_threads() + thread_id()] = total


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_what_is_streamed_through_a_ring_of_stages_is_what_was_there(target, lanes, dtype):
    blocks = 2
    values = np.random.default_rng(1).integers(-99, 99, (ROUNDS, blocks, SIZE)).astype(np.float32)
    x = values.reshape(-1) if dtype == np.float32 else (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    out = np.zeros(blocks * lanes, np.float32)
    launch(stream, blocks, lanes, x, out, SIZE, STAGES, target=target)
    sums = out.reshape(blocks, lanes).sum(1)
    assert sums.tolist() == values.sum((0, 2)).tolist()  # whole numbers: exact in any order


@device
def look_before_the_wait(block, x, out):
    full = mbarriers(block.shared, 0, 1)
    mbarrier_init(full, 0, 1)
    block.shared[4] = f32(7.0)
    async_fence()
    barrier()
    mbarrier_expect_bytes(full, 0, 16)
    copy_async(block.shared, 4, x, 0, 4, full, 0)
    out[0] = block.shared[4]
    mbarrier_wait(full, 0, 0)
    out[1] = block.shared[4]


def test_in_python_a_copy_is_not_seen_before_it_is_waited_for():
    out = np.zeros(2, np.float32)
    launch(look_before_the_wait, 1, 1, np.ones(4, np.float32), out, target="python")
    assert out.tolist() == [7, 1]


@device
def copy_some(block, x, at, first, n):
    full = mbarriers(block.shared, 0, 1)
    mbarrier_init(full, 0, 1)
    mbarrier_expect_bytes(full, 0, n * 4)
    copy_async(block.shared, at, x, first, n, full, 0)
    mbarrier_wait(full, 0, 0)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("at", "first", "n", "complaint"),
    [
        (5, 0, 4, "target begins at element 5, no multiple of 16 bytes"),
        (4, 1, 4, "source begins at element 1, no multiple of 16 bytes"),
        (4, 0, 5, "5 elements: 20 bytes, no multiple of 16"),
    ],
)
def test_a_copy_that_is_not_aligned_is_refused(at, first, n, complaint, check):
    with pytest.raises(ValueError, match=complaint):
        launch(copy_some, 1, 1, np.zeros(16, np.float32), at, first, n, target="python", check=check)


def test_a_copy_from_beyond_an_array_is_refused():
    with pytest.raises(IndexError, match=r"source is \[0:8\], of an array of 4"):
        launch(copy_some, 1, 1, np.zeros(4, np.float32), 4, 0, 8, target="python")


@device
def copy_floats_as_they_are_not(block, x):
    copy_async(block.shared, 4, x, 0, 8, mbarriers(block.shared, 0, 1), 0)


@device
def misplaced(block):
    mbarriers(block.shared, 1, 1)


@device
def arrive_too_often(block, x):
    full = mbarriers(block.shared, 0, 1)
    mbarrier_init(full, 0, 1)
    mbarrier_expect_bytes(full, 0, 16)
    mbarrier_arrive(full, 0)


@pytest.mark.parametrize(
    ("fn", "args", "complaint"),
    [
        (copy_floats_as_they_are_not, [np.zeros(8, np.uint16)], "from uint16 to float32; take an arena_view"),
        (misplaced, [], "begin at float 1 of the arena; it has to be even"),
        (arrive_too_often, [np.zeros(4, np.float32)], "one arrival too many: a phase of the mbarrier takes 1"),
    ],
)
def test_what_the_hardware_would_take_amiss_is_refused(fn, args, complaint):
    with pytest.raises(ValueError, match=complaint):
        launch(fn, 1, 1, *args, target="python")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_phase_is_complete_when_arrivals_and_bytes_are_in_whatever_order(compiled):
    after = numba.njit(mbarrier.after) if compiled else mbarrier.after
    for steps in ([(1, 32), (1, 0), (0, -32)], [(0, -32), (1, 0), (1, 32)], [(1, 32), (0, -16), (0, -16), (1, 0)]):
        word = mbarrier.fresh(2)
        for phase in range(4):
            for arrivals, size in steps:
                assert mbarrier.parity(word) == phase % 2
                word = after(word, arrivals, size)
        assert word == mbarrier.fresh(2)


# --- on GPUs

GENERATIONS = pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0)], ids=["7.5", "8.0", "9.0"])

BULK = (
    "mbarrier.init.shared::cta.b64",
    "fence.proxy.async.shared::cta",
    "mbarrier.arrive.shared::cta.b64",
    "mbarrier.arrive.expect_tx.shared::cta.b64",
    "mbarrier.try_wait.parity.shared::cta.b64",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
)
PLAIN = ("ld.acquire.cta.shared.u64", "atom.cas.acq_rel.cta.shared.b64", "st.shared.v4")


@GENERATIONS
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int16])
def test_a_gpu_that_has_bulk_copies_uses_them_and_an_older_one_plain_code(cc, dtype):
    on_cuda = pytest.importorskip(
        "blink_ref.simt.on_cuda", reason="needs numba-cuda and ptxas: pip install 'blink-ref[cuda13]'"
    )
    from blink_ref.simt import assembler

    args = (np.zeros(1, dtype), np.zeros(1, np.float32), 1, 1)
    ptx = on_cuda.compile_to_ptx(stream, tuple(map(numba.typeof, args)), 128, cc)
    assert assembler.assemble(ptx, cc).faults() == []
    there, gone = (BULK, PLAIN) if cc >= (9, 0) else (PLAIN, BULK)
    for text in there:
        assert text in ptx, text
    for text in (*gone, "fence.proxy.async;"):  # without a space, it is a fence of the whole GPU
        assert text not in ptx, text
    assert ("L2::cache_hint" in ptx) == (cc >= (9, 0) and dtype == np.int16)  # of packed weights only
