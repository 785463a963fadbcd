"""The linear layers for many rows: tiles of results, which a block makes at once with :func:`block_dots`.

For a few rows the other kernels read each weight once, and are as fast as the memory. For many rows they would
read each weight often, out of a cache, for few products each time. Here a block takes a tile of up to 8 strips of
packed weights (:mod:`.packing`), 128 outputs, and 128 rows, so that what it reads is used 128 times, and on a GPU
the products are the tensor cores' work. Activations lie as :func:`block_put` leaves them.

There are five such products in a model. What becomes of their results is the same as in the other files, and a
test holds both equal, but for the order of additions: float32's rounding.
"""

import numpy as np

from ..model.config import ModelConfig
from ..simt import device, grid_barrier, grid_warp, grid_warps
from ..simt.vocabulary import (
    DOTS_FLOATS,
    DOTS_PITCH,
    DOTS_ROWS,
    DOTS_STRIPS,
    FRAGMENT,
    barrier,
    block_dots,
    block_put,
    block_threads,
    divide,
    f32,
    i32,
    i64,
    lane_id,
    opaque,
    thread_id,
    tiles_pay,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)
from . import flash, packing
from .attention import put_pair
from .logits import draw
from .mlp import silu
from .packing import AT, ATTENDED, GATED, LOGITS, LOWERED, PROJECT, SIZE, STEPS, STRIPS, block_row_at
from .rmsnorm import rmsnorm
from .staging import SCRATCH, staged_at

FEW = 4
"""Rows up to which the other kernels are the faster ones, on a GPU."""

LEAST_STEPS = 2
"""Fewest fragments of a strip that a piece of a tile has."""

MOST_PIECES = 8
"""Most pieces of a tile."""

PAIRS = FRAGMENT >> 1
"""Outputs of a strip's first half, to each of which belongs one of the second."""


def arena(head_dim: int, halves: bool) -> int:
    """Floats of arena that these kernels need, and attention in tiles; `halves`: see there."""
    return max(SCRATCH + DOTS_FLOATS, flash.arena(head_dim, halves))


def fits(config: ModelConfig, dtype: np.dtype, shared: int, halves: bool) -> bool:
    """Whether these kernels, and attention in tiles, serve a model, with `shared` floats of arena."""
    return packing.fits(config, dtype) and flash.fits(config) and shared >= arena(config.head_dim, halves)


@device
def wanted(model, rows):
    """Whether these kernels are to be used for so many rows."""
    return tiles_pay(model.weights) and model.tiles > 0 and rows > model.tiles


@device
def normalise(block, plan, rows, kind, layer, x, model, normed):
    """``normed[t]`` = RMSNorm of the t-th row that a product takes. Blocks share out the rows.

    All blocks call it. It begins and ends without a grid barrier.
    """
    width, t, shared = opaque(i64(model.hidden)), i32(block.id), block.shared
    gain = (2 * i64(layer) + i64(kind == GATED)) * width
    while t < rows:
        row = i64(t)
        if kind == LOGITS:
            row = i64(plan.sample_row[t])
        rmsnorm(block, x, row * width, model.norm, gain, width, model.eps, 0)
        barrier()
        i, at = 4 * i64(thread_id()), i64(0)
        while i < width:
            at = staged_at() + i
            a, b, c, d = shared[at], shared[at + 1], shared[at + 2], shared[at + 3]
            block_put(normed, block_row_at(rows, t, i), a, b, c, d)
            i += 4 * block_threads()
        t = i32(t + block.blocks)


