"""A few queries over a few positions of the KV cache, on CUDA: one warp and its tensor cores.

Up to eight queries are rows of a product, keys its columns: a query is two bfloat16, so that little of it is lost,
and the second one is a row as well, so that all 16 are of use. The weights that come of it lie in the lanes as
the second product takes them (FlashAttention-2: Dao, 2023), where values, two positions to a word, are the rows;
weights are two bfloat16 too.
"""

import numpy as np
from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_loops import _four, _keep_rolled, _store_four
from .cuda_tensor import (
    define_binary,
    has_tensor_cores,
    load_piece,
    multiply,
    shared_address,
    split,
)
from .cuda_words import define, define_by
from .lowering import F32, asm
from .numba_cuda import cuda
from .vocabulary import (
    FULL_WARP,
    HEADS,
    HEADS_GAP,
    PART,
    arena_view,
    async_fence,
    exp,
    f32,
    i32,
    i64,
    lane_id,
    u32,
    warp_barrier,
    widen,
)

NOTHING = f32(-np.inf)


_lower_halves, _upper_halves = (define_binary(text) for text in (ptx.LOWER_HALVES, ptx.UPPER_HALVES))


def _one_over_root(x):
    """1 / sqrt(x), to 2**-22 of itself. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_one_over_root)
def _(typing_context, x):
    def codegen(context, builder, signature, args):
        return asm(builder, F32, ptx.ONE_OVER_ROOT, "=f,f", args, effects=False)

    return types.float32(types.float32), codegen


@cuda.jit(device=True)
def _max_of_quad(x):
    x = max(x, cuda.shfl_xor_sync(FULL_WARP, x, 1))
    return max(x, cuda.shfl_xor_sync(FULL_WARP, x, 2))


@cuda.jit(device=True)
def _sum_of_quad(x):
    x += cuda.shfl_xor_sync(FULL_WARP, x, 1)
    return x + cuda.shfl_xor_sync(FULL_WARP, x, 2)


@cuda.jit(device=True)
def _scores(arena, keys, j, heads, d):
    """Of each eight positions four sums: of query g with 2q and 2q + 1, by its high half, and by its low one.

    Of 32 columns, a lane has eight of one query, and of one key in each eight.
    """
    zero = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    s0, s1, s2, s3 = zero, zero, zero, zero
    g, piece, left = i32(lane_id() >> 2), i32(i32(lane_id() & 3) * 8), i32(d)
    at, across = j + i64(i32(min(g, i32(heads - 1)) * i32(d) + piece)), u32(d) * u32(16)
    mine = u32(shared_address(keys, i64(i32(g * i32(d) + piece))))
    a, b, further = _four(arena, at), _four(arena, at + 4), _four_pieces(mine, across)
    while left > 0:
        left = _keep_rolled(left)
        (h0, l0), (h1, l1) = split(a[0], a[1]), split(a[2], a[3])
        (h2, l2), (h3, l3) = split(b[0], b[1]), split(b[2], b[3])
        one, two, (x, y, z, w) = (h0, l0, h1, l1), (h2, l2, h3, l3), further
        step = i32(32 if left > 32 else 0)  # behind the last columns, the last ones once more, in vain
        at, mine = at + i64(step), u32(mine + u32(step + step))
        a, b, further = _four(arena, at), _four(arena, at + 4), _four_pieces(mine, across)
        s0, s1 = multiply(s0, one, x[0], x[1]), multiply(s1, one, y[0], y[1])
        s2, s3 = multiply(s2, one, z[0], z[1]), multiply(s3, one, w[0], w[1])
        s0, s1 = multiply(s0, two, x[2], x[3]), multiply(s1, two, y[2], y[3])
        s2, s3 = multiply(s2, two, z[2], z[3]), multiply(s3, two, w[2], w[3])
        left = i32(left - 32)
    return s0, s1, s2, s3


@cuda.jit(device=True)
def _four_pieces(at, apart):
    x, y = load_piece(at), load_piece(u32(at + apart))
    return x, y, load_piece(u32(at + apart * u32(2))), load_piece(u32(at + apart * u32(3)))


@cuda.jit(device=True)
def _weigh(arena, k, keys, j, heads, d, n):
    """:func:`.vocabulary.heads_weigh` on tensor cores: a lane's weights, two to a word, each as two bfloat16."""
    s0, s1, s2, s3 = _scores(arena, keys, j, heads, d)
    scale, left = _one_over_root(f32(i32(d))), i32(i32(n) - i32(lane_id() & 3) * 2)
    a0, a1 = _seen((s0[0] + s0[2]) * scale, left, 0), _seen((s0[1] + s0[3]) * scale, left, 1)
    b0, b1 = _seen((s1[0] + s1[2]) * scale, left, 8), _seen((s1[1] + s1[3]) * scale, left, 9)
    c0, c1 = _seen((s2[0] + s2[2]) * scale, left, 16), _seen((s2[1] + s2[3]) * scale, left, 17)
    e0, e1 = _seen((s3[0] + s3[2]) * scale, left, 24), _seen((s3[1] + s3[3]) * scale, left, 25)
    highest = _max_of_quad(max(max(max(a0, a1), max(b0, b1)), max(max(c0, c1), max(e0, e1))))
    a0, a1, b0, b1 = exp(a0 - highest), exp(a1 - highest), exp(b0 - highest), exp(b1 - highest)
    c0, c1, e0, e1 = exp(c0 - highest), exp(c1 - highest), exp(e0 - highest), exp(e1 - highest)
    total, head = _sum_of_quad(((a0 + a1) + (b0 + b1)) + ((c0 + c1) + (e0 + e1))), i32(lane_id() >> 2)
    if i32(lane_id() & 3) == 0 and head < heads:
        arena[k + 2 * head] = highest
        arena[k + 2 * head + 1] = total
    (h0, l0), (h1, l1), (h2, l2), (h3, l3) = split(a0, a1), split(b0, b1), split(c0, c1), split(e0, e1)
    return (h0, h1, h2, h3), (l0, l1, l2, l3)


