"""The `cpu` target: a block is one OS thread with one lane, compiled by numba, the GIL released."""

import threading
from types import FunctionType
from typing import Any

import numba

from . import cpu_published, cpu_words  # noqa: F401 - define the words
from . import vocabulary as words
from .cache import CalleeCache, ClosureCache
from .cpu_library import CalleeCompiler, set_environments

# Without nnan and ninf: -inf masks and NaN poison must keep their meaning. Without reassoc: a sum's
# order is part of the result.
FASTMATH = {"contract", "nsz", "arcp"}


def dispatcher(fn: FunctionType, kept_on_disk: bool = True) -> Any:
    """Numba's dispatcher for a device function; no reference counts, since device code allocates nothing."""
    made = numba.njit(nogil=True, error_model="numpy", fastmath=FASTMATH, _nrt=False)(fn)
    if kept_on_disk:
        made._cache = ClosureCache(fn)
    return made


def callee(fn: FunctionType, kept_on_disk: bool = True) -> Any:
    """As :func:`dispatcher`, for calls by other device functions only, which is quicker to compile."""
    made = numba.njit(nogil=True, error_model="numpy", fastmath=FASTMATH, _nrt=False)(fn)
    made._compiler.__class__ = CalleeCompiler
    if kept_on_disk:
        made._cache = CalleeCache(fn)
    return made


class Running:
    """A launched grid: one thread a block."""

    def __init__(self, fn: Any, blocks: list[words.Block], args: tuple[Any, ...]) -> None:
        compiled = fn.cpu
        types = (numba.typeof(blocks[0]), *map(numba.typeof, args))
        compiled.compile(types)
        set_environments(compiled.overloads[types])
        self._threads = [threading.Thread(target=compiled, args=(b, *args), daemon=True) for b in blocks]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Return when every block has."""
        for thread in self._threads:
            thread.join()
