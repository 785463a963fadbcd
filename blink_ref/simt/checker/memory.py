"""Arrays as a checked launch sees them: each access is checked against a shadow, then made.

The shadow keeps for each element its last plain write (who, when, on which line) and every agent's last
plain read; elements with ordered accesses have a :class:`.words.Word` besides. A read races with a write
that is later than what the reader's clock knows of the writer, and so on (FastTrack: Flanagan and Freund, 2009).

Device code takes its arrays apart element by element. The bodies of words take slices: those are reads,
and get a copy. A slice in device code is a view, and no access yet.
"""

import math
import operator
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..vocabulary import BLOCK, GPU
from .agents import Agent
from .explorer import Explorer
from .findings import OutOfBounds, Place, Race, Unwritten
from .lines import WORDS, Lines
from .words import ORDERS, Access, Order, Word, scope_of

NEVER = -1
"""The moment of a write that has not been."""

LOADS, STORES = range(2)


class Run:
    """What all arrays of a launch share."""

    def __init__(self, explorer: Explorer, lines: Lines, agents: list[Agent]) -> None:
        self.explorer, self.lines, self.agents = explorer, lines, agents
        self.wholes: list[Whole] = []
        self.suspicion: Unwritten | None = None
        """the first read of memory that nobody has written"""


class Shadow:
    """What is known of an array's elements; :meth:`part` is that of some of them."""

    def __init__(self, shape: tuple[int, ...], agents: int, written: bool) -> None:
        self.who = np.zeros(shape, np.int16)
        self.when = np.full(shape, 0 if written else NEVER, np.int32)
        self.line = np.zeros(shape, np.int32)
        self.read = np.zeros((*shape, agents), np.int32)
        self.read_line = np.zeros((*shape, agents), np.int32)
        self.word = np.zeros(shape, np.int32)
        self.place = np.arange(math.prod(shape)).reshape(shape)

    def part(self, key: Any) -> "Shadow":
        """Of the elements at a key; they share memory with the whole."""
        part = object.__new__(Shadow)
        for name, values in vars(self).items():
            setattr(part, name, values[key])
        return part


class Whole:
    """One array of a launch: its name, its words, and how often each agent accessed it."""

    def __init__(self, run: Run, name: str, shape: tuple[int, ...], shared: bool) -> None:
        self.run, self.name, self.shape, self.shared = run, name, shape, shared
        self.words: list[Word] = []
        self.counts = [[0, 0] for _ in run.agents]
        run.wholes.append(self)

    def element(self, place: int) -> str:
        """An element's name, by its place in the array."""
        return f"{self.name}[{', '.join(str(i) for i in np.unravel_index(place, self.shape))}]"


