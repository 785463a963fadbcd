"""Compiled code on disk, keyed by what the code depends on.

Numba's own cache looks at one file's time stamp, so it misses an edit to a callee in another file.
Here the key is a hash over a function's *call closure*: its own bytecode and constants, those of
every device function it reaches, and the sources of this folder, which say how words are lowered.
After one device function is edited, only it and its callers are compiled again.
"""

import functools
import hashlib
import types
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import caching

from ..config import cache_dir
from ..errors import BlinkError
from .cpu_library import CalleeImplementation
from .device import DeviceFunction, references

CODE_FIELDS = ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_argcount")


@functools.cache
def _lowering() -> str:
    """Hash of this folder: a change to a word's meaning changes all compiled code."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))).hexdigest()


def closure_hash(fn: types.FunctionType) -> str:
    """Hash of everything that the compiled form of `fn` depends on, but for argument types and CPU."""
    digest = hashlib.sha256(f"{numba.__version__} {_lowering()}".encode())
    seen: set[types.FunctionType] = set()
    queue = [fn]
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        digest.update(repr([_plain(getattr(current.__code__, field)) for field in CODE_FIELDS]).encode())
        for name, value in sorted(references(current).items()):
            if isinstance(value, DeviceFunction):
                queue.append(value.python)
            digest.update(f"{name}={_plain(value)}\n".encode())
    return digest.hexdigest()[:32]


def _plain(value: Any) -> Any:
    """A text for `value` that is the same in every process."""
    if isinstance(value, types.CodeType):
        return [_plain(getattr(value, field)) for field in CODE_FIELDS]
    if isinstance(value, tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, DeviceFunction):
        return f"device {value.__module__}.{value.python.__qualname__}"
    if callable(value) or isinstance(value, types.ModuleType):
        # NumPy's functions too, whose repr is an address
        return f"{type(value).__name__} {getattr(value, '__module__', '')}.{value.__name__}"
    if isinstance(value, np.ndarray):  # its repr leaves out the middle
        return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    return repr(value)


class Locator(caching._CacheLocator):
    """Puts a function's compiled code into the user's cache folder, stamped with its closure's hash."""

    TARGET = "cpu"

    def __init__(self, fn: types.FunctionType) -> None:
        self._hash = closure_hash(fn)
        self._py_file = fn.__code__.co_filename

    def get_cache_path(self) -> str:
        return str(cache_dir() / self.TARGET)

    def get_source_stamp(self) -> str:
        return self._hash

    def get_disambiguator(self) -> str:
        """Tells files apart, not versions: an edited function's code replaces its past."""
        return hashlib.sha256(self._py_file.encode()).hexdigest()[:12]

    @classmethod
    def from_function(cls, py_func: types.FunctionType, py_file: str) -> "Locator":
        locator = cls(py_func)
        try:
            locator.ensure_cache_path()
        except OSError as error:
            raise BlinkError(
                f"compiled code cannot be kept in {locator.get_cache_path()} ({error.strerror}); "
                "set BLINK_REF_CACHE to a folder that can be written"
            ) from None
        return locator


def pass_over_what_is_gone(cache: Any) -> None:
    """Let a cache take an index whose keys name types that are no longer defined for one of other code."""
    load = cache._cache_file._load_index

    def load_index() -> dict[Any, str]:
        try:
            return load()
        except (AttributeError, ImportError):
            return {}

    cache._cache_file._load_index = load_index


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [Locator]  # noqa: RUF012 - numba's name and form


class ClosureCache(caching.Cache):
    """For ``dispatcher._cache``: what ``cache=True`` would put there, with the key above."""

    _impl_class = _Implementation

    def __init__(self, fn: types.FunctionType) -> None:
        super().__init__(fn)
        pass_over_what_is_gone(self)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """The closure's hash covers the code and its cells; types and the CPU are left."""
        return sig, codegen.magic_tuple()


class _CalleeLocator(Locator):
    TARGET = "cpu-callees"


class _CalleeImplementation(CalleeImplementation):
    _locator_classes = [_CalleeLocator]  # noqa: RUF012 - numba's name and form


class CalleeCache(ClosureCache):
    """The same for what only compiled code calls, and Python cannot."""

    _impl_class = _CalleeImplementation
