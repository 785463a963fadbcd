"""A few queries over a few positions of the KV cache, on CUDA: one warp and its tensor cores.

A part's keys lie side by side in a page, and so do its values: each is one bulk copy to a place of the warp in
shared memory, of which an mbarrier tells. (Asynchronous copies of 16 bytes by each lane take 1.5 times as long as
the memory does, even if nothing else is done.) Up to eight queries are rows of a product, keys its columns: a
query is two bfloat16, so that little of it is lost, and the second one is a row as well, so that all 16 are of
use. The weights that come of it lie in the lanes just as the second product takes them (FlashAttention-2: Dao,
2023), where values, two positions to a word, are the rows; weights are two bfloat16 too.
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
    store_piece,
)
from .cuda_words import define, define_by
from .lowering import F32, asm
from .numba_cuda import cuda
from .vocabulary import (
    FULL_WARP,
    HEADS,
    PART,
    arena_view,
    async_fence,
    copy_async,
    exp,
    f32,
    i32,
    i64,
    lane_id,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mbarriers,
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


_column = cuda.jit(device=True)(words.heads_column)


@cuda.jit(device=True)
def _copy(arena, b, which, to, stored, at, d, n):
    """A warp's n positions of keys (0) or values (1) are on their way. Its first lane does it."""
    if lane_id() == 0:
        bars, there = mbarriers(arena, b, 2), arena_view(arena, to, PART * d, stored)
        mbarrier_expect_bytes(bars, which, 2 * n * d)
        copy_async(there, i64(0), stored, at, n * d, bars, which)


@cuda.jit(device=True)
def _put_queries(arena, k, x, j, heads, d, part, parts):
    """:func:`.vocabulary.heads_queries`: of 32 columns, a lane has eight of one query.

    They become eight words, the fragments of two products as the lane has them: four, and four for the other one.
    """
    g, lane = min(i32(lane_id() >> 2), i32(heads - 1)), u32(lane_id()) * u32(16)
    at = j + i64(i32(g * i32(d) + i32(lane_id() & 3) * 8))
    while i32(part * 32) < d:
        a, b = _four(x, at + 32 * part), _four(x, at + 32 * part + 4)
        (h0, l0), (h1, l1) = split(a[0], a[1]), split(a[2], a[3])
        (h2, l2), (h3, l3) = split(b[0], b[1]), split(b[2], b[3])
        to = u32(shared_address(arena, k) + u32(part) * u32(1024) + lane)
        store_piece(to, h0, l0, h1, l1)
        store_piece(u32(to + u32(512)), h2, l2, h3, l3)
        part = i32(part + parts)


@cuda.jit(device=True)
def _copy_queries(arena, k, x, j, heads, d, part, parts):
    """The same, as they are."""
    while 32 * part < d:
        for h in range(heads):
            at = h * d + 32 * part + lane_id()
            arena[k + at] = x[j + at]
        part += parts


@cuda.jit(device=True)
def _scores(keys, queries, d):
    """A lane's scores of query g: positions 2q, 2q + 1, 2q + 8 and 2q + 9."""
    near, far = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    left, half = i32(d), u32(d) * u32(16)
    mine = u32(keys + u32(lane_id() >> 2) * u32(u32(d) * u32(2)) + u32(lane_id() & 3) * u32(16))
    while left > 0:
        left = _keep_rolled(left)
        a, b = load_piece(queries), load_piece(u32(queries + u32(512)))
        k, m = load_piece(mine), load_piece(u32(mine + half))
        near, far = multiply(near, a, k[0], k[1]), multiply(far, a, m[0], m[1])
        near, far = multiply(near, b, k[2], k[3]), multiply(far, b, m[2], m[3])
        mine, queries, left = u32(mine + u32(64)), u32(queries + u32(1024)), i32(left - 32)
    return near[0] + near[2], near[1] + near[3], far[0] + far[2], far[1] + far[3]