@cuda.jit(device=True)
def _seen(score, left, position):
    return score if left > position else NOTHING


@cuda.jit(device=True)
def _mix(arena, k, values, weights, heads, d, n):
    """:func:`.vocabulary.heads_mix` on tensor cores."""
    if n < PART:
        _forget(arena_view(values, 0, PART * d >> 1, arena), d, n)
    high, low = weights
    left, begin = i32(d), i32(0)
    while left > 0:
        left = _keep_rolled(left)
        _mix_columns(arena, k + 2 * HEADS, values, high, low, heads, d, begin)
        begin, left = i32(begin + 64), i32(left - 64)


@cuda.jit(device=True)
def _forget(values, d, n):
    """Values of positions from n on become 0, as their weights are: anything may lie there."""
    i, end = i64(n * d >> 1) + lane_id(), PART * i64(d) >> 1
    while i < end:
        values[i] = f32(0.0)
        i += 32
    async_fence()
    warp_barrier()


@cuda.jit(device=True)
def _mix_columns(arena, k, values, high, low, heads, d, begin):
    """Of 64 columns from `begin` on: the lane's eight, of two queries."""
    g, left, row = i32(lane_id() >> 2), i32(i32(d) - begin), u32(d) * u32(2)
    column = i32(begin + min(i32(8 * g), i32(left - 8)))  # behind the last column, the last ones once more
    mine = u32(shared_address(values, i64(i32(i32(lane_id() & 3) * 2 * i32(d) + column))))
    zero = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    sums = _mix_sixteen(zero, zero, zero, zero, mine, row, high[0], high[1], low[0], low[1])
    further = u32(mine + row * u32(16))
    s0, s1, s2, s3 = _mix_sixteen(*sums, further, row, high[2], high[3], low[2], low[3])
    head = i32(lane_id() & 3) * 2
    at, apart = k + i64(i32(head * i32(i32(d) + HEADS_GAP) + column)), i64(d) + HEADS_GAP
    if head < heads:
        _store_four(arena, at, (s0[0], s0[2], s1[0], s1[2]))
        _store_four(arena, at + 4, (s2[0], s2[2], s3[0], s3[2]))
    if i32(head + 1) < heads:
        _store_four(arena, at + apart, (s0[1], s0[3], s1[1], s1[3]))
        _store_four(arena, at + apart + 4, (s2[1], s2[3], s3[1], s3[3]))