@device
def product(block, plan, rows, kind, layer, model, sampling, cache, act):
    """One of the five products for all rows, and what is made of it. Blocks share out tiles, or pieces of them.

    All blocks call it. It begins and ends without a grid barrier. A piece of a tile has the products of some of
    the columns; where there are several, they wait in memory, and are added up in order behind a grid barrier.
    """
    item, shared = i32(block.id), block.shared
    while True:
        pieces = pieces_of_tile(block, model, kind, rows)
        if item >= tiles_in_all(block, model, kind, rows) * pieces:  # asked each time, not kept in registers
            break
        tile, piece = divide(i64(item), pieces)
        across, t0, here = place_of(block, model, kind, rows, tile)
        x, number = act.normed, product_number(model, kind, layer)
        if kind == ATTENDED:
            x = act.attended
        elif kind == LOWERED:
            x = act.gated
        steps = i64(model.stream[number, STEPS])
        first, strips = across * DOTS_STRIPS, strips_of(model, number, across)
        at = (i64(model.stream[number, AT]) + first * steps) * SIZE
        n = divide(steps, pieces)[0]
        barrier()  # the tile before has been read
        j = block_row_at(rows, t0, i64(0))
        block_dots(shared, SCRATCH, model.packed, at, steps, strips, x, j, rows, here, piece * n, n)
        barrier()
        if pieces_of_tile(block, model, kind, rows) > 1:
            keep_piece(shared, act.pieces, item, here, FRAGMENT * strips)
        else:
            finish_tile(block, plan, rows, kind, layer, model, sampling, cache, act, i32(opaque(i64(item))))
        item = i32(item + block.blocks)
    if pieces_of_tile(block, model, kind, rows) > 1:
        grid_barrier(block)
        finish_pieces(block, plan, rows, kind, layer, model, sampling, cache, act)


@device
def product_number(model, kind, layer):
    """A product's row of :attr:`Model.stream`."""
    return i64(4 * i64(model.layers) if kind == LOGITS else 4 * i64(layer) + kind)


@device
def strips_of(model, number, across):
    """How many strips a product has for its tiles number `across`."""
    return min(i64(DOTS_STRIPS), i64(model.stream[number, STRIPS]) - across * DOTS_STRIPS)


@device
def tiles_in_all(block, model, kind, rows):
    """How many tiles a product has."""
    return tiles_across(model, kind) * tiles_down(block, model, kind, rows)


@device
def pieces_of_tile(block, model, kind, rows):
    """Into how many pieces each tile is cut: 1, or as many, up to MOST_PIECES, as there are blocks for at once."""
    pieces, steps = i64(1), i64(model.stream[product_number(model, kind, 0), STEPS])
    tiles = tiles_in_all(block, model, kind, rows)
    if kind == LOGITS:
        tiles = i64(block.blocks)
    while (
        pieces < MOST_PIECES and 2 * pieces * tiles <= block.blocks and steps & (2 * LEAST_STEPS * pieces - 1) == 0
    ):
        pieces *= 2
    return pieces


@device
def keep_piece(shared, pieces, item, here, outs):
    """The results of a piece of a tile, out of the arena. A warp takes a row at a time."""
    t = i64(warp_id())
    while t < here:
        copy_row(shared, SCRATCH + t * DOTS_PITCH, pieces, (i64(item) * DOTS_ROWS + t) * DOTS_ROWS, outs)
        t += warps()


@device
def finish_pieces(block, plan, rows, kind, layer, model, sampling, cache, act):
    """What is made of the sums of pieces. The warps of all blocks share out the rows of the tiles."""
    row, at = grid_warp(block), SCRATCH + i64(warp_id()) * DOTS_PITCH
    height = tile_height(block, model, kind, rows)
    end = tiles_in_all(block, model, kind, rows) * height
    while row < end:
        tile, t = divide(row, height)
        across, t0, here = place_of(block, model, kind, rows, tile)
        if t < here:
            pieces, c = pieces_of_tile(block, model, kind, rows), i64(lane_id())
            first = (tile * pieces * DOTS_ROWS + t) * DOTS_ROWS
            outs = FRAGMENT * strips_of(model, product_number(model, kind, layer), across)
            while c < outs:
                total = f32(0.0)
                for piece in range(pieces):
                    total += act.pieces[first + piece * DOTS_ROWS * DOTS_ROWS + c]
                block.shared[at + c] = total
                c += warp_width()
            warp_barrier()
            finish_row(block, plan, rows, kind, layer, model, sampling, cache, act, across, t0 + t, at, True)
            warp_barrier()
        row += grid_warps(block)


@device
def tiles_across(model, kind):
    """How many tiles have all outputs of a product, for the same rows."""
    return (i64(model.stream[product_number(model, kind, 0), STRIPS]) + (DOTS_STRIPS - 1)) >> 3


