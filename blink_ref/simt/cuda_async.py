"""Asynchronous copies and mbarriers on CUDA: the hardware's from compute capability 9.0 on, else plain code."""

from llvmlite import ir
from numba import types

from . import mbarrier, ptx
from . import vocabulary as words
from .cuda_words import access, compiles_for, define, define_by, define_text
from .lowering import I32, I64, VOID, asm, element_pointer, index_argument, is_vector
from .numba_cuda import cuda
from .vocabulary import i64, relax, u32

SHARED, GLOBAL = 3, 1
"""Numbers of address spaces (NVVM IR specification, "Address Spaces")."""


_has_bulk_copies = compiles_for(900)
"""Whether this compiles for compute capability 9.0 or newer; a constant."""


def _in_space(builder, pointer, space):
    """A generic pointer's address within an address space; one in shared memory has 32 bits."""
    there = builder.addrspacecast(pointer, pointer.type.pointee.as_pointer(space))
    return builder.ptrtoint(there, I32 if space == SHARED else I64)


def _instruction(text, returns, *numbers):
    """A word of this file only: an instruction on ``bar[i]``, called with bar, i and numbers of these types."""
    kinds = {types.uint32: (I32, "r"), types.int64: (I64, "l")}
    result, letter = kinds.get(returns, (VOID, ""))
    constraints = ",".join([f"={letter}"] * bool(letter) + ["r"] + [kinds[number][1] for number in numbers])

    def word(bar, i, *numbers):
        raise NotImplementedError("compiled code only")

    def lower(bar, i):
        def codegen(context, builder, signature, args):
            at = _in_space(builder, access(context, builder, signature, args), SHARED)
            got = asm(builder, result, text, constraints, [at, *args[2:]])
            return got if letter else context.get_dummy_value()

        return returns(bar, i, *numbers), codegen

    forms = (
        lambda typing_context, bar, i: lower(bar, i),
        lambda typing_context, bar, i, a: lower(bar, i),
        lambda typing_context, bar, i, a, b: lower(bar, i),
    )
    define(word)(forms[len(numbers)])  # numba does not take *args here
    return word


_init = _instruction(ptx.MBARRIER_INIT, types.none, types.uint32)
_arrive = _instruction(ptx.MBARRIER_ARRIVE, types.none)
_expect = _instruction(ptx.MBARRIER_EXPECT, types.none, types.uint32)
_try = _instruction(ptx.MBARRIER_TRY, types.uint32, types.uint32)
_load = _instruction(ptx.LOAD_SHARED, types.int64)
_swap = _instruction(ptx.SWAP_SHARED, types.int64, types.int64, types.int64)

_fresh, _after, _parity = map(cuda.jit(device=True), (mbarrier.fresh, mbarrier.after, mbarrier.parity))


@cuda.jit(device=True)
def _advance(bar, i, arrivals, size):
    """``bar[i]`` becomes what it is after so many arrivals, and `size` bytes more to come, in one step."""
    seen, old = _load(bar, i), i64(0)
    while seen != old:
        old = seen
        seen = _swap(bar, i, old, _after(old, arrivals, size))


@define_by(words.mbarrier_init)
def _(bar, i, count):
    def mbarrier_init(bar, i, count):
        if _has_bulk_copies():
            _init(bar, i, u32(count))
        else:
            bar[i] = _fresh(i64(count))

    return mbarrier_init


@define_by(words.mbarrier_arrive)
def _(bar, i):
    def mbarrier_arrive(bar, i):
        if _has_bulk_copies():
            _arrive(bar, i)
        else:
            _advance(bar, i, i64(1), i64(0))

    return mbarrier_arrive


@define_by(words.mbarrier_expect_bytes)
def _(bar, i, size):
    def mbarrier_expect_bytes(bar, i, size):
        if _has_bulk_copies():
            _expect(bar, i, u32(size))
        else:
            _advance(bar, i, i64(1), i64(size))

    return mbarrier_expect_bytes


@cuda.jit(device=True)
def _is_complete(bar, i, parity):
    if _has_bulk_copies():
        return _try(bar, i, u32(parity)) != 0
    return _parity(_load(bar, i)) != parity


@define_by(words.mbarrier_wait)
def _(bar, i, parity):
    def mbarrier_wait(bar, i, parity):
        spins = i64(0)
        while not _is_complete(bar, i, parity):
            relax(spins)
            spins += 1

    return mbarrier_wait


def _bulk_copy(target, at, source, first, size, bar, i):
    """Bulk copy of `size` bytes. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_bulk_copy)
def _(typing_context, target, at, source, first, size, bar, i):
    def codegen(context, builder, signature, args):
        def address(m, space):
            index = index_argument(context, builder, signature, args, m + 1)
            return _in_space(builder, element_pointer(context, builder, signature.args[m], args[m], index), space)

        operands = [address(0, SHARED), address(2, GLOBAL), args[4], address(5, SHARED)]
        text = ptx.COPY_ONCE if source.dtype == types.int16 else ptx.COPY_ASYNC
        asm(builder, VOID, text, "r,l,r,r", operands)
        return context.get_dummy_value()

    return types.none(target, at, source, first, types.uint32, bar, i), codegen


def _copy_sixteen(target, at, source, first):
    """Copy 16 bytes. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_copy_sixteen)
def _(typing_context, target, at, source, first):
    def codegen(context, builder, signature, args):
        def pointer(m):
            index = index_argument(context, builder, signature, args, m + 1)
            found = element_pointer(context, builder, signature.args[m], args[m], index)
            return builder.bitcast(found, ir.VectorType(I32, 4).as_pointer())

        builder.store(builder.load(pointer(2), align=16), pointer(0), align=16)
        return context.get_dummy_value()

    return types.none(target, at, source, first), codegen


@define_by(words.copy_async)
def _(target, at, source, first, n, bar, i):
    if not (is_vector(target) and is_vector(source) and target.dtype == source.dtype):
        return None
    size = source.dtype.bitwidth // 8
    sixteen = 16 // size

    def copy_async(target, at, source, first, n, bar, i):
        if _has_bulk_copies():
            _bulk_copy(target, at, source, first, u32(n * size), bar, i)
        else:
            k = i64(0)
            while k < n:
                _copy_sixteen(target, at + k, source, first + k)
                k += sixteen
            _advance(bar, i, i64(0), -i64(n) * size)

    return copy_async


def _fence():
    """The fence itself. A word of this file only."""
    raise NotImplementedError("compiled code only")


define_text(_fence, ptx.ASYNC_FENCE)


@define_by(words.async_fence)
def _():
    def async_fence():
        if _has_bulk_copies():
            _fence()

    return async_fence
