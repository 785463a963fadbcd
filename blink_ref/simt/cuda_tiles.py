"""Products of many rows on CUDA: tiles on tensor cores, from compute capability 9.0 on.

A block multiplies up to eight strips of 16 stored rows with up to 128 rows of x, both float16, in matrices of
8 x 8 (kernels/packing.py, :func:`.vocabulary.block_put`), which lie in memory as tensor cores take them. So the
four fragments of a strip that a stage holds are one run of memory, and so are eight columns of all rows: sixteen
bulk copies fill a stage, and nothing is rearranged. The second half of the warps does nothing but start them: a
copy costs a warp some 100 clocks, so each starts only two for a stage. The first half multiplies. An mbarrier says
that a stage is full, another that all who multiply are done with it, and nobody else is waited for.

Tiles follow each other without a gap: while the block looks at the results of one, the stages fill with the next,
and the stored rows of a run's first tile, which nobody has to compute, come before x is there.

On compute capability 9.0 four warps multiply 64 stored rows with 64 or 128 rows of x by `wgmma`, which reads both
factors from shared memory. Its 64 stored rows are the first halves of eight strips, or their second halves: these
matrices lie a strip apart. Elsewhere a warp multiplies 64 stored rows with 32 rows of x by `mma.sync`.
"""

from llvmlite import ir
from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_fragments import BACK
from .cuda_loops import _keep_rolled
from .cuda_tensor import has_tensor_cores, load_matrices, multiply_f16, shared_address
from .cuda_words import compiles_for, define, define_by
from .lowering import F32, asm
from .numba_cuda import cuda
from .vocabulary import (
    DOTS_PITCH,
    DOTS_RESULTS,
    FRAGMENT,
    arena_view,
    async_fence,
    barrier,
    copy_async,
    divide,
    f32,
    i32,
    i64,
    lane_id,
    lane_sum,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mbarriers,
    thread_id,
    u32,
    u64,
    warp_barrier,
    warp_id,
    warps,
    widen,
)

IN_STAGE = 4
"""Fragments of a strip in a stage."""
STRIP = 256 * IN_STAGE
"""Weights of a strip in a stage: 2 KB."""
ROWS_AT = 4096
"""Where the rows of x begin in a stage, in floats: behind eight strips."""
STAGES, STAGES_OF_FEW = 4, 6
"""Stages, and where a tile has 64 rows at most."""
STAGE, STAGE_OF_FEW = 8192, 6144
"""Floats of a stage; the same."""
FULL, EMPTY = 0, STAGES_OF_FEW
"""The mbarriers that tell of the stages."""
BARS = DOTS_RESULTS - 64
"""Where they lie: behind the stages."""
STATE = BARS + 4 * STAGES_OF_FEW
"""Where it is noted, as floats, which stage is next, the parity of its phase, and for how many stages rows of x
have been asked."""
WORKERS = 8
"""Warps that multiply, and as many that copy."""

_is_newer = compiles_for(1000)


@cuda.jit(device=True)
def _has_wgmma():
    """A constant: 9.0 alone has it."""
    return has_tensor_cores() and not _is_newer()


def wgmma(sums, a, b, step_a, step_b):
    """A lane's 32 or 64 sums, of 64 x 64 or 64 x 128, with one fragment more. By four warps; of this file only.

    a and b say where its matrices lie (:func:`_matrices`). Only :func:`wgmma_wait` may look at the sums.
    """
    raise NotImplementedError("compiled code only")


def wgmma_stage(sums, a, b, step_a, step_b):
    """:func:`wgmma` with all fragments of a stage; `step_a` and `step_b` lead from one to the next."""
    raise NotImplementedError("compiled code only")


