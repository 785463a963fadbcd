"""Arrays as a checked launch sees them: each access is checked against its :mod:`.shadow`, then made.

Device code takes its arrays apart element by element; a slice in device code is a view, and no access
yet. The bodies of words take slices: those are reads, and get a copy. An access in the body of an ordered
word is that word's.
"""

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import mbarrier
from ..on_python import Copy
from .agents import Copier
from .findings import OutOfBounds, Place
from .lines import WORDS
from .shadow import Run, Shadow, Whole
from .words import ORDERS, scope_of

VIEWS = frozenset({"arena_view", "mbarriers"})
"""Words that make another view of an array's memory."""


class Watched:
    """An array, or a part of one, whose accesses are checked; `share` elements are one in the shadow."""

    def __init__(self, data: np.ndarray, shadow: Shadow, share: int = 1) -> None:
        self._data, self._shadow, self._share, self._run = data, shadow, share, shadow.whole.run
        self.shape, self.dtype, self.ndim, self.size = data.shape, data.dtype, data.ndim, data.size
        self.itemsize = data.itemsize

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._plain(..., write=False)
        return np.array(self._data, dtype)

    def view(self, dtype: Any) -> "Watched":
        """The same memory, its bits as another type; of a larger element, the shadow is that of its first part."""
        old, new = self.dtype.itemsize, np.dtype(dtype).itemsize
        assert self._share == 1, f"a view of {self.dtype}, itself a view, as {dtype}"
        shadow = self._shadow.part(slice(None, None, new // old)) if new > old else self._shadow
        return Watched(self._data.view(dtype), shadow, max(old // new, 1))

    def __getitem__(self, key: Any) -> Any:
        key, is_element = self._within(key)
        frame = sys._getframe(1)
        in_word = frame.f_globals is WORDS
        if in_word and (order := ORDERS.get(frame.f_code.co_name)):
            self._run.explorer.ordered(write=order.is_atomic)
            if order.word == "mbarrier_wait":
                complete = mbarrier.parity(int(self._data[key])) != frame.f_locals["parity"]
                order = order._replace(acquires=complete)
            self._shadow.load(key, self._run.lines.number(frame), order, scope_of(frame))
        elif is_element or (in_word and frame.f_code.co_name not in VIEWS):
            self._plain(key, write=False)
        else:
            assert self._share == 1, "a slice, in device code, of a view of another type"
            return Watched(self._data[key], self._shadow.part(key))
        return self._data[key] if is_element else self._data[key].copy()

    def __setitem__(self, key: Any, value: Any) -> None:
        key, _ = self._within(key)
        frame = sys._getframe(1)
        value = np.asarray(value) if isinstance(value, Watched) else value
        if frame.f_globals is WORDS and (order := ORDERS.get(frame.f_code.co_name)):
            if not order.is_atomic:  # else the word goes on with what it has loaded, in one step
                self._run.explorer.ordered(write=True)
            line = self._run.lines.number(frame)
            if order.on_mbarrier:
                self._shadow.arrive(key, line, order.word, completes=self._completes(key, value))
            else:
                self._shadow.store(key, line, order, scope_of(frame))
        else:
            self._plain(key, write=True)
        self._data[key] = value

    def _plain(self, key: Any, write: bool) -> None:
        self._run.explorer.plain(write)
        self._shadow.plain(self._shadowed(key), self._run.lines.number(sys._getframe(2)), write)

    def _shadowed(self, key: Any) -> Any:
        """The key in the shadow."""
        if self._share == 1 or key is ...:
            return key
        if not isinstance(key, tuple):
            return key // self._share
        start, stop, _ = key[0].indices(len(self))
        return slice(start // self._share, -(-stop // self._share))

    def _completes(self, key: Any, word: int) -> bool:
        """Whether a phase is complete with this word in its mbarrier's place."""
        return mbarrier.parity(int(word)) != mbarrier.parity(int(self._data[key]))

    def receive(self, copy: Copy, line: int) -> Callable[[Copier], None]:
        """What makes an asynchronous copy into this array; raises OutOfBounds, or as :meth:`Copy.check`."""
        there, _ = self._within(slice(copy.at, copy.at + copy.n))
        here, _ = copy.source._within(slice(copy.first, copy.first + copy.n))
        i, _ = copy.bar._within(copy.i)
        of, to, bar = copy.source, self, copy.bar
        plain = copy._replace(target=to._data, source=of._data, bar=bar._data)
        plain.check()
        if not to._shadow.whole.is_arena or of._shadow.whole.is_arena:
            names = of._shadow.whole.name, to._shadow.whole.name
            raise ValueError("copy_async from {} to {}; it takes global memory, and the arena".format(*names))

        def make(copier: Copier) -> None:
            of._shadow.plain(of._shadowed(here), line, write=False, copier=copier)
            to._shadow.plain(to._shadowed(there), line, write=True, copier=copier)
            after = mbarrier.after(int(bar._data[i]), 0, -plain.size)
            bar._shadow.arrive(i, line, "copy_async", bar._completes(i, after), copier)
            plain.make()

        return make

    def _within(self, key: Any) -> tuple[Any, bool]:
        """The key, its numbers made plain, and whether it is of one element; raises OutOfBounds."""
        if self.ndim == 1 and not isinstance(key, slice | tuple):
            i = operator.index(key)
            if not 0 <= i < self.shape[0]:
                raise self._outside(key)
            return i, True
        keys = key if isinstance(key, tuple) else (key,)
        if not all(_fits(part, length) for part, length in zip(keys, self.shape, strict=False)):
            raise self._outside(key)
        return keys, len(keys) == self.ndim and not any(isinstance(part, slice) for part in keys)

    def _outside(self, key: Any) -> OutOfBounds:
        wanted = ", ".join(map(_written, key if isinstance(key, tuple) else (key,)))
        name, lines = self._shadow.whole.name, self._run.lines
        about = f"{name}[{wanted}], of an array of shape {self.shape}"
        line = lines[lines.number(sys._getframe())]
        return OutOfBounds(about, [Place(self._run.explorer.running.name, "accesses it", line)], array=name)


def _fits(part: Any, length: int) -> bool:
    """Whether a number or slice lies within a dimension; an empty slice may begin anywhere."""
    if not isinstance(part, slice):
        return 0 <= operator.index(part) < length
    start, stop, step = part.start or 0, length if part.stop is None else part.stop, part.step or 1
    return step > 0 and (start >= stop >= 0 or 0 <= start < stop <= length)


def _written(part: Any) -> str:
    """A number or slice as it is written between brackets."""
    if not isinstance(part, slice):
        return str(part)
    bounds = [part.start, part.stop, *([part.step] if part.step is not None else [])]
    return ":".join("" if bound is None else str(bound) for bound in bounds)


class Records:
    """An array of records: each field is watched on its own."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.shape = next(iter(fields.values())).shape

    def __getitem__(self, key: Any) -> Any:
        return self._fields[key] if isinstance(key, str) else Record(self._fields, key)


class Record:
    """One record of an array."""

    def __init__(self, fields: dict[str, Any], key: Any) -> None:
        self._fields, self._key = fields, key

    def __getitem__(self, name: str) -> Any:
        return self._fields[name][self._key]

    def __setitem__(self, name: str, value: Any) -> None:
        self._fields[name][self._key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)


def watch(run: Run, name: str, array: np.ndarray, written: bool = True, is_arena: bool = False) -> Any:
    """An array of a launch, watched under a name; `written`: whether what is in it may be read."""
    if array.dtype.names:
        return Records(
            {field: watch(run, f"{name}.{field}", array[field], written) for field in array.dtype.names}
        )
    return Watched(array, Shadow.of(Whole(run, name, array.shape, is_arena), written))
