"""The inner loops on CUDA: 32 lanes, 16-byte loads, several in flight."""

from llvmlite import ir
from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_words import access, compiles_for, define, define_by, is_at_least
from .lowering import F32, I16, I32, I64, asm, index_argument, is_vector
from .numba_cuda import cuda
from .vocabulary import (
    FULL_WARP,
    block_threads,
    f32,
    i32,
    i64,
    lane_id,
    lane_sum,
    opaque,
    row_dot,
    row_dots,
    thread_id,
)


def _keep_rolled(n):
    """At a loop's head: do not unroll it. `n` is what it counts with: itself, but nobody may know how often it
    goes round, or LLVM makes four rounds of one, and copies what tells ptxas not to. A word of simt only."""
    raise NotImplementedError("compiled code only")


@define(_keep_rolled)
def _(typing_context, n):
    bits = n if n in (types.int32, types.int64) else types.int64

    def codegen(context, builder, signature, args):
        same = "=r,0" if bits is types.int32 else "=l,0"
        return asm(builder, I32 if bits is types.int32 else I64, ptx.NO_UNROLL, same, args)

    return bits(bits), codegen


def _eight(a, i):
    """Elements ``a[i:i+8]`` as eight float32 in a tuple, by 16-byte loads. A word of this file only.

    Of 16-bit elements these are loads of what nothing writes while the kernel runs.
    """
    raise NotImplementedError("compiled code only")


def _floats(builder, pointer, index):
    """``pointer[index : index+4]`` of float32 as four values, by one 16-byte load."""
    vector = ir.VectorType(F32, 4)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    loaded = builder.load(at, align=16)
    return [builder.extract_element(loaded, ir.Constant(I32, lane)) for lane in range(4)]


def _words(builder, pointer, index, n):
    """From ``pointer[index]`` on n 32-bit words as values, by one ordinary load; so aligned."""
    vector = ir.VectorType(I32, n)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    loaded = builder.load(at, align=4 * n)
    return [builder.extract_element(loaded, ir.Constant(I32, lane)) for lane in range(n)]


def _halves(builder, word, dtype):
    """The two stored 16-bit numbers in a 32-bit word, as float32, the lower first."""
    if dtype == types.uint16:
        texts = (ptx.LOW_HALF, ptx.HIGH_HALF)
        return [builder.bitcast(asm(builder, I32, t, "=r,r", [word], effects=False), F32) for t in texts]
    parts = (builder.trunc(word, I16), builder.trunc(builder.lshr(word, ir.Constant(I32, 16)), I16))
    return [builder.fpext(builder.bitcast(part, ir.HalfType()), F32) for part in parts]


@define(_eight)
def _(typing_context, a, i):
    if not is_vector(a):
        return None
    result = types.UniTuple(types.float32, 8)

    def codegen(context, builder, signature, args):
        index = index_argument(context, builder, signature, args, 1)
        pointer = context.make_array(a)(context, builder, args[0]).data
        if a.dtype == types.float32:
            values = _floats(builder, pointer, index)
            values += _floats(builder, pointer, builder.add(index, ir.Constant(I64, 4)))
        else:
            four = ir.LiteralStructType([I32] * 4)
            at = builder.gep(pointer, [index])
            with builder.if_else(is_at_least(builder, 800)) as (newer, older):
                with newer:
                    once = asm(builder, four, ptx.LOAD_WEIGHTS_ONCE, "=r,=r,=r,=r,l", [at], effects=False)
                    newer_end = builder.block
                with older:
                    plain = asm(builder, four, ptx.LOAD_WEIGHTS, "=r,=r,=r,=r,l", [at], effects=False)
                    older_end = builder.block
            loaded = builder.phi(four)
            loaded.add_incoming(once, newer_end)
            loaded.add_incoming(plain, older_end)
            pairs = [builder.extract_value(loaded, k) for k in range(4)]
            values = [v for pair in pairs for v in _halves(builder, pair, a.dtype)]
        return context.make_tuple(builder, result, values)

    return result(a, i), codegen


def _four(a, i):
    """Elements ``a[i:i+4]`` in a tuple of float32, by one ordinary load. A word of this file only.

    Of float32 (16 bytes), or of bfloat16 (8 bytes).
    """
    raise NotImplementedError("compiled code only")


