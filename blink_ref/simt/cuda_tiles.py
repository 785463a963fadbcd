"""Products of many rows on CUDA: tiles of `mma.sync` on tensor cores, from compute capability 9.0 on.

A block multiplies up to 128 stored rows with up to 128 rows of x. Both come by 16-byte asynchronous copies, in
stages of twice 32 columns, which wait in shared memory up to three ahead. Who wrote x has split each float32 in
two bfloat16, ``x = high + low``, so that little of it is lost. A warp multiplies a part of 32 x 32, in eight
accumulators of 16 x 8; where there are parts for half of the warps only, or for a quarter, the others share each
stage's fragments of 16 columns with them, and their sums are added at the end.

In a stage a row's four pieces of 16 bytes lie in an order that differs from row to row (:func:`_piece`), so that
the eight rows that a matrix load reads at once lie in different banks.
"""

from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_loops import _keep_rolled
from .cuda_tensor import (
    bits_of_f32,
    copy_piece,
    copy_weights,
    has_tensor_cores,
    load_matrices,
    multiply,
    shared_address,
    split,
)
from .cuda_words import define_by, define_text
from .numba_cuda import cuda
from .vocabulary import (
    DOTS_PITCH,
    barrier,
    block_threads,
    divide,
    f32,
    f32_of_bits,
    i32,
    i64,
    lane_id,
    lane_sum,
    thread_id,
    u32,
    warp_id,
    warps,
    widen,
)

STAGES = 4
STAGE_ROWS = 128
ROW_BYTES = 64
"""Of 32 columns, as bfloat16."""
PART_BYTES = STAGE_ROWS * ROW_BYTES
"""Half of a stage has three such parts: stored rows, the high and the low halves of x."""
HALF_STAGE = 3 * PART_BYTES
STAGE_BYTES = 2 * HALF_STAGE


def _end_of_group():
    """The copies started so far are a group. A word of the `cuda_` files."""
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
def _in_stage(e):
    """Where piece e of a stage's rows lies in its part."""
    return _piece(u32(e >> 2), u32(e & 3))


@cuda.jit(device=True)
def _stored_at(i, i2, outs, n, e):
    """Where piece e of the stored rows' first columns begins in the weights."""
    row, half = e >> 2, outs >> 1
    at = i + row * n if row < half else i2 + (row - half) * n
    return at + 8 * (e & 3)


@cuda.jit(device=True)
def _row_at(j, n, e):
    """Where piece e of the rows' first columns begins in x: high halves, and n / 2 floats further the low ones."""
    return j + (e >> 2) * n + 4 * (e & 3)


@cuda.jit(device=True)
def _fill_stored(stage, w, i, i2, outs, n, column, e):
    """Start the copies of a stage's columns of the stored rows, from piece e on. All lanes."""
    while e < 4 * outs:
        copy_weights(u32(stage + _in_stage(e)), w, _stored_at(i, i2, outs, n, e) + column)
        e += block_threads()


@cuda.jit(device=True)
def _copy_halves(to, x, at, n):
    """Start the copies of a piece of high halves, and of the same of low halves. One lane."""
    copy_piece(u32(to + u32(PART_BYTES)), x, at)
    copy_piece(u32(to + u32(2 * PART_BYTES)), x, at + (n >> 1))


@cuda.jit(device=True)
def _fill_rows(stage, x, j, rows, n, column, e):
    """Start the copies of a stage's columns of the rows of x, from piece e on. All lanes."""
    while e < 4 * rows:
        _copy_halves(u32(stage + _in_stage(e)), x, _row_at(j, n, e) + (column >> 1), n)
        e += block_threads()


@cuda.jit(device=True)
def _copy_mine(to, w, i, x, j, n, stored, row):
    """Start the copies of one piece of stored rows, and of rows of x, if there are such. One lane."""
    if stored:
        copy_weights(to, w, i)
    if row:
        _copy_halves(to, x, j, n)


