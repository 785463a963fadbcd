"""A few queries over a few positions of the KV cache, on CUDA: one warp and its tensor cores.

A lane copies the 16-byte pieces of keys and values that it will multiply to places of its own in shared memory,
asynchronously, so that all of them are on their way at once and take no registers. Nobody else reads them, so
there is no barrier. Queries are 16 rows of a product (of which up to eight are real), keys its columns; the
weights that come of it lie in the lanes just as the second product takes them (FlashAttention-2: Dao, 2023), where
values, two positions to a word, are the rows. Queries and weights are two bfloat16 each: little of them is lost.
"""

import numpy as np
from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_loops import _four, _keep_rolled, _store_four
from .cuda_tensor import copy_piece, define_binary, has_tensor_cores, load_piece, multiply, shared_address, split
from .cuda_words import define, define_by, define_text
from .lowering import F32, asm
from .numba_cuda import cuda
from .vocabulary import FULL_WARP, HEADS, exp, f32, i32, i64, lane_id, u32, warp_barrier, widen

NOTHING = f32(-np.inf)


def _end_of_group():
    """The copies started so far are a group. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _wait_for_all_but_one():
    """Wait for all groups of copies but the last. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _wait_for_all():
    """Wait for all groups of copies. A word of this file only."""
    raise NotImplementedError("compiled code only")


define_text(_end_of_group, ptx.END_OF_GROUP)
define_text(_wait_for_all_but_one, ptx.WAIT_FOR_GROUPS.format(1))
define_text(_wait_for_all, ptx.WAIT_FOR_GROUPS.format(0))

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
def _copy_keys(to, keys, at, d, n):
    """A lane's pieces of positions g and g + 8: eight columns of each 32."""
    g, column = i32(lane_id() >> 2), i32(lane_id() & 3) * 8
    first = at + i64(i32(min(g, i32(n - 1)) * i32(d) + column))
    second = at + i64(i32(min(i32(g + 8), i32(n - 1)) * i32(d) + column))
    left = i32(d)
    while left > 0:
        left = _keep_rolled(left)
        copy_piece(to, keys, first)
        copy_piece(u32(to + u32(512)), keys, second)
        to, first, second, left = u32(to + u32(1024)), first + 32, second + 32, i32(left - 32)


@cuda.jit(device=True)
def _copy_values(to, values, at, d, n):
    """A lane's pieces of positions 2q, 2q + 1, 2q + 8 and 2q + 9: eight columns of each 64, if there are."""
    two, column, last = i32(lane_id() & 3) * 2, i32(lane_id() >> 2) * 8, i32(n - 1)
    a, b = i64(i32(min(two, last) * i32(d))), i64(i32(min(i32(two + 1), last) * i32(d)))
    c, e = i64(i32(min(i32(two + 8), last) * i32(d))), i64(i32(min(i32(two + 9), last) * i32(d)))
    left = i32(d)
    while left > 0:
        left = _keep_rolled(left)
        here = at + i64(min(column, i32(left - 8)))  # behind the last column, the last ones once more
        copy_piece(to, values, here + a)
        copy_piece(u32(to + u32(512)), values, here + b)
        copy_piece(u32(to + u32(1024)), values, here + c)
        copy_piece(u32(to + u32(1536)), values, here + e)
        to, at, left = u32(to + u32(2048)), at + 64, i32(left - 64)


@cuda.jit(device=True)
def _four_rows(c, high, low, low2, high2, k0, k1):
    """Sums c plus eight rows of queries times keys, of 16 columns; the product's other eight rows are 0."""
    zero = u32(0)
    c = multiply(c, (low, zero, low2, zero), k0, k1)
    return multiply(c, (high, zero, high2, zero), k0, k1)


