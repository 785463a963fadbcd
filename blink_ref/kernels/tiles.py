"""The linear layers for many rows: tiles of results, which a block makes at once with :func:`block_dots`.

For a few rows the other kernels read each weight once, and are as fast as the memory. For many rows they would
read each weight often, out of a cache, for few products each time. Here a block takes a tile of up to 128 outputs
and 128 rows, so that what it reads is used 128 times, and on a GPU the products are the tensor cores' work.

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
    barrier,
    block_dots,
    block_threads,
    divide,
    f32,
    i32,
    i64,
    lane_id,
    opaque,
    row_put,
    thread_id,
    tiles_pay,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)
from . import flash
from .attention import head_start, put_pair
from .logits import draw
from .mlp import silu
from .packing import ATTENDED, GATED, LOGITS, LOWERED, PROJECT
from .rmsnorm import rmsnorm
from .staging import SCRATCH, staged_at
from .tensors import DOWN, GATE, OUT, UP

FEW = 4
"""Rows up to which the other kernels are the faster ones, on a GPU."""

HALF = DOTS_ROWS >> 1
"""Most outputs in each half of a tile, where two belong together."""

COLUMNS = 32
"""Widths of all matrices are multiples of it, and of the pieces of a tile."""

MOST_PIECES = 8
"""Most pieces of a tile."""


def arena(head_dim: int) -> int:
    """Floats of arena that these kernels need, and attention in tiles."""
    return max(SCRATCH + DOTS_FLOATS, flash.arena(head_dim))


def fits(config: ModelConfig, dtype: np.dtype, shared: int) -> bool:
    """Whether these kernels, and attention in tiles, serve a model, with `shared` floats of arena."""
    widths = config.hidden, config.ffn, config.heads * config.head_dim
    fit = dtype == np.uint16 and all(width % COLUMNS == 0 for width in widths)
    return fit and flash.fits(config) and shared >= arena(config.head_dim)


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
        i = 2 * i64(thread_id())
        while i < width:
            row_put(normed, t * width, width, i, shared[staged_at() + i], shared[staged_at() + i + 1])
            i += 2 * block_threads()
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
        first, other, outs = stored_rows(model, kind, layer, place_of(block, model, kind, rows, tile)[0])
        _, t0, here = place_of(block, model, kind, rows, tile)
        x, width = act.normed, columns_of(model, kind)
        if kind == ATTENDED:
            x = act.attended
        elif kind == LOWERED:
            x = act.gated
        columns = divide(width, pieces)[0]
        barrier()  # the tile before has been read
        block_dots(
            shared,
            SCRATCH,
            model.weights,
            first,
            other,
            outs,
            x,
            t0 * width,
            here,
            width,
            piece * columns,
            columns,
        )
        barrier()
        if pieces_of_tile(block, model, kind, rows) > 1:
            keep_piece(shared, act.pieces, item, here, outs)
        else:
            finish_tile(block, plan, rows, kind, layer, model, sampling, cache, act, i32(opaque(i64(item))))
        item = i32(item + block.blocks)
    if pieces_of_tile(block, model, kind, rows) > 1:
        grid_barrier(block)
        finish_pieces(block, plan, rows, kind, layer, model, sampling, cache, act)


@device
def columns_of(model, kind):
    """The width of a product's stored rows, and of the rows of x."""
    if kind == ATTENDED:
        return opaque(i64(model.heads)) * i64(model.head_dim)
    if kind == LOWERED:
        return opaque(i64(model.ffn))
    return opaque(i64(model.hidden))


@device
def tiles_in_all(block, model, kind, rows):
    """How many tiles a product has."""
    return tiles_across(model, kind) * tiles_down(block, model, kind, rows)


@device
def pieces_of_tile(block, model, kind, rows):
    """Into how many pieces each tile is cut: 1, or as many, up to MOST_PIECES, as there are blocks for at once."""
    pieces, width = i64(1), columns_of(model, kind)
    tiles = tiles_in_all(block, model, kind, rows)
    if kind == LOGITS:
        tiles = i64(block.blocks)
    while pieces < MOST_PIECES and 2 * pieces * tiles <= block.blocks and width & (2 * COLUMNS * pieces - 1) == 0:
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
            first, outs = (tile * pieces * DOTS_ROWS + t) * DOTS_ROWS, stored_rows(model, kind, layer, across)[2]
            while c < outs:
                total = f32(0.0)
                for piece in range(pieces):
                    total += act.pieces[first + piece * DOTS_ROWS * DOTS_ROWS + c]
                block.shared[at + c] = total
                c += warp_width()
            warp_barrier()
            finish_row(block, plan, kind, layer, model, sampling, cache, act, across, t0 + t, at, True)
            warp_barrier()
        row += grid_warps(block)


@device
def tiles_across(model, kind):
    """How many tiles have all outputs of a product, for the same rows."""
    outs, size = i64(model.hidden), i64(DOTS_ROWS)
    if kind == PROJECT:
        parts, heads = head_parts(model)
        return divide(i64(model.heads) + 2 * i64(model.kv_heads) + heads - 1, heads)[0] * parts
    if kind == GATED:
        outs, size = i64(model.ffn), i64(HALF)
    elif kind == LOGITS:
        outs = i64(model.vocab)
    return divide(outs + size - 1, size)[0]


