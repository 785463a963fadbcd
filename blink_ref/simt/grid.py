"""The grid barrier, and how the blocks of a grid share out work: device code on top of the words."""

from .device import device
from .vocabulary import (
    GRID_WORDS,
    Block,
    atomic_add,
    barrier,
    divide,
    i32,
    i64,
    load_acquire,
    opaque,
    relax,
    thread_id,
    u32,
    warp_id,
    warps,
)


@device
def grid_barrier(block):
    """Wait until every lane of every block is here; what each wrote before, all see after.

    All lanes of all blocks call it. One lane a block counts its block's arrival and waits for the
    count to reach the next multiple of the number of blocks; the counter only grows (and wraps), so
    there is nothing to reset. The block barriers before and after carry the order to the other lanes.
    """
    grid_arrive(block)
    grid_wait(block)


@device
def grid_arrive(block):
    """The first half of a :func:`grid_barrier`: what the block has written, all see behind the second half.

    In between is time for what needs nothing from other blocks, and gives them nothing.
    """
    barrier()
    if thread_id() == 0:
        team = opaque(block.team)  # addresses made here are in no register before
        block.turn[team] = u32(block.turn[team] + u32(block.blocks))
        atomic_add(block.grid, team * (GRID_WORDS >> 1), u32(1))


@device
def grid_wait(block):
    """The second half: wait until every block has come to the first."""
    if thread_id() == 0:
        team = opaque(block.team)
        counter, turn, spins = team * (GRID_WORDS >> 1), block.turn[team], i64(0)
        while i32(load_acquire(block.grid, counter) - turn) < 0:
            relax(spins)
            spins += 1
    barrier()


@device
def team_of(block, first):
    """The blocks from number `first` on, which is 0 or 1, as a grid of their own: numbered from 0, they share
    work and meet at a barrier without block 0."""
    first = i64(first)
    number, blocks = i64(i32(block.id - first)), i64(i32(block.blocks - first))  # half the registers
    return Block(number, blocks, block.shared, block.grid, block.turn, first)


@device
def first_of_share(n, part, parts):
    """Where run `part` begins when n items are dealt to `parts` in runs; it ends where run part + 1 begins.

    Runs differ in length by one at most, the longer ones first.
    """
    length, longer = divide(i64(n), i64(parts))
    return part * length + min(part, longer)


@device
def grid_warp(block):
    """This warp's number in the grid. Neighbours in number lie in different blocks, for balance."""
    return i64(warp_id()) * i64(block.blocks) + i64(block.id)


@device
def grid_warps(block):
    """Warps in the grid."""
    return i64(block.blocks) * i64(warps())
