"""Products of many rows on CUDA: tiles of `mma.sync` on tensor cores, from compute capability 9.0 on.

A block multiplies up to 128 stored rows with up to 128 rows of x. Both come in stages of 32 columns, which wait in
shared memory, three stages ahead: stored rows by 16-byte asynchronous copies, rows of x through registers, where
each float32 is split in two bfloat16, ``x = high + low``, so that little of it is lost. A warp multiplies a part
of 32 x 32, in eight accumulators of 16 x 8; where there are parts for half of the warps only, the other half takes
every second fragment of 16 columns, and its sums are added at the end.

In a stage a row's four pieces of 16 bytes lie in an order that differs from row to row (:func:`_piece`), so that
the eight rows that a matrix load reads at once lie in different banks.
"""

from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_loops import _four, _keep_rolled
from .cuda_tensor import (
    copy_piece,
    has_tensor_cores,
    load_matrices,
    multiply,
    shared_address,
    split,
    store_piece,
)
from .cuda_words import define_by, define_text
from .numba_cuda import cuda
from .vocabulary import (
    DOTS_PITCH,
    barrier,
    block_threads,
    divide,
    f32,
    i32,
    i64,
    lane_id,
    row_dot,
    thread_id,
    u32,
    warp_id,
    warps,
)

STAGES = 4
STAGE_ROWS = 128
ROW_BYTES = 64
"""Of a stage's 32 columns, as bfloat16."""
PART_BYTES = STAGE_ROWS * ROW_BYTES
"""A stage has three such parts: stored rows, the high and the low halves of x."""
STAGE_BYTES = 3 * PART_BYTES


def _end_of_group():
    """The copies started so far are a group. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _wait_for_groups():
    """All groups but the last two are there. A word of this file only."""
    raise NotImplementedError("compiled code only")


define_text(_end_of_group, ptx.END_OF_GROUP)
define_text(_wait_for_groups, ptx.WAIT_FOR_GROUPS.format(STAGES - 2))


@cuda.jit(device=True)
def _piece(row, column):
    """Where piece `column` (0 to 3) of a row lies in a part of a stage, in bytes."""
    return u32(row * u32(ROW_BYTES) + ((column ^ ((row >> u32(1)) & u32(3))) << u32(4)))


@cuda.jit(device=True)
def _stored_at(i, i2, outs, n, e):
    """Where piece e of the stored rows' first columns begins in the weights."""
    row, half = e >> 2, outs >> 1
    at = i + row * n if row < half else i2 + (row - half) * n
    return at + 8 * (e & 3)


@cuda.jit(device=True)
def _in_stage(e):
    """Where piece e of a stage's rows lies in its part."""
    return _piece(u32(e >> 2), u32(e & 3))


@cuda.jit(device=True)
def _fill_stored(stage, w, i, i2, outs, n, column, e):
    """Start the copies of a stage's columns of the stored rows, from piece e on. All lanes."""
    while e < 4 * outs:
        copy_piece(u32(stage + _in_stage(e)), w, _stored_at(i, i2, outs, n, e) + column)
        e += block_threads()


@cuda.jit(device=True)
def _store_split(at, low, high):
    """Eight numbers of x, as two pieces of bfloat16; the first one's shared address. One lane."""
    a, b = split(low[0], low[1]), split(low[2], low[3])
    c, d = split(high[0], high[1]), split(high[2], high[3])
    store_piece(at, a[0], b[0], c[0], d[0])
    store_piece(u32(at + u32(PART_BYTES)), a[1], b[1], c[1], d[1])


@cuda.jit(device=True)
def _fill_rows(stage, x, j, rows, n, column, e):
    """A stage's columns of the rows of x, from piece e on. All lanes."""
    while e < 4 * rows:
        at = j + (e >> 2) * n + column + 8 * (e & 3)
        _store_split(u32(stage + u32(PART_BYTES) + _in_stage(e)), _four(x, at), _four(x, at + 4))
        e += block_threads()


@cuda.jit(device=True)
def _multiply_split(c, a, high, low, h2, l2):
    return multiply(multiply(c, a, high, h2), a, low, l2)


