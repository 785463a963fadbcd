"""Attention in tiles on CUDA (FlashAttention-2: Dao, 2023): tiles wait in shared memory, all else is in registers.

Tiles hold float16. Rows are 16 bytes further apart than they are long, so that the eight rows that a matrix load
reads at once lie in different banks. Sixteen queries belong to two warps, which take 32 positions by turns; what
each has of them, maxima, totals and sums, is put together at the end. The scores of 32 positions lie in the lanes
just as the second product takes the weights that they become. Heads of more than 128 columns have tiles of 64
queries: there four warps have the same sixteen, all positions, and 64 columns of the sums each.
"""

import numpy as np
from numba import types

from . import plain_tiles, ptx
from . import vocabulary as words
from .cuda_heads import _max_of_quad, _sum_of_quad
from .cuda_loops import _four, _keep_rolled, _store_four
from .cuda_tensor import (
    copy_piece,
    has_tensor_cores,
    load_matrices,
    load_piece,
    load_transposed,
    multiply_f16,
    narrow_bf16,
    narrow_two,
    power_of_two,
    shared_address,
    store_piece,
)
from .cuda_words import define_by, define_text
from .numba_cuda import cuda
from .vocabulary import (
    FULL_WARP,
    LOWEST,
    TILE_GAP,
    TILE_LANES,
    barrier,
    divide,
    f32,
    f32_of_bits,
    i32,
    i64,
    lane_id,
    opaque,
    thread_id,
    u32,
    warp_id,
)

LOG2_E = f32(1.4426950408889634)
"""Queries are scaled by it too, so that weights are powers of two."""
GROWTH = f32(8.0)
"""By how much a score may be above the maximum, which would better not change: all sums have to shrink then."""
HIDDEN = f32(-np.inf)
"""In place of the score of a position that a query does not see."""

_put_plainly, _take_plainly, _begin_plainly, _attend_plainly, _end_plainly = (
    cuda.jit(device=True)(plain_tiles.WORDS[word])
    for word in (words.tile_put, words.tile_take, words.tile_begin, words.tile_attend, words.tile_end)
)


# --- tiles


def _end_of_group():
    """The copies started so far are a group. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _wait_for_all():
    """Wait for all groups of copies. A word of this file only."""
    raise NotImplementedError("compiled code only")


define_text(_end_of_group, ptx.END_OF_GROUP)
define_text(_wait_for_all, ptx.WAIT_FOR_GROUPS)


@cuda.jit(device=True)
def _pitch(n):
    """Bytes from a row of a tile to the next."""
    return u32(u32(n) * u32(2) + u32(4 * TILE_GAP))


@cuda.jit(device=True)
def _store_eight(at, a, b):
    """Eight numbers, of two fours, to a shared address."""
    first, second = narrow_two(a[0], a[1]), narrow_two(a[2], a[3])
    store_piece(at, first, second, narrow_two(b[0], b[1]), narrow_two(b[2], b[3]))


@cuda.jit(device=True)
def _scaled(x, j, scale):
    a = _four(x, j)
    return a[0] * scale, a[1] * scale, a[2] * scale, a[3] * scale


@define_by(words.tile_put)
def _(arena, k, t, n, i, x, j, scale):
    def tile_put(arena, k, t, n, i, x, j, scale):
        if has_tensor_cores():
            at, scale = u32(shared_address(arena, k) + u32(t) * _pitch(n) + u32(2 * i)), f32(scale * LOG2_E)
            _store_eight(at, _scaled(x, j, scale), _scaled(x, j + 4, scale))
            _store_eight(u32(at + u32(16)), _scaled(x, j + 8, scale), _scaled(x, j + 12, scale))
        else:
            _put_plainly(arena, k, t, n, i, x, j, scale)

    return tile_put


PIECE = 4 * TILE_LANES
"""Floats from where a lane's 16 bytes wait to where its next ones do."""


@cuda.jit(device=True)
def _copy_halves(place, x, j, half):
    """Begin to copy eight bfloat16, and eight more, to where this lane's pieces wait."""
    copy_piece(place, x, j)
    copy_piece(u32(place + u32(4 * PIECE)), x, j + half)


@cuda.jit(device=True)
def _copy_floats(place, x, j, half):
    """The same of float32."""
    copy_piece(place, x, j)
    copy_piece(u32(place + u32(4 * PIECE)), x, j + 4)
    copy_piece(u32(place + u32(8 * PIECE)), x, j + half)
    copy_piece(u32(place + u32(12 * PIECE)), x, j + half + 4)