def wgmma_wait(sums):
    """The sums, as soon as they are there. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _codegen(text_of):
    """What lowers a word that takes a lane's sums, and descriptors, and gives the sums; its text for so many."""

    def codegen(context, builder, signature, args):
        n = len(signature.args[0])
        constraints = ",".join(["=f"] * n + [str(m) for m in range(n)] + ["l"] * (len(args) - 1))
        before = [builder.extract_value(args[0], m) for m in range(n)]
        made = asm(builder, ir.LiteralStructType([F32] * n), text_of(n), constraints, [*before, *args[1:]])
        after = [builder.extract_value(made, m) for m in range(n)]
        return context.make_tuple(builder, signature.return_type, after)

    return codegen


def _define_wgmma(word, fragments):
    codegen = _codegen(lambda n: ptx.wgmma(n, fragments))
    define(word)(lambda _, sums, a, b, step_a, step_b: (sums(sums, *[types.uint64] * 4), codegen))


_define_wgmma(wgmma, 1)
_define_wgmma(wgmma_stage, IN_STAGE)
_wait_codegen = _codegen(lambda n: ptx.WGMMA_WAIT)
define(wgmma_wait)(lambda _, sums: (sums(sums), _wait_codegen))


@cuda.jit(device=True)
def _matrices(at, along, across):
    """Matrices of 8 x 8 as `wgmma` takes them ("Matrix Descriptor"): where the first begins in shared memory, the
    bytes to the next one of the same rows, and to the next of the same columns."""
    return (u64(at) >> u64(4)) | ((u64(along) >> u64(4)) << u64(16)) | ((u64(across) >> u64(4)) << u64(32))


@cuda.jit(device=True)
def _stages(most):
    """How many stages there are, and the floats of one, where a tile has so many rows at most."""
    if most > 64:
        return i32(STAGES), i64(STAGE)
    return i32(STAGES_OF_FEW), i64(STAGE_OF_FEW)


@cuda.jit(device=True)
def _state(out, k):
    """The stage that is next, and the parity of its phase."""
    return i32(out[k + STATE]), i32(out[k + STATE + 1])


@cuda.jit(device=True)
def _after(stage, parity, stages):
    """The stage behind a stage, and the parity of its phase."""
    stage = i32(stage + 1)
    return (stage, parity) if stage < stages else (i32(0), i32(parity ^ 1))


@cuda.jit(device=True)
def _asked(tile):
    """For how many stages it is asked before a tile is multiplied."""
    stages, _ = _stages(tile.most)
    return i32(min(i64(stages), (tile.n + (IN_STAGE - 1)) >> 2))


@cuda.jit(device=True)
def _copy(out, k, w, x, tile, begin, stored_from, end, with_rows):
    """A warp of the second half: its copies for a tile's stages from number `begin` on, before number `end`.

    Of each stage it copies a strip, but not of those before number `stored_from`, and eight columns of the rows,
    if they are wanted.
    """
    (stages, size), (stage, parity) = _stages(tile.most), _state(out, k)
    bars, stored = mbarriers(out, k + BARS, 2 * STAGES_OF_FEW), arena_view(out, k, DOTS_RESULTS * 2, w)
    mine, c, rows = i64(warp_id()) - WORKERS, begin, i64(tile.rows)
    stage = i32(stage + begin)
    if stage >= stages:
        stage, parity = i32(stage - stages), i32(parity ^ 1)
    left = i64(tile.n) - IN_STAGE * begin
    at = tile.at + (mine * tile.steps + tile.first + IN_STAGE * begin) * (FRAGMENT * FRAGMENT)
    j = tile.j + (2 * (tile.first + IN_STAGE * begin) + mine) * tile.across * 4
    async_fence()  # others have written x, and this block where the stages are
    while c < end:
        left = _keep_rolled(left)
        if c >= stored_from:
            mbarrier_wait(bars, EMPTY + i64(stage), i32(parity ^ 1))
        if lane_id() == 0:
            here, full, of_rows = min(i64(IN_STAGE), left), FULL + i64(stage), i64(0)
            of_strip = here if mine < tile.strips else i64(0)
            if mine < 2 * here:
                of_rows = rows
            if with_rows:
                mbarrier_expect_bytes(bars, full, 512 * of_strip + 16 * of_rows)
            if of_strip > 0 and c >= stored_from:
                to = i64(stage) * (2 * size) + mine * STRIP
                copy_async(stored, to, w, at, of_strip * (FRAGMENT * FRAGMENT), bars, full)
            if of_rows > 0 and with_rows:
                copy_async(out, k + i64(stage) * size + ROWS_AT + mine * rows * 4, x, j, rows * 4, bars, full)
        at += IN_STAGE * FRAGMENT * FRAGMENT
        j += 2 * IN_STAGE * tile.across * 4
        c, left = i32(c + 1), left - IN_STAGE
        stage, parity = _after(stage, parity, stages)