@cuda.jit(device=True)
def _multiply_fragment(sums, stored, rows):
    """The sums of a part of 32 x 32 with one fragment of 16 columns more; two shared addresses. One warp."""
    a0, a1 = load_matrices(stored), load_matrices(u32(stored + u32(16 * ROW_BYTES)))
    c0, c1, c2, c3, c4, c5, c6, c7 = sums
    h, s = load_matrices(rows), load_matrices(u32(rows + u32(PART_BYTES)))
    c0 = _multiply_split(c0, a0, h[0], s[0], h[1], s[1])
    c1 = _multiply_split(c1, a1, h[0], s[0], h[1], s[1])
    c2 = _multiply_split(c2, a0, h[2], s[2], h[3], s[3])
    c3 = _multiply_split(c3, a1, h[2], s[2], h[3], s[3])
    rows = u32(rows + u32(16 * ROW_BYTES))
    h, s = load_matrices(rows), load_matrices(u32(rows + u32(PART_BYTES)))
    c4 = _multiply_split(c4, a0, h[0], s[0], h[1], s[1])
    c5 = _multiply_split(c5, a1, h[0], s[0], h[1], s[1])
    c6 = _multiply_split(c6, a0, h[2], s[2], h[3], s[3])
    c7 = _multiply_split(c7, a1, h[2], s[2], h[3], s[3])
    return c0, c1, c2, c3, c4, c5, c6, c7


@cuda.jit(device=True)
def _put_sums(out, at, c, added):
    """One lane: its four of 16 x 8 sums, to ``out[at:]`` or added to what is there."""
    if added:
        c = (c[0] + out[at], c[1] + out[at + DOTS_PITCH], c[2] + out[at + 8], c[3] + out[at + DOTS_PITCH + 8])
    out[at] = c[0]
    out[at + DOTS_PITCH] = c[1]
    out[at + 8] = c[2]
    out[at + DOTS_PITCH + 8] = c[3]


@cuda.jit(device=True)
def _put_part(out, at, sums, added):
    """One warp: its 32 x 32 sums; the first of them belongs at ``out[at]``."""
    at += (lane_id() >> 2) + 2 * (lane_id() & 3) * DOTS_PITCH
    for m in range(2):
        _put_sums(out, at + 16 * m, sums[m], added)
        _put_sums(out, at + 16 * m + 8 * DOTS_PITCH, sums[2 + m], added)
        _put_sums(out, at + 16 * m + 16 * DOTS_PITCH, sums[4 + m], added)
        _put_sums(out, at + 16 * m + 24 * DOTS_PITCH, sums[6 + m], added)


@cuda.jit(device=True)
def _first_stored(part, wide):
    """The first stored row of a part, if `wide` parts lie side by side."""
    return 32 * divide(i64(part), i64(wide))[1]


@cuda.jit(device=True)
def _first_row(part, wide):
    """The first row of x of a part."""
    return 32 * divide(i64(part), i64(wide))[0]


