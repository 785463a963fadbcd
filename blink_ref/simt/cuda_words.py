"""The words on CUDA: ids, waiting, exchanges, ordered accesses; inner loops are in :mod:`.cuda_loops`."""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import ptx
from . import vocabulary as words
from .lowering import (
    COMMON,
    DEFAULT,
    I16,
    I32,
    I64,
    VOID,
    asm,
    element_pointer,
    index_argument,
    narrow_put_by,
    nearest_bf16,
    register,
)
from .numba_cuda import cuda, cuda_types, cudaimpl, overload, templates
from .vocabulary import FULL_WARP, block_threads, thread_id, u32


def define(word: Any) -> Any:
    def decorate(define: Any) -> Any:
        register(templates, cuda_types.Function, "cuda", word, define)
        return define

    return decorate


def define_by(word: Any) -> Any:
    """Lower `word` by a function that numba-cuda compiles."""

    def decorate(make: Any) -> Any:
        overload(word, target="cuda", strict=False)(make)
        return make

    return decorate


for _word, _definition in COMMON.items():
    define(_word)(_definition)


def _define_id(word: Any, text: str) -> None:
    @define(word)
    def _(typing_context):
        def codegen(context, builder, signature, args):
            return builder.zext(asm(builder, I32, text, "=r", []), I64)

        return types.int64(), codegen


_define_id(words.thread_id, ptx.THREAD)
_define_id(words.block_threads, ptx.THREADS)
define_by(words.warp_width)(lambda: lambda: 32)
define_by(words.lane_id)(lambda: lambda: thread_id() & 31)
define_by(words.warp_id)(lambda: lambda: thread_id() >> 5)
define_by(words.warps)(lambda: lambda: (block_threads() + 31) >> 5)


def arena():
    """The block's dynamic shared memory as float32 [n]. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(arena)
def _(typing_context):
    def codegen(context, builder, signature, args):
        return cudaimpl._generic_array(
            context, builder, (0,), types.float32, "arena", 3, can_dynsized=True, alignment=128
        )

    return types.Array(types.float32, 1, "C")(), codegen


def define_text(word: Any, text: str) -> None:
    @define(word)
    def _(typing_context):
        def codegen(context, builder, signature, args):
            asm(builder, VOID, text, "", [])
            return context.get_dummy_value()

        return types.none(), codegen


define_text(words.barrier, ptx.BARRIER)
define_text(words.warp_barrier, ptx.WARP_BARRIER)


@define(words.clock_ns)
def _(typing_context):
    return types.int64(), lambda context, builder, signature, args: asm(builder, I64, ptx.GLOBAL_TIMER, "=l", [])


def _sleep(ns):
    """``nanosleep``. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_sleep)
def _(typing_context, ns):
    def codegen(context, builder, signature, args):
        asm(builder, VOID, ptx.NANOSLEEP, "r", args)
        return context.get_dummy_value()

    return types.none(types.uint32), codegen


@define_by(words.relax)
def _(spins):
    def relax(spins):
        if spins > 20000:
            _sleep(u32(2000))
        elif spins > 64:
            _sleep(u32(100))

    return relax


@define_by(words.lane_sum)
def _(x):
    def lane_sum(x):
        for distance in (16, 8, 4, 2, 1):
            x += cuda.shfl_xor_sync(FULL_WARP, x, distance)
        return x

    return lane_sum


@define_by(words.lane_max)
def _(x):
    def lane_max(x):
        for distance in (16, 8, 4, 2, 1):
            x = max(x, cuda.shfl_xor_sync(FULL_WARP, x, distance))
        return x

    return lane_max


define_by(words.lane_broadcast)(lambda x, source: lambda x, source: cuda.shfl_sync(FULL_WARP, x, source))
define_by(words.lane_any)(lambda x: lambda x: cuda.any_sync(FULL_WARP, x) != 0)


@define(words.opaque)
def _(typing_context, x):
    def codegen(context, builder, signature, args):
        return asm(builder, I64, ptx.COPY, "=l,l", args)

    return types.int64(types.int64), codegen


@define_by(words.exp)
def _(x):
    return lambda x: math.exp(x)


def is_at_least(builder: Any, least: int) -> Any:
    """Whether this compiles for compute capability `least` / 100 or newer: a constant, which NVVM knows.

    So what numba-cuda keeps of compiled callees fits every GPU.
    """
    text = cgutils.make_bytearray(b"__CUDA_ARCH\0")
    name = cgutils.global_constant(builder.module, "reflect.arch", text)
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(I32, [pointer])
    reflect = cgutils.get_or_insert_function(builder.module, kind, "__nvvm_reflect")
    arch = builder.call(reflect, [builder.bitcast(name, pointer)])
    return builder.icmp_signed(">=", arch, ir.Constant(I32, least))


