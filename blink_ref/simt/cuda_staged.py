"""Tiles that wait in shared memory and are multiplied there, on CUDA: the words of attention in tiles.

In a row of n columns lie first its n high halves, then its n low ones, as bfloat16: as many bytes as float32
takes. Rows are 16 bytes further apart than that, so that the eight rows that a matrix load reads at once lie in
different banks. Three products of halves make one of float32: high * high + high * low + low * high. A warp makes
parts of 32 x 32 results, in eight accumulators of 16 x 8; where there are fewer parts than warps, the rest wait.
"""

import numpy as np
from numba import types

from . import vocabulary as words
from .cuda_loops import _four, _keep_rolled, eight_halves
from .cuda_tensor import (
    has_tensor_cores,
    load_matrices,
    load_transposed,
    multiply,
    shared_address,
    split,
    store_piece,
)
from .cuda_words import define_by
from .numba_cuda import cuda
from .vocabulary import (
    TILE_GAP,
    block_threads,
    divide,
    exp,
    f32,
    f32_of_bits,
    i32,
    i64,
    lane_id,
    lane_max,
    lane_sum,
    thread_id,
    u32,
    warp_barrier,
    warp_id,
    warps,
    widen,
)

NOTHING = f32(-np.inf)


@cuda.jit(device=True)
def _row_bytes(n):
    return u32(4 * (n + TILE_GAP))


@cuda.jit(device=True)
def _put_eight(at, lower, x, j):
    """Eight numbers as two pieces, high and low halves, the first of them at a shared address. One lane."""
    low, high = _four(x, j), _four(x, j + 4)
    a, b = split(low[0], low[1]), split(low[2], low[3])
    c, d = split(high[0], high[1]), split(high[2], high[3])
    store_piece(at, a[0], b[0], c[0], d[0])
    store_piece(u32(at + lower), a[1], b[1], c[1], d[1])


@cuda.jit(device=True)
def _put_eight_halves(at, lower, x, j):
    """The same of eight bfloat16, of whose values nothing is lower."""
    word, zero = eight_halves(x, j), u32(0)
    store_piece(at, word[0], word[1], word[2], word[3])
    store_piece(u32(at + lower), zero, zero, zero, zero)


@define_by(words.tile_put)
def _(arena, k, t, n, i, x, j):
    put_eight = _put_eight_halves if x.dtype == types.uint16 else _put_eight

    def tile_put(arena, k, t, n, i, x, j):
        if has_tensor_cores():
            at, lower = u32(shared_address(arena, k + t * (n + TILE_GAP)) + u32(2 * i)), u32(2 * n)
            put_eight(at, lower, x, j)
            put_eight(u32(at + u32(16)), lower, x, j + 8)
        else:
            at = k + t * (n + TILE_GAP) + i
            for m in range(16):
                arena[at + m] = widen(x[j + m])

    return tile_put


@cuda.jit(device=True)
def _weighed(arena, at, c, n, seen, scale):
    """Scores c and c + 1, scaled, or minus infinity."""
    a, b = NOTHING, NOTHING
    if c < n:
        if c < seen:
            a = arena[at + c] * scale
        if c + 1 < seen:
            b = arena[at + c + 1] * scale
    return a, b


@cuda.jit(device=True)
def _put_weights(arena, at, c, n, a, b):
    if c < n:
        if has_tensor_cores():
            high, low = split(a, b)
            arena[at + (c >> 1)] = f32_of_bits(high)
            arena[at + ((n + c) >> 1)] = f32_of_bits(low)
        else:
            arena[at + c] = a
            arena[at + c + 1] = b