def _eight_written(a, i):
    """The same of eight elements: :func:`_eight` of what the kernel itself may write. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _define_ordinary(word, n):
    """`word` takes n elements, by loads of 16 bytes at most."""
    result = types.UniTuple(types.float32, n)

    @define(word)
    def _(typing_context, a, i):
        if not (is_vector(a) and a.dtype in (types.float32, types.uint16)):
            return None

        def codegen(context, builder, signature, args):
            index = index_argument(context, builder, signature, args, 1)
            pointer = context.make_array(a)(context, builder, args[0]).data
            if a.dtype == types.float32:
                fours = (builder.add(index, ir.Constant(I64, first)) for first in range(0, n, 4))
                values = [value for at in fours for value in _floats(builder, pointer, at)]
            else:
                pairs = _words(builder, pointer, index, n // 2)
                values = [value for pair in pairs for value in _halves(builder, pair, a.dtype)]
            return context.make_tuple(builder, result, values)

        return result(a, i), codegen


_define_ordinary(_four, 4)
_define_ordinary(_eight_written, 8)


def eight_halves(a, i):
    """Elements ``a[i:i+8]`` of bfloat16 as four words, by one ordinary load. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(eight_halves)
def _(typing_context, a, i):
    result = types.UniTuple(types.uint32, 4)

    def codegen(context, builder, signature, args):
        index = index_argument(context, builder, signature, args, 1)
        pointer = context.make_array(a)(context, builder, args[0]).data
        return context.make_tuple(builder, result, _words(builder, pointer, index, 4))

    return result(a, i), codegen


def two_words(a, i):
    """Elements ``a[i:i+2]`` of 32 bits as two words, by one load of 8 bytes. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(two_words)
def _(typing_context, a, i):
    result = types.UniTuple(types.uint32, 2)

    def codegen(context, builder, signature, args):
        index = index_argument(context, builder, signature, args, 1)
        pointer = context.make_array(a)(context, builder, args[0]).data
        return context.make_tuple(builder, result, _words(builder, pointer, index, 2))

    return result(a, i), codegen


def store_two_words(a, i, first, second):
    """Two words become ``a[i:i+2]`` of 32 bits, by one store of 8 bytes. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(store_two_words)
def _(typing_context, a, i, first, second):
    def codegen(context, builder, signature, args):
        pointer = access(context, builder, signature, args)
        vector = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
        for lane in range(2):
            vector = builder.insert_element(vector, args[2 + lane], ir.Constant(I32, lane))
        builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.none(a, i, types.uint32, types.uint32), codegen


def _store_four(a, i, values):
    """``a[i:i+4] = values`` of float32, by one 16-byte store. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_store_four)
def _(typing_context, a, i, values):
    def codegen(context, builder, signature, args):
        pointer = access(context, builder, signature, args)
        vector = ir.Constant(ir.VectorType(F32, 4), ir.Undefined)
        for lane in range(4):
            value = builder.extract_value(args[2], lane)
            vector = builder.insert_element(vector, value, ir.Constant(I32, lane))
        builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=16)
        return context.get_dummy_value()

    return types.none(a, i, values), codegen


@define_by(words.block_copy)
def _(out, k, a, i, n):
    def block_copy(out, k, a, i, n):
        step = block_threads() * 4
        c = thread_id() * 4
        while c + 3 * step < n:  # four loads in flight: a store waits for its load, and the next load for it
            a0, a1 = _four(a, i + c), _four(a, i + c + step)
            a2, a3 = _four(a, i + c + 2 * step), _four(a, i + c + 3 * step)
            _store_four(out, k + c, a0)
            _store_four(out, k + c + step, a1)
            _store_four(out, k + c + 2 * step, a2)
            _store_four(out, k + c + 3 * step, a3)
            c += 4 * step
        while c < n:
            _store_four(out, k + c, _four(a, i + c))
            c += step

    return block_copy


@define_by(words.block_scale)
def _(out, k, a, i, scale, gain, g, n):
    def block_scale(out, k, a, i, scale, gain, g, n):
        c = thread_id() * 4
        while c < n:
            x, y = _four(a, i + c), _four(gain, g + c)
            scaled = (x[0] * scale * y[0], x[1] * scale * y[1], x[2] * scale * y[2], x[3] * scale * y[3])
            _store_four(out, k + c, scaled)
            c += block_threads() * 4

    return block_scale


def _fma(a, b, c):
    """a * b + c, rounded once, wherever it is inlined. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_fma)
def _(typing_context, a, b, c):
    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@cuda.jit(device=True)
def _add_dot8(s, a, b):
    """s plus the dot product of two eights, a chain of fused steps: its rounding leaves the compiler no choice."""
    s = _fma(a[0], b[0], s)
    s = _fma(a[1], b[1], s)
    s = _fma(a[2], b[2], s)
    s = _fma(a[3], b[3], s)
    s = _fma(a[4], b[4], s)
    s = _fma(a[5], b[5], s)
    s = _fma(a[6], b[6], s)
    return _fma(a[7], b[7], s)


