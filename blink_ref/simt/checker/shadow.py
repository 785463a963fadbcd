"""What is known of each element of an array, and whether one more access is in order.

The shadow keeps for each element its last plain write (who, when, on which line) and every agent's last
plain read; elements with ordered accesses have a :class:`.words.Word` besides. A read races with a write
that is later than what the reader's clock knows of the writer, and so on (FastTrack: Flanagan and Freund, 2009).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..vocabulary import BLOCK, GPU
from .agents import Actor, Agent, Copier
from .explorer import Explorer
from .findings import Place, Race, Unwritten
from .lines import Lines
from .words import PLAIN, Access, Order, Word, commute

NEVER = -1
"""The moment of a write that has not been."""

LOADS, STORES = range(2)


class Run:
    """What all arrays of a launch share."""

    def __init__(self, explorer: Explorer, lines: Lines, actors: list[Actor]) -> None:
        self.explorer, self.lines, self.actors = explorer, lines, actors
        self.wholes: list[Whole] = []
        self.suspicion: Unwritten | None = None
        """the first read of memory that nobody has written"""


class Whole:
    """One array of a launch: its name, its words, and how often each agent accessed it."""

    def __init__(self, run: Run, name: str, shape: tuple[int, ...], is_arena: bool) -> None:
        self.run, self.name, self.shape, self.is_arena = run, name, shape, is_arena
        self.words: list[Word] = []
        self.counts = [[0, 0] for _ in run.actors]
        run.wholes.append(self)

    def element(self, place: int) -> str:
        """An element's name, by its place in the array."""
        return f"{self.name}[{', '.join(str(i) for i in np.unravel_index(place, self.shape))}]"


class Attempt(NamedTuple):
    """An access that is about to be made."""

    agent: Actor
    line: int
    write: bool
    scope: int = PLAIN
    word: str = ""
    """the ordered word that makes it"""


class Elements(NamedTuple):
    """Arrays over the elements; those over readers have one more dimension, the agents."""

    who: np.ndarray
    when: np.ndarray
    line: np.ndarray
    read: np.ndarray
    read_line: np.ndarray
    word: np.ndarray
    """1 + index into the words of the whole; 0 for none"""
    place: np.ndarray