@cuda.jit(device=True)
def _by_four_warps(out, k, tile, sums):
    """A lane's sums of 64 stored rows, every other half of a strip, and 64 or 128 rows of x, by `wgmma`."""
    (stages, size), (stage, parity) = _stages(tile.most), _state(out, k)
    bars, half = mbarriers(out, k + BARS, 2 * STAGES_OF_FEW), u32(warp_id() >> 2)
    before, n, size = i32(-1), i64(tile.n), u32(size * 4)
    stored, staged = u32(shared_address(out, k) + half * u32(128)), u32(shared_address(out, k + ROWS_AT))
    while n > 0:
        n = _keep_rolled(n)
        mbarrier_wait(bars, FULL + i64(stage), parity)
        a = _matrices(u32(stored + u32(stage) * size), u32(256), u32(2 * STRIP))
        b = _matrices(u32(staged + u32(stage) * size), u32(tile.rows) * u32(16), u32(128))
        warp_barrier()  # whoever waited is here
        step_b, left = u64(tile.rows) << u64(1), i32(min(i64(IN_STAGE), n))
        if left == IN_STAGE:
            sums = wgmma_stage(sums, a, b, u64(32), step_b)
        else:
            while left > 0:
                left = _keep_rolled(left)
                sums = wgmma(sums, a, b, u64(32), step_b)
                a, b, left = u64(a + u64(32)), u64(b + step_b), i32(left - 1)
        if lane_id() == 0 and before >= 0:
            mbarrier_arrive(bars, EMPTY + i64(before))
        n, before = n - IN_STAGE, stage
        stage, parity = _after(stage, parity, stages)
    sums = wgmma_wait(sums)
    if lane_id() == 0:
        mbarrier_arrive(bars, EMPTY + i64(before))
    return sums


@cuda.jit(device=True)
def _add_strip(c0, c1, c2, c3, a, b, d):
    """Four sums of 16 x 8 with a fragment of weights more, and 32 rows of x."""
    c0, c1 = multiply_f16(c0, a, b[0], b[1]), multiply_f16(c1, a, b[2], b[3])
    return c0, c1, multiply_f16(c2, a, d[0], d[1]), multiply_f16(c3, a, d[2], d[3])