@device
def head_parts(model):
    """How a tile of PROJECT cuts heads: into so many parts each, or none, and so many heads at a time, 1 or 2.

    A part has up to HALF first elements of the pairs that rotate together, and their second ones.
    """
    d = opaque(i64(model.head_dim))
    if d <= HALF:
        return i64(1), i64(2)
    return divide((d >> 1) + HALF - 1, i64(HALF))[0], i64(1)


@device
def tile_height(block, model, kind, rows):
    """Rows of a tile: 128, or 64 where that would leave blocks without a tile."""
    few = tiles_across(model, kind) * divide(i64(rows) + DOTS_ROWS - 1, i64(DOTS_ROWS))[0] < block.blocks
    return i64(HALF if few and rows > HALF else DOTS_ROWS)


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
def stored_rows(model, kind, layer, across):
    """Where a tile's stored rows begin in the weights, where their second half does, and how many there are."""
    width, matrix = i64(model.hidden), model.matrix
    if kind == PROJECT:
        head, i0, n, both = pairs_of(model, across)
        first = head_start(model, layer, head) + i0 * width
        if both == 2:
            return first, head_start(model, layer, head + 1), 4 * n
        return first, first + (i64(model.head_dim) >> 1) * width, 2 * n
    if kind == GATED:
        f0 = across * HALF
        return matrix[layer, GATE] + f0 * width, matrix[layer, UP] + f0 * width, 2 * min(i64(HALF), model.ffn - f0)
    r0, outs, at = across * DOTS_ROWS, width, i64(model.head)
    if kind == LOGITS:
        outs = i64(model.vocab)
    elif kind == ATTENDED:
        at, width = matrix[layer, OUT], i64(model.heads) * i64(model.head_dim)
    else:
        at, width = matrix[layer, DOWN], i64(model.ffn)
    n = min(i64(DOTS_ROWS), outs - r0)
    return at + r0 * width, at + (r0 + (n >> 1)) * width, n


@device
def pairs_of(model, across):
    """Of a tile of PROJECT: (first head, first pair, pairs, heads: 1 or 2)."""
    parts, heads = head_parts(model)
    head, part = divide(across, parts)
    i0, left = part * HALF, i64(model.heads) + 2 * i64(model.kv_heads) - head * heads
    return head * heads, i0, min(i64(HALF), (i64(model.head_dim) >> 1) - i0), min(heads, left)


@device
def finish_tile(block, plan, rows, kind, layer, model, sampling, cache, act, tile):
    """What is made of a tile's results, which lie in the arena. A warp takes a row at a time."""
    across, t0, here = place_of(block, model, kind, rows, tile)
    t = i64(warp_id())
    while t < here:
        finish_row(
            block, plan, kind, layer, model, sampling, cache, act, across, t0 + t, SCRATCH + t * DOTS_PITCH, False
        )
        t += warps()


@device
def finish_row(block, plan, kind, layer, model, sampling, cache, act, across, row, at, in_pieces):
    """What is made of a row's results of a tile, which begin at `at` in the arena. One warp."""
    if kind == PROJECT:
        put_pairs(block.shared, at, plan, row, layer, across, model, cache, act.q)
    elif kind == GATED:
        ffn, f0 = i64(model.ffn), across * HALF
        put_gated(block.shared, at, act.gated, row * ffn, ffn, f0, min(i64(HALF), ffn - f0))
    elif kind == LOGITS and not in_pieces:  # they never are: it keeps `draw` from being compiled twice
        vocab, r0 = i64(model.vocab), across * DOTS_ROWS
        n = min(i64(DOTS_ROWS), vocab - r0)
        copy_row(block.shared, at, act.logits, row * vocab + r0, n)
        if sampling.filtered[plan.sample_slot[row]] == 0:
            draw(plan, row, act.logits, row * vocab, r0, r0 + n)  # each lane looks at those that it has copied
    else:
        outs, r0 = i64(model.hidden), across * DOTS_ROWS
        add_row(block.shared, at, act.x, row * outs + r0, min(i64(DOTS_ROWS), outs - r0))


@device
def put_pairs(shared, at, plan, row, layer, across, model, cache, q):
    """One warp: a row's results of PROJECT, rotated, to where they belong."""
    head, i0, n, both = pairs_of(model, across)
    pair = i64(lane_id())
    while pair < n * both:
        second = i64(pair >= n)
        i = pair - n * second
        here = at + 2 * n * second + i
        put_pair(plan, row, layer, head + second, i0 + i, shared[here], shared[here + n], model, cache, q)
        pair += warp_width()


@device
def put_gated(shared, at, gated, to, ffn, f0, n):
    """One warp: numbers f0 to f0 + n - 1 of the row at ``gated[to]`` are silu(gate) * up."""
    f = 2 * i64(lane_id())
    while f < n:
        even, odd = silu(shared[at + f]) * shared[at + n + f], silu(shared[at + f + 1]) * shared[at + n + f + 1]
        row_put(gated, to, ffn, f0 + f, even, odd)
        f += 2 * warp_width()


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
