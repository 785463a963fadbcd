"""Who a lane is, and waiting for each other: ids, the block's, the warp's and the grid's barrier."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_ref.simt import device, first_of_share, grid_barrier, grid_warp, grid_warps, launch, team_of
from blink_ref.simt.on_python import WARP_WIDTH
from blink_ref.simt.vocabulary import (
    atomic_add,
    barrier,
    block_threads,
    f32,
    i32,
    i64,
    lane_id,
    load_acquire,
    relax,
    store_release,
    thread_id,
    u32,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)

SHAPES = {
    "python": [(1, 1), (3, 1), (2, 2), (1, 3), (2, 4), (1, 5), (2, 7), (2, 8)],
    "cpu": [(1, 1), (3, 1)],
    "cuda": [(1, 32), (3, 32), (2, 64), (1, 1024)],
}
"""(blocks, lanes) to try on each target."""


@device
def sign_in(block, times, ids):
    """Each lane notes who it is, at the place that its block and thread number give."""
    at = i64(block.id) * block_threads() + thread_id()
    atomic_add(times, at, i32(1))
    ids[at, 0] = warp_id()
    ids[at, 1] = lane_id()
    ids[at, 2] = warps()
    ids[at, 3] = warp_width()
    ids[at, 4] = grid_warp(block)
    ids[at, 5] = grid_warps(block)


def test_the_ids_name_every_lane_of_every_block_once(target):
    width = {"python": WARP_WIDTH, "cpu": 1, "cuda": 32}[target]
    for blocks, lanes in SHAPES[target]:
        times, ids = np.zeros(blocks * lanes + 1, np.int32), np.full((blocks * lanes, 6), -1)
        launch(sign_in, blocks, lanes, times, ids, target=target)
        assert times.tolist() == [1] * (blocks * lanes) + [0]
        thread, block = np.arange(blocks * lanes) % lanes, np.arange(blocks * lanes) // lanes
        warp, lane, warps_here, width_here, warp_of_grid, warps_of_grid = ids.T
        assert (warp == thread // width).all()
        assert (lane == thread % width).all()
        assert (warps_here == -(-lanes // width)).all()
        assert (width_here == np.minimum(width, lanes - warp * width)).all()  # the last warp may be partial
        assert (warps_of_grid == blocks * warps_here).all()
        assert (warp_of_grid == warp * blocks + block).all()


@device
def pass_round(block, rounds, wrong):
    """Each lane reads what its neighbour has just written, many times."""
    n, me = block_threads(), thread_id()
    neighbour = (me + 1) % n
    for r in range(rounds):
        block.shared[me] = f32(r * n + me)
        barrier()
        if block.shared[neighbour] != f32(r * n + neighbour):
            atomic_add(wrong, 0, i32(1))
        barrier()


def test_after_a_barrier_every_lane_sees_what_the_others_wrote_before_it(target):
    for blocks, lanes in SHAPES[target]:
        wrong = np.zeros(1, np.int32)
        launch(pass_round, blocks, lanes, 20, wrong, target=target)
        assert wrong[0] == 0, (blocks, lanes)


@device
def pass_round_in_warp(block, rounds, wrong):
    """The same among the lanes of a warp, by the warp's barrier alone."""
    n, me = warp_width(), lane_id()
    first, neighbour = thread_id() - me, (me + 1) % n
    for r in range(rounds):
        block.shared[first + me] = f32(r * n + me)
        warp_barrier()
        if block.shared[first + neighbour] != f32(r * n + neighbour):
            atomic_add(wrong, 0, i32(1))
        warp_barrier()


def test_a_warp_barrier_publishes_within_the_warp(target):
    for blocks, lanes in SHAPES[target]:
        wrong = np.zeros(1, np.int32)
        launch(pass_round_in_warp, blocks, lanes, 20, wrong, target=target)
        assert wrong[0] == 0, (blocks, lanes)


@device
def meet(block, rounds, count, cells, ready, wrong):
    """Blocks write a cell each, meet, and read all cells. The barrier's counter stands at `count` before."""
    if thread_id() == 0:
        block.turn[0] = u32(count)
        if block.id == 0:
            atomic_add(block.grid, 0, u32(count))
            store_release(ready, 0, i32(1))
        spins = i64(0)
        while load_acquire(ready, 0) == 0:
            relax(spins)
            spins += 1
    for r in range(rounds):
        if thread_id() == block_threads() - 1:
            cells[block.id] = r + 1
        grid_barrier(block)
        for b in range(block.blocks):
            if cells[b] != r + 1:
                atomic_add(wrong, 0, i32(1))
        grid_barrier(block)


@pytest.mark.parametrize("count", [0, 2**32 - 9], ids=["from 0", "across 2**32"])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_grid_barrier_publishes_to_all_blocks_round_after_round(target, blocks, count):
    lanes, rounds = {"python": (2, 12), "cpu": (1, 300), "cuda": (64, 300)}[target]
    cells, ready, wrong = np.zeros(blocks, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int32)
    launch(meet, blocks, lanes, rounds, count, cells, ready, wrong, target=target)
    assert cells.tolist() == [rounds] * blocks
    assert wrong[0] == 0


@device
def work_beside(block, rounds, cells, seen, wrong):
    """Block 0 looks on while the others meet as a team; then all meet."""
    team = team_of(block, 1)
    if block.id > 0:
        for r in range(rounds):
            if thread_id() == 0:
                cells[team.id] = r + 1
            grid_barrier(team)
            for b in range(team.blocks):
                if cells[b] != r + 1:
                    atomic_add(wrong, 0, i32(1))
            grid_barrier(team)
    grid_barrier(block)
    if block.id == 0 and thread_id() == 0:
        for b in range(team.blocks):
            seen[b] = cells[b]


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_team_meets_without_the_first_block_and_then_with_it(target, blocks):
    lanes, rounds = {"python": (2, 12), "cpu": (1, 300), "cuda": (64, 300)}[target]
    cells, seen, wrong = np.zeros(blocks - 1, np.int64), np.zeros(blocks - 1, np.int64), np.zeros(1, np.int32)
    launch(work_beside, blocks, lanes, rounds, cells, seen, wrong, target=target)
    assert seen.tolist() == [rounds] * (blocks - 1)
    assert wrong[0] == 0


@given(st.integers(0, 10**6), st.integers(1, 5000))
def test_shares_cover_everything_once_and_differ_by_one_at_most_longer_first(n, parts):
    first = [first_of_share(n, part, parts) for part in range(parts + 1)]
    lengths = np.diff(first)
    assert (first[0], first[-1]) == (0, n)
    assert lengths.max() - lengths.min() <= 1
    assert sorted(lengths, reverse=True) == list(lengths)


@device
def shares(block, n, parts, out):
    for part in range(thread_id(), parts + 1, block_threads()):
        out[part] = first_of_share(n, part, parts)


def test_shares_are_the_same_on_every_target(target, lanes):
    for n, parts in ((0, 3), (2, 7), (1000, 7), (128_256, 2112), (49_152, 1)):
        out = np.full(parts + 1, -1)
        launch(shares, 1, lanes, n, parts, out, target=target)
        assert out.tolist() == [first_of_share(n, part, parts) for part in range(parts + 1)]
