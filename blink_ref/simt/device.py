"""``@device``: one function, three lives."""

import builtins
import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from . import sites


class DeviceFunction:
    """A device function. Calling it runs it as plain Python; a target compiles it when launched.

    Inside another device function it is called by name, on every target.
    """

    known: ClassVar[weakref.WeakSet["DeviceFunction"]] = weakref.WeakSet()
    """All there are, for :mod:`.swap`."""

    def __init__(self, fn: types.FunctionType) -> None:
        names = _synchronising_names(fn)
        self.python = sites.mend(fn, names)
        self.collective = bool(names)
        """Whether lanes wait for each other in it, or may, as it calls what is defined below it."""
        self.kept_on_disk = True
        """Whether compiled forms go to the cache; not while :mod:`.swap` lasts."""
        functools.update_wrapper(self, fn)
        self.known.add(self)

    def __call__(self, *args: Any) -> Any:
        return self.python(*args)

    def __repr__(self) -> str:
        return f"<device function {self.__module__}.{self.python.__qualname__}>"

    @functools.cached_property
    def cpu(self) -> Any:
        """Numba's CPU dispatcher of this function."""
        from . import on_cpu

        return on_cpu.dispatcher(self.python, self.kept_on_disk)

    @functools.cached_property
    def cpu_callee(self) -> Any:
        """The same for calls by other device functions."""
        from . import on_cpu

        return on_cpu.callee(self.python, self.kept_on_disk)

    @functools.cached_property
    def cuda(self) -> Any:
        """Numba's CUDA device-function dispatcher of this function."""
        from . import on_cuda

        return on_cuda.dispatcher(self.python)

    def closure(self) -> Iterator["DeviceFunction"]:
        """It, and every device function that it may come to call."""
        queue, seen = [self], set()
        while queue:
            current = queue.pop()
            if current not in seen:
                seen.add(current)
                yield current
                queue += [v for v in references(current.python).values() if isinstance(v, DeviceFunction)]

    @property
    def _numba_type_(self) -> Any:
        """What numba's CPU compiler takes a global of this type for."""
        from numba.core import types as numba_types

        return numba_types.Dispatcher(self.cpu_callee)


def device(fn: Callable[..., Any]) -> DeviceFunction:
    """Declare a device function: a Python function of numbers, arrays and tuples of them.

    It is written in the words of :mod:`.vocabulary` and in plain arithmetic; its first parameter is
    the :class:`.vocabulary.Block` unless only one lane's work is meant. Raises
    :class:`.sites.CopiedBarrier` for the rare shape in which CPython would copy a barrier.
    """
    assert isinstance(fn, types.FunctionType)
    return DeviceFunction(fn)


def references(fn: types.FunctionType) -> dict[str, Any]:
    """What the code of `fn` names: globals, filled closure cells, and, as ``module.name``, what is in modules.

    In the same order in every process: a module with several names is taken by the same one.
    """
    names = sorted({name for code in _codes(fn.__code__) for name in code.co_names})
    found = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    found |= {name: cell.cell_contents for name, cell in _cells(fn).items() if _is_filled(cell)}
    queue = [(name, value) for name, value in found.items() if isinstance(value, types.ModuleType)]
    seen = set()
    while queue:
        path, module = queue.pop()
        if module not in seen:
            seen.add(module)
            inside = {f"{path}.{name}": getattr(module, name) for name in names if hasattr(module, name)}
            queue += [(name, value) for name, value in inside.items() if isinstance(value, types.ModuleType)]
            found |= inside
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _cells(fn: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _synchronising_names(fn: types.FunctionType) -> frozenset[str]:
    """Names by which `fn` calls words or device functions at which lanes wait for each other.

    What is defined below `fn` cannot be known yet, and is counted with them.
    """
    loads = (i for code in _codes(fn.__code__) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    later = {i.argval for i in loads} - fn.__globals__.keys() - vars(builtins).keys()
    later |= {name for name, cell in _cells(fn).items() if not _is_filled(cell)}
    known = (name.rpartition(".")[2] for name, value in references(fn).items() if _synchronises(value))
    return frozenset(later).union(known)


def _synchronises(value: Any) -> bool:
    if isinstance(value, DeviceFunction):
        return value.collective
    is_word = getattr(value, "__module__", "") == f"{__package__}.vocabulary"
    return is_word and getattr(value, "__name__", "") in sites.WORDS