@cuda.jit(device=True)
def _take_halves(place, at, half):
    a, b = load_piece(place), load_piece(u32(place + u32(4 * PIECE)))
    store_piece(at, narrow_bf16(a[0]), narrow_bf16(a[1]), narrow_bf16(a[2]), narrow_bf16(a[3]))
    store_piece(u32(at + half), narrow_bf16(b[0]), narrow_bf16(b[1]), narrow_bf16(b[2]), narrow_bf16(b[3]))


@cuda.jit(device=True)
def _load_floats(place):
    a = load_piece(place)
    return f32_of_bits(a[0]), f32_of_bits(a[1]), f32_of_bits(a[2]), f32_of_bits(a[3])


@cuda.jit(device=True)
def _take_floats(place, at, half):
    _store_eight(at, _load_floats(place), _load_floats(u32(place + u32(4 * PIECE))))
    third, fourth = u32(place + u32(8 * PIECE)), u32(place + u32(12 * PIECE))
    _store_eight(u32(at + half), _load_floats(third), _load_floats(fourth))


@define_by(words.tile_ask)
def _(arena, waiting, n, i, x, j):
    copy = _copy_halves if x.dtype == types.uint16 else _copy_floats

    def tile_ask(arena, waiting, n, i, x, j):
        if has_tensor_cores():
            copy(u32(shared_address(arena, waiting) + u32(thread_id()) * u32(16)), x, j + i, i64(n) >> 1)
            _end_of_group()

    return tile_ask


@define_by(words.tile_take)
def _(arena, k, t, n, i, x, j, waiting):
    take = _take_halves if x.dtype == types.uint16 else _take_floats

    def tile_take(arena, k, t, n, i, x, j, waiting):
        if has_tensor_cores():
            _wait_for_all()
            at = u32(shared_address(arena, k) + u32(t) * _pitch(n) + u32(2 * i))
            take(u32(shared_address(arena, waiting) + u32(thread_id()) * u32(16)), at, u32(n))
        else:
            _take_plainly(arena, k, t, n, i, x, j, waiting)

    return tile_take


# --- attention


@cuda.jit(device=True)
def _shares(d):
    """This warp's first query; its first position, and how far to the next; its first column, and how many."""
    warp = i32(warp_id())
    if d <= 128:
        return i32((warp >> 1) << 4), i32((warp & 1) << 5), i32(64), i32(0), i32(d)
    column = i32((warp & 3) << 6)
    return i32((warp >> 2) << 4), i32(0), i32(32), column, min(i32(64), i32(i32(d) - column))


@cuda.jit(device=True)
def _stage_rows(d):
    """How many rows a tile of keys has, behind which that of values begins."""
    if d <= 64:
        return u32(128)
    return u32(64) if d <= 128 else u32(32)


@cuda.jit(device=True)
def _nothing():
    zero = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    return zero, zero, zero, zero


@define_by(words.tile_begin)
def _(arena, k, queries, d):
    def tile_begin(arena, k, queries, d):
        if not has_tensor_cores():
            _begin_plainly(arena, k, queries, d)
        none, zero = _nothing(), f32(0.0)
        return none, none, none, none, (LOWEST, LOWEST, zero, zero)

    return tile_begin


@cuda.jit(device=True)
def _add_columns(sums, queries, near, far):
    a, b = multiply_f16(sums[0], queries, near[0], near[1]), multiply_f16(sums[1], queries, near[2], near[3])
    return a, b, multiply_f16(sums[2], queries, far[0], far[1]), multiply_f16(sums[3], queries, far[2], far[3])


@cuda.jit(device=True)
def _scores(at, to, pitch, steps):
    """A lane's dot products of its two queries with 32 positions, in fours: both with each two of eight.

    Of `steps` times 32 columns.
    """
    sums, below = _nothing(), u32(u32(16) * pitch)
    while steps > 0:
        steps = _keep_rolled(steps)
        sums = _add_columns(sums, load_matrices(at), load_matrices(to), load_matrices(u32(to + below)))
        at, to = u32(at + u32(32)), u32(to + u32(32))
        sums = _add_columns(sums, load_matrices(at), load_matrices(to), load_matrices(u32(to + below)))
        at, to, steps = u32(at + u32(32)), u32(to + u32(32)), i32(opaque(i64(steps - 1)))
    return sums