@device
def tile_height(block, model, kind, rows):
    """Rows of a tile: 128, or 64 where that would leave blocks without a tile."""
    few = tiles_across(model, kind) * divide(i64(rows) + DOTS_ROWS - 1, i64(DOTS_ROWS))[0] < block.blocks
    return i64(DOTS_ROWS >> 1 if few and rows > DOTS_ROWS >> 1 else DOTS_ROWS)


@device
def tiles_down(block, model, kind, rows):
    """How many tiles have all rows, for the same outputs."""
    height = tile_height(block, model, kind, rows)
    return divide(i64(rows) + height - 1, height)[0]


@device
def place_of(block, model, kind, rows, tile):
    """(number of the outputs' tile, first row, rows) of a tile.

    Tiles of the same outputs follow each other, so that other blocks find the weights in the cache.
    """
    height = tile_height(block, model, kind, rows)
    across, down = divide(i64(tile), tiles_down(block, model, kind, rows))
    t0 = down * height
    return across, t0, min(height, i64(rows) - t0)


@device
def finish_tile(block, plan, rows, kind, layer, model, sampling, cache, act, tile):
    """What is made of a tile's results, which lie in the arena. A warp takes a row at a time."""
    across, t0, here = place_of(block, model, kind, rows, tile)
    t = i64(warp_id())
    while t < here:
        at = SCRATCH + t * DOTS_PITCH
        finish_row(block, plan, rows, kind, layer, model, sampling, cache, act, across, t0 + t, at, False)
        t += warps()


@device
def finish_row(block, plan, rows, kind, layer, model, sampling, cache, act, across, row, at, in_pieces):
    """What is made of a row's results of a tile, which begin at `at` in the arena. One warp."""
    strips = strips_of(model, product_number(model, kind, layer), across)
    if kind == PROJECT:
        put_pairs(block.shared, at, plan, row, layer, across, PAIRS * strips, model, cache, act.q)
    elif kind == GATED:
        put_gated(block.shared, at, rows, row, across, PAIRS * strips, act.gated)
    elif kind == LOGITS and not in_pieces:  # they never are: it keeps `draw` from being compiled twice
        vocab, r0 = i64(model.vocab), across * DOTS_ROWS
        n = min(i64(DOTS_ROWS), vocab - r0)
        copy_row(block.shared, at, act.logits, row * vocab + r0, n)
        if sampling.filtered[plan.sample_slot[row]] == 0:
            draw(plan, row, act.logits, row * vocab, r0, r0 + n)  # each lane looks at those that it has copied
    else:
        add_row(block.shared, at, act.x, row * i64(model.hidden) + across * DOTS_ROWS, FRAGMENT * strips)


@device
def put_pairs(shared, at, plan, row, layer, across, n, model, cache, q):
    """One warp: a row's n pairs of PROJECT's results, rotated, to where they belong."""
    pair, half = i64(lane_id()), opaque(i64(model.head_dim)) >> 1
    while pair < n:
        head, i = divide(across * (PAIRS * DOTS_STRIPS) + pair, half)
        here = at + (pair >> 3) * FRAGMENT + (pair & 7)
        put_pair(plan, row, layer, head, i, shared[here], shared[here + PAIRS], model, cache, q)
        pair += warp_width()


@device
def put_gated(shared, at, rows, row, across, n, gated):
    """One warp: n numbers of a row are silu(gate) * up."""
    f = 4 * i64(lane_id())
    while f < n:
        here = at + (f >> 3) * FRAGMENT + (f & 7)
        a = silu(shared[here]) * shared[here + PAIRS]
        b = silu(shared[here + 1]) * shared[here + PAIRS + 1]
        c = silu(shared[here + 2]) * shared[here + PAIRS + 2]
        d = silu(shared[here + 3]) * shared[here + PAIRS + 3]
        block_put(gated, block_row_at(rows, row, across * (PAIRS * DOTS_STRIPS) + f), a, b, c, d)
        f += 4 * warp_width()


@device
def copy_row(shared, at, out, to, n):
    """One warp: ``out[to:to+n]`` are a row's results."""
    r = i64(lane_id())
    while r < n:
        out[to + r] = shared[at + r]
        r += warp_width()


@device
def add_row(shared, at, x, to, n):
    """One warp: a row's results are added to ``x[to:to+n]``."""
    r = i64(lane_id())
    while r < n:
        x[to + r] += shared[at + r]
        r += warp_width()
