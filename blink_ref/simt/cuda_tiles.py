"""Products of many rows on CUDA: tiles on tensor cores, from compute capability 9.0 on.

A block multiplies up to eight strips of 16 stored rows with up to 128 rows of x, both float16, in matrices of
8 x 8 (kernels/packing.py, :func:`.vocabulary.block_put`), which lie in memory as tensor cores take them. So the
four fragments of a strip that a stage holds are one run of memory, and so are eight columns of all rows: sixteen
bulk copies fill a stage, and nothing is rearranged. The second half of the warps does nothing but start them: a
copy costs a warp some 100 clocks, so each starts only two for a stage. The first half multiplies. An mbarrier says
that a stage is full, another that all who multiply are done with it, and nobody else is waited for.

On compute capability 9.0 four warps multiply 64 stored rows with 128 rows of x by `wgmma`, which reads both
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
    FRAGMENT,
    arena_view,
    async_fence,
    barrier,
    copy_async,
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

STAGES = 6
IN_STAGE = 4
"""Fragments of a strip in a stage."""
STRIP = 256 * IN_STAGE
"""Weights of a strip in a stage: 2 KB."""
ROWS_AT = 4096
"""Where the rows of x begin in a stage, in floats: behind eight strips."""
STAGE = 8192
"""Floats of a stage."""
FULL, EMPTY = 0, STAGES
"""The mbarriers that tell of the stages."""
BARS = STAGES * STAGE
"""Where they lie: behind the stages."""
WORKERS = 8
"""Warps that multiply, and as many that copy."""
SUMS = 64
"""Of a lane that multiplies."""

_is_newer = compiles_for(1000)


@cuda.jit(device=True)
def _has_wgmma():
    """A constant: 9.0 alone has it."""
    return has_tensor_cores() and not _is_newer()


def wgmma(sums, a, b, step_a, step_b):
    """A lane's 64 sums of 64 x 128 with one fragment more, by four warps. A word of this file only.

    a and b say where its matrices lie (:func:`_matrices`). Only :func:`wgmma_wait` may look at the sums.
    """
    raise NotImplementedError("compiled code only")


def wgmma_stage(sums, a, b, step_a, step_b):
    """:func:`wgmma` with all fragments of a stage; `step_a` and `step_b` lead from one to the next."""
    raise NotImplementedError("compiled code only")


def wgmma_wait(sums):
    """The sums, as soon as they are there. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _define_wgmma(word, text, others):
    """Lower a word that takes 64 sums, and so many descriptors, and gives 64 sums."""
    result = types.UniTuple(types.float32, SUMS)
    constraints = ",".join(["=f"] * SUMS + [str(n) for n in range(SUMS)] + ["l"] * others)

    def codegen(context, builder, signature, args):
        before = [builder.extract_value(args[0], n) for n in range(SUMS)]
        made = asm(builder, ir.LiteralStructType([F32] * SUMS), text, constraints, [*before, *args[1:]])
        return context.make_tuple(builder, result, [builder.extract_value(made, n) for n in range(SUMS)])

    signature = result(result, *[types.uint64] * others)
    if others:
        define(word)(lambda typing_context, sums, a, b, step_a, step_b: (signature, codegen))
    else:
        define(word)(lambda typing_context, sums: (signature, codegen))


_define_wgmma(wgmma, ptx.wgmma(SUMS, 1), 4)
_define_wgmma(wgmma_stage, ptx.wgmma(SUMS, IN_STAGE), 4)
_define_wgmma(wgmma_wait, ptx.WGMMA_WAIT, 0)


@cuda.jit(device=True)
def _matrices(at, along, across):
    """Matrices of 8 x 8 as `wgmma` takes them ("Matrix Descriptor"): where the first begins in shared memory, the
    bytes to the next one of the same rows, and to the next of the same columns."""
    return (u64(at) >> u64(4)) | ((u64(along) >> u64(4)) << u64(16)) | ((u64(across) >> u64(4)) << u64(32))