class Watched:
    """An array, or a part of one, whose accesses are checked."""

    def __init__(self, whole: Whole, data: np.ndarray, shadow: Shadow) -> None:
        self._whole, self._run, self._data, self._shadow = whole, whole.run, data, shadow
        self.shape, self.dtype, self.ndim, self.size = data.shape, data.dtype, data.ndim, data.size

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._plain(..., write=False)
        return np.array(self._data, dtype)

    def __getitem__(self, key: Any) -> Any:
        key, is_element = self._within(key)
        frame = sys._getframe(1)
        in_word = frame.f_globals is WORDS
        if in_word and (order := ORDERS.get(frame.f_code.co_name)):
            self._load(key, order, scope_of(frame))
        elif is_element or in_word:
            self._plain(key, write=False)
        else:
            return Watched(self._whole, self._data[key], self._shadow.part(key))
        return self._data[key] if is_element else self._data[key].copy()

    def __setitem__(self, key: Any, value: Any) -> None:
        key, _ = self._within(key)
        frame = sys._getframe(1)
        value = np.asarray(value) if isinstance(value, Watched) else value
        if frame.f_globals is WORDS and (order := ORDERS.get(frame.f_code.co_name)):
            self._store(key, order, scope_of(frame))
        else:
            self._plain(key, write=True)
        self._data[key] = value

    def _within(self, key: Any) -> tuple[Any, bool]:
        """The key, its numbers made plain, and whether it is of one element; raises OutOfBounds."""
        if self.ndim == 1 and not isinstance(key, slice | tuple):
            i = operator.index(key)
            if not 0 <= i < self.shape[0]:
                raise self._outside(key)
            return i, True
        keys = key if isinstance(key, tuple) else (key,)
        for part, length in zip(keys, self.shape, strict=False):
            if isinstance(part, slice):
                start, stop, step = part.start or 0, length if part.stop is None else part.stop, part.step or 1
                fits = step > 0 and (start >= stop >= 0 or 0 <= start < stop <= length)
            else:
                fits = 0 <= operator.index(part) < length
            if not fits:
                raise self._outside(key)
        return keys, len(keys) == self.ndim and not any(isinstance(part, slice) for part in keys)

    def _outside(self, key: Any) -> OutOfBounds:
        agent, line = self._run.explorer.running, self._run.lines.number(sys._getframe())
        keys = key if isinstance(key, tuple) else (key,)
        wanted = ", ".join(
            f"{k.start or 0}:{'' if k.stop is None else k.stop}" if isinstance(k, slice) else str(k) for k in keys
        )
        what = f"{self._whole.name}[{wanted}] of an array of shape {self.shape}"
        place = Place(agent.name, "accesses it", self._run.lines[line])
        return OutOfBounds(what, [place], array=self._whole.name)

    # --- plain accesses

    def _plain(self, key: Any, write: bool) -> None:
        run, whole, shadow = self._run, self._whole, self._shadow
        run.explorer.plain(write)
        agent = run.explorer.running
        line, clock = run.lines.number(sys._getframe(2)), agent.clock
        when = shadow.when[key]
        if when.size == 0:
            return
        self._check_writes(key, agent, line, write)
        if write:
            self._check_reads(key, agent, line)
        elif (when < 0).any():
            place = int(np.extract(when < 0, shadow.place[key])[0])
            self._suspect(place, agent, line)
        if whole.words:
            self._check_words(key, agent, line, write)
        whole.counts[agent.index][STORES if write else LOADS] += when.size
        if write:
            shadow.who[key], shadow.when[key], shadow.line[key] = agent.index, clock[agent.index], line
        else:
            shadow.read[key][..., agent.index] = clock[agent.index]
            shadow.read_line[key][..., agent.index] = line

    def _check_writes(self, key: Any, agent: Agent, line: int, write: bool) -> None:
        """Against the plain writes of others."""
        shadow = self._shadow
        late = shadow.when[key] > agent.clock[shadow.who[key]]
        if late.any():
            who, earlier, place = (np.extract(late, of[key])[0] for of in (shadow.who, shadow.line, shadow.place))
            raise self._race(place, agent, line, write, self._run.agents[who], earlier, True)

    def _check_reads(self, key: Any, agent: Agent, line: int) -> None:
        """Against the plain reads of others."""
        shadow = self._shadow
        late = shadow.read[key] > agent.clock
        if late.any():
            *inner, who = np.argwhere(late)[0]
            place, lines = shadow.place[key], shadow.read_line[key]
            raise self._race(
                place[tuple(inner)], agent, line, True, self._run.agents[who], lines[(*inner, who)], False
            )

    def _check_words(self, key: Any, agent: Agent, line: int, write: bool) -> None:
        """Against the ordered accesses of others."""
        numbers = self._shadow.word[key]
        for number in np.extract(numbers, numbers):
            word = self._whole.words[number - 1]
            if found := word.unordered(agent, write):
                place = np.extract(numbers == number, self._shadow.place[key])[0]
                access, is_store = found
                raise self._race(place, agent, line, write, access.agent, access.line, is_store, ordered="it")
            if write:
                word.forget()

    # --- ordered accesses

    def _load(self, key: Any, order: Order, scope: int) -> None:
        self._run.explorer.ordered(write=order.releases)
        agent, line, word = self._begin(key, order.releases, scope)
        self._whole.counts[agent.index][LOADS] += 1
        word.loads[agent.index] = Access(agent, agent.clock[agent.index], line, scope)
        if order.acquires:
            word.acquire(agent, scope)

    def _store(self, key: Any, order: Order, scope: int) -> None:
        if not order.is_atomic:  # the load before, by the same word, has done it
            self._run.explorer.ordered(write=True)
        agent, line, word = self._begin(key, True, scope)
        self._whole.counts[agent.index][STORES] += 1
        word.stores[agent.index] = Access(agent, agent.clock[agent.index], line, scope)
        self._shadow.when[key] = max(self._shadow.when[key], 0)
        word.release(agent, scope, keeps=order.is_atomic)

    def _begin(self, key: Any, write: bool, scope: int) -> tuple[Agent, int, Word]:
        """Check an ordered access against all others of its element."""
        run, whole, shadow = self._run, self._whole, self._shadow
        agent, line = run.explorer.running, run.lines.number(sys._getframe(3))
        if not shadow.word[key]:
            whole.words.append(Word())
            shadow.word[key] = len(whole.words)
        word = whole.words[shadow.word[key] - 1]
        self._check_writes(key, agent, line, write)
        if write:
            self._check_reads(key, agent, line)
        elif shadow.when[key] < 0:
            self._suspect(int(shadow.place[key]), agent, line)
        if found := word.unordered(agent, write, scope):
            access, is_store = found
            raise self._race(
                shadow.place[key], agent, line, write, access.agent, access.line, is_store, ordered="scope"
            )
        return agent, line, word

    def _suspect(self, place: int, agent: Agent, line: int) -> None:
        """Nobody has written it yet; should another agent do so with no order, it will be a race."""
        if self._run.suspicion is None:
            read = Place(agent.name, "reads it", self._run.lines[line])
            whole = self._whole
            self._run.suspicion = Unwritten(whole.element(place), [read], array=whole.name)

    def _race(
        self,
        place: Any,
        agent: Agent,
        line: int,
        write: bool,
        other: Agent,
        other_line: int,
        other_wrote: bool,
        ordered: str = "",
    ) -> Race:
        lines = self._run.lines
        places = [
            Place(other.name, "writes it" if other_wrote else "reads it", lines[int(other_line)]),
            Place(agent.name, "writes it" if write else "reads it", lines[line]),
        ]
        whole = self._whole
        return Race(whole.element(int(place)), places, _advice(agent, other, ordered), whole.name)


