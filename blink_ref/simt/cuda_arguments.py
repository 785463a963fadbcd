"""What a kernel is given: the addresses of arrays and the numbers first, then the arrays' lengths.

Arguments lie in constant memory, whose first cache holds some 2 KB, and a line that is not in it costs some 110
clocks (H200). In numba's own form an array is a line: words for its owner, its size, that of an item, its address,
its lengths and strides, of which mostly the address is used; so many drive each other out. In this form eight
are a line, and strides are made of lengths, since all arrays are contiguous.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .lowering import F32, I32
from .numba_cuda import arrayobj, cgutils, cuda_types, intrinsic


def words_of(value: Any) -> tuple[int, ...]:
    """An int64 for each number and for the address of each device array in nested tuples, and then all lengths."""
    leaves = list(_leaves(value))
    return *map(_word, leaves), *(
        n for each in leaves if hasattr(each, "shape") and each.shape for n in each.shape
    )


def count_of(value_type: Any) -> int:
    """How many words values of a type take."""
    leaves = list(_leaf_types(value_type))
    return len(leaves) + sum(each.ndim for each in leaves if isinstance(each, types.Array))


def maker_of(value_type: Any) -> Any:
    """A function for device code: words, in the form of :func:`words_of`, to a value of the type."""

    @intrinsic
    def from_words(typing_context, words):
        def codegen(context, builder, signature, args):
            values = cgutils.unpack_tuple(builder, args[0])
            leaves = sum(1 for _ in _leaf_types(value_type))
            return _made(context, builder, value_type, iter(values[:leaves]), iter(values[leaves:]))

        return value_type(words), codegen

    return from_words


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _leaf_types(value_type: Any) -> Iterator[Any]:
    if isinstance(value_type, types.BaseTuple):
        for each in value_type:
            yield from _leaf_types(each)
    else:
        yield value_type


def _word(leaf: Any) -> int:
    if hasattr(leaf, "__cuda_array_interface__"):
        if not leaf.is_c_contiguous():
            raise ValueError("a kernel takes contiguous arrays")
        return int(leaf.__cuda_array_interface__["data"][0])
    if isinstance(leaf, np.floating):
        return int(leaf.view(np.uint32))
    return int(leaf)


def _made(context: Any, builder: Any, kind: Any, leaves: Iterator[Any], lengths: Iterator[Any]) -> Any:
    """A value of a type, out of the words that are next."""
    if isinstance(kind, types.BaseTuple):
        return context.make_tuple(builder, kind, [_made(context, builder, t, leaves, lengths) for t in kind])
    word = next(leaves)
    if isinstance(kind, types.Array):
        return _array(context, builder, kind, word, [next(lengths) for _ in range(kind.ndim)])
    if kind == types.float32:
        return builder.bitcast(builder.trunc(word, I32), F32)
    return context.cast(builder, word, cuda_types.int64, kind)


def _array(context: Any, builder: Any, kind: Any, address: Any, shape: list[Any]) -> Any:
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    made = context.make_array(kind)(context, builder)
    strides: list[Any] = []
    stride = ir.Constant(address.type, itemsize)
    for length in reversed(shape):
        strides.insert(0, stride)
        stride = builder.mul(stride, length)
    pointer = builder.inttoptr(address, context.get_data_type(kind.dtype).as_pointer())
    arrayobj.populate_array(made, pointer, shape, strides, itemsize, meminfo=None)
    return made._getvalue()
