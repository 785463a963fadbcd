"""Who runs next: one agent at a time, chosen by a seeded draw, so that a run replays from its seed.

Every agent is a thread that waits at its gate for the baton. It hands the baton over where agents can
meet (barriers, exchanges, ordered accesses, :func:`~..vocabulary.relax`), and now and then at a plain access.
"""

import contextlib
import random
import sys
from typing import TYPE_CHECKING

from ..on_python import Abandoned
from .findings import Deadlock, Place, Race
from .lines import Line, Lines

if TYPE_CHECKING:
    from .agents import Agent, Copier

STILL = 2000
"""Turns of spin loops in which no agent does anything else, before they count as a deadlock."""

READS = 1_000_000
"""Plain reads, with no write by any agent, before they count as one: a spin loop on a plain load."""

SPINS = 300_000
"""Turns of spin loops in a run."""

LAG = 256
"""Turns for which some agents, and then others, fall behind."""


class Explorer:
    """The baton, and the draws that say who gets it."""

    def __init__(self, seed: int, lines: Lines) -> None:
        self._draw = random.Random(seed)
        self._pace = self._draw.choice((16, 128, 1024))
        self._restless = self._draw.choice((0.5, 0.1))
        self._until_handed = self._pace
        self._lines = lines
        self._turns = self._still = self._reads = self._spins = 0
        self._able: list[Agent] = []
        self._asleep: list[Agent] = []
        self.running: Agent
        self._copies: list[Copier] = []
        self._copy_draw = random.Random(seed)  # its own: runs without copies are as they would be
        self._haste = self._copy_draw.choice((0.3, 0.03, 0.003))
        self._slow: set[Agent] = set()
        self._resting: set[Agent] = set()
        """who gave way in a spin loop, and has seen no ordered store since"""
        self.failure: BaseException | None = None
        self.lock = contextlib.nullcontext()
        """what the atomic words hold: nobody else runs between their load and their store"""

    def start(self, agents: list["Agent"]) -> None:
        """Give the baton to one of `agents`, whose threads wait at their gates."""
        self._able = list(agents)
        self.running = self._choose()
        self.running.gate.release()

    def await_turn(self, agent: "Agent") -> None:
        """Wait for the baton; raises Abandoned when another agent has failed."""
        agent.gate.acquire()
        if self.failure is not None:
            raise Abandoned

    def hand_over(self) -> None:
        """Whoever is drawn goes on; it may be the caller."""
        agent, following = self.running, self._choose()
        if following is not agent:
            self._give(following)
            self.await_turn(agent)

    def sleep(self) -> None:
        """Let others run until :meth:`wake`."""
        agent = self.running
        self._able.remove(agent)
        self._asleep.append(agent)
        self._pass_on()
        self.await_turn(agent)

    def wake(self, agents: list["Agent"]) -> None:
        """Those of `agents` who sleep can run again."""
        for agent in agents:
            if agent in self._asleep:
                self._asleep.remove(agent)
                self._able.append(agent)

    def end(self) -> None:
        """The running agent has ended."""
        self._able.remove(self.running)
        if self._able or self._asleep:
            self._pass_on()

    def fail(self, failure: BaseException) -> None:
        """Keep what went wrong, and let all who wait go with an exception.

        A race of a copy that is still to be made comes first: whatever else went wrong may follow from it.
        """
        self.failure = failure if isinstance(failure, Race) else self._race_of_a_copy() or failure
        for agent in (*self._able, *self._asleep):
            if agent is not self.running:
                agent.gate.release()

    # --- what agents do, as seen from here

    def moved(self) -> None:
        """The running agent did something that is no turn of a spin loop."""
        self._still = 0
        self.running.spins_at = None

    def plain(self, write: bool) -> None:
        """The running agent is about to make a plain access."""
        self._still = 0
        self.running.spins_at = None
        self._reads = 0 if write else self._reads + 1
        if self._reads > READS:
            raise self._stuck("agents read on and on, and nobody writes")
        self._until_handed -= 1
        if self._until_handed <= 0:
            self._until_handed = 1 + int(2 * self._pace * self._draw.random())
            self.hand_over()

    def ordered(self, write: bool) -> None:
        """The running agent is about to make an ordered access."""
        if write:
            self._still = self._reads = 0
            self._resting.clear()
        else:
            self._turn_of_spin()
        if self._draw.random() < self._restless:
            self.hand_over()

    def relax(self, spins: int) -> None:
        """The running agent gives way in a spin loop."""
        self._turn_of_spin()
        self._resting.add(self.running)
        self.hand_over()

    def start_copy(self, copier: "Copier") -> None:
        """An asynchronous copy can be made from now on."""
        self._copies.append(copier)
        self.moved()
        self.hand_over()

    def finish(self, copier: "Copier") -> None:
        """Make a copy, if it has not been made."""
        if copier in self._copies:
            self._copies.remove(copier)
            self._still = self._reads = 0
            self._resting.clear()
            copier.make()

    def _race_of_a_copy(self) -> Race | None:
        try:
            while self._copies:
                self.finish(self._copies[0])
        except Race as race:
            return race
        return None

    def clock_ns(self) -> int:
        """A clock by which a turn takes a microsecond, so that a run replays."""
        return 1000 * self._turns

    def _turn_of_spin(self) -> None:
        self.running.spins_at = sys._getframe(2)
        self._still += 1
        self._spins += 1
        if self._still > STILL or self._spins > SPINS:
            raise self._stuck("whoever is left spins, and nothing changes")

    # --- the baton

    def _choose(self) -> "Agent":
        self._turns += 1
        if self._draw.random() < 1 / LAG:
            self._slow = {agent for agent in (*self._able, *self._asleep) if self._draw.random() < 0.5}
        while self._copies and self._copy_draw.random() < self._haste:
            self.finish(self._copy_draw.choice(self._copies))
        able = [agent for agent in self._able if agent not in self._resting]
        if not able:
            if self._copies:
                self.finish(self._copy_draw.choice(self._copies))
            self._resting.clear()
            able = self._able
        if self._draw.random() < 0.98:
            able = [agent for agent in able if agent not in self._slow] or able
        return able[int(self._draw.random() * len(able))]

    def _give(self, agent: "Agent") -> None:
        self.running = agent
        agent.gate.release()

    def _pass_on(self) -> None:
        if not self._able:
            raise self._stuck("every agent that is left waits for another")
        self._give(self._choose())

    def _stuck(self, what: str) -> Deadlock:
        places: dict[tuple[Line, object], Place] = {}
        for agent in (*self._asleep, *self._able):
            did, frame = ("waits at", agent.waits_at) if agent in self._asleep else ("spins at", agent.spins_at)
            if frame is not None:
                line = self._lines[self._lines.number(frame)]
                places.setdefault((line, agent.block), Place(agent.name, did, line))
        return Deadlock(what, list(places.values()))
