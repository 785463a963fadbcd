"""The linear layers for many rows: tiles of results, which a block makes at once with :func:`block_dots`.

For a few rows the other kernels read each weight once, and are as fast as the memory. For many rows they would
read each weight often, out of a cache, for few products each time. Here a block takes a tile of up to 8 strips of
packed weights (:mod:`.packing`), 128 outputs, and 128 rows, so that what it reads is used 128 times, and on a GPU
the products are the tensor cores' work. Activations lie as :func:`block_put` leaves them.

Weights do not depend on results: those of a block's first tile are asked for before the grid barrier in front of
a product (:func:`ask`), and what its next tile takes before it looks at what one has given. And as in
:mod:`.stream`, a row is normalised where it is used: its columns are multiplied with the gains where they are
made, with the sums of their squares beside them, and the result with the row's scale.

There are five such products in a model. What becomes of their results is the same as in the other files, and a
test holds both equal, but for the order of additions: float32's rounding.
"""

import math

import numpy as np

from ..model.config import ModelConfig
from ..simt import device
from ..simt.vocabulary import (
    DOTS_FLOATS,
    DOTS_PITCH,
    DOTS_RESULTS,
    DOTS_ROWS,
    DOTS_STRIPS,
    FRAGMENT,
    arena_view,
    atomic_add,
    barrier,
    block_dots,
    block_put,
    block_threads,
    divide,
    dots_ask,
    dots_forget,
    f32,
    i32,
    i64,
    lane_id,
    lane_sum,
    load_acquire,
    opaque,
    relax,
    store_relaxed,
    sum_of_fours,
    thread_id,
    tiles_pay,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)
from . import flash, packing
from .attention import store_pair
from .deal import ITEMS, PIECES, noted, place_of, strips_of, tile_of
from .logits import draw
from .mlp import silu
from .packing import ATTENDED, GATED, LOGITS, LOWERED, PROJECT, block_row_at
from .rmsnorm import rmsnorm
from .rope import rotate
from .staging import SCRATCH, staged_at

FEW = 4
"""Rows up to which the other kernels are the faster ones, on a GPU."""

PAIRS = FRAGMENT >> 1
"""Outputs of a strip's first half, to each of which belongs one of the second."""

RESULTS = SCRATCH + DOTS_RESULTS
"""Where a tile's results begin in the arena."""

SCALES = SCRATCH + DOTS_FLOATS
"""Where the scale of each of a tile's rows lies, one over its root mean square."""

PLACES = SCALES + DOTS_ROWS
"""Where it is noted of each of them: its position, where that lies in its page, and the page."""


def arena(head_dim: int, halves: bool) -> int:
    """Floats of arena that these kernels need, and attention in tiles; `halves`: see there."""
    return max(PLACES + 3 * DOTS_ROWS, flash.arena(head_dim, halves))


def fits(config: ModelConfig, dtype: np.dtype, shared: int, halves: bool) -> bool:
    """Whether these kernels, and attention in tiles, serve a model, with `shared` floats of arena."""
    return packing.fits(config, dtype) and flash.fits(config) and shared >= arena(config.head_dim, halves)


@device
def wanted(model, rows):
    """Whether these kernels are to be used for so many rows."""
    return tiles_pay(model.weights) and model.tiles > 0 and rows > model.tiles


@device
def parts_of(model):
    """How many sums of squares a row has, of 128 columns each: a multiple of 4, the last ones 0."""
    return ((opaque(i64(model.hidden)) + (4 * DOTS_ROWS - 1)) >> 9) << 2


@device
def begin_rows(block, rows, layer, x, model, act):
    """The rows of x are the residual stream before a layer. Blocks share out rows; no barrier."""
    width, t = opaque(i64(model.hidden)), i64(block.id)
    while t < rows:
        across = i64(warp_id())
        while across < parts_of(model):
            n, at = min(i64(DOTS_ROWS), width - across * DOTS_ROWS), across * DOTS_ROWS + t * width
            put_columns(rows, t, across, n, 2 * i64(layer), x, at, block.shared, at, False, model, act)
            across += warps()
        t += block.blocks


