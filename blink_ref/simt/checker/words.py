"""Elements that are accessed with an order: what each access hands on, and to whom."""

from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..vocabulary import BLOCK

if TYPE_CHECKING:
    from .agents import Actor, Agent

PLAIN = -1
"""In a scope's place: the access has no order. No other agent is within this reach."""


class Order(NamedTuple):
    """What a word of the vocabulary does to its element."""

    word: str
    acquires: bool = False
    releases: bool = False
    is_atomic: bool = False
    """it loads and stores in one step"""
    on_mbarrier: bool = False
    """its store is an arrival, its load a test for a phase: both within the block"""


ORDERS = {
    order.word: order
    for order in (
        Order("load_relaxed"),
        Order("load_relaxed_four"),
        Order("load_acquire", acquires=True),
        Order("store_relaxed"),
        Order("publish"),
        Order("fragment_put"),
        Order("awaited"),
        Order("store_release", releases=True),
        Order("atomic_add", acquires=True, releases=True, is_atomic=True),
        Order("atomic_max", acquires=True, releases=True, is_atomic=True),
        Order("atomic_cas", acquires=True, releases=True, is_atomic=True),
        Order("mbarrier_arrive", releases=True, is_atomic=True, on_mbarrier=True),
        Order("mbarrier_expect_bytes", releases=True, is_atomic=True, on_mbarrier=True),
        Order("mbarrier_wait", acquires=True, on_mbarrier=True),
    )
}
"""By the word in whose body an access stands."""


def scope_of(frame: FrameType) -> int:
    """The scope that a word was called with, given the frame of its body."""
    return int(frame.f_locals.get("scope", BLOCK))


def commute(word: str, other: str) -> bool:
    """Whether two words may come in either order: an add and a max leave another value."""
    return {word, other} != {"atomic_add", "atomic_max"}


class Access(NamedTuple):
    """An actor's last ordered load, or store, of an element."""

    agent: "Actor"
    moment: int
    line: int
    scope: int
    word: str


class Word:
    """The ordered accesses of one element so far."""

    def __init__(self) -> None:
        self.loads: dict[int, Access] = {}
        self.stores: dict[int, Access] = {}
        self._released: list[tuple[Agent, int, np.ndarray]] = []
        """who released the value that is there now, with which scope, and all that came before it"""
        self._arrived: np.ndarray | int = 0
        """of an mbarrier: what came before the arrivals so far"""
        self._complete: np.ndarray | int = 0
        """and before those of phases that are complete"""

    def unordered(self, agent: "Actor", write: bool, scope: int, word: str) -> tuple[Access, bool] | None:
        """An access that races with one by `agent`, and whether it is a store. Scope PLAIN: it has no order."""
        for is_store, accesses in ((True, self.stores), (False, self.loads)):
            if is_store or write:
                for access in accesses.values():
                    unseen = access.moment > agent.clock[access.agent.index]
                    reached = min(scope, access.scope) >= agent.distance(access.agent)
                    if unseen and not (reached and commute(word, access.word)):
                        return access, is_store
        return None

    def acquire(self, agent: "Agent", scope: int) -> None:
        """What came before the release of the value now seen, has come before what `agent` does next."""
        for _, known in self._handed_on(agent, scope):
            np.maximum(agent.known, known, out=agent.known)

    def see(self, agent: "Agent", scope: int) -> None:
        """The same, if the agent comes to a fence later."""
        for distance, known in self._handed_on(agent, scope):
            agent.see(distance, known)

    def _handed_on(self, agent: "Agent", scope: int) -> Iterator[tuple[int, np.ndarray]]:
        """How far the releasers are from whom `scope` lets see it, and what they knew."""
        for releaser, reach, known in self._released:
            if min(scope, reach) >= (distance := agent.distance(releaser)):
                yield distance, known

    def release(self, agent: "Agent", scope: int, keeps: bool) -> None:
        """`agent` hands on all that it did and saw; if it `keeps` what it found, so do those before it."""
        kept = [each for each in self._released if keeps and each[0] is not agent]
        self._released = [*kept, (agent, scope, agent.known.copy())]
        agent.tick()

    def arrive(self, actor: "Actor", completes: bool) -> None:
        """An arrival at an mbarrier, or a copy's end, which may complete the phase."""
        self._arrived = np.maximum(self._arrived, actor.known)
        if completes:
            self._complete = self._arrived

    def pass_phase(self, agent: "Agent") -> None:
        """`agent` has found its phase complete."""
        np.maximum(agent.known, self._complete, out=agent.known)

    def forget(self) -> None:
        """A store that releases nothing took the value's place: whoever sees it acquires nothing."""
        self._released = []
        self._arrived = self._complete = 0