@define_by(words.row_weigh)
def _(arena, at, n, seen, scale, maximum):
    def row_weigh(arena, at, n, seen, scale, maximum):
        c = 2 * lane_id()
        a0, a1 = _weighed(arena, at, c, n, seen, scale)
        b0, b1 = _weighed(arena, at, c + 64, n, seen, scale)
        highest = max(maximum, lane_max(max(max(a0, a1), max(b0, b1))))
        a0, a1, b0, b1 = exp(a0 - highest), exp(a1 - highest), exp(b0 - highest), exp(b1 - highest)
        warp_barrier()  # all lanes have read what the halves are written over
        _put_weights(arena, at, c, n, a0, a1)
        _put_weights(arena, at, c + 64, n, b0, b1)
        return highest, lane_sum((a0 + a1) + (b0 + b1))

    return row_weigh


@cuda.jit(device=True)
def _multiply_halves(c, a, a_low, b, b2, b_low, b2_low):
    return multiply(multiply(multiply(c, a_low, b, b2), a, b_low, b2_low), a, b, b2)


@cuda.jit(device=True)
def _multiply_sixteen(sums, a, a_low, b, b_low):
    """The sums of 32 rows and 16 columns, with 16 products more in each."""
    c0, c1, c2, c3 = sums
    c0 = _multiply_halves(c0, a[0], a_low[0], b[0], b[1], b_low[0], b_low[1])
    c1 = _multiply_halves(c1, a[1], a_low[1], b[0], b[1], b_low[0], b_low[1])
    c2 = _multiply_halves(c2, a[0], a_low[0], b[2], b[3], b_low[2], b_low[3])
    c3 = _multiply_halves(c3, a[1], a_low[1], b[2], b[3], b_low[2], b_low[3])
    return c0, c1, c2, c3


@cuda.jit(device=True)
def _store_part(arena, k, pitch, left, right, added):
    """One warp: the sums of a part of 32 x 32, to ``arena[k]`` and the rows that follow, or added there."""
    k += (lane_id() >> 2) * pitch + 2 * (lane_id() & 3)
    for m in range(2):
        _store_sums(arena, k + 16 * m * pitch, pitch, left[m], added)
        _store_sums(arena, k + 16 * m * pitch + 8, pitch, left[2 + m], added)
        _store_sums(arena, k + 16 * m * pitch + 16, pitch, right[m], added)
        _store_sums(arena, k + 16 * m * pitch + 24, pitch, right[2 + m], added)


@cuda.jit(device=True)
def _store_sums(arena, at, pitch, c, added):
    """One lane: its four of 16 x 8 sums."""
    below = at + 8 * pitch
    if added:
        c = (c[0] + arena[at], c[1] + arena[at + 1], c[2] + arena[below], c[3] + arena[below + 1])
    arena[at] = c[0]
    arena[at + 1] = c[1]
    arena[below] = c[2]
    arena[below + 1] = c[3]


@cuda.jit(device=True)
def _zeros():
    zero = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    return zero, zero, zero, zero


@cuda.jit(device=True)
def _products(arena, k, pitch, at, row, lower, to, further, to_lower, step, steps, transposed, added):
    """One warp: a part of 32 x 32 results at k, of `steps` times sixteen products each.

    The lane's rows begin at the shared addresses `at`, and sixteen rows further, and at `to`, where `further`
    leads to sixteen columns more and `step` to the next sixteen products.
    """
    c, d = _zeros(), _zeros()
    while steps > 0:
        _keep_rolled()
        high = load_matrices(at), load_matrices(u32(at + u32(16) * row))
        low = load_matrices(u32(at + lower)), load_matrices(u32(at + lower + u32(16) * row))
        if transposed:
            c = _multiply_sixteen(c, high, low, load_transposed(to), load_transposed(u32(to + to_lower)))
            to2 = u32(to + further)
            d = _multiply_sixteen(d, high, low, load_transposed(to2), load_transposed(u32(to2 + to_lower)))
        else:
            c = _multiply_sixteen(c, high, low, load_matrices(to), load_matrices(u32(to + to_lower)))
            to2 = u32(to + further)
            d = _multiply_sixteen(d, high, low, load_matrices(to2), load_matrices(u32(to2 + to_lower)))
        at, to = u32(at + u32(32)), u32(to + step)
        steps = i32(steps - 1)
    _store_part(arena, k, pitch, c, d, added)