@device
def normalise(block, plan, rows, model, act):
    """``normed[t]`` = RMSNorm of the row of sample t, for the logits. Blocks share out the rows.

    All blocks call it. It begins and ends without a grid barrier.
    """
    width, t, shared = opaque(i64(model.hidden)), i32(block.id), block.shared
    while t < rows:
        row = i64(plan.sample_row[t])
        rmsnorm(block, act.x, row * width, model.norm, 2 * i64(model.layers) * width, width, model.eps, 0)
        barrier()
        i, at = 4 * i64(thread_id()), i64(0)
        while i < width:
            at = staged_at() + i
            a, b, c, d = shared[at], shared[at + 1], shared[at + 2], shared[at + 3]
            block_put(act.normed, block_row_at(rows, t, i), a, b, c, d)
            i += 4 * block_threads()
        t = i32(t + block.blocks)


@device
def ask(block, rows, kind, layer, item, begins, model, act):
    """Ask for what an item multiplies, if there is one; only for weights, if a product `begins` with it."""
    if item < noted(block, kind, ITEMS, model):
        x = act.normed
        if kind == ATTENDED:
            x = act.attended
        elif kind == LOWERED:
            x = act.gated
        dots_ask(block.shared, SCRATCH, model.packed, x, tile_of(block, rows, kind, layer, item, model), begins)


@device
def forget(block, rows, kind, layer, model):
    """A product is not computed for which :func:`ask` has asked. A barrier is to follow."""
    item = i32(block.id)
    if item < noted(block, kind, ITEMS, model):
        dots_forget(block.shared, SCRATCH, model.packed, tile_of(block, rows, kind, layer, item, model))


@device
def product(block, plan, rows, kind, layer, model, sampling, cache, act):
    """One of the five products for all rows, and what is made of it. Blocks share out tiles, or pieces of them.

    All blocks call it, behind :func:`ask` and a grid barrier. It begins and ends without a grid barrier. A piece
    of a tile has the products of some of the columns; where there are several, they wait in memory until all are
    there, and are added up in order.
    """
    item, last = i32(block.id), i64(-1)
    if thread_id() == 0:
        store_relaxed(act.met, met_at(block, kind + 1, block.id), i32(0))  # of the product before
    while item < noted(block, kind, ITEMS, model):
        barrier()  # what the tile before has given has been read
        t0 = place_of(block, rows, kind, item, model)[1]
        if t0 != last:
            note_rows(block, plan, rows, kind, t0, model, cache, act)
        last, x = t0, act.normed
        if kind == ATTENDED:
            x = act.attended
        elif kind == LOWERED:
            x = act.gated
        block_dots(block.shared, SCRATCH, model.packed, x, tile_of(block, rows, kind, layer, item, model))
        barrier()
        if noted(block, kind, PIECES, model) > 1:
            finish_piece(block, plan, rows, kind, layer, model, sampling, cache, act, i32(opaque(i64(item))))
        else:
            ask(block, rows, kind, layer, i32(item + block.blocks), False, model, act)
            finish_tile(block, plan, rows, kind, layer, model, sampling, cache, act, i32(opaque(i64(item))))
        item = i32(item + block.blocks)


@device
def note_rows(block, plan, rows, kind, t0, model, cache, act):
    """Note what the results of a tile's rows take to know, those from `t0` on. A barrier is to follow."""
    t, width = i64(thread_id()), opaque(i64(model.hidden))
    places = arena_view(block.shared, PLACES, 3 * DOTS_ROWS, model.eos)
    while t < min(i64(DOTS_ROWS), rows - t0):
        if kind in (PROJECT, GATED):
            parts = parts_of(model)
            a, b, c, d = sum_of_fours(act.squares, (t0 + t) * parts, i64(4), parts >> 2)
            block.shared[SCALES + t] = f32(1.0) / f32(math.sqrt((a + b + (c + d)) / f32(width) + model.eps))
        if kind == PROJECT:
            position = i64(plan.position[t0 + t])
            n_page, inside = divide(position, i64(cache.page_size))
            places[3 * t] = i32(position)
            places[3 * t + 1] = i32(inside)
            places[3 * t + 2] = cache.table[plan.slot[t0 + t], n_page]
        t += block_threads()


