"""Who runs in a checked launch: the grid's lanes, their asynchronous copies, and agents outside, such as a NIC.

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

from ..on_python import WARP_WIDTH, Copy
from ..vocabulary import BLOCK, GPU, SYSTEM
from .explorer import Explorer
from .findings import Divergence, InFlight, Place
from .lines import Lines

COPIES = 16
"""Asynchronous copies of a block that are told apart at a time."""


class Actor:
    """Whoever accesses memory: an agent, or an asynchronous copy."""

    def __init__(self, index: int, actors: int, name: str, block: "Block") -> None:
        self.index, self.name, self.block = index, name, block
        self.known = np.zeros((2, actors), np.int32)
        """two clocks: what has come before, and what of it is a copy, or has come before an async_fence()"""

    @property
    def clock(self) -> np.ndarray:
        """What has come before what this actor does next."""
        return self.known[0]

    @property
    def writes_seen(self) -> np.ndarray:
        """The same, of writes."""
        return self.known[0]

    def distance(self, other: "Actor") -> int:
        """The scope that reaches from one to the other."""
        if self.block is other.block:
            return BLOCK
        return SYSTEM if self.block.outside or other.block.outside else GPU


class Copier(Actor):
    """An asynchronous copy; one that is known to be over gives its place to the next."""

    def __init__(self, index: int, actors: int, block: "Block") -> None:
        super().__init__(index, actors, f"an asynchronous copy of {block.name}", block)
        self.issuer: Agent | None = None
        self.line = 0
        """where it was started"""
        self.make: Callable[[], None]

    @property
    def writes_seen(self) -> np.ndarray:
        """Of ordinary writes, those that have passed a fence."""
        return self.known[1]

    @property
    def moment(self) -> int:
        """When the present copy is."""
        return int(self.known[0, self.index])

    def begin(self, issuer: "Agent", line: int) -> None:
        """A copy starts: what has come before its issuer's next access has come before it."""
        moment = self.moment + 1
        self.issuer, self.line, self.known = issuer, line, issuer.known.copy()
        self.known[:, self.index] = moment
        issuer.tick()


class Agent(Actor):
    """One thread of the launch. It runs only while it holds the explorer's baton."""

    def __init__(self, index: int, actors: int, name: str, block: "Block", thread: int) -> None:
        super().__init__(index, actors, name, block)
        self.thread = thread
        self.warp, self.lane = block.warps[thread // WARP_WIDTH], thread % WARP_WIDTH
        self.tick()
        block.lanes.append(self)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.seen: dict[int, np.ndarray] = {}
        """by distance: what has been released by those whose values its relaxed loads have read"""
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

    def see(self, distance: int, known: np.ndarray) -> None:
        """A relaxed load has read the value of a releaser at a distance, who knew this."""
        self.seen[distance] = np.maximum(known, self.seen.get(distance, 0))

    def acquire(self, scope: int) -> None:
        """A fence: what its relaxed loads have seen so far has come before what it does next."""
        for distance, known in self.seen.items():
            if scope >= distance:
                np.maximum(self.known, known, out=self.known)

    def fence(self) -> None:
        """What has come before comes before asynchronous copies, too."""
        self.known[1] = self.known[0]
        self.tick()


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
    latest = np.maximum.reduce([agent.known for agent in agents])
    for agent in agents:
        agent.known = latest.copy()
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
        self.threads, self.python_grid, self.name, self.outside = threads, explorer, name, outside
        self._lines = lines
        self.lanes: list[Agent] = []
        self.copiers: list[Copier] = []
        self._left = 0
        self.barrier = Meeting(explorer, lines, threads, name)
        widths = [min(WARP_WIDTH, threads - first) for first in range(0, threads, WARP_WIDTH)]
        self.warps = [Warp(i, width, explorer, lines, f"{name}, warp {i}") for i, width in enumerate(widths)]

    def leave(self, agent: Agent) -> None:
        """`agent` has ended; raises InFlight with the last one, where a copy may still be writing to the arena."""
        for meeting in (self.barrier, agent.warp.barrier):
            meeting.leave(agent)
        self._left += 1
        if self._left < self.threads:
            return
        for copier in self.copiers:
            self.python_grid.finish(copier)
            if copier.issuer and not any(self._is_over(copier, lane) for lane in self.lanes):
                place = Place(copier.issuer.name, "starts it", self._lines[copier.line])
                raise InFlight(
                    f"{self.name} has ended, and no lane knows that {copier.name} is over",
                    [place],
                    "a lane has to mbarrier_wait() for it: the shared memory may be another block's by then",
                )

    # --- what the words ask for

    def start_copy(self, copy: Copy) -> None:
        """Start an asynchronous copy; the explorer decides when it is made."""
        agent = self.python_grid.running
        line = self._lines.number(sys._getframe(1))
        make = copy.target.receive(copy, line)
        copier = next((c for c in self.copiers if not c.issuer or self._is_over(c, agent)), None)
        if copier is None:  # the oldest: who knows of its next copy will seem to know of this one
            copier = self.copiers[0]
            self.python_grid.finish(copier)
        self.copiers.remove(copier)
        self.copiers.append(copier)
        copier.begin(agent, line)
        copier.make = lambda: make(copier)
        self.python_grid.start_copy(copier)

    def acquire_fence(self, scope: int) -> None:
        """What the running agent's relaxed loads have seen released comes before what it does next."""
        self.python_grid.running.acquire(scope)

    def async_fence(self) -> None:
        """What the running agent has done or seen comes before copies that follow."""
        self.python_grid.running.fence()

    def _is_over(self, copier: Copier, agent: Agent) -> bool:
        return int(agent.clock[copier.index]) >= copier.moment
