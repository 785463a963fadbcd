"""The inner loops on CUDA: 32 lanes, 16-byte loads, several in flight."""

from llvmlite import ir
from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_words import access, define, define_by, define_text
from .lowering import F32, I16, I32, I64, VOID, asm, index_argument, is_vector
from .numba_cuda import cuda
from .vocabulary import block_threads, f32, i64, lane_id, lane_sum, opaque, thread_id


def _keep_rolled():
    """At a loop's head: do not unroll it. A word of this file only."""
    raise NotImplementedError("compiled code only")


define_text(_keep_rolled, ptx.NO_UNROLL)


def _eight(a, i):
    """Elements ``a[i:i+8]`` as eight float32 in a tuple, by 16-byte loads. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _floats(builder, pointer, index):
    """``pointer[index : index+4]`` of float32 as four values, by one 16-byte load."""
    vector = ir.VectorType(F32, 4)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    loaded = builder.load(at, align=16)
    return [builder.extract_element(loaded, ir.Constant(I32, lane)) for lane in range(4)]


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
            loaded = asm(builder, four, ptx.LOAD_WEIGHTS, "=r,=r,=r,=r,l", [at], effects=False)
            pairs = [builder.extract_value(loaded, k) for k in range(4)]
            values = [v for pair in pairs for v in _halves(builder, pair, a.dtype)]
        return context.make_tuple(builder, result, values)

    return result(a, i), codegen


def _four(a, i):
    """Elements ``a[i:i+4]`` of float32 in a tuple, by one 16-byte load. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_four)
def _(typing_context, a, i):
    result = types.UniTuple(types.float32, 4)

    def codegen(context, builder, signature, args):
        index = index_argument(context, builder, signature, args, 1)
        pointer = context.make_array(a)(context, builder, args[0]).data
        return context.make_tuple(builder, result, _floats(builder, pointer, index))

    return result(a, i), codegen


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


@cuda.jit(device=True)
def _dot8(a, b):
    s = a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
    return s + (a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7])


@define_by(words.row_dot)
def _(w, i, x, j, n):
    def of_floats(w, i, x, j, n):
        s = f32(0.0)
        k = lane_id() * 8
        while k < n:
            _keep_rolled()
            s += _dot8(_eight(w, i + k), _eight(x, j + k))
            k = opaque(k + 256)
        return lane_sum(s)

    def of_halves(w, i, x, j, n):
        lane8 = lane_id() * 8
        i += lane8
        j += lane8
        s, t = f32(0.0), f32(0.0)
        k = lane8
        while k + 768 < n:  # four loads in flight
            w0, w1, w2, w3 = _eight(w, i), _eight(w, i + 256), _eight(w, i + 512), _eight(w, i + 768)
            s += _dot8(w0, _eight(x, j))
            t += _dot8(w1, _eight(x, j + 256))
            s += _dot8(w2, _eight(x, j + 512))
            t += _dot8(w3, _eight(x, j + 768))
            i += 1024
            j += 1024
            k += 1024
        while k < n:
            s += _dot8(_eight(w, i), _eight(x, j))
            i += 256
            j += 256
            k += 256
        return lane_sum(s + t)

    return of_floats if w.dtype == types.float32 else of_halves


def _prefetch_line(w, i):
    """Fetch the 128 bytes at ``w[i]`` into L2. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_prefetch_line)
def _(typing_context, w, i):
    def codegen(context, builder, signature, args):
        asm(builder, VOID, ptx.PREFETCH_L2, "l", [access(context, builder, signature, args)])
        return context.get_dummy_value()

    return types.none(w, i), codegen


@define_by(words.prefetch)
def _(w, i, n):
    line = 128 * 8 // w.dtype.bitwidth

    def prefetch(w, i, n):
        k = lane_id() * line
        while k < n:
            _prefetch_line(w, i + k)
            k += 32 * line

    return prefetch


@define_by(words.dot)
def _(a, i, b, j, n):
    def dot(a, i, b, j, n):
        s, k = f32(0.0), i64(0)
        while k < n:
            _keep_rolled()
            s += _dot8(_eight(a, i + k), _eight(b, j + k))
            k = opaque(k + 8)
        return s

    return dot


@define_by(words.row_mix)
def _(weight, i, n, rows, j, width, out, k):
    def row_mix(weight, i, n, rows, j, width, out, k):
        c = lane_id()
        while c < width:
            s = out[k + c]
            for p in range(n):
                s += weight[i + p] * rows[j + p * width + c]
            out[k + c] = s
            c += 32

    return row_mix