@cuda.jit(device=True)
def _seen(sees, group, query):
    """How many positions a query sees."""
    return i32(sees + i32(divide(i64(query), i64(group))[0]))


@cuda.jit(device=True)
def _hide(s, position, seen, seen_below):
    """Scores at a position and the one behind it, as far as each of the two queries sees."""
    a = s[0] if position < seen else HIDDEN
    b = s[1] if i32(position + 1) < seen else HIDDEN
    c = s[2] if position < seen_below else HIDDEN
    e = s[3] if i32(position + 1) < seen_below else HIDDEN
    return a, b, c, e


@cuda.jit(device=True)
def _weights(s, m, m_below):
    """What four scores become."""
    a, b = power_of_two(s[0] - m), power_of_two(s[1] - m)
    return a, b, power_of_two(s[2] - m_below), power_of_two(s[3] - m_below)


@cuda.jit(device=True)
def _narrow_weights(a, b):
    """Those of 16 positions as a fragment."""
    return narrow_two(a[0], a[1]), narrow_two(a[2], a[3]), narrow_two(b[0], b[1]), narrow_two(b[2], b[3])


@cuda.jit(device=True)
def _shrink_four(c, a, b):
    return c[0] * a, c[1] * a, c[2] * b, c[3] * b


@cuda.jit(device=True)
def _shrink(sums, a, b):
    """The sums of 32 columns, of two queries, times a number each."""
    c0, c1, c2, c3 = sums
    return _shrink_four(c0, a, b), _shrink_four(c1, a, b), _shrink_four(c2, a, b), _shrink_four(c3, a, b)


@cuda.jit(device=True)
def _mix(sums, near, far, at, below):
    """The sums of 32 columns with the values of 32 positions, each weighted; `below`: to the second 16."""
    c0, c1, c2, c3 = sums
    x, y = load_transposed(at), load_transposed(u32(at + u32(32)))
    c0, c1 = multiply_f16(c0, near, x[0], x[2]), multiply_f16(c1, near, x[1], x[3])
    c2, c3 = multiply_f16(c2, near, y[0], y[2]), multiply_f16(c3, near, y[1], y[3])
    x, y = load_transposed(u32(at + below)), load_transposed(u32(at + below + u32(32)))
    c0, c1 = multiply_f16(c0, far, x[0], x[2]), multiply_f16(c1, far, x[1], x[3])
    return c0, c1, multiply_f16(c2, far, y[0], y[2]), multiply_f16(c3, far, y[1], y[3])


@cuda.jit(device=True)
def _grown(m, highest):
    """The new maximum: the old one, until scores are higher by so much that their weights might be too large."""
    return highest if highest > m + GROWTH else m


@cuda.jit(device=True)
def _highest(a, b, c, e):
    return max(max(a, b), max(c, e))


@cuda.jit(device=True)
def _queries_at(arena, q, d):
    """A lane's piece of a warp's queries: of rows 0 to 15 the first, then the second."""
    lane = u32(lane_id())
    row = u32(u32(_shares(d)[0]) + (lane & u32(15)))
    return u32(shared_address(arena, q) + row * _pitch(d) + ((lane >> u32(4)) << u32(4)))


@cuda.jit(device=True)
def _keys_at(arena, keys, d):
    """Of its keys, and of the values behind them: of rows 0 to 7 first and second, then of rows 8 to 15."""
    lane = u32(lane_id())
    row = u32(u32(_shares(d)[1]) + (lane & u32(7)) + ((lane >> u32(1)) & u32(8)))
    return u32(shared_address(arena, keys) + row * _pitch(d) + (((lane >> u32(3)) & u32(1)) << u32(4)))


@cuda.jit(device=True)
def _hide_unseen(scores, sees, group, d):
    """Scores of 32 positions, of which the tile's first query sees so many, as far as the lane's two see them."""
    a, b, c, e = scores
    here, row = i32(i32(lane_id() & 3) * 2), i32(_shares(d)[0] + i32(lane_id() >> 2))
    seen, seen_below = _seen(sees, group, row), _seen(sees, group, i32(row + 8))
    a, b = _hide(a, here, seen, seen_below), _hide(b, i32(here + 8), seen, seen_below)
    return a, b, _hide(c, i32(here + 16), seen, seen_below), _hide(e, i32(here + 24), seen, seen_below)