@cuda.jit(device=True)
def _fill(stage, w, i, i2, outs, x, j, rows, n, column, end, e):
    """Start the copies of a stage from a column on, as far as there are any, and from piece e on. All lanes."""
    half = i32(0)
    while half < 2 and column < end:
        _fill_stored(stage, w, i, i2, outs, n, column, e)
        _fill_rows(stage, x, j, rows, n, column, e)
        stage, column, half = u32(stage + u32(HALF_STAGE)), column + 32, i32(half + 1)


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
def _tile(out, k, w, i, i2, outs, x, j, rows, n, first, columns):
    """:func:`.vocabulary.block_dots` on tensor cores, for a block with a warp for each part of 32 x 32."""
    stages, chunks = shared_address(out, k), i32((columns + 63) >> 6)
    wide = i32((outs + 31) >> 5)
    parts = i32(wide * ((rows + 31) >> 5))
    part, group, groups = i32(warp_id()), i32(0), i32(1)
    while 2 * groups * parts <= warps() and groups < 4:
        groups = i32(2 * groups)
    while part >= parts and group + 1 < groups:
        part, group = i32(part - parts), i32(group + 1)
    lane = u32(lane_id())
    # the lanes' rows and pieces in the matrices that a load reads: rows 0 to 15 and pieces 0 and 1 of a fragment
    row = u32((lane & u32(7)) + (lane & u32(8)))
    stored = u32(_piece(u32(u32(_first_stored(part, wide)) + row), u32(lane >> u32(4))))
    row = u32((lane & u32(7)) + ((lane >> u32(1)) & u32(8)))
    staged = _piece(u32(u32(_first_row(part, wide)) + row), u32((lane >> u32(3)) & u32(1)))
    staged = u32(staged + u32(PART_BYTES))
    zero = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    end = first + columns
    chunk = i32(0)
    while chunk < STAGES - 1:
        _keep_rolled()
        if chunk < chunks:
            there = u32(stages + u32(chunk) * u32(STAGE_BYTES))
            _fill(there, w, i, i2, outs, x, j, rows, n, first + 64 * chunk, end, thread_id())
        _end_of_group()
        chunk = i32(chunk + 1)
    # the lane's first pieces, which are all it has if there are lanes enough
    my_stored, my_row = 4 * outs - thread_id() > 0, 4 * rows - thread_id() > 0
    more = 4 * max(outs, i64(rows)) > block_threads()
    from_w, from_x = _stored_at(i, i2, outs, n, thread_id()) + first, _row_at(j, n, thread_id()) + (first >> 1)
    to, all_columns = _in_stage(thread_id()), i32(columns)
    chunk = i32(0)
    while chunk < chunks:
        _keep_rolled()
        _wait_for_groups()
        barrier()
        ahead = i32(chunk + STAGES - 1)
        if ahead < chunks:
            there, column = u32(stages + u32(ahead & (STAGES - 1)) * u32(STAGE_BYTES)), i32(64 * ahead)
            _copy_mine(u32(there + to), w, from_w + column, x, from_x + (column >> 1), n, my_stored, my_row)
            if column + 32 < all_columns:
                half = u32(there + to + u32(HALF_STAGE))
                _copy_mine(half, w, from_w + column + 32, x, from_x + (column >> 1) + 16, n, my_stored, my_row)
            if more:
                _fill(there, w, i, i2, outs, x, j, rows, n, first + column, end, thread_id() + block_threads())
        _end_of_group()
        if part < parts:
            here = u32(stages + u32(chunk & (STAGES - 1)) * u32(STAGE_BYTES))
            step, steps = group, min(i32(4), i32((end - first - 64 * chunk) >> 4))
            while step < steps:
                flip, at = u32(u32(step & 1) << u32(5)), u32(here + u32(step >> 1) * u32(HALF_STAGE))
                sums = _multiply_fragment(sums, u32(at + (stored ^ flip)), u32(at + (staged ^ flip)))
                step = i32(step + groups)
        chunk = i32(chunk + 1)
    at = k + _first_row(part, wide) * DOTS_PITCH + _first_stored(part, wide)
    turn = i32(0)
    while turn < groups:
        barrier()  # nobody reads the stages any more, where the sums go; nor does one add while another does
        if part < parts and group == turn:
            _put_part(out, at, sums, turn > 0)
        turn = i32(turn + 1)


@cuda.jit(device=True)
def _number(x, j, n, i):
    """Number i of a row that `row_put` has written."""
    if not has_tensor_cores():
        return x[j + i]
    at = j + (i >> 1)
    high, low, shift = bits_of_f32(x[at]), bits_of_f32(x[at + (n >> 1)]), u32((i & 1) << 4)
    return f32_of_bits(u32((high >> shift) << u32(16))) + f32_of_bits(u32((low >> shift) << u32(16)))


@cuda.jit(device=True)
def _rows_one_by_one(out, k, w, i, i2, outs, x, j, rows, n, first, columns):
    """:func:`.vocabulary.block_dots` without tensor cores: a warp takes a stored row at a time."""
    half, r = outs >> 1, warp_id()
    while r < outs:
        at = i + r * n
        if r >= half:
            at = i2 + (r - half) * n
        for t in range(rows):
            y, c = f32(0.0), first + lane_id()
            while c < first + columns:
                y += widen(w[at + c]) * _number(x, j + t * n, n, c)
                c += 32
            y = lane_sum(y)
            if lane_id() == 0:
                out[k + t * DOTS_PITCH + r] = y
        r += warps()


@define_by(words.row_put)
def _(x, j, n, i, a, b):
    def row_put(x, j, n, i, a, b):
        if has_tensor_cores():
            high, low = split(a, b)
            x[j + (i >> 1)] = f32_of_bits(high)
            x[j + (n >> 1) + (i >> 1)] = f32_of_bits(low)
        else:
            x[j + i] = a
            x[j + i + 1] = b

    return row_put


@define_by(words.block_dots)
def _(out, k, w, i, i2, outs, x, j, rows, n, first, columns):
    def of_bfloat16(out, k, w, i, i2, outs, x, j, rows, n, first, columns):
        parts = ((outs + 31) >> 5) * ((rows + 31) >> 5)
        if has_tensor_cores() and parts <= warps():
            _tile(out, k, w, i, i2, outs, x, j, rows, n, first, columns)
        else:
            _rows_one_by_one(out, k, w, i, i2, outs, x, j, rows, n, first, columns)

    def of_others(out, k, w, i, i2, outs, x, j, rows, n, first, columns):
        _rows_one_by_one(out, k, w, i, i2, outs, x, j, rows, n, first, columns)

    return of_bfloat16 if w.dtype == types.uint16 else of_others


@define_by(words.tiles_pay)
def _(w):
    if w.dtype == types.uint16:
        return lambda w: has_tensor_cores()
    return lambda w: False