@cuda.jit(device=True)
def _dots(arena, k, a, rows, b, across, n):
    wide = i32(across >> 5)
    part, parts = i32(warp_id()), i32(wide * ((rows + 31) >> 5))
    pitch, lower, lane = _row_bytes(n), u32(2 * n), u32(lane_id())
    while part < parts:
        down, right = divide(i64(part), i64(wide))
        # the lane's rows and pieces of 16 bytes in the matrices that a load reads: of a, rows 0 to 15 with their
        # first piece, then with their second; of b, rows 0 to 7 with either piece, then rows 8 to 15
        row, piece = u32(u32(32 * down) + (lane & u32(15))), lane >> u32(4)
        at = u32(shared_address(arena, a) + row * pitch + (piece << u32(4)))
        row, piece = u32(u32(32 * right) + (lane & u32(7)) + ((lane >> u32(1)) & u32(8))), lane >> u32(3) & u32(1)
        to = u32(shared_address(arena, b) + row * pitch + (piece << u32(4)))
        apart = across + TILE_GAP
        here, further = k + 32 * down * apart + 32 * right, u32(u32(16) * pitch)
        _products(arena, here, apart, at, pitch, lower, to, further, lower, u32(32), i32(n >> 4), False, False)
        part = i32(part + warps())


@cuda.jit(device=True)
def _mix(arena, k, p, rows, across, b, n):
    wide = i32(n >> 5)
    part, parts = i32(warp_id()), i32(wide * ((rows + 31) >> 5))
    p_pitch, pitch, lane = _row_bytes(across), _row_bytes(n), u32(lane_id())
    while part < parts:
        down, right = divide(i64(part), i64(wide))
        row, piece = lane & u32(15), lane >> u32(4)
        at = u32(shared_address(arena, p) + u32(u32(32 * down) + row) * p_pitch + (piece << u32(4)))
        # rows 0 to 15 of b, with the first piece of 32 columns, then with the second
        to = u32(shared_address(arena, b) + row * pitch + u32(u32(64 * right) + (piece << u32(4))))
        apart = n + TILE_GAP
        here, step = k + 32 * down * apart + 32 * right, u32(u32(16) * pitch)
        lower, to_lower, steps = u32(2 * across), u32(2 * n), i32(across >> 4)
        _products(arena, here, apart, at, p_pitch, lower, to, u32(32), to_lower, step, steps, True, True)
        part = i32(part + warps())


@cuda.jit(device=True)
def _dots_one_by_one(arena, k, a, rows, b, across, n):
    e = thread_id()
    while e < rows * across:
        t, c = divide(i64(e), i64(across))
        total = f32(0.0)
        for i in range(n):
            total += arena[a + t * (n + TILE_GAP) + i] * arena[b + c * (n + TILE_GAP) + i]
        arena[k + t * (across + TILE_GAP) + c] = total
        e += block_threads()


@cuda.jit(device=True)
def _mix_one_by_one(arena, k, p, rows, across, b, n):
    e = thread_id()
    while e < rows * n:
        t, i = divide(i64(e), i64(n))
        total = arena[k + t * (n + TILE_GAP) + i]
        for c in range(across):
            total += arena[p + t * (across + TILE_GAP) + c] * arena[b + c * (n + TILE_GAP) + i]
        arena[k + t * (n + TILE_GAP) + i] = total
        e += block_threads()


@define_by(words.tile_dots)
def _(arena, k, a, rows, b, across, n):
    def tile_dots(arena, k, a, rows, b, across, n):
        if has_tensor_cores():
            _dots(arena, k, a, rows, b, across, n)
        else:
            _dots_one_by_one(arena, k, a, rows, b, across, n)

    return tile_dots


@define_by(words.tile_mix)
def _(arena, k, p, rows, across, b, n):
    def tile_mix(arena, k, p, rows, across, b, n):
        if has_tensor_cores():
            _mix(arena, k, p, rows, across, b, n)
        else:
            _mix_one_by_one(arena, k, p, rows, across, b, n)

    return tile_mix
