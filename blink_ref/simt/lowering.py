"""Words whose LLVM is the same on the CPU and on CUDA, and the tools to define the others."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from . import vocabulary as words

VOID, I16, I32, I64 = ir.VoidType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()

DEFAULT = types.Omitted(None)
"""Type of an optional argument that was left out."""

Definition = Callable[..., Any]
"""``(typing_context, *argument_types) -> (signature, codegen)``, or None where it does not apply."""


def element_pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any) -> Any:
    """Address of ``array[index]`` of a contiguous 1-D array; `index` is intp."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def index_argument(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, n: int) -> Any:
    """Argument `n` as an intp."""
    return context.cast(builder, args[n], signature.args[n], types.intp)


def is_vector(t: Any) -> bool:
    return isinstance(t, types.Array) and t.ndim == 1 and t.layout == "C"


def asm(builder: ir.IRBuilder, returns: Any, text: str, constraints: str, args: Any, effects: bool = True) -> Any:
    """A call of inline assembly. With `effects` it stays in place, and memory is taken as changed."""
    if effects and "~{memory}" not in constraints:
        constraints = ",".join(filter(None, [constraints, "~{memory}"]))
    kind = ir.FunctionType(returns, [a.type for a in args])
    quoted = text.replace('"', "\\22")  # llvmlite writes the text as it is
    return builder.call(ir.InlineAsm(kind, quoted, constraints, effects), args)


def _bf16(typing_context, bits):
    def codegen(context, builder, signature, args):
        wide = builder.zext(builder.trunc(args[0], I16) if args[0].type != I16 else args[0], I32)
        return builder.bitcast(builder.shl(wide, ir.Constant(I32, 16)), F32)

    return types.float32(bits), codegen


def _f32_of_bits(typing_context, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


def _fp16(typing_context, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), F32)

    return types.float32(types.int16), codegen


def _widen(typing_context, x):
    if x == types.uint16:
        return types.float32(x), _bf16(typing_context, x)[1]
    if x == types.int16:
        return types.float32(x), _fp16(typing_context, x)[1]
    if x == types.float32:
        return types.float32(x), lambda context, builder, signature, args: args[0]
    return None


def nearest_bf16(builder: ir.IRBuilder, x: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32, ties to even, by integer arithmetic."""
    bits = builder.bitcast(x, I32)
    high = builder.lshr(bits, ir.Constant(I32, 16))
    half = builder.add(builder.and_(high, ir.Constant(I32, 1)), ir.Constant(I32, 0x7FFF))
    rounded = builder.lshr(builder.add(bits, half), ir.Constant(I32, 16))
    nan = builder.or_(high, ir.Constant(I32, 0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", x, x), nan, rounded), I16)


def narrow_put_by(narrow: Callable[[ir.IRBuilder, Any], Any]) -> Definition:
    """The definition of `narrow_put`, given what makes the bits of a bfloat16."""

    def _narrow_put(typing_context, a, i, x):
        if not (is_vector(a) and a.dtype in (types.float32, types.uint16, types.int16)):
            return None

        def codegen(context, builder, signature, args):
            index = index_argument(context, builder, signature, args, 1)
            value = args[2]
            if a.dtype == types.int16:
                value = builder.bitcast(builder.fptrunc(value, ir.HalfType()), I16)
            elif a.dtype == types.uint16:
                value = narrow(builder, value)
            builder.store(value, element_pointer(context, builder, a, args[0], index))
            return context.get_dummy_value()

        return types.none(a, i, types.float32), codegen

    return _narrow_put


def _rank(typing_context, value, index):
    def codegen(context, builder, signature, args):
        number, position = args
        bits = builder.bitcast(number, I32)
        minus_zero = builder.icmp_unsigned("==", bits, ir.Constant(I32, 0x80000000))
        bits = builder.select(minus_zero, ir.Constant(I32, 0), bits)
        negative = builder.icmp_signed("<", bits, ir.Constant(I32, 0))
        bits = builder.select(negative, builder.not_(bits), builder.or_(bits, ir.Constant(I32, 0x80000000)))
        bits = builder.select(builder.fcmp_unordered("uno", number, number), ir.Constant(I32, 0), bits)
        key = builder.sub(builder.shl(builder.zext(bits, I64), ir.Constant(I64, 31)), ir.Constant(I64, 1 << 62))
        return builder.add(key, builder.sub(ir.Constant(I64, 0x7FFFFFFF), position))

    return types.int64(types.float32, types.int64), codegen


def _rank_index(typing_context, key):
    def codegen(context, builder, signature, args):
        mask = ir.Constant(I64, 0x7FFFFFFF)
        return builder.sub(mask, builder.and_(args[0], mask))

    return types.int64(types.int64), codegen


def _divide(typing_context, a, b):
    result = types.UniTuple(types.int64, 2)

    def codegen(context, builder, signature, args):
        x, y = (builder.trunc(n, I32) for n in args)
        both = (builder.udiv(x, y), builder.urem(x, y))
        return context.make_tuple(builder, result, [builder.zext(n, I64) for n in both])

    return result(types.int64, types.int64), codegen


def _view(result, arena, at, n, *like):
    """n elements of the array type `result` from float32 ``arena[at]`` on."""

    def codegen(context, builder, signature, args):
        first, count = (index_argument(context, builder, signature, args, k) for k in (1, 2))
        view = context.make_array(result)(context, builder)
        data = builder.bitcast(element_pointer(context, builder, arena, args[0], first), view.data.type)
        size = context.get_constant(types.intp, result.dtype.bitwidth // 8)
        context.populate_array(view, data=data, shape=[count], strides=[size], itemsize=size, meminfo=None)
        return view._getvalue()

    return result(arena, at, n, *like), codegen


def _arena_view(typing_context, arena, at, n, like):
    return _view(types.Array(like.dtype, 1, "C"), arena, at, n, like) if is_vector(like) else None


def _mbarriers(typing_context, arena, at, n):
    return _view(types.Array(types.int64, 1, "C"), arena, at, n)


COMMON: dict[Callable[..., Any], Definition] = {
    words.bf16: _bf16,
    words.f32_of_bits: _f32_of_bits,
    words.fp16: _fp16,
    words.widen: _widen,
    words.divide: _divide,
    words.rank: _rank,
    words.rank_index: _rank_index,
    words.arena_view: _arena_view,
    words.mbarriers: _mbarriers,
}


def register(
    templates: Any, function_type: Any, target: str, word: Callable[..., Any], define: Definition
) -> None:
    """Make compilers of `target` lower calls of the Python function `word` by `define`.

    `templates` is the target's module of typing templates, `function_type` its ``types.Function``.
    Like ``@intrinsic``, but the name that device code calls stays a plain function.
    """
    template = templates.make_intrinsic_template(word, define, word.__name__, kwargs={"target": target})
    templates.infer(template)
    templates.infer_global(word, function_type(template))