@define_by(words.row_dot)
def _(w, i, x, j, n):
    def of_floats(w, i, x, j, n):
        s = f32(0.0)
        k = lane_id() * 8
        while k < n:
            k = _keep_rolled(k)
            s = _add_dot8(s, _eight(w, i + k), _eight(x, j + k))
            k = opaque(k + 256)
        return lane_sum(s)

    def of_halves(w, i, x, j, n):
        k = lane_id() * 8
        i += k
        j += k
        s, t = f32(0.0), f32(0.0)
        while k + 1792 < n:  # eight loads in flight: a warp alone must cover the memory's latency
            k = _keep_rolled(k)
            w0, w1, w2, w3 = _eight(w, i), _eight(w, i + 256), _eight(w, i + 512), _eight(w, i + 768)
            w4, w5, w6, w7 = _eight(w, i + 1024), _eight(w, i + 1280), _eight(w, i + 1536), _eight(w, i + 1792)
            s = _add_dot8(s, w0, _eight(x, j))
            t = _add_dot8(t, w1, _eight(x, j + 256))
            s = _add_dot8(s, w2, _eight(x, j + 512))
            t = _add_dot8(t, w3, _eight(x, j + 768))
            s = _add_dot8(s, w4, _eight(x, j + 1024))
            t = _add_dot8(t, w5, _eight(x, j + 1280))
            s = _add_dot8(s, w6, _eight(x, j + 1536))
            t = _add_dot8(t, w7, _eight(x, j + 1792))
            i += 2048
            j += 2048
            k += 2048
        while k + 256 < n:
            k = _keep_rolled(k)
            w0, w1 = _eight(w, i), _eight(w, i + 256)
            s = _add_dot8(s, w0, _eight(x, j))
            t = _add_dot8(t, w1, _eight(x, j + 256))
            i += 512
            j += 512
            k += 512
        if k < n:
            s = _add_dot8(s, _eight(w, i), _eight(x, j))
        return lane_sum(s + t)

    return of_floats if w.dtype == types.float32 else of_halves


@cuda.jit(device=True)
def _two_row_dots(w, i, x, j, n):
    """:func:`row_dot` of one stored row with two rows of x, each weight loaded once; adds in the same order."""
    k = lane_id() * 8
    i += k
    j += k
    s0, s1, t0, t1 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    while k + 768 < n:
        k = _keep_rolled(k)
        w0, w1, w2, w3 = _eight(w, i), _eight(w, i + 256), _eight(w, i + 512), _eight(w, i + 768)
        s0 = _add_dot8(s0, w0, _eight(x, j))
        s1 = _add_dot8(s1, w0, _eight(x, j + n))
        t0 = _add_dot8(t0, w1, _eight(x, j + 256))
        t1 = _add_dot8(t1, w1, _eight(x, j + n + 256))
        s0 = _add_dot8(s0, w2, _eight(x, j + 512))
        s1 = _add_dot8(s1, w2, _eight(x, j + n + 512))
        t0 = _add_dot8(t0, w3, _eight(x, j + 768))
        t1 = _add_dot8(t1, w3, _eight(x, j + n + 768))
        i += 1024
        j += 1024
        k += 1024
    while k + 256 < n:
        k = _keep_rolled(k)
        w0, w1 = _eight(w, i), _eight(w, i + 256)
        s0 = _add_dot8(s0, w0, _eight(x, j))
        s1 = _add_dot8(s1, w0, _eight(x, j + n))
        t0 = _add_dot8(t0, w1, _eight(x, j + 256))
        t1 = _add_dot8(t1, w1, _eight(x, j + n + 256))
        i += 512
        j += 512
        k += 512
    if k < n:
        w0 = _eight(w, i)
        s0 = _add_dot8(s0, w0, _eight(x, j))
        s1 = _add_dot8(s1, w0, _eight(x, j + n))
    return lane_sum(s0 + t0), lane_sum(s1 + t1)