@cuda.jit(device=True)
def _by_one_warp(out, k, tile):
    """A lane's sums of 64 stored rows, four strips, and 32 rows of x, by `mma.sync`, in sixteen fours."""
    (stages, size), (stage, parity) = _stages(tile.most), _state(out, k)
    bars, n, size = mbarriers(out, k + BARS, 2 * STAGES_OF_FEW), i64(tile.n), u32(size * 4)
    zero, lane = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), u32(lane_id())
    stored = u32(shared_address(out, k) + u32(warp_id() & 1) * u32(8 * STRIP) + lane * u32(16))
    row = u32(u32(warp_id() >> 1) * u32(32) + (lane & u32(7)) + ((lane >> u32(4)) & u32(1)) * u32(8))
    half = u32(tile.rows) * u32(16)
    staged = u32(shared_address(out, k + ROWS_AT) + row * u32(16) + ((lane >> u32(3)) & u32(1)) * half)
    none = (zero, zero, zero, zero)
    s0, s1, s2, s3 = none, none, none, none
    while n > 0:
        n = _keep_rolled(n)
        mbarrier_wait(bars, FULL + i64(stage), parity)
        left, a = i32(min(i64(IN_STAGE), n)), u32(stored + u32(stage) * size)
        x = u32(staged + u32(stage) * size)
        while left > 0:
            left = _keep_rolled(left)
            b, d = load_matrices(x), load_matrices(u32(x + u32(256)))
            s0 = _add_strip(*s0, load_matrices(a), b, d)
            s1 = _add_strip(*s1, load_matrices(u32(a + u32(2 * STRIP))), b, d)
            s2 = _add_strip(*s2, load_matrices(u32(a + u32(4 * STRIP))), b, d)
            s3 = _add_strip(*s3, load_matrices(u32(a + u32(6 * STRIP))), b, d)
            a, x, left = u32(a + u32(512)), u32(x + half + half), i32(left - 1)
        warp_barrier()
        if lane_id() == 0:
            mbarrier_arrive(bars, EMPTY + i64(stage))
        n -= IN_STAGE
        stage, parity = _after(stage, parity, stages)
    return s0, s1, s2, s3


@cuda.jit(device=True)
def _put_four(out, at, gap, a, b, c, d):
    """One lane: two neighbouring rows' sums of two stored rows, the second `gap` behind the first."""
    out[at] = a * BACK
    out[at + DOTS_PITCH] = b * BACK
    out[at + gap] = c * BACK
    out[at + DOTS_PITCH + gap] = d * BACK


@cuda.jit(device=True)
def _put_strip(out, at, sums):
    """One warp: its 16 x 32 sums of a strip."""
    _put_four(out, at, 8, *sums[0])
    _put_four(out, at + 8 * DOTS_PITCH, 8, *sums[1])
    _put_four(out, at + 16 * DOTS_PITCH, 8, *sums[2])
    _put_four(out, at + 24 * DOTS_PITCH, 8, *sums[3])


NONE, NONE_OF_FEW = (f32(0.0),) * 64, (f32(0.0),) * 32


@cuda.jit(device=True)
def _put_sums(out, at, rows, sums):
    """One lane: its sums of `wgmma`, to the results of so many rows."""
    for m in range(len(sums) >> 2):
        if 8 * m < rows:
            here = at + 8 * m * DOTS_PITCH
            _put_four(out, here, 16, sums[4 * m], sums[4 * m + 1], sums[4 * m + 2], sums[4 * m + 3])


@cuda.jit(device=True)
def _ask(out, k, w, x, tile, begins):
    """:func:`.vocabulary.dots_ask`, by a block of 16 warps."""
    if begins:
        if thread_id() < 2 * STAGES_OF_FEW:
            mbarrier_init(mbarriers(out, k + BARS, 2 * STAGES_OF_FEW), thread_id(), WORKERS)
        if thread_id() == 0:
            out[k + STATE] = f32(0.0)
            out[k + STATE + 1] = f32(0.0)
        barrier()
    if warp_id() >= WORKERS:
        _copy(out, k, w, x, tile, i32(0), i32(0), _asked(tile), not begins)
    if thread_id() == 0:
        out[k + STATE + 2] = f32(0 if begins else _asked(tile))


@cuda.jit(device=True)
def _forget(out, k, tile):
    """:func:`.vocabulary.dots_forget`: the stages are as full as they can be, and are waited for."""
    bars = mbarriers(out, k + BARS, 2 * STAGES_OF_FEW)
    mine, left = i64(warp_id()) - WORKERS, i64(tile.n)
    for stage in range(_asked(tile)):
        if warp_id() >= WORKERS and lane_id() == 0:
            of_strip = min(i64(IN_STAGE), left) if mine < tile.strips else i64(0)
            mbarrier_expect_bytes(bars, FULL + stage, 512 * of_strip)
        left -= IN_STAGE
    for stage in range(_asked(tile)):
        mbarrier_wait(bars, FULL + stage, 0)