@device
def finish_piece(block, plan, rows, kind, layer, model, sampling, cache, act, item):
    """What is made of a piece of a tile, together with those who have the others: each finishes some rows.

    The results of a piece go out of the arena, a warp a row, and come back with those of the other pieces.
    """
    across, t0, here, piece = place_of(block, rows, kind, item, model)
    pieces, outs = i64(noted(block, kind, PIECES, model)), FRAGMENT * strips_of(block, kind, across, model)
    first_item, t = i64(item) - piece, i64(warp_id())
    while t < here:
        to = (i64(item) * DOTS_ROWS + t) * DOTS_ROWS
        copy_row(block.shared, RESULTS + t * DOTS_PITCH, act.pieces, to, outs)
        t += warps()
    meet(act.met, met_at(block, kind, first_item), pieces)
    t = i64(warp_id()) * pieces + piece
    while t < here:
        at, c = RESULTS + t * DOTS_PITCH, 4 * i64(lane_id())
        first = (first_item * DOTS_ROWS + t) * DOTS_ROWS
        while c < outs:
            a, b, d, e = sum_of_fours(act.pieces, first + c, i64(DOTS_ROWS * DOTS_ROWS), pieces)
            block.shared[at + c] = a
            block.shared[at + c + 1] = b
            block.shared[at + c + 2] = d
            block.shared[at + c + 3] = e
            c += 4 * warp_width()
        warp_barrier()
        finish_row(block, plan, rows, kind, layer, model, sampling, cache, act, across, t0, t, True)
        t += warps() * pieces


@device
def met_at(block, kind, item):
    """Where it is counted who has come to :func:`meet`, for a tile with that first item.

    Every other product has the same places: a product clears those of the one before, for the one behind. The
    logits have no pieces.
    """
    return i64(kind & 1) * block.blocks + i64(item)


@device
def meet(met, at, pieces):
    """Wait for the blocks that have the other pieces of a tile: what each wrote before, all see after."""
    barrier()
    if thread_id() == 0:
        atomic_add(met, at, i32(1))
        spins = i64(0)
        while load_acquire(met, at) < pieces:
            relax(spins)
            spins += 1
    barrier()


@device
def finish_tile(block, plan, rows, kind, layer, model, sampling, cache, act, item):
    """What is made of a tile's results, which lie in the arena. A warp takes a row at a time."""
    across, t0, here, _ = place_of(block, rows, kind, item, model)
    t = i64(warp_id())
    while t < here:
        finish_row(block, plan, rows, kind, layer, model, sampling, cache, act, across, t0, t, False)
        t += warps()


@device
def finish_row(block, plan, rows, kind, layer, model, sampling, cache, act, across, t0, t, in_pieces):
    """What is made of the results of a tile's row t, which lie in the arena. One warp."""
    strips, row = strips_of(block, kind, across, model), t0 + t
    if kind == PROJECT:
        put_pairs(block.shared, t, row, layer, across, PAIRS * strips, model, cache, act.q)
    elif kind == GATED:
        put_gated(block.shared, t, rows, row, across, PAIRS * strips, act.gated)
    elif kind == LOGITS and not in_pieces:  # they never are: it keeps `draw` from being compiled twice
        vocab, r0 = i64(model.vocab), across * DOTS_ROWS
        n = min(i64(DOTS_ROWS), vocab - r0)
        copy_row(block.shared, RESULTS + t * DOTS_PITCH, act.logits, row * vocab + r0, n)
        if sampling.filtered[plan.sample_slot[row]] == 0:
            draw(plan, row, act.logits, row * vocab, r0, r0 + n)  # each lane looks at those that it has copied
    else:
        norm, at = 2 * i64(layer) + 1 + i64(kind == LOWERED), across * DOTS_ROWS + row * opaque(i64(model.hidden))
        result = RESULTS + t * DOTS_PITCH
        put_columns(rows, row, across, FRAGMENT * strips, norm, act.x, at, block.shared, result, True, model, act)


