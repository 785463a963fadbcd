"""Who runs in a checked launch: the lanes of the grid, and agents outside of it, such as a NIC.

They stand in for the classes of :mod:`..on_python`, as far as the words ask for them. Each has a vector
clock: ``clock[a]`` is the last moment of agent a that is known to have come before (Lamport, 1978;
FastTrack: Flanagan and Freund, 2009).
"""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from ..on_python import WARP_WIDTH
from ..vocabulary import BLOCK, GPU, SYSTEM
from .explorer import Explorer
from .findings import Divergence, Place
from .lines import Lines


class Agent:
    """One thread of the launch. It runs only while it holds the explorer's baton."""

    def __init__(self, index: int, agents: int, name: str, block: "Block", thread: int) -> None:
        self.index, self.name, self.block, self.thread = index, name, block, thread
        self.warp, self.lane = block.warps[thread // WARP_WIDTH], thread % WARP_WIDTH
        self.clock = np.zeros(agents, np.int32)
        self.clock[index] = 1
        self.gate = threading.Lock()
        self.gate.acquire()
        self.received: list[Any] = []
        """what the warp's last exchange brought"""
        self.waits_at: FrameType | None = None
        """where it waits for others"""
        self.spins_at: FrameType | None = None
        """where it last took a turn of a spin loop, if it has done nothing else since"""

    def __repr__(self) -> str:
        return self.name

    def tick(self) -> None:
        """What this agent does from now on is not covered by what it has released so far."""
        self.clock[self.index] += 1

    def distance(self, other: "Agent") -> int:
        """The scope that reaches from one to the other."""
        if self.block is other.block:
            return BLOCK
        return SYSTEM if self.block.outside or other.block.outside else GPU


class Meeting:
    """Where so many agents wait for each other, again and again, each time at one place of the source."""

    def __init__(self, explorer: Explorer, lines: Lines, n: int, who: str) -> None:
        self._explorer, self._lines, self._n, self._who = explorer, lines, n, who
        self._waiting: list[Agent] = []
        self._ended: list[Agent] = []

    def wait(self) -> None:
        """Meet; what each wrote before, all see after."""
        self.meet(sys._getframe(1), orders=True)

    def meet(self, at: FrameType, orders: bool, gather: Callable[[list[Agent]], None] | None = None) -> None:
        """Meet at a frame; the last to come lets `gather` hand over what all have brought."""
        agent = self._explorer.running
        agent.waits_at = at
        self._explorer.moved()
        if self._ended:
            raise self._passed_by([agent], self._ended[0])
        if self._waiting:
            self._check_place(self._waiting[0], agent)
        self._waiting.append(agent)
        if len(self._waiting) < self._n:
            self._explorer.sleep()
        else:
            met, self._waiting = self._waiting, []
            if orders:
                _join(met)
            if gather is not None:
                gather(met)
            self._explorer.wake(met)
            self._explorer.hand_over()
        agent.waits_at = None

    def leave(self, agent: Agent) -> None:
        """`agent` has ended, and will not come again."""
        self._ended.append(agent)
        if self._waiting:
            raise self._passed_by(self._waiting, agent)

    def _check_place(self, first: Agent, agent: Agent) -> None:
        if parting := self._lines.parting(first.waits_at, agent.waits_at):
            places = [Place(who.name, "waits at", line) for who, line in zip((first, agent), parting, strict=True)]
            raise Divergence(
                f"lanes of {self._who} wait for each other at different places",
                places,
                "every lane of the block (for a warp's words, of the warp) has to come to the same call",
            )

    def _passed_by(self, waiting: list[Agent], ended: Agent) -> Divergence:
        places = [Place(a.name, "waits at", self._lines[self._lines.number(a.waits_at)]) for a in waiting[:1]]
        return Divergence(f"{ended.name} has ended, and lanes of {self._who} wait for it", places)


def _join(agents: list[Agent]) -> None:
    latest = np.maximum.reduce([agent.clock for agent in agents])
    for agent in agents:
        agent.clock = latest.copy()
        agent.tick()


class Warp:
    """Some lanes of a block that exchange values.

    An exchange is not a barrier: it hands over values, and orders no memory (CUDA Programming Guide, "Warp
    Shuffle Functions").
    """

    def __init__(self, index: int, width: int, explorer: Explorer, lines: Lines, who: str) -> None:
        self.index, self.width = index, width
        self.barrier = Meeting(explorer, lines, width, who)
        self._explorer = explorer
        self._given: dict[int, Any] = {}

    def exchange(self, x: Any) -> list[Any]:
        """Every lane gives a value and gets the list of all of them, in lane order."""
        agent = self._explorer.running
        self._given[agent.lane] = x
        self.barrier.meet(sys._getframe(1), orders=False, gather=self._deal)
        return agent.received

    def _deal(self, met: list[Agent]) -> None:
        values = [self._given[lane] for lane in range(self.width)]
        for agent in met:
            agent.received = list(values)


class Block:
    """The lanes of one block; an outside agent is alone in one of its own."""

    def __init__(self, name: str, threads: int, explorer: Explorer, lines: Lines, outside: bool = False) -> None:
        self.threads, self.python_grid, self.outside = threads, explorer, outside
        self.barrier = Meeting(explorer, lines, threads, name)
        widths = [min(WARP_WIDTH, threads - first) for first in range(0, threads, WARP_WIDTH)]
        self.warps = [Warp(i, width, explorer, lines, f"{name}, warp {i}") for i, width in enumerate(widths)]