@cuda.jit(device=True)
def _mix_sixteen(s0, s1, s2, s3, at, row, h0, h1, l0, l1):
    """Those sums and the values of 16 positions; the lane's are at `at`, in the row behind, and eight rows on."""
    x, y = load_piece(at), load_piece(u32(at + row))
    z, w = load_piece(u32(at + row * u32(8))), load_piece(u32(at + row * u32(9)))
    a0 = _lower_halves(x[0], y[0]), _upper_halves(x[0], y[0]), _lower_halves(z[0], w[0]), _upper_halves(z[0], w[0])
    a1 = _lower_halves(x[1], y[1]), _upper_halves(x[1], y[1]), _lower_halves(z[1], w[1]), _upper_halves(z[1], w[1])
    a2 = _lower_halves(x[2], y[2]), _upper_halves(x[2], y[2]), _lower_halves(z[2], w[2]), _upper_halves(z[2], w[2])
    a3 = _lower_halves(x[3], y[3]), _upper_halves(x[3], y[3]), _lower_halves(z[3], w[3]), _upper_halves(z[3], w[3])
    s0, s1 = multiply(multiply(s0, a0, l0, l1), a0, h0, h1), multiply(multiply(s1, a1, l0, l1), a1, h0, h1)
    s2, s3 = multiply(multiply(s2, a2, l0, l1), a2, h0, h1), multiply(multiply(s3, a3, l0, l1), a3, h0, h1)
    return s0, s1, s2, s3


@cuda.jit(device=True)
def _weigh_in_lanes(arena, k, keys, j, heads, d, n):
    """:func:`_weigh` without tensor cores, a lane a query: the weights lie where the sums go."""
    h, scale = i64(lane_id()), _one_over_root(f32(i32(d)))
    if h < heads:
        highest, total, weights = NOTHING, f32(0.0), k + 2 * HEADS + h * (d + HEADS_GAP)
        for p in range(n):
            score = f32(0.0)
            for c in range(d):
                score += arena[j + h * d + c] * widen(keys[p * d + c])
            arena[weights + p] = score * scale
            highest = max(highest, score * scale)
        for p in range(n):
            weight = exp(arena[weights + p] - highest)
            arena[weights + p] = weight
            total += weight
        arena[k + 2 * h] = highest
        arena[k + 2 * h + 1] = total


@cuda.jit(device=True)
def _mix_in_lanes(arena, k, values, heads, d, n):
    """:func:`_mix` likewise, all lanes a query: those of its first columns, where its weights lie, come last."""
    for h in range(heads):
        sums, i = k + 2 * HEADS + h * (d + HEADS_GAP), ((i64(d) - 1) & -32) + lane_id()
        while i >= 0:
            mixed = f32(0.0)
            for p in range(n):
                mixed += arena[sums + p] * widen(values[p * d + i])
            warp_barrier()
            arena[sums + i] = mixed
            i -= 32


@define_by(words.heads_weigh)
def _(arena, k, keys, j, heads, d, n):
    def heads_weigh(arena, k, keys, j, heads, d, n):
        if has_tensor_cores():
            return _weigh(arena, k, keys, j, heads, d, n)
        _weigh_in_lanes(arena, k, keys, j, heads, d, n)
        nothing = u32(0), u32(0), u32(0), u32(0)
        return nothing, nothing

    return heads_weigh


@define_by(words.heads_mix)
def _(arena, k, values, weights, heads, d, n):
    def heads_mix(arena, k, values, weights, heads, d, n):
        if has_tensor_cores():
            _mix(arena, k, values, weights, heads, d, n)
        else:
            warp_barrier()
            _mix_in_lanes(arena, k, values, heads, d, n)

    return heads_mix


@define_by(words.heads_pay)
def _(keys):
    return (lambda keys: False) if keys.dtype == types.float32 else (lambda keys: True)


@define_by(words.mix_of_fours)
def _(weights, w, a, i, step, n):
    def mix_of_fours(weights, w, a, i, step, n):
        s, left = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), i32(n)
        while left > 3:  # four loads in flight
            left = _keep_rolled(left)
            y0, y1, y2, y3 = _four(a, i), _four(a, i + step), _four(a, i + 2 * step), _four(a, i + 3 * step)
            s = _add(_add(s, weights[w], y0), weights[w + 1], y1)
            s = _add(_add(s, weights[w + 2], y2), weights[w + 3], y3)
            w, i, left = w + 4, i + 4 * step, i32(left - 4)
        if left > 0:
            second = i + (step if left > 1 else i64(0))  # behind the last, the last once more, with no weight
            third = second + (step if left > 2 else i64(0))
            y0, y1, y2 = _four(a, i), _four(a, second), _four(a, third)
            s = _add(s, weights[w], y0)
            s = _add(s, weights[w + 1] if left > 1 else f32(0.0), y1)
            s = _add(s, weights[w + 2] if left > 2 else f32(0.0), y2)
        return s

    return mix_of_fours


@cuda.jit(device=True)
def _add(s, weight, y):
    return s[0] + weight * y[0], s[1] + weight * y[1], s[2] + weight * y[2], s[3] + weight * y[3]
