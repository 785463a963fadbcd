"""``@device``: one function, three lives."""

import functools
import types
from typing import Any

from . import sites


class DeviceFunction:
    """A device function. Calling it runs it as plain Python; a target compiles it when launched.

    Inside another device function it is called by name, on every target.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        names = _synchronising_globals(fn)
        self.python = sites.mend(fn, names)
        self.collective = bool(names)
        """Whether lanes wait for each other in it, so that all of them have to call it."""
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any) -> Any:
        return self.python(*args)

    def __repr__(self) -> str:
        return f"<device function {self.__module__}.{self.__qualname__}>"

    @functools.cached_property
    def cpu(self) -> Any:
        """Numba's CPU dispatcher of this function."""
        from . import on_cpu

        return on_cpu.dispatcher(self.python)

    @functools.cached_property
    def cuda(self) -> Any:
        """Numba's CUDA device-function dispatcher of this function."""
        from . import on_cuda

        return on_cuda.dispatcher(self.python)

    @property
    def _numba_type_(self) -> Any:
        """What numba's CPU compiler takes a global of this type for."""
        from numba.core import types as numba_types

        return numba_types.Dispatcher(self.cpu)


def device(fn: types.FunctionType) -> DeviceFunction:
    """Declare a device function: a Python function of numbers, arrays and tuples of them.

    It is written in the words of :mod:`.vocabulary` and in plain arithmetic; its first parameter is
    the :class:`.vocabulary.Block` unless only one lane's work is meant. Raises
    :class:`.sites.CopiedBarrier` for the rare shape in which CPython would copy a barrier.
    """
    return DeviceFunction(fn)


def _synchronising_globals(fn: types.FunctionType) -> frozenset[str]:
    """Names that `fn` uses for words or device functions at which lanes wait for each other."""
    code, found = fn.__code__, set()
    cells = dict(zip(code.co_freevars, (c.cell_contents for c in fn.__closure__ or ()), strict=False))
    for name in (*code.co_names, *code.co_freevars):
        value = cells.get(name, fn.__globals__.get(name))
        is_word = getattr(value, "__module__", "") == f"{__package__}.vocabulary" and name in sites.WORDS
        if is_word or getattr(value, "collective", False):
            found.add(name)
    return frozenset(found)