@cuda.jit(device=True)
def _four_row_dots(w, i, x, j, n):
    """:func:`row_dot` of one stored row with four rows of x, each weight loaded once; adds in the same order."""
    k = lane_id() * 8
    i += k
    j += k
    s0, s1, s2, s3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    t0, t1, t2, t3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    while k + 256 < n:
        k = _keep_rolled(k)
        even, odd = _eight(w, i), _eight(w, i + 256)
        s0 = _add_dot8(s0, even, _eight(x, j))
        s1 = _add_dot8(s1, even, _eight(x, j + n))
        s2 = _add_dot8(s2, even, _eight(x, j + 2 * n))
        s3 = _add_dot8(s3, even, _eight(x, j + 3 * n))
        t0 = _add_dot8(t0, odd, _eight(x, j + 256))
        t1 = _add_dot8(t1, odd, _eight(x, j + n + 256))
        t2 = _add_dot8(t2, odd, _eight(x, j + 2 * n + 256))
        t3 = _add_dot8(t3, odd, _eight(x, j + 3 * n + 256))
        i += 512
        j += 512
        k += 512
    if k < n:
        even = _eight(w, i)
        s0 = _add_dot8(s0, even, _eight(x, j))
        s1 = _add_dot8(s1, even, _eight(x, j + n))
        s2 = _add_dot8(s2, even, _eight(x, j + 2 * n))
        s3 = _add_dot8(s3, even, _eight(x, j + 3 * n))
    return lane_sum(s0 + t0), lane_sum(s1 + t1), lane_sum(s2 + t2), lane_sum(s3 + t3)


@define_by(words.row_dots)
def _(w, i, x, j, rows, n, out, k):
    # float32 weights take twice the registers, and leave none for several rows
    several = w.dtype != types.float32

    def row_dots(w, i, x, j, rows, n, out, k):
        t = i64(0)
        while several and t + 3 < rows:
            y0, y1, y2, y3 = _four_row_dots(w, i, x, j + t * n, n)
            if lane_id() == 0:
                out[k + t] = y0
                out[k + t + 1] = y1
                out[k + t + 2] = y2
                out[k + t + 3] = y3
            t += 4
        while several and t + 1 < rows:
            y0, y1 = _two_row_dots(w, i, x, j + t * n, n)
            if lane_id() == 0:
                out[k + t] = y0
                out[k + t + 1] = y1
            t += 2
        while t < rows:
            y = row_dot(w, i, x, j + t * n, n)
            if lane_id() == 0:
                out[k + t] = y
            t += 1

    return row_dots


@define_by(words.row_dots_of_two)
def _(w, i, i2, x, j, rows, n, out, k, k2):
    def row_dots_of_two(w, i, i2, x, j, rows, n, out, k, k2):
        row_dots(w, i, x, j, rows, n, out, k)
        row_dots(w, i2, x, j, rows, n, out, k2)

    return row_dots_of_two


@cuda.jit(device=True)
def _dot_from(s, k, a, i, b, j, n):
    """s plus the products from the k-th on; b is what comes from afar."""
    while k + 24 < n:  # of float32, eight loads in flight
        k = _keep_rolled(k)
        b0, b1 = _eight_written(b, j + k), _eight_written(b, j + k + 8)
        b2, b3 = _eight_written(b, j + k + 16), _eight_written(b, j + k + 24)
        s = _add_dot8(s, _eight(a, i + k), b0)
        s = _add_dot8(s, _eight(a, i + k + 8), b1)
        s = _add_dot8(s, _eight(a, i + k + 16), b2)
        s = _add_dot8(s, _eight(a, i + k + 24), b3)
        k = opaque(k + 32)
    while k + 8 < n:
        k = _keep_rolled(k)
        b0, b1 = _eight_written(b, j + k), _eight_written(b, j + k + 8)
        s = _add_dot8(s, _eight(a, i + k), b0)
        s = _add_dot8(s, _eight(a, i + k + 8), b1)
        k = opaque(k + 16)
    if k < n:
        s = _add_dot8(s, _eight(a, i + k), _eight_written(b, j + k))
    return s


@define_by(words.dot)
def _(a, i, b, j, n):
    def with_floats(a, i, b, j, n):
        return _dot_from(f32(0.0), i64(0), a, i, b, j, n)

    def with_halves(a, i, b, j, n):
        s, k = f32(0.0), i64(0)
        while k + 56 < n:  # eight loads in flight
            k = _keep_rolled(k)
            b0, b1 = _eight_written(b, j + k), _eight_written(b, j + k + 8)
            b2, b3 = _eight_written(b, j + k + 16), _eight_written(b, j + k + 24)
            b4, b5 = _eight_written(b, j + k + 32), _eight_written(b, j + k + 40)
            b6, b7 = _eight_written(b, j + k + 48), _eight_written(b, j + k + 56)
            s = _add_dot8(s, _eight(a, i + k), b0)
            s = _add_dot8(s, _eight(a, i + k + 8), b1)
            s = _add_dot8(s, _eight(a, i + k + 16), b2)
            s = _add_dot8(s, _eight(a, i + k + 24), b3)
            s = _add_dot8(s, _eight(a, i + k + 32), b4)
            s = _add_dot8(s, _eight(a, i + k + 40), b5)
            s = _add_dot8(s, _eight(a, i + k + 48), b6)
            s = _add_dot8(s, _eight(a, i + k + 56), b7)
            k = opaque(k + 64)
        return _dot_from(s, k, a, i, b, j, n)

    return with_floats if b.dtype == types.float32 else with_halves