@cuda.jit(device=True)
def _copy(out, k, w, at, steps, strips, x, j, across, rows, n):
    """A warp of the second half: its two copies of each stage, of a strip and of eight columns of the rows."""
    bars, stored = mbarriers(out, k + BARS, 2 * STAGES), arena_view(out, k, 2 * STAGES * STAGE, w)
    mine, stage, parity = i64(warp_id()) - WORKERS, i32(0), i32(1)
    at += mine * steps * (FRAGMENT * FRAGMENT)
    j += mine * across * 4
    async_fence()  # others have written x, and this block where the stages are
    while n > 0:
        n = _keep_rolled(n)
        mbarrier_wait(bars, EMPTY + i64(stage), parity)
        if lane_id() == 0:
            here, full, of_rows = min(i64(IN_STAGE), n), FULL + i64(stage), i64(0)
            of_strip = here if mine < strips else i64(0)
            if mine < 2 * here:
                of_rows = rows
            mbarrier_expect_bytes(bars, full, 512 * of_strip + 16 * of_rows)
            if of_strip > 0:
                to = i64(stage) * (2 * STAGE) + mine * STRIP
                copy_async(stored, to, w, at, of_strip * (FRAGMENT * FRAGMENT), bars, full)
            if of_rows > 0:
                copy_async(out, k + i64(stage) * STAGE + ROWS_AT + mine * rows * 4, x, j, rows * 4, bars, full)
        at += IN_STAGE * FRAGMENT * FRAGMENT
        j += 2 * IN_STAGE * across * 4
        n -= IN_STAGE
        stage = i32(stage + 1)
        if stage == STAGES:
            stage, parity = i32(0), i32(parity ^ 1)


@cuda.jit(device=True)
def _by_four_warps(out, k, rows, n):
    """A lane's sums of 64 stored rows, every other half of a strip, and 128 rows of x, by `wgmma`."""
    bars, half = mbarriers(out, k + BARS, 2 * STAGES), u32(warp_id() >> 2)
    stage, parity, before, sums = i32(0), i32(0), i32(-1), NONE
    stored, staged = u32(shared_address(out, k) + half * u32(128)), u32(shared_address(out, k + ROWS_AT))
    while n > 0:
        n = _keep_rolled(n)
        mbarrier_wait(bars, FULL + i64(stage), parity)
        a = _matrices(u32(stored + u32(stage) * u32(4 * STAGE)), u32(256), u32(2 * STRIP))
        b = _matrices(u32(staged + u32(stage) * u32(4 * STAGE)), u32(rows) * u32(16), u32(128))
        warp_barrier()  # whoever waited is here
        step_b, left = u64(rows) << u64(1), i32(min(i64(IN_STAGE), n))
        if left == IN_STAGE:
            sums = wgmma_stage(sums, a, b, u64(32), step_b)
        else:
            while left > 0:
                left = _keep_rolled(left)
                sums = wgmma(sums, a, b, u64(32), step_b)
                a, b, left = u64(a + u64(32)), u64(b + step_b), i32(left - 1)
        if lane_id() == 0 and before >= 0:
            mbarrier_arrive(bars, EMPTY + i64(before))
        n -= IN_STAGE
        before, stage = stage, i32(stage + 1)
        if stage == STAGES:
            stage, parity = i32(0), i32(parity ^ 1)
    return wgmma_wait(sums)


@cuda.jit(device=True)
def _add_strip(c0, c1, c2, c3, a, b, d):
    """Four sums of 16 x 8 with a fragment of weights more, and 32 rows of x."""
    c0, c1 = multiply_f16(c0, a, b[0], b[1]), multiply_f16(c1, a, b[2], b[3])
    return c0, c1, multiply_f16(c2, a, d[0], d[1]), multiply_f16(c3, a, d[2], d[3])