@cuda.jit(device=True)
def _sums(values, h0, h1, l0, l1, out, k, heads, d, begin):
    """Of 64 columns from `begin` on: the lane's eight, of two queries, from values and halves of weights."""
    g, left, row = i32(lane_id() >> 2), i32(i32(d) - begin), u32(d) * u32(2)
    column = min(i32(8 * g), i32(left - 8))  # behind the last column, the last ones once more
    mine = u32(values + u32(lane_id() & 3) * u32(row * u32(2)) + u32(i32(begin + column)) * u32(2))
    x, y = load_piece(mine), load_piece(u32(mine + row))
    z, w = load_piece(u32(mine + row * u32(8))), load_piece(u32(mine + row * u32(9)))
    zero = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    a0 = _lower_halves(x[0], y[0]), _upper_halves(x[0], y[0]), _lower_halves(z[0], w[0]), _upper_halves(z[0], w[0])
    a1 = _lower_halves(x[1], y[1]), _upper_halves(x[1], y[1]), _lower_halves(z[1], w[1]), _upper_halves(z[1], w[1])
    a2 = _lower_halves(x[2], y[2]), _upper_halves(x[2], y[2]), _lower_halves(z[2], w[2]), _upper_halves(z[2], w[2])
    a3 = _lower_halves(x[3], y[3]), _upper_halves(x[3], y[3]), _lower_halves(z[3], w[3]), _upper_halves(z[3], w[3])
    s0, s1 = multiply(multiply(zero, a0, l0, l1), a0, h0, h1), multiply(multiply(zero, a1, l0, l1), a1, h0, h1)
    s2, s3 = multiply(multiply(zero, a2, l0, l1), a2, h0, h1), multiply(multiply(zero, a3, l0, l1), a3, h0, h1)
    warp_barrier()  # all lanes have read the values in whose place the sums may go
    head = i32(lane_id() & 3) * 2
    at, apart = k + i64(_column(i32(d), head, i32(begin + column))), i64(d)
    if head < heads:
        _store_four(out, at, (s0[0], s0[2], s1[0], s1[2]))
        _store_four(out, at + 4, (s2[0], s2[2], s3[0], s3[2]))
    if i32(head + 1) < heads:
        _store_four(out, at + apart, (s0[1], s0[3], s1[1], s1[3]))
        _store_four(out, at + apart + 4, (s2[1], s2[3], s3[1], s3[3]))


@cuda.jit(device=True)
def _forget(arena, k, d, n):
    """The places of positions from n on are 0, where their weights are, but anything may lie."""
    i, end = k + i64(n * d >> 1) + lane_id(), k + (PART * i64(d) >> 1)
    while i < end:
        arena[i] = f32(0.0)
        i += 32
    async_fence()
    warp_barrier()


@cuda.jit(device=True)
def _begin(arena, b):
    """:func:`.vocabulary.heads_begin`: an mbarrier for keys and one for values, and the parity of their phases."""
    if lane_id() == 0:
        bars = mbarriers(arena, b, 2)
        mbarrier_init(bars, 0, i64(1))
        mbarrier_init(bars, 1, i64(1))
        arena[b + 4] = f32(0.0)
        async_fence()
    warp_barrier()


@cuda.jit(device=True)
def _ask(arena, b, k_keys, k_values, keys, values, at, d, n):
    """:func:`.vocabulary.heads_ask`."""
    if n > 0:
        if lane_id() == 0:
            async_fence()  # results may have been where they come to
        _copy(arena, b, 0, k_keys, keys, at, d, n)
        if k_keys != k_values:
            _copy(arena, b, 1, k_values, values, at, d, n)


