"""Numbers that are published, and awaited, on the CPU: relaxed atomic accesses of 32 bits."""

from llvmlite import ir
from numba import types
from numba.extending import overload

from . import vocabulary as words
from .cpu_words import _define, _pointer
from .lowering import F32, I32
from .vocabulary import UNPUBLISHED, awaited, f32, f32_of_bits, publish, relax, u32


def _of_words(context, builder, signature, args):
    """Where element ``a[i]`` of float32 lies, as 32 bits."""
    return builder.bitcast(_pointer(context, builder, signature, args), I32.as_pointer())


@_define(words.publish)
def _(typing_context, a, i, x):
    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[2], I32)
        taken = builder.icmp_unsigned("==", bits, ir.Constant(I32, UNPUBLISHED))
        bits = builder.select(taken, ir.Constant(I32, UNPUBLISHED - 1), bits)
        builder.store_atomic(bits, _of_words(context, builder, signature, args), "monotonic", 4)
        return context.get_dummy_value()

    return types.none(a, i, types.float32), codegen


@_define(words.unpublish)
def _(typing_context, a, i):
    def codegen(context, builder, signature, args):
        nothing = builder.bitcast(ir.Constant(I32, UNPUBLISHED), F32)
        builder.store(nothing, _pointer(context, builder, signature, args))
        return context.get_dummy_value()

    return types.none(a, i), codegen


def _published(a, i):
    """The bits of ``a[i]``, published or not. A word of this file only."""
    raise NotImplementedError("compiled code only")


@_define(_published)
def _(typing_context, a, i):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_of_words(context, builder, signature, args), "monotonic", 4)

    return types.uint32(a, i), codegen


@overload(words.awaited, target="cpu", strict=False)
def _(a, i):
    def awaited(a, i):
        bits, spins = _published(a, i), 0
        while bits == u32(UNPUBLISHED):
            relax(spins)
            spins += 1
            bits = _published(a, i)
        return f32_of_bits(bits)

    return awaited


@overload(words.awaited_four, target="cpu", strict=False)
def _(a, i):
    return lambda a, i: (awaited(a, i), awaited(a, i + 1), awaited(a, i + 2), awaited(a, i + 3))


@overload(words.awaited_copy, target="cpu", strict=False)
def _(out, k, a, i, n):
    def awaited_copy(out, k, a, i, n):
        for c in range(n):
            out[k + c] = awaited(a, i + c)

    return awaited_copy


@overload(words.awaited_sum, target="cpu", strict=False)
def _(a, i, n):
    def awaited_sum(a, i, n):
        total = f32(0.0)
        for c in range(n):
            total += awaited(a, i + c)
        return total

    return awaited_sum


@overload(words.awaited_mix, target="cpu", strict=False)
def _(weights, w, a, i, step, n):
    def awaited_mix(weights, w, a, i, step, n):
        s0, s1, s2, s3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        for m in range(n):
            weight, at = weights[w + m], i + m * step
            s0 += weight * awaited(a, at)
            s1 += weight * awaited(a, at + 1)
            s2 += weight * awaited(a, at + 2)
            s3 += weight * awaited(a, at + 3)
        return s0, s1, s2, s3

    return awaited_mix


@overload(words.fragment_put, target="cpu", strict=False)
def _(x, at, a, b, c, d):
    def fragment_put(x, at, a, b, c, d):
        publish(x, at, a)
        publish(x, at + 1, b)
        publish(x, at + 2, c)
        publish(x, at + 3, d)

    return fragment_put
