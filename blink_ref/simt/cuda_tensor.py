"""Single instructions of the tensor cores and of what feeds them, as words of the other `cuda_` files."""

from llvmlite import ir
from numba import types

from . import ptx
from .cuda_async import GLOBAL, SHARED, _in_space
from .cuda_words import access, compiles_for, define
from .lowering import F32, I32, VOID, asm, element_pointer, index_argument

has_tensor_cores = compiles_for(900)
"""A constant. Those of 8.0 know bfloat16 too, but there the persistent kernel has no registers left for it."""

_FOUR = types.UniTuple(types.float32, 4)
_WORDS = types.UniTuple(types.uint32, 4)


def _four_words(builder, value):
    return [builder.extract_value(value, n) for n in range(4)]


def multiply(c, a, low, high):
    """16 x 8 sums c plus a 16 x 16 fragment a times a 16 x 8 one of two words. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


def multiply_f16(c, a, low, high):
    """The same, where the fragments hold float16. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


def _define_multiply(word, text):
    @define(word)
    def _(typing_context, c, a, low, high):
        def codegen(context, builder, signature, args):
            operands = [*_four_words(builder, args[1]), *args[2:], *_four_words(builder, args[0])]
            result = ir.LiteralStructType([F32] * 4)
            made = asm(builder, result, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", operands, effects=False)
            return context.make_tuple(builder, _FOUR, _four_words(builder, made))

        return _FOUR(_FOUR, _WORDS, types.uint32, types.uint32), codegen


_define_multiply(multiply, ptx.MULTIPLY_ADD)
_define_multiply(multiply_f16, ptx.MULTIPLY_ADD_F16)


def load_matrices(at):
    """Four 8 x 8 matrices of 16-bit numbers out of shared memory. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


def load_transposed(at):
    """The same, each of the four transposed. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


def _define_load(word, text):
    @define(word)
    def _(typing_context, at):
        def codegen(context, builder, signature, args):
            loaded = asm(builder, ir.LiteralStructType([I32] * 4), text, "=r,=r,=r,=r,r", args)
            return context.make_tuple(builder, _WORDS, _four_words(builder, loaded))

        return _WORDS(types.uint32), codegen


def load_piece(at):
    """The 16 bytes at a shared address, as four words. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


_define_load(load_piece, ptx.LOAD_PIECE)
_define_load(load_matrices, ptx.LOAD_MATRICES)
_define_load(load_transposed, ptx.LOAD_TRANSPOSED)


def split(even, odd):
    """The high and the low halves of two float32, as two words. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(split)
def _(typing_context, even, odd):
    returns = types.UniTuple(types.uint32, 2)

    def codegen(context, builder, signature, args):
        made = asm(builder, ir.LiteralStructType([I32, I32]), ptx.SPLIT, "=&r,=r,f,f", args, effects=False)
        return context.make_tuple(builder, returns, [builder.extract_value(made, n) for n in range(2)])

    return returns(types.float32, types.float32), codegen


def narrow_two(even, odd):
    """Two float32 as float16, in one word. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(narrow_two)
def _(typing_context, even, odd):
    def codegen(context, builder, signature, args):
        return asm(builder, I32, ptx.NARROW_TWO, "=r,f,f", args, effects=False)

    return types.uint32(types.float32, types.float32), codegen


def narrow_bf16(word):
    """The two bfloat16 of a word as float16, in one word. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(narrow_bf16)
def _(typing_context, word):
    def codegen(context, builder, signature, args):
        return asm(builder, I32, ptx.NARROW_BF16, "=r,r", args, effects=False)

    return types.uint32(types.uint32), codegen


def power_of_two(x):
    """2**x of a float32. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(power_of_two)
def _(typing_context, x):
    def codegen(context, builder, signature, args):
        return asm(builder, F32, ptx.POWER_OF_TWO, "=f,f", args, effects=False)

    return types.float32(types.float32), codegen


def define_binary(text):
    """A word of the `cuda_` files: a word made of two."""

    def word(a, b):
        raise NotImplementedError("compiled code only")

    @define(word)
    def _(typing_context, a, b):
        def codegen(context, builder, signature, args):
            return asm(builder, I32, text, "=r,r,r", args, effects=False)

        return types.uint32(types.uint32, types.uint32), codegen

    return word


def shared_address(a, i):
    """The address of ``a[i]`` in shared memory, in 32 bits. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(shared_address)
def _(typing_context, a, i):
    def codegen(context, builder, signature, args):
        return _in_space(builder, access(context, builder, signature, args), SHARED)

    return types.uint32(a, i), codegen


def copy_piece(at, a, i):
    """Start a copy of 16 bytes from ``a[i]`` to a shared address. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


def copy_weights(at, w, i):
    """The same, of weights, which L2 need not keep. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


def _define_copy(word, text):
    @define(word)
    def _(typing_context, at, a, i):
        def codegen(context, builder, signature, args):
            index = index_argument(context, builder, signature, args, 2)
            source = element_pointer(context, builder, a, args[1], index)
            asm(builder, VOID, text, "r,l", [args[0], _in_space(builder, source, GLOBAL)])
            return context.get_dummy_value()

        return types.none(types.uint32, a, i), codegen


_define_copy(copy_piece, ptx.COPY_PIECE)
_define_copy(copy_weights, ptx.COPY_WEIGHTS)


def bits_of_f32(x):
    """The bits of a float32. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(bits_of_f32)
def _(typing_context, x):
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], I32)


def store_piece(at, a, b, c, d):
    """Four words to a shared address. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(store_piece)
def _(typing_context, at, a, b, c, d):
    def codegen(context, builder, signature, args):
        asm(builder, VOID, ptx.STORE_PIECE, "r,r,r,r,r", args)
        return context.get_dummy_value()

    return types.none(*[types.uint32] * 5), codegen