def _advice(agent: Agent, other: Agent, ordered: str) -> str:
    """What would order two accesses."""
    reach = agent.distance(other)
    name = {BLOCK: "BLOCK", GPU: "GPU"}.get(reach, "SYSTEM")
    if ordered == "scope":
        return f"both have an order, but one has too narrow a scope: from one to the other it takes {name}"
    if ordered:
        return "one of the two has an order, the other is plain: access it by ordered words on both sides"
    if reach == BLOCK:
        within = "a warp_barrier() or a barrier()" if agent.warp is other.warp else "a barrier()"
        return f"nothing orders the two: {within} between them would"
    if reach == GPU:
        return "nothing orders the two: a grid_barrier(block) would, or a store_release seen by a load_acquire"
    return "nothing orders the two: a store_release seen by a load_acquire would, both with scope SYSTEM"


class Records:
    """An array of records: each field is watched on its own."""

    def __init__(self, fields: dict[str, Watched]) -> None:
        self._fields = fields
        first = next(iter(fields.values()))
        self.shape, self.size = first.shape, first.size

    def __getitem__(self, key: Any) -> Any:
        return self._fields[key] if isinstance(key, str) else Record(self._fields, key)


class Record:
    """One record of an array."""

    def __init__(self, fields: dict[str, Watched], key: Any) -> None:
        self._fields, self._key = fields, key

    def __getitem__(self, name: str) -> Any:
        return self._fields[name][self._key]

    def __setitem__(self, name: str, value: Any) -> None:
        self._fields[name][self._key] = value


def watch(run: Run, name: str, array: np.ndarray, written: bool = True, shared: bool = False) -> Watched | Records:
    """An array of a launch, watched under a name; `written`: whether what is in it may be read."""
    if array.dtype.names:
        return Records({f: watch(run, f"{name}.{f}", array[f], written) for f in array.dtype.names})  # type: ignore[misc]
    whole = Whole(run, name, array.shape, shared)
    return Watched(whole, array, Shadow(array.shape, len(run.agents), written))
