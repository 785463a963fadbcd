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

    acquires: bool
    is_atomic: bool = False
    """it loads and stores in one step"""


ORDERS = {
    "load_relaxed": Order(acquires=False),
    "load_acquire": Order(acquires=True),
    "store_release": Order(acquires=False),
    "atomic_add": Order(acquires=True, is_atomic=True),
    "atomic_max": Order(acquires=True, is_atomic=True),
    "atomic_cas": Order(acquires=True, is_atomic=True),
}
"""By the word in whose body an access stands."""


def scope_of(frame: FrameType) -> int:
    """The scope that a word was called with, given the frame of its body."""
    return int(frame.f_locals["scope"])


class Access(NamedTuple):
    """An agent's last ordered load, or store, of an element."""

    agent: "Agent"
    moment: int
    line: int
    scope: int


class Word:
    """The ordered accesses of one element so far."""

    def __init__(self) -> None:
        self.loads: dict[int, Access] = {}
        self.stores: dict[int, Access] = {}
        self._released: list[tuple[Agent, int, np.ndarray]] = []
        """who released the value that is there now, with which scope, and all that came before it"""

    def unordered(self, agent: "Agent", write: bool, scope: int) -> tuple[Access, bool] | None:
        """An access, and whether it is a store, that races with one by `agent` in a scope, or PLAIN."""
        for is_store, accesses in ((True, self.stores), (False, self.loads)):
            if is_store or write:
                for access in accesses.values():
                    unseen = access.moment > agent.clock[access.agent.index]
                    if unseen and min(scope, access.scope) < agent.distance(access.agent):
                        return access, is_store
        return None

    def acquire(self, agent: "Agent", scope: int) -> None:
        """What came before the release of the value now seen, has come before what `agent` does next."""
        for releaser, reach, clock in self._released:
            if min(scope, reach) >= agent.distance(releaser):
                np.maximum(agent.clock, clock, out=agent.clock)

    def release(self, agent: "Agent", scope: int, keeps: bool) -> None:
        """`agent` hands on all that it did and saw; `keeps`: so do those whose value it has changed in one step."""
        kept = [each for each in self._released if keeps and each[0] is not agent]
        self._released = [*kept, (agent, scope, agent.clock.copy())]
        agent.tick()

    def forget(self) -> None:
        """A plain store took the value's place: whoever sees it acquires nothing."""
        self._released = []
