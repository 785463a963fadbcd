"""The one place that imports numba.cuda, and the parts of numba-cuda that simt/ builds on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba import cuda
from numba.cuda import cgutils, cudaimpl, dispatcher
from numba.cuda import types as cuda_types
from numba.cuda.cudadrv import driver
from numba.cuda.extending import intrinsic, overload
from numba.cuda.np import arrayobj
from numba.cuda.typing import templates
from numba.cuda.typing.typeof import typeof, typeof_impl

__all__ = [
    "arrayobj",
    "cgutils",
    "cuda",
    "cuda_types",
    "cudaimpl",
    "dispatcher",
    "driver",
    "intrinsic",
    "no_index_from_the_end",
    "overload",
    "templates",
    "typeof",
    "typeof_impl",
]


@contextmanager
def no_index_from_the_end() -> Iterator[None]:
    """For as long as kernels compile: no index is negative, so none is compared with 0 and moved by a length.

    That is about a quarter of the scheduler's instructions. The checker reports negative ones.
    """

    def as_it_is(context: Any, builder: Any, kind: Any, index: Any, size: Any) -> Any:
        return context.cast(builder, index, kind, arrayobj.types.intp if kind.signed else arrayobj.types.uintp)

    from_the_end = arrayobj.fix_integer_index
    arrayobj.fix_integer_index = as_it_is
    try:
        yield
    finally:
        arrayobj.fix_integer_index = from_the_end