@cuda.jit(device=True)
def _weighted(sums, weight, four):
    return (
        sums[0] + weight * four[0],
        sums[1] + weight * four[1],
        sums[2] + weight * four[2],
        sums[3] + weight * four[3],
    )


@cuda.jit(device=True)
def _four_rows(rows, at, step):
    """Four columns each of four rows that lie `step` apart."""
    return _four(rows, at), _four(rows, at + step), _four(rows, at + 2 * step), _four(rows, at + 3 * step)


@cuda.jit(device=True)
def _weighted_rows(sums, weight, i, groups, four_rows):
    """The sums with four rows more, whose weights lie `groups` apart."""
    sums = _weighted(sums, weight[i], four_rows[0])
    sums = _weighted(sums, weight[i + groups], four_rows[1])
    sums = _weighted(sums, weight[i + 2 * groups], four_rows[2])
    return _weighted(sums, weight[i + 3 * groups], four_rows[3])


@cuda.jit(device=True)
def _with_lane(sums, distance):
    """Each of the four sums plus that of the lane `distance` away."""
    return (
        sums[0] + cuda.shfl_xor_sync(FULL_WARP, sums[0], distance),
        sums[1] + cuda.shfl_xor_sync(FULL_WARP, sums[1], distance),
        sums[2] + cuda.shfl_xor_sync(FULL_WARP, sums[2], distance),
        sums[3] + cuda.shfl_xor_sync(FULL_WARP, sums[3], distance),
    )


_has_registers = compiles_for(900)
"""Whether the persistent kernel has them to spare for sixteen rows at once: a constant."""


@define_by(words.row_mix)
def _(weight, i, n, rows, j, width, out, k):
    halves = rows.dtype == types.uint16

    def row_mix(weight, i, n, rows, j, width, out, k):
        # a lane takes four columns; narrow rows leave lanes over, which take every second or fourth row
        quads, shift = i32(width >> 2), i32(5)
        if quads <= 16:
            shift = i32(4)
        if quads <= 8:
            shift = i32(3)
        lanes, groups = i32(1 << shift), i32(32 >> shift)
        lane, group = i32(lane_id() & (lanes - 1)), i32(lane_id() >> shift)
        first = i32(0)
        while first < quads:
            column = i32((first + lane) << 2)
            sums = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
            if column < width:
                of, at, step, left = i + group, j + group * width + column, groups * width, i32(n - group)
                # as many bytes in flight as of eight rows of float32
                while halves and _has_registers() and left > 15 * groups:
                    left = _keep_rolled(left)
                    a, b = _four_rows(rows, at, step), _four_rows(rows, at + 4 * step, step)
                    c, d = _four_rows(rows, at + 8 * step, step), _four_rows(rows, at + 12 * step, step)
                    sums = _weighted_rows(sums, weight, of, groups, a)
                    sums = _weighted_rows(sums, weight, of + 4 * groups, groups, b)
                    sums = _weighted_rows(sums, weight, of + 8 * groups, groups, c)
                    sums = _weighted_rows(sums, weight, of + 12 * groups, groups, d)
                    of, at, left = of + 16 * groups, at + 16 * step, i32(left - 16 * groups)
                while left > 7 * groups:
                    left = _keep_rolled(left)
                    a, b = _four_rows(rows, at, step), _four_rows(rows, at + 4 * step, step)
                    sums = _weighted_rows(sums, weight, of, groups, a)
                    sums = _weighted_rows(sums, weight, of + 4 * groups, groups, b)
                    of, at, left = of + 8 * groups, at + 8 * step, i32(left - 8 * groups)
                while left > 3 * groups:
                    left = _keep_rolled(left)
                    sums = _weighted_rows(sums, weight, of, groups, _four_rows(rows, at, step))
                    of, at, left = of + 4 * groups, at + 4 * step, i32(left - 4 * groups)
                while left > 0:
                    left = _keep_rolled(left)
                    sums = _weighted(sums, weight[of], _four(rows, at))
                    of, at, left = of + groups, at + step, i32(left - groups)
            if groups >= 2:
                sums = _with_lane(sums, 16)
            if groups == 4:
                sums = _with_lane(sums, 8)
            if group == 0 and column < width:
                old = _four(out, k + column)
                _store_four(out, k + column, _weighted(old, f32(1.0), sums))
            first = i32(first + lanes)

    return row_mix