class Shadow:
    """Of an array, or of a part of one."""

    def __init__(self, whole: Whole, elements: Elements) -> None:
        self.whole, self._run, self._of = whole, whole.run, elements

    @classmethod
    def of(cls, whole: Whole, written: bool) -> "Shadow":
        """Of a whole array; `written`: whether what is in it may be read."""
        shape, readers = whole.shape, (*whole.shape, len(whole.run.actors))
        elements = Elements(
            who=np.zeros(shape, np.int16),
            when=np.full(shape, 0 if written else NEVER, np.int32),
            line=np.zeros(shape, np.int32),
            read=np.zeros(readers, np.int32),
            read_line=np.zeros(readers, np.int32),
            word=np.zeros(shape, np.int32),
            place=np.arange(math.prod(shape)).reshape(shape),
        )
        return cls(whole, elements)

    def part(self, key: Any) -> "Shadow":
        """Of the elements at a key, which are some; they share memory with the whole."""
        return Shadow(self.whole, Elements(*(values[key] for values in self._of)))

    def plain(self, key: Any, line: int, write: bool, copier: Copier | None = None) -> None:
        """A plain access of the elements at a key, by the running agent or by a copy."""
        agent, of = copier or self._run.explorer.running, self._of
        when = of.when[key]
        if when.size == 0:
            return
        attempt = Attempt(agent, line, write)
        self._check_writes(key, attempt)
        if write:
            self._check_reads(key, attempt)
        elif (when < 0).any():
            self._suspect(np.extract(when < 0, of.place[key])[0], attempt)
        if self.whole.words:
            self._check_words(key, attempt)
        counted = copier.issuer if copier and copier.issuer else agent
        self.whole.counts[counted.index][STORES if write else LOADS] += when.size
        moment = agent.clock[agent.index]
        if write:
            of.who[key], of.when[key], of.line[key] = agent.index, moment, line
        else:
            of.read[key][..., agent.index] = moment
            of.read_line[key][..., agent.index] = line

    def load(self, key: Any, line: int, order: Order, scope: int) -> None:
        """The load of an ordered word; an atomic one is checked as the store that it will be."""
        attempt = Attempt(self._run.explorer.running, line, order.is_atomic, scope, order.word)
        word = self._checked_word(key, attempt)
        self._note(word.loads, LOADS, attempt)
        if not order.acquires:
            word.see(self._run.explorer.running, scope)
        elif order.on_mbarrier:
            word.pass_phase(self._run.explorer.running)
        else:
            word.acquire(self._run.explorer.running, scope)

    def store(self, key: Any, line: int, order: Order, scope: int) -> None:
        """The store of an ordered word."""
        attempt = Attempt(self._run.explorer.running, line, True, scope, order.word)
        word = self._checked_word(key, attempt)
        self._note(word.stores, STORES, attempt)
        self._of.when[key] = max(self._of.when[key], 0)
        if order.releases:
            word.release(self._run.explorer.running, scope, keeps=order.is_atomic)
        else:
            word.forget()

    def arrive(self, key: Any, line: int, word_name: str, completes: bool, copier: Copier | None = None) -> None:
        """An arrival at an mbarrier by the running agent, or the end of a copy."""
        agent = self._run.explorer.running
        attempt = Attempt(copier or agent, line, True, BLOCK, word_name)
        if self._of.when[key] < 0:
            self._suspect(self._of.place[key], attempt)
        word = self._checked_word(key, attempt)
        word.arrive(attempt.agent, completes)
        self._note(word.stores, STORES, attempt)
        if copier is None:
            agent.tick()

    def _note(self, accesses: dict[int, Access], kind: int, attempt: Attempt) -> None:
        agent = attempt.agent
        self.whole.counts[agent.index][kind] += 1
        moment = int(agent.clock[agent.index])
        accesses[agent.index] = Access(agent, moment, attempt.line, attempt.scope, attempt.word)

    def _checked_word(self, key: Any, attempt: Attempt) -> Word:
        """An element's word, after a check of an ordered access against all others."""
        of, words = self._of, self.whole.words
        if not of.word[key]:
            words.append(Word())
            of.word[key] = len(words)
        self._check_writes(key, attempt)
        if attempt.write:
            self._check_reads(key, attempt)
        elif of.when[key] < 0:
            self._suspect(of.place[key], attempt)
        self._check_words(key, attempt)
        return words[of.word[key] - 1]

    # --- against what others did

    def _check_writes(self, key: Any, attempt: Attempt) -> None:
        of = self._of
        late = of.when[key] > attempt.agent.writes_seen[of.who[key]]
        if late.any():
            who, when, line, place = (
                np.extract(late, values[key])[0] for values in (of.who, of.when, of.line, of.place)
            )
            other = Attempt(self._run.actors[who], line, True)
            raise self._race(place, attempt, other, lacks_fence=bool(when <= attempt.agent.clock[who]))

    def _check_reads(self, key: Any, attempt: Attempt) -> None:
        of = self._of
        late = of.read[key] > attempt.agent.clock
        if late.any():
            at = tuple(np.argwhere(late)[0])
            reader = Attempt(self._run.actors[at[-1]], of.read_line[key][at], False)
            raise self._race(of.place[key][at[:-1]], attempt, reader)

    def _check_words(self, key: Any, attempt: Attempt) -> None:
        numbers = self._of.word[key]
        for number in np.extract(numbers, numbers):
            word = self.whole.words[number - 1]
            if found := word.unordered(attempt.agent, attempt.write, attempt.scope, attempt.word):
                (agent, _, line, scope, name), is_store = found
                place = np.extract(numbers == number, self._of.place[key])[0]
                raise self._race(place, attempt, Attempt(agent, line, is_store, scope, name))
            if attempt.write and attempt.scope == PLAIN:
                word.forget()

    def _suspect(self, place: int, attempt: Attempt) -> None:
        """Nobody has written it yet; should another agent do so with no order, it will be a race."""
        if self._run.suspicion is None:
            read = Place(attempt.agent.name, "reads it", self._run.lines[attempt.line])
            self._run.suspicion = Unwritten(self.whole.element(place), [read], array=self.whole.name)

    def _race(self, place: int, attempt: Attempt, other: Attempt, lacks_fence: bool = False) -> Race:
        places = [
            Place(one.agent.name, "writes it" if one.write else "reads it", self._run.lines[int(one.line)])
            for one in (other, attempt)
        ]
        advice = FENCE if lacks_fence else _advice(attempt, other)
        return Race(self.whole.element(place), places, advice, self.whole.name)


FENCE = "the two are in order, but an asynchronous copy sees ordinary writes by way of an async_fence() only"
COPY = (
    "nothing orders the two: an mbarrier_wait() after the copy would, or a barrier() or mbarrier_wait() before it"
)


def _advice(one: Attempt, other: Attempt) -> str:
    """What would order two accesses."""
    reach = one.agent.distance(other.agent)
    if isinstance(one.agent, Copier) or isinstance(other.agent, Copier):
        return COPY
    if not commute(one.word, other.word):
        return "an add and a max give another result in the other order, and nothing orders the two"
    if PLAIN not in (one.scope, other.scope):
        name = {BLOCK: "BLOCK", GPU: "GPU"}.get(reach, "SYSTEM")
        return f"both are ordered, but one in too narrow a scope: from one to the other it takes {name}"
    if one.scope != other.scope:
        return "one of the two is ordered, the other plain: use ordered words on both sides"
    if reach == BLOCK:
        in_one_warp = isinstance(one.agent, Agent) and one.agent.warp is getattr(other.agent, "warp", None)
        words = "a warp_barrier() or a barrier()" if in_one_warp else "a barrier()"
        return f"nothing orders the two: {words} between them would"
    if reach == GPU:
        return "nothing orders the two: a grid_barrier(block) would, or a store_release seen by a load_acquire"
    return "nothing orders the two: a store_release seen by a load_acquire would, both with scope SYSTEM"