@cuda.jit(device=True)
def _scores(mine, x, j, heads, d):
    """A lane's scores of query g: positions 2q, 2q + 1, 2q + 8 and 2q + 9."""
    g, column = min(i32(lane_id() >> 2), i32(heads - 1)), i32(lane_id() & 3) * 8
    query, left = j + i64(i32(g * i32(d) + column)), i32(d)
    near, far = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    while left > 0:
        left = _keep_rolled(left)
        a, b = _four(x, query), _four(x, query + 4)
        (h0, l0), (h1, l1) = split(a[0], a[1]), split(a[2], a[3])
        (h2, l2), (h3, l3) = split(b[0], b[1]), split(b[2], b[3])
        k, m = load_piece(mine), load_piece(u32(mine + u32(512)))
        near = _four_rows(near, h0, l0, l1, h1, k[0], k[1])
        far = _four_rows(far, h0, l0, l1, h1, m[0], m[1])
        near = _four_rows(near, h2, l2, l3, h3, k[2], k[3])
        far = _four_rows(far, h2, l2, l3, h3, m[2], m[3])
        mine, query, left = u32(mine + u32(1024)), query + 32, i32(left - 32)
    return near[0], near[1], far[0], far[1]


@cuda.jit(device=True)
def _sums(mine, h0, h1, l0, l1, out, k, heads):
    """Of 64 columns: the lane's eight, of two queries, from pieces of values and halves of weights."""
    x, y = load_piece(mine), load_piece(u32(mine + u32(512)))
    z, w = load_piece(u32(mine + u32(1024))), load_piece(u32(mine + u32(1536)))
    zero = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    a0 = _lower_halves(x[0], y[0]), _upper_halves(x[0], y[0]), _lower_halves(z[0], w[0]), _upper_halves(z[0], w[0])
    a1 = _lower_halves(x[1], y[1]), _upper_halves(x[1], y[1]), _lower_halves(z[1], w[1]), _upper_halves(z[1], w[1])
    a2 = _lower_halves(x[2], y[2]), _upper_halves(x[2], y[2]), _lower_halves(z[2], w[2]), _upper_halves(z[2], w[2])
    a3 = _lower_halves(x[3], y[3]), _upper_halves(x[3], y[3]), _lower_halves(z[3], w[3]), _upper_halves(z[3], w[3])
    s0, s1 = multiply(multiply(zero, a0, l0, l1), a0, h0, h1), multiply(multiply(zero, a1, l0, l1), a1, h0, h1)
    s2, s3 = multiply(multiply(zero, a2, l0, l1), a2, h0, h1), multiply(multiply(zero, a3, l0, l1), a3, h0, h1)
    warp_barrier()  # all lanes have read the pieces in whose place the sums go
    head, at = i32(lane_id() & 3) * 2, k + i64(i32(i32(lane_id() & 3) * 128 + i32(lane_id() >> 2) * 8))
    if head < heads:
        _store_four(out, at, (s0[0], s0[2], s1[0], s1[2]))
        _store_four(out, at + 4, (s2[0], s2[2], s3[0], s3[2]))
    if i32(head + 1) < heads:
        _store_four(out, at + 64, (s0[1], s0[3], s1[1], s1[3]))
        _store_four(out, at + 68, (s2[1], s2[3], s3[1], s3[3]))


@cuda.jit(device=True)
def _ask(arena, k_keys, k_values, keys, values, at, d, n):
    """:func:`.vocabulary.heads_ask`: a group of keys, and one of values, either of which may be empty."""
    lane = u32(lane_id()) * u32(16)
    if n > 0:
        _copy_keys(u32(shared_address(arena, k_keys) + lane), keys, at, d, n)
    _end_of_group()
    if n > 0 and k_keys != k_values:
        _copy_values(u32(shared_address(arena, k_values) + lane), values, at, d, n)
    _end_of_group()