@cuda.jit(device=True)
def _tile(out, k, w, i, i2, outs, x, j, rows, n):
    """:func:`.vocabulary.block_dots` on tensor cores, for a block with a warp for each part of 32 x 32."""
    stages, chunks = shared_address(out, k), i32(n >> 5)
    wide = i32((outs + 31) >> 5)
    parts = i32(wide * ((rows + 31) >> 5))
    part, second, groups = i32(warp_id()), i32(0), i32(1)
    if 2 * parts <= warps():
        groups = i32(2)
        if part >= parts:
            part = i32(part - parts)
            second = i32(1)
    lane = u32(lane_id())
    # the lanes' rows and pieces in the matrices that a load reads: rows 0 to 15 and pieces 0 and 1 of a fragment
    row = u32((lane & u32(7)) + (lane & u32(8)))
    stored = u32(_piece(u32(u32(_first_stored(part, wide)) + row), u32(lane >> u32(4))))
    row = u32((lane & u32(7)) + ((lane >> u32(1)) & u32(8)))
    staged = _piece(u32(u32(_first_row(part, wide)) + row), u32((lane >> u32(3)) & u32(1)))
    staged = u32(staged + u32(PART_BYTES))
    zero = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    for s in range(STAGES - 1):
        if s < chunks:
            _fill_stored(u32(stages + s * STAGE_BYTES), w, i, i2, outs, n, 32 * s, thread_id())
            _fill_rows(u32(stages + s * STAGE_BYTES), x, j, rows, n, 32 * s, thread_id())
        _end_of_group()
    # the lane's first pieces, which are all it has if there are lanes enough: its piece of x is on its way while
    # the warp multiplies
    my_stored = 4 * outs - thread_id() > 0
    my_row = 4 * rows - thread_id() > 0
    from_w = _stored_at(i, i2, outs, n, min(thread_id(), 4 * outs - 1))
    from_x = j + (min(thread_id(), 4 * rows - 1) >> 2) * n + 8 * (min(thread_id(), 4 * rows - 1) & 3)
    to = _in_stage(thread_id())
    chunk = i32(0)
    while chunk < chunks:
        _keep_rolled()
        _wait_for_groups()
        barrier()
        ahead = i32(chunk + STAGES - 1)
        there = u32(stages + u32(ahead & (STAGES - 1)) * u32(STAGE_BYTES))
        column = i32(32 * min(ahead, i32(chunks - 1)))
        if ahead < chunks:
            if my_stored:
                copy_piece(u32(there + to), w, from_w + column)
            _fill_stored(there, w, i, i2, outs, n, column, thread_id() + block_threads())
        _end_of_group()
        low, high = _four(x, from_x + column), _four(x, from_x + column + 4)
        if part < parts:
            here = u32(stages + u32(chunk & (STAGES - 1)) * u32(STAGE_BYTES))
            step = second
            while step < 2:
                flip = u32(step << 5)
                sums = _multiply_fragment(sums, u32(here + (stored ^ flip)), u32(here + (staged ^ flip)))
                step = i32(step + groups)
        if ahead < chunks:
            if my_row:
                _store_split(u32(there + u32(PART_BYTES) + to), low, high)
            _fill_rows(there, x, j, rows, n, column, thread_id() + block_threads())
        chunk = i32(chunk + 1)
    barrier()  # nobody reads the stages any more, where the sums go
    at = k + _first_row(part, wide) * DOTS_PITCH + _first_stored(part, wide)
    if part < parts and second == 0:
        _put_part(out, at, sums, False)
    barrier()
    if part < parts and second == 1:
        _put_part(out, at, sums, True)


@cuda.jit(device=True)
def _rows_one_by_one(out, k, w, i, i2, outs, x, j, rows, n):
    """:func:`.vocabulary.block_dots` without tensor cores: a warp takes a stored row at a time."""
    half, r = outs >> 1, warp_id()
    while r < outs:
        at = i + r * n
        if r >= half:
            at = i2 + (r - half) * n
        for t in range(rows):
            y = row_dot(w, at, x, j + t * n, n)
            if lane_id() == 0:
                out[k + t * DOTS_PITCH + r] = y
        r += warps()


@define_by(words.block_dots)
def _(out, k, w, i, i2, outs, x, j, rows, n):
    def of_bfloat16(out, k, w, i, i2, outs, x, j, rows, n):
        parts = ((outs + 31) >> 5) * ((rows + 31) >> 5)
        if has_tensor_cores() and parts <= warps():
            _tile(out, k, w, i, i2, outs, x, j, rows, n)
        else:
            _rows_one_by_one(out, k, w, i, i2, outs, x, j, rows, n)

    def of_others(out, k, w, i, i2, outs, x, j, rows, n):
        _rows_one_by_one(out, k, w, i, i2, outs, x, j, rows, n)

    return of_bfloat16 if w.dtype == types.uint16 else of_others


@define_by(words.tiles_pay)
def _(w):
    if w.dtype == types.uint16:
        return lambda w: has_tensor_cores()
    return lambda w: False