@device
def put_pairs(shared, t, row, layer, across, n, model, cache, q):
    """One warp: n pairs of PROJECT's results of a tile's row t, rotated, to where they belong."""
    pair, half, scale = i64(lane_id()), opaque(i64(model.head_dim)) >> 1, shared[SCALES + t]
    places = arena_view(shared, PLACES, 3 * DOTS_ROWS, model.eos)
    position, inside, page = i64(places[3 * t]), i64(places[3 * t + 1]), i64(places[3 * t + 2])
    while pair < n:
        head, i = divide(across * (PAIRS * DOTS_STRIPS) + pair, half)
        here = RESULTS + t * DOTS_PITCH + (pair >> 3) * FRAGMENT + (pair & 7)
        a, b = shared[here] * scale, shared[here + PAIRS] * scale
        if head < i64(model.heads) + model.kv_heads:
            a, b = rotate(a, b, model.rope[position, i], model.rope[position, half + i])
        store_pair(page, inside, row, layer, head, i, a, b, model, cache, q)
        pair += warp_width()


@device
def put_gated(shared, t, rows, row, across, n, gated):
    """One warp: n numbers of a tile's row t are silu(gate) * up."""
    f, scale = 4 * i64(lane_id()), shared[SCALES + t]
    while f < n:
        here = RESULTS + t * DOTS_PITCH + (f >> 3) * FRAGMENT + (f & 7)
        a = gated_at(shared, here, scale)
        b = gated_at(shared, here + 1, scale)
        c = gated_at(shared, here + 2, scale)
        d = gated_at(shared, here + 3, scale)
        block_put(gated, block_row_at(rows, row, across * (PAIRS * DOTS_STRIPS) + f), a, b, c, d)
        f += 4 * warp_width()


@device
def gated_at(shared, here, scale):
    """silu(gate) * up, of results that lie PAIRS apart."""
    return silu(shared[here] * scale) * (shared[here + PAIRS] * scale)


@device
def copy_row(shared, at, out, to, n):
    """One warp: ``out[to:to+n]`` are a row's results."""
    r = i64(lane_id())
    while r < n:
        out[to + r] = shared[at + r]
        r += warp_width()


@device
def put_columns(rows, row, across, n, norm, x, at, results, result, adds, model, act):
    """One warp: n columns of the residual stream, those of tile `across`, and what the next product takes of them.

    They are ``x[at:at+n]``; a product `adds` its results to them.
    """
    width, i, total = opaque(i64(model.hidden)), 4 * i64(lane_id()), f32(0.0)
    column = across * DOTS_ROWS
    while i < n:
        a, b, c, d = x[at + i], x[at + i + 1], x[at + i + 2], x[at + i + 3]
        gain = norm * width + column + i
        g0, g1, g2, g3 = model.norm[gain], model.norm[gain + 1], model.norm[gain + 2], model.norm[gain + 3]
        if adds:
            here = result + i
            a, b, c, d = a + results[here], b + results[here + 1], c + results[here + 2], d + results[here + 3]
        to = row * width + column + i
        act.x[to] = a
        act.x[to + 1] = b
        act.x[to + 2] = c
        act.x[to + 3] = d
        total += a * a + b * b + (c * c + d * d)
        block_put(act.normed, block_row_at(rows, row, column + i), a * g0, b * g1, c * g2, d * g3)
        i += 4 * warp_width()
    total = lane_sum(total)
    if lane_id() == 0:
        act.squares[row * parts_of(model) + across] = total