@cuda.jit(device=True)
def _attend(arena, b, k, k_keys, k_values, j, heads, d, keys, values, n, then, later):
    """:func:`.vocabulary.heads_attend` on tensor cores."""
    bars, apart, parity = mbarriers(arena, b, 2), k_keys != k_values, i32(arena[b + 4])
    at_keys, at_values = u32(shared_address(arena, k_keys)), u32(shared_address(arena, k_values))
    mbarrier_wait(bars, 0, parity)
    a, s, c, e = _scores(at_keys, u32(shared_address(arena, j) + u32(lane_id()) * u32(16)), d)
    warp_barrier()  # all lanes have read the keys, and the parity
    if lane_id() == 0:
        arena[b + 4] = f32(parity ^ 1)
    if later > 0 and apart:
        _copy(arena, b, 0, k_keys, keys, then, d, later)
    if not apart:
        _copy(arena, b, 1, k_values, values, then, d, later)
    scale, two = _one_over_root(f32(i32(d))), i32(lane_id() & 3) * 2
    a = a * scale if two < n else NOTHING
    s = s * scale if i32(two + 1) < n else NOTHING
    c = c * scale if i32(two + 8) < n else NOTHING
    e = e * scale if i32(two + 9) < n else NOTHING
    highest = _max_of_quad(max(max(a, s), max(c, e)))
    a, s, c, e = exp(a - highest), exp(s - highest), exp(c - highest), exp(e - highest)
    total, head = _sum_of_quad((a + s) + (c + e)), i32(lane_id() >> 2)
    if two == 0 and head < heads:
        arena[k + 2 * head] = highest
        arena[k + 2 * head + 1] = total
    (h0, l0), (h1, l1) = split(a, s), split(c, e)
    mbarrier_wait(bars, 1, parity)
    if n < PART:
        _forget(arena, k_values, d, n)
    left, begin = i32(d), i32(0)
    while left > 0:
        left = _keep_rolled(left)
        _sums(at_values, h0, h1, l0, l1, arena, k + 2 * HEADS, heads, d, begin)
        begin, left = i32(begin + 64), i32(left - 64)
    if apart and later > 0:
        warp_barrier()  # all lanes have read the last values
        _copy(arena, b, 1, k_values, values, then, d, later)


@cuda.jit(device=True)
def _one_by_one(arena, k, j, heads, d, keys, values, at, n):
    """The same without tensor cores: a lane takes a column of sums at a time, and the scores again for each."""
    scale = _one_over_root(f32(i32(d)))
    for h in range(heads):
        i = i64(lane_id())
        while i < d:
            highest, total, mixed = NOTHING, f32(0.0), f32(0.0)
            for p in range(n):
                score = f32(0.0)
                for c in range(d):
                    score += arena[j + h * d + c] * widen(keys[at + p * d + c])
                higher = max(highest, score * scale)
                shrink, weight = exp(highest - higher), exp(score * scale - higher)
                mixed = mixed * shrink + weight * widen(values[at + p * d + i])
                highest, total = higher, total * shrink + weight
            arena[k + 2 * HEADS + _column(d, h, i)] = mixed
            if i == 0:
                arena[k + 2 * h] = highest
                arena[k + 2 * h + 1] = total
            i += 32


@define_by(words.heads_queries)
def _(arena, k, x, j, heads, d, keys, part, parts):
    def as_they_are(arena, k, x, j, heads, d, keys, part, parts):
        _copy_queries(arena, k, x, j, heads, d, i64(part), i64(parts))

    def heads_queries(arena, k, x, j, heads, d, keys, part, parts):
        if has_tensor_cores():
            _put_queries(arena, k, x, j, heads, d, i32(part), i32(parts))
        else:
            _copy_queries(arena, k, x, j, heads, d, i64(part), i64(parts))

    return heads_queries if keys.dtype == types.uint16 else as_they_are


@define_by(words.heads_column)
def _(d, head, i):
    return words.heads_column


@define_by(words.heads_begin)
def _(arena, b):
    def heads_begin(arena, b):
        if has_tensor_cores():
            _begin(arena, b)

    return heads_begin


@define_by(words.heads_ask)
def _(arena, b, k_keys, k_values, keys, values, at, d, n):
    def heads_ask(arena, b, k_keys, k_values, keys, values, at, d, n):
        if has_tensor_cores():
            _ask(arena, b, k_keys, k_values, keys, values, at, d, n)

    def nothing(arena, b, k_keys, k_values, keys, values, at, d, n):
        pass

    return heads_ask if keys.dtype == types.uint16 else nothing


@define_by(words.heads_attend)
def _(arena, b, k, k_keys, k_values, j, heads, d, keys, values, at, n, then, later):
    def in_lanes(arena, b, k, k_keys, k_values, j, heads, d, keys, values, at, n, then, later):
        _one_by_one(arena, k, j, heads, d, keys, values, at, n)

    def heads_attend(arena, b, k, k_keys, k_values, j, heads, d, keys, values, at, n, then, later):
        if has_tensor_cores():
            _attend(arena, b, k, k_keys, k_values, j, heads, d, keys, values, n, then, later)
        else:
            _one_by_one(arena, k, j, heads, d, keys, values, at, n)

    return heads_attend if keys.dtype == types.uint16 else in_lanes


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