@cuda.jit(device=True)
def _by_one_warp(out, k, rows, n):
    """A lane's sums of 64 stored rows, four strips, and 32 rows of x, by `mma.sync`, in sixteen fours."""
    bars, stage, parity = mbarriers(out, k + BARS, 2 * STAGES), i32(0), i32(0)
    zero, lane = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), u32(lane_id())
    stored = u32(shared_address(out, k) + u32(warp_id() & 1) * u32(8 * STRIP) + lane * u32(16))
    row = u32(u32(warp_id() >> 1) * u32(32) + (lane & u32(7)) + ((lane >> u32(4)) & u32(1)) * u32(8))
    half = u32(rows) * u32(16)
    staged = u32(shared_address(out, k + ROWS_AT) + row * u32(16) + ((lane >> u32(3)) & u32(1)) * half)
    none = (zero, zero, zero, zero)
    s0, s1, s2, s3 = none, none, none, none
    while n > 0:
        n = _keep_rolled(n)
        mbarrier_wait(bars, FULL + i64(stage), parity)
        left, a = i32(min(i64(IN_STAGE), n)), u32(stored + u32(stage) * u32(4 * STAGE))
        x = u32(staged + u32(stage) * u32(4 * STAGE))
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
        stage = i32(stage + 1)
        if stage == STAGES:
            stage, parity = i32(0), i32(parity ^ 1)
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


NONE = (f32(0.0),) * SUMS


@cuda.jit(device=True)
def _tile(out, k, w, at, x, j, steps, strips, across, rows, n):
    """:func:`.vocabulary.block_dots` on tensor cores, from the first fragment on, by a block of 16 warps."""
    bars, warp = mbarriers(out, k + BARS, 2 * STAGES), i64(warp_id())
    if thread_id() == 0:
        for stage in range(STAGES):
            mbarrier_init(bars, FULL + stage, WORKERS)
            mbarrier_init(bars, EMPTY + stage, WORKERS)
    barrier()
    lane = k + (lane_id() >> 2) + 2 * (lane_id() & 3) * DOTS_PITCH
    if warp >= WORKERS:
        _copy(out, k, w, at, steps, strips, x, j, across, rows, n)
        barrier()
    elif _has_wgmma():
        sums = _by_four_warps(out, k, rows, n)
        barrier()  # nobody reads the stages any more, where the sums go
        to = lane + 32 * (warp & 3) + 8 * (warp >> 2)
        for m in range(16):
            if 8 * m < rows:
                here = to + 8 * m * DOTS_PITCH
                _put_four(out, here, 16, sums[4 * m], sums[4 * m + 1], sums[4 * m + 2], sums[4 * m + 3])
    else:
        s0, s1, s2, s3 = _by_one_warp(out, k, rows, n)
        barrier()
        to = lane + 64 * (warp & 1) + 32 * (warp >> 1) * DOTS_PITCH
        _put_strip(out, to, s0)
        _put_strip(out, to + 16, s1)
        _put_strip(out, to + 32, s2)
        _put_strip(out, to + 48, s3)


@cuda.jit(device=True)
def _rows_one_by_one(out, k, w, at, steps, strips, x, j, across, rows, n):
    """:func:`.vocabulary.block_dots` without tensor cores: a warp takes a stored row at a time."""
    r = i64(warp_id())
    while r < FRAGMENT * strips:
        stored = at + (r >> 4) * steps * (FRAGMENT * FRAGMENT) + ((r >> 3) & 1) * 64 + (r & 7) * 8
        for t in range(rows):
            y, c = f32(0.0), i64(lane_id())
            while c < FRAGMENT * n:
                of = stored + (c >> 4) * (FRAGMENT * FRAGMENT) + ((c >> 3) & 1) * 128 + (c & 7)
                y += widen(w[of]) * x[j + ((c >> 3) * across + t) * 8 + (c & 7)]
                c += 32
            y = lane_sum(y)
            if lane_id() == 0:
                out[k + t * DOTS_PITCH + r] = y
        r += warps()


@define_by(words.block_dots)
def _(out, k, w, at, steps, strips, x, j, across, rows, first, n):
    def block_dots(out, k, w, at, steps, strips, x, j, across, rows, first, n):
        at += first * (FRAGMENT * FRAGMENT)
        if has_tensor_cores():
            j += first * across * FRAGMENT >> 1
            sizes = i64(steps), i64(strips), i64(across), i64(rows), i64(n)
            _tile(out, k, w, i64(at), x, i64(j), *sizes)
        else:
            j += first * across * FRAGMENT
            _rows_one_by_one(out, k, w, at, steps, strips, x, j, across, rows, n)

    return block_dots


@define_by(words.tiles_pay)
def _(w):
    if w.dtype == types.float32:
        return lambda w: False
    return lambda w: has_tensor_cores()
