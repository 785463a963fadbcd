"""Runs a grid under the checker."""

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .. import on_python, vocabulary
from ..device import DeviceFunction, references
from ..swap import reached
from . import agents, explorer, memory
from .agents import COPIES, Agent, Block, Copier
from .explorer import Explorer
from .findings import Finding, Race, Unwritten
from .lines import Lines
from .memory import watch
from .shadow import Run

Outside = Callable[..., None]
"""An agent beside the grid: it is called with the launch's arguments, without a block, and uses the words."""


class Count(NamedTuple):
    """How many elements of an array one lane, or outside agent, has accessed."""

    who: str
    array: str
    shared: bool
    """whether it is a block's arena, else it is global memory"""
    loads: int
    stores: int


def check(
    fn: DeviceFunction,
    blocks: int,
    lanes: int,
    *args: Any,
    seed: int = 0,
    shared: int = 4096,
    outside: Iterable[Outside] = (),
    unwritten: Iterable[np.ndarray] = (),
) -> list[Count]:
    """As :func:`..launch.launch` on the `python` target, every access checked; returns how many there were.

    `seed` decides the interleaving, and the same seed gives the same one again. `outside` are agents
    beside the grid, such as a NIC. What the arrays among `args` hold may be read, but for those in
    `unwritten`; the blocks' arenas hold nothing. Raises the first :class:`.findings.Finding`, or what
    the device function raised; ValueError where two arrays overlap.
    """
    outside = list(outside)
    lines = Lines(*map(vars, (agents, explorer, memory)))
    turns = Explorer(seed, lines)
    copies = COPIES if _copies(fn) else 0
    everyone, copiers = _actors(blocks, lanes, copies, outside, turns, lines)
    arrays = _Arrays(Run(turns, lines, [*everyone, *copiers]), unwritten)
    names = fn.python.__code__.co_varnames[1:]
    watched = [arrays.watch(name, value) for name, value in zip(names, args, strict=False)]
    grid = arrays.watch("block.grid", np.zeros(vocabulary.GRID_WORDS, np.uint32))
    threads = []
    for number, own in itertools.groupby(everyone[: blocks * lanes], key=lambda agent: agent.index // lanes):
        arena = arrays.watch("block.shared", np.full(shared, np.nan, np.float32), is_arena=True)
        turn = arrays.watch("block.turn", np.zeros(2, np.uint32))
        block = vocabulary.Block(number, blocks, arena, grid, turn)
        threads += [_thread(agent, turns, fn.python, (block, *watched)) for agent in own]
    threads += [
        _thread(agent, turns, run, tuple(watched))
        for agent, run in zip(everyone[blocks * lanes :], outside, strict=True)
    ]
    for thread in threads:
        thread.start()
    turns.start(everyone)
    for thread in threads:
        thread.join()
    if (failure := _first_fault(turns.failure, arrays.run.suspicion)) is not None:
        if isinstance(failure, Finding):
            failure.seed = seed
        raise failure
    return [
        Count(agent.name, whole.name, whole.is_arena, *whole.counts[agent.index])
        for agent in everyone
        for whole in arrays.run.wholes
        if any(whole.counts[agent.index])
    ]


def _first_fault(failure: BaseException | None, suspicion: Unwritten | None) -> BaseException | None:
    """A read of unwritten memory comes before what follows from it, but for the race with the write it missed."""
    if suspicion is None or (isinstance(failure, Race) and failure.array == suspicion.array):
        return failure
    return suspicion


def _copies(fn: DeviceFunction) -> bool:
    """Whether a device function may start asynchronous copies."""
    names = (value for each in reached(fn) for value in references(each.python).values())
    return any(value is vocabulary.copy_async for value in names)


def _actors(
    blocks: int, lanes: int, copies: int, outside: list[Outside], turns: Explorer, lines: Lines
) -> tuple[list[Agent], list[Copier]]:
    """The lanes and outside agents; and so many copies a block, whose numbers come after theirs."""
    n = blocks * (lanes + copies) + len(outside)
    made, copiers = list[Agent](), list[Copier]()
    for b in range(blocks):
        block = Block(f"block {b}", lanes, turns, lines)
        made += [Agent(b * lanes + t, n, f"block {b}, lane {t}", block, t) for t in range(lanes)]
        first = blocks * lanes + len(outside) + b * copies
        block.copiers = [Copier(first + c, n, block) for c in range(copies)]
        copiers += block.copiers
    for run in outside:
        name = f"the agent {getattr(run, '__name__', 'outside')}"
        made.append(Agent(len(made), n, name, Block(name, 1, turns, lines, outside=True), 0))
    return made, copiers


def _thread(agent: Agent, turns: Explorer, fn: Callable[..., None], args: tuple[Any, ...]) -> threading.Thread:
    def run() -> None:
        on_python.become(agent)
        try:
            turns.await_turn(agent)
            with np.errstate(all="ignore"):
                fn(*args)
            agent.block.leave(agent)
            turns.end()
        except on_python.Abandoned:
            pass  # the agent that failed says why
        except BaseException as failure:  # handed to the launcher, which raises it
            turns.fail(failure)

    return threading.Thread(target=run, daemon=True)


class _Arrays:
    """The arrays of a launch, each watched once, however often it is passed."""

    def __init__(self, run: Run, unwritten: Iterable[np.ndarray]) -> None:
        self.run = run
        self._unwritten = {_where(array) for array in unwritten}
        self._watched: dict[Any, Any] = {}
        self._known: list[tuple[str, np.ndarray]] = []

    def watch(self, name: str, value: Any, is_arena: bool = False) -> Any:
        """`value`, with every array in it watched; in an arena nothing is written yet."""
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            parts = [self.watch(f"{name}.{f}", part) for f, part in zip(fields, value, strict=True)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if not isinstance(value, np.ndarray):
            return value
        where = _where(value)
        if where not in self._watched:
            for other, array in self._known:
                if np.may_share_memory(value, array) and np.shares_memory(value, array):
                    raise ValueError(
                        f"{name} and {other} are parts of one array; pass the array, or copy one of them"
                    )
            self._known.append((name, value))
            written = not is_arena and where not in self._unwritten
            self._watched[where] = watch(self.run, name, value, written, is_arena)
        return self._watched[where]


def _where(array: np.ndarray) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str