def compiles_for(least: int) -> Any:
    """A word: :func:`is_at_least`."""

    def word():
        raise NotImplementedError("compiled code only")

    @define(word)
    def _(typing_context):
        return types.boolean(), lambda context, builder, signature, args: is_at_least(builder, least)

    return word


def _narrow(builder: Any, x: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32."""
    with builder.if_else(is_at_least(builder, 800)) as (newer, older):
        with newer:
            converted = asm(builder, I16, ptx.NARROW, "=h,f", [x], effects=False)
            newer_end = builder.block
        with older:
            rounded = nearest_bf16(builder, x)
            older_end = builder.block
    bits = builder.phi(I16)
    bits.add_incoming(converted, newer_end)
    bits.add_incoming(rounded, older_end)
    return bits


define(words.narrow_put)(narrow_put_by(_narrow))


# --- ordered accesses


def _scope(scope: Any) -> int | None:
    """The scope of an access, or None while it is not yet known as a constant."""
    if scope is None or isinstance(scope, types.Omitted):
        return words.GPU
    return scope.literal_value if isinstance(scope, types.IntegerLiteral) else None


def _register_class(dtype: Any) -> str:
    return "r" if dtype.bitwidth == 32 else "l"


def access(context, builder, signature, args):
    index = index_argument(context, builder, signature, args, 1)
    return element_pointer(context, builder, signature.args[0], args[0], index)


def _define_load(word: Any, order: str) -> None:
    @define(word)
    def _(typing_context, a, i, scope=None):
        level = _scope(scope)
        if level is None:
            return None
        bits = a.dtype.bitwidth

        def codegen(context, builder, signature, args):
            pointer = access(context, builder, signature, args)
            constraints = f"={_register_class(a.dtype)},l"
            return asm(builder, ir.IntType(bits), ptx.load(order, level, bits), constraints, [pointer])

        return a.dtype(a, i, scope or DEFAULT), codegen


_define_load(words.load_relaxed, "relaxed")
_define_load(words.load_acquire, "acquire")


@define(words.acquire_fence)
def _(typing_context, scope=None):
    level = _scope(scope)
    if level is None:
        return None

    def codegen(context, builder, signature, args):
        asm(builder, VOID, ptx.fence(level), "", [])
        return context.get_dummy_value()

    return types.none(scope or DEFAULT), codegen


@define(words.load_relaxed_four)
def _(typing_context, a, i, scope=None):
    level = _scope(scope)
    if level is None or a.dtype.bitwidth != 32:
        return None
    returns = types.UniTuple(a.dtype, 4)

    def codegen(context, builder, signature, args):
        pointer = access(context, builder, signature, args)
        four = ir.LiteralStructType([I32] * 4)
        loaded = asm(builder, four, ptx.load_four(level), "=r,=r,=r,=r,l", [pointer])
        return context.make_tuple(builder, returns, [builder.extract_value(loaded, n) for n in range(4)])

    return returns(a, i, scope or DEFAULT), codegen


def _define_store(word: Any, order: str) -> None:
    @define(word)
    def _(typing_context, a, i, value, scope=None):
        level = _scope(scope)
        if level is None:
            return None

        def codegen(context, builder, signature, args):
            pointer = access(context, builder, signature, args)
            text = ptx.store(order, level, a.dtype.bitwidth)
            asm(builder, VOID, text, f"l,{_register_class(a.dtype)}", [pointer, args[2]])
            return context.get_dummy_value()

        return types.none(a, i, a.dtype, scope or DEFAULT), codegen


_define_store(words.store_relaxed, "relaxed")
_define_store(words.store_release, "release")


def _define_rmw(word: Any, operation: str) -> None:
    @define(word)
    def _(typing_context, a, i, value, scope=None):
        level = _scope(scope)
        if level is None:
            return None
        # addition wraps alike for both, and PTX has no 64-bit signed form of it
        signed = "s" if a.dtype.signed and operation == "max" else "u"

        def codegen(context, builder, signature, args):
            pointer = access(context, builder, signature, args)
            text = ptx.atomic(operation, level, f"{signed}{a.dtype.bitwidth}")
            r = _register_class(a.dtype)
            return asm(builder, ir.IntType(a.dtype.bitwidth), text, f"={r},l,{r}", [pointer, args[2]])

        return a.dtype(a, i, a.dtype, scope or DEFAULT), codegen


_define_rmw(words.atomic_add, "add")
_define_rmw(words.atomic_max, "max")


@define(words.atomic_cas)
def _(typing_context, a, i, expected, value, scope=None):
    level = _scope(scope)
    if level is None:
        return None

    def codegen(context, builder, signature, args):
        pointer = access(context, builder, signature, args)
        text = ptx.compare_and_swap(level, a.dtype.bitwidth)
        r = _register_class(a.dtype)
        return asm(builder, ir.IntType(a.dtype.bitwidth), text, f"={r},l,{r},{r}", [pointer, args[2], args[3]])

    return a.dtype(a, i, a.dtype, a.dtype, scope or DEFAULT), codegen