@cuda.jit(device=True)
def _attend(arena, held, q, keys, sizes):
    """:func:`.vocabulary.tile_attend` on tensor cores: one warp, what is its own.

    Little is kept beside the sums; what can be is made anew for each 32 positions.
    """
    s0, s1, s2, s3, (m, m_below, total, total_below) = held
    queries, left, sees, group, d = sizes
    query, first, _, _, wide = _shares(d)
    if query >= queries or wide <= 0:
        left = i32(0)
    elif sees < left:  # not all rows see all positions
        left = min(left, _seen(sees, group, min(i32(query + 15), i32(queries - 1))))
    left, sees = i32(left - first), i32(sees - first)
    at, shape = _keys_at(arena, keys, d), i32(d | i32(group << 16))
    while left > 0:
        left = _keep_rolled(left)
        d = i32(opaque(i64(shape & 0xFFFF)))  # else all that follows from it is kept
        a, b, c, e = _scores(_queries_at(arena, q, d), at, _pitch(d), i32(d >> 5))
        if sees < 32:
            a, b, c, e = _hide_unseen((a, b, c, e), sees, i32(shape >> 16), d)
        highest = max(_highest(a[0], a[1], b[0], b[1]), _highest(c[0], c[1], e[0], e[1]))
        highest_below = max(_highest(a[2], a[3], b[2], b[3]), _highest(c[2], c[3], e[2], e[3]))
        highest, highest_below = _grown(m, _max_of_quad(highest)), _grown(m_below, _max_of_quad(highest_below))
        if cuda.any_sync(FULL_WARP, highest > m or highest_below > m_below):
            by, by_below = power_of_two(m - highest), power_of_two(m_below - highest_below)
            s0, s1 = _shrink(s0, by, by_below), _shrink(s1, by, by_below)
            s2, s3 = _shrink(s2, by, by_below), _shrink(s3, by, by_below)
            m, m_below, total, total_below = highest, highest_below, total * by, total_below * by_below
        a, b = _weights(a, m, m_below), _weights(b, m, m_below)
        c, e = _weights(c, m, m_below), _weights(e, m, m_below)
        total += ((a[0] + a[1]) + (b[0] + b[1])) + ((c[0] + c[1]) + (e[0] + e[1]))
        total_below += ((a[2] + a[3]) + (b[2] + b[3])) + ((c[2] + c[3]) + (e[2] + e[3]))
        near, far, below = _narrow_weights(a, b), _narrow_weights(c, e), u32(u32(16) * _pitch(d))
        _, _, step, column, wide = _shares(d)
        at_v = u32(at + _stage_rows(d) * _pitch(d) + u32(2) * u32(column))
        s0 = _mix(s0, near, far, at_v, below)
        if wide > 32:
            s1 = _mix(s1, near, far, u32(at_v + u32(64)), below)
        if wide > 64:
            s2 = _mix(s2, near, far, u32(at_v + u32(128)), below)
        if wide > 96:
            s3 = _mix(s3, near, far, u32(at_v + u32(192)), below)
        at, left, sees = u32(at + u32(step) * _pitch(d)), i32(left - step), i32(sees - step)
    return s0, s1, s2, s3, (m, m_below, total, total_below)


@define_by(words.tile_attend)
def _(arena, held, k, q, queries, keys, across, sees, group, d):
    def tile_attend(arena, held, k, q, queries, keys, across, sees, group, d):
        if has_tensor_cores():
            sizes = i32(queries), i32(across), i32(sees), i32(group), i32(d)
            held = _attend(arena, held, q, keys, sizes)
        else:
            _attend_plainly(arena, i64(0), k, q, queries, keys, across, sees, group, d)
        return held

    return tile_attend


# --- its end


@cuda.jit(device=True)
def _leave(arena, at, sums):
    """A lane's 16 sums, for the other warp."""
    _store_four(arena, at, sums[0])
    _store_four(arena, at + 128, sums[1])
    _store_four(arena, at + 256, sums[2])
    _store_four(arena, at + 384, sums[3])


@cuda.jit(device=True)
def _add_four(s, other, mine, mine_below, its, its_below):
    a, b = s[0] * mine + other[0] * its, s[1] * mine + other[1] * its
    return a, b, s[2] * mine_below + other[2] * its_below, s[3] * mine_below + other[3] * its_below


