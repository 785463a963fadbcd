"""The one place that imports numba.cuda, and the parts of numba-cuda that simt/ builds on."""

from numba import cuda
from numba.cuda import cudaimpl, dispatcher
from numba.cuda import types as cuda_types
from numba.cuda.cudadrv import driver
from numba.cuda.extending import overload
from numba.cuda.typing import templates
from numba.cuda.typing.typeof import typeof, typeof_impl

__all__ = [
    "cuda",
    "cuda_types",
    "cudaimpl",
    "dispatcher",
    "driver",
    "overload",
    "templates",
    "typeof",
    "typeof_impl",
]
