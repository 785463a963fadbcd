"""Elements that are accessed with an order: what each access hands on, and to whom."""

from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .agents import Agent


PLAIN = -1
"""In a scope's place: the access has no order. No other agent is within this reach."""


class Order(NamedTuple):
    """What a word of the vocabulary does to its element. Its store, if it has one, releases."""

    word: str
    acquires: bool
    is_atomic: bool = False
    """it loads and stores in one step"""


ORDERS = {
    order.word: order
    for order in (
        Order("load_relaxed", acquires=False),
        Order("load_acquire", acquires=True),
        Order("store_release", acquires=False),
        Order("atomic_add", acquires=True, is_atomic=True),
        Order("atomic_max", acquires=True, is_atomic=True),
        Order("atomic_cas", acquires=True, is_atomic=True),
    )
}
"""By the word in whose body an access stands."""


def scope_of(frame: FrameType) -> int:
    """The scope that a word was called with, given the frame of its body."""
    return int(frame.f_locals["scope"])


def commute(word: str, other: str) -> bool:
    """Whether two words may come in either order: an add and a max leave another value."""
    return {word, other} != {"atomic_add", "atomic_max"}


class Access(NamedTuple):
    """An agent's last ordered load, or store, of an element."""

    agent: "Agent"
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

    def unordered(self, agent: "Agent", write: bool, scope: int, word: str) -> tuple[Access, bool] | None:
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
        for releaser, reach, clock in self._released:
            if min(scope, reach) >= agent.distance(releaser):
                np.maximum(agent.clock, clock, out=agent.clock)

    def release(self, agent: "Agent", scope: int, keeps: bool) -> None:
        """`agent` hands on all that it did and saw; if it `keeps` what it found, so do those before it."""
        kept = [each for each in self._released if keeps and each[0] is not agent]
        self._released = [*kept, (agent, scope, agent.clock.copy())]
        agent.tick()

    def forget(self) -> None:
        """A plain store took the value's place: whoever sees it acquires nothing."""
        self._released = []