@cuda.jit(device=True)
def _attend(arena, k, k_keys, k_values, x, j, heads, d, keys, values, n, then, later):
    """:func:`.vocabulary.heads_attend` on tensor cores. Of each part there are two groups of copies, in turn."""
    lane, apart = u32(lane_id()) * u32(16), k_keys != k_values
    at_keys, at_values = u32(shared_address(arena, k_keys) + lane), u32(shared_address(arena, k_values) + lane)
    _wait_for_all_but_one()
    a, b, c, e = _scores(at_keys, x, j, heads, d)
    if later > 0:
        if apart:
            _copy_keys(at_keys, keys, then, d, later)
        else:
            _copy_values(at_values, values, then, d, later)
    _end_of_group()
    scale, two = _one_over_root(f32(i32(d))), i32(lane_id() & 3) * 2
    a = a * scale if two < n else NOTHING
    b = b * scale if i32(two + 1) < n else NOTHING
    c = c * scale if i32(two + 8) < n else NOTHING
    e = e * scale if i32(two + 9) < n else NOTHING
    highest = _max_of_quad(max(max(a, b), max(c, e)))
    a, b, c, e = exp(a - highest), exp(b - highest), exp(c - highest), exp(e - highest)
    total, head = _sum_of_quad((a + b) + (c + e)), i32(lane_id() >> 2)
    if two == 0 and head < heads:
        arena[k + 2 * head] = highest
        arena[k + 2 * head + 1] = total
    (h0, l0), (h1, l1) = split(a, b), split(c, e)
    if apart:
        _wait_for_all_but_one()
    else:
        _wait_for_all()
    left, mine, to = i32(d), at_values, k + 2 * HEADS
    while left > 0:
        left = _keep_rolled(left)
        _sums(mine, h0, h1, l0, l1, arena, to, heads)
        mine, to, left = u32(mine + u32(2048)), to + 64 * i64(heads), i32(left - 64)
    if apart and later > 0:
        _copy_values(at_values, values, then, d, later)
    _end_of_group()


@cuda.jit(device=True)
def _one_by_one(arena, k, x, j, heads, d, keys, values, at, n):
    """The same without tensor cores: a lane takes a column of sums at a time, and the scores again for each."""
    scale = _one_over_root(f32(i32(d)))
    for h in range(heads):
        i = i64(lane_id())
        while i < d:
            highest, total, mixed = NOTHING, f32(0.0), f32(0.0)
            for p in range(n):
                score = f32(0.0)
                for c in range(d):
                    score += x[j + h * d + c] * widen(keys[at + p * d + c])
                higher = max(highest, score * scale)
                shrink, weight = exp(highest - higher), exp(score * scale - higher)
                mixed = mixed * shrink + weight * widen(values[at + p * d + i])
                highest, total = higher, total * shrink + weight
            arena[k + 2 * HEADS + (i >> 6) * (64 * heads) + 64 * h + (i & 63)] = mixed
            if i == 0:
                arena[k + 2 * h] = highest
                arena[k + 2 * h + 1] = total
            i += 32


@define_by(words.heads_ask)
def _(arena, k_keys, k_values, keys, values, at, d, n):
    def heads_ask(arena, k_keys, k_values, keys, values, at, d, n):
        if has_tensor_cores():
            _ask(arena, k_keys, k_values, keys, values, at, d, n)

    def nothing(arena, k_keys, k_values, keys, values, at, d, n):
        pass

    return heads_ask if keys.dtype == types.uint16 else nothing


@define_by(words.heads_attend)
def _(arena, k, k_keys, k_values, x, j, heads, d, keys, values, at, n, then, later):
    def in_lanes(arena, k, k_keys, k_values, x, j, heads, d, keys, values, at, n, then, later):
        _one_by_one(arena, k, x, j, heads, d, keys, values, at, n)

    def heads_attend(arena, k, k_keys, k_values, x, j, heads, d, keys, values, at, n, then, later):
        if has_tensor_cores():
            _attend(arena, k, k_keys, k_values, x, j, heads, d, keys, values, n, then, later)
        else:
            _one_by_one(arena, k, x, j, heads, d, keys, values, at, n)

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