@cuda.jit(device=True)
def _add(arena, at, sums, mine, mine_below, its, its_below):
    """A lane's 16 sums, and those that the other warp has left, each times a number, added up."""
    a = _add_four(sums[0], _four(arena, at), mine, mine_below, its, its_below)
    b = _add_four(sums[1], _four(arena, at + 128), mine, mine_below, its, its_below)
    c = _add_four(sums[2], _four(arena, at + 256), mine, mine_below, its, its_below)
    return a, b, c, _add_four(sums[3], _four(arena, at + 384), mine, mine_below, its, its_below)


@cuda.jit(device=True)
def _put_two(arena, at, below, c):
    arena[at] = c[0]
    arena[at + 1] = c[1]
    arena[at + below] = c[2]
    arena[at + below + 1] = c[3]


@cuda.jit(device=True)
def _put(arena, at, below, sums):
    """A lane's 16 sums to the rows of its two queries."""
    _put_two(arena, at, below, sums[0])
    _put_two(arena, at + 8, below, sums[1])
    _put_two(arena, at + 16, below, sums[2])
    _put_two(arena, at + 24, below, sums[3])


@cuda.jit(device=True)
def _leave_all(arena, at, held, wide):
    """What a warp that takes every other 32 positions has, for the warp that takes those between."""
    s0, s1, s2, s3, totals = held
    _store_four(arena, at, totals)
    _leave(arena, at + 128, s0)
    if wide > 32:
        _leave(arena, at + 640, s1)
    if wide > 64:
        _leave(arena, at + 1152, s2)
    if wide > 96:
        _leave(arena, at + 1664, s3)


@cuda.jit(device=True)
def _add_all(arena, at, held, wide):
    """A lane's sums of all positions, over their totals, of which another warp has left some."""
    s0, s1, s2, s3, (m, m_below, total, total_below) = held
    its_m, its_m_below, its_total, its_total_below = _four(arena, at)
    highest, highest_below = max(m, its_m), max(m_below, its_m_below)
    mine, mine_below = power_of_two(m - highest), power_of_two(m_below - highest_below)
    its, its_below = power_of_two(its_m - highest), power_of_two(its_m_below - highest_below)
    scale, scale_below = total * mine + its_total * its, total_below * mine_below + its_total_below * its_below
    mine, its, mine_below, its_below = mine / scale, its / scale, mine_below / scale_below, its_below / scale_below
    s0 = _add(arena, at + 128, s0, mine, mine_below, its, its_below)
    if wide > 32:
        s1 = _add(arena, at + 640, s1, mine, mine_below, its, its_below)
    if wide > 64:
        s2 = _add(arena, at + 1152, s2, mine, mine_below, its, its_below)
    if wide > 96:
        s3 = _add(arena, at + 1664, s3, mine, mine_below, its, its_below)
    return s0, s1, s2, s3


@cuda.jit(device=True)
def _end(arena, held, k, room, queries, d):
    """:func:`.vocabulary.tile_end` on tensor cores."""
    s0, s1, s2, s3, (m, m_below, total, total_below) = held
    query, first, _, column, wide = _shares(d)
    if query >= queries:
        wide = i32(0)
    total, total_below = _sum_of_quad(total), _sum_of_quad(total_below)
    left = room + i64(query) * (d + 8) + 4 * lane_id()
    held = s0, s1, s2, s3, (m, m_below, total, total_below)
    if first > 0 and wide > 0:
        _leave_all(arena, left, held, wide)
    barrier()
    if first == 0 and wide > 0:
        if d <= 128:
            s0, s1, s2, s3 = _add_all(arena, left, held, wide)
        else:
            by, by_below = f32(1.0) / total, f32(1.0) / total_below
            s0, s1 = _shrink(s0, by, by_below), _shrink(s1, by, by_below)
        at = k + (i64(query) + (lane_id() >> 2)) * (d + TILE_GAP) + column + 2 * (lane_id() & 3)
        below = 8 * (i64(d) + TILE_GAP)
        _put(arena, at, below, s0)
        if wide > 32:
            _put(arena, at + 32, below, s1)
        if wide > 64:
            _put(arena, at + 64, below, s2)
        if wide > 96:
            _put(arena, at + 96, below, s3)


@define_by(words.tile_end)
def _(arena, held, k, room, queries, d):
    def tile_end(arena, held, k, room, queries, d):
        if has_tensor_cores():
            _end(arena, held, k, room, queries, d)
        else:
            _end_plainly(arena, i64(0), k, room, queries, d)

    return tile_end