@cuda.jit(device=True)
def _tile(out, k, w, x, tile):
    """:func:`.vocabulary.block_dots` on tensor cores, by a block of 16 warps."""
    warp, results = i64(warp_id()), k + DOTS_RESULTS
    (stages, _), (stage, parity) = _stages(tile.most), _state(out, k)
    lane, chunks = results + (lane_id() >> 2) + 2 * (lane_id() & 3) * DOTS_PITCH, (tile.n + (IN_STAGE - 1)) >> 2
    if warp >= WORKERS:
        _copy(out, k, w, x, tile, i32(out[k + STATE + 2]), _asked(tile), i32(chunks), True)
    elif _has_wgmma():
        to = lane + 32 * (warp & 3) + 8 * (warp >> 2)
        if tile.most > 64:
            _put_sums(out, to, tile.rows, _by_four_warps(out, k, tile, NONE))
        else:
            _put_sums(out, to, tile.rows, _by_four_warps(out, k, tile, NONE_OF_FEW))
    else:
        s0, s1, s2, s3 = _by_one_warp(out, k, tile)
        to = lane + 64 * (warp & 1) + 32 * (warp >> 1) * DOTS_PITCH
        _put_strip(out, to, s0)
        _put_strip(out, to + 16, s1)
        _put_strip(out, to + 32, s2)
        _put_strip(out, to + 48, s3)
    barrier()  # all have read the state
    if thread_id() == 0:
        turns, more = divide(i64(stage) + chunks, i64(stages))
        out[k + STATE] = f32(more)
        out[k + STATE + 1] = f32(parity ^ i32(turns & 1))


@cuda.jit(device=True)
def _rows_one_by_one(out, k, w, x, tile):
    """:func:`.vocabulary.block_dots` without tensor cores: a warp takes a stored row at a time."""
    r, across = i64(warp_id()), tile.across
    j = tile.j + tile.first * across * FRAGMENT
    while r < FRAGMENT * tile.strips:
        stored = tile.at + ((r >> 4) * tile.steps + tile.first) * (FRAGMENT * FRAGMENT)
        stored += ((r >> 3) & 1) * 64 + (r & 7) * 8
        for t in range(tile.rows):
            y, c = f32(0.0), i64(lane_id())
            while c < FRAGMENT * tile.n:
                of = stored + (c >> 4) * (FRAGMENT * FRAGMENT) + ((c >> 3) & 1) * 128 + (c & 7)
                y += widen(w[of]) * x[j + ((c >> 3) * across + t) * 8 + (c & 7)]
                c += 32
            y = lane_sum(y)
            if lane_id() == 0:
                out[k + DOTS_RESULTS + t * DOTS_PITCH + r] = y
        r += warps()


@define_by(words.dots_ask)
def _(out, k, w, x, tile, begins):
    def dots_ask(out, k, w, x, tile, begins):
        if has_tensor_cores():
            _ask(out, k, w, x, tile, begins)

    return dots_ask


@define_by(words.dots_forget)
def _(out, k, w, tile):
    def dots_forget(out, k, w, tile):
        if has_tensor_cores():
            _forget(out, k, tile)

    return dots_forget


@define_by(words.block_dots)
def _(out, k, w, x, tile):
    def block_dots(out, k, w, x, tile):
        if has_tensor_cores():
            _tile(out, k, w, x, tile)
        else:
            _rows_one_by_one(out, k, w, x, tile)

    return block_dots


@define_by(words.tiles_pay)
def _(w):
    if w.dtype == types.float32:
        return lambda w: False
    return lambda w: has_tensor_cores()
