"""Events as a scheduler writes them, made up: a small model of one, with chunked prefill, a prefix cache,
preemption and steps that give way. For tests of what reads them.
"""

import random
from dataclasses import dataclass, field

import numpy as np

from blink_ref.ring.layout import (
    EVENT_ADMIT,
    EVENT_ARRIVE,
    EVENT_EVICT,
    EVENT_FINISH,
    EVENT_HOLD,
    EVENT_PAUSE,
    EVENT_PHASE,
    EVENT_PREEMPT,
    EVENT_RELEASE,
    EVENT_RESUME,
    EVENT_ROWS,
    EVENT_STEP,
    LENGTH,
    PHASES,
)
from blink_ref.trace.record import Event, Part, Recording, pack_event


@dataclass(eq=False)
class Request:
    """A request, and how far it is."""

    slot: int
    prompt: int
    answer: int
    shared: int = 0  # pages that its prompt has in common with the others'
    known: int = 0
    done: int = 0
    pages: list[int] = field(default_factory=list)


class History:
    """A scheduler with `pages` pages of 16, steps of `rows` rows, and a clock that each event moves on."""

    def __init__(self, pages: int = 96, rows: int = 32, running: int = 8, rows_first: bool = True, seed: int = 0):
        self.events: list[Event] = []
        self.ns = 10_000_000
        self.free = list(range(pages))[::-1]
        self.pages, self.rows, self.most, self.rows_first = pages, rows, running, rows_first
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.cache: list[int] = []
        self.shared: list[int] = []
        self.step_number = 0
        self.random = random.Random(seed)

    def write(self, kind: int, slot: int = 0, value: int = 0, after: int = 200) -> None:
        self.ns += after
        self.events.append(Event(self.ns, kind, slot, value))

    def arrive(self, slot: int, prompt: int, answer: int, shared: int = 0) -> None:
        self.write(EVENT_ARRIVE, slot, prompt)
        self.waiting.append(Request(slot, prompt, answer, shared, prompt))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self, gives_way: Request | None = None) -> None:
        """Admit, plan, compute and publish; in the middle, perhaps, let a request in that cannot wait."""
        self.admit()
        chunks = self.chunks(self.running)
        if not chunks:
            self.ns += 1000
            return
        self.plan(chunks)
        if gives_way:
            self.compute(0, 4)
            self.write(EVENT_PAUSE, 0, 3)
            self.write(EVENT_ARRIVE, gives_way.slot, gives_way.prompt)
            self.write(EVENT_ADMIT, gives_way.slot)
            self.running.append(gives_way)
            while gives_way in self.running:
                urgent = self.chunks([gives_way])
                self.plan(urgent)
                self.compute(0, 8)
                self.publish(urgent)
            self.write(EVENT_RESUME, 0, 3)
            self.compute(4, 8)
        else:
            self.compute(0, 8)
        self.publish(chunks)

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.most:
            request = self.waiting[0]
            found = self.shared[: request.shared]
            need = -(-request.known // 16) + 1 - len(found)
            while need > len(self.free) and self.cache:
                self.write(EVENT_EVICT, 0, self.cache[0])
                self.free.append(self.cache.pop(0))
            if need > len(self.free):
                return
            self.running.append(self.waiting.pop(0))
            request.done = min(16 * len(found), request.known - 1)
            self.write(EVENT_ADMIT, request.slot, request.done)
            for page in found:
                if page in self.cache:
                    self.cache.remove(page)
                self.hold(request, page)
            for _ in range(need):
                self.hold(request, self.free.pop())
            if request.shared and not self.shared:
                self.shared = request.pages[: request.shared]

    def hold(self, request: Request, page: int) -> None:
        self.write(EVENT_HOLD, request.slot, len(request.pages) << 20 | page)
        request.pages.append(page)

    def release(self, request: Request) -> None:
        for page in request.pages:
            others = any(page in other.pages for other in self.running if other is not request)
            kept = page in self.shared
            self.write(EVENT_RELEASE, request.slot, kept << 20 | page)
            if kept and not others and page not in self.cache:
                self.cache.append(page)
            elif not kept:
                self.free.append(page)
        request.pages = []

    def chunks(self, running: list[Request]) -> list[tuple[Request, int, int]]:
        chunks = [(r, r.done, 1) for r in running if r.done >= r.known - (r.known > r.prompt)]
        left = self.rows - len(chunks)
        for request in running:
            todo = request.known - request.done
            if all(request is not other for other, *_ in chunks) and left > 0:
                chunks.append((request, request.done, min(todo, left)))
                left -= min(todo, left)
        return chunks

    def plan(self, chunks: list[tuple[Request, int, int]]) -> None:
        self.step_number += 1
        if not self.rows_first:
            self.write(EVENT_STEP, 0, self.step_number)
        for request, first, rows in chunks:
            self.write(EVENT_ROWS, request.slot, first << 20 | rows)
        if self.rows_first:
            self.write(EVENT_STEP, 0, self.step_number)

    def compute(self, first: int, last: int) -> None:
        for index in range(first, min(last, len(PHASES))):
            spent = 1500 if index == 0 else self.random.randrange(20_000, 90_000)
            self.write(EVENT_PHASE, 0, index << 32 | spent, spent if index else 10)

    def publish(self, chunks: list[tuple[Request, int, int]]) -> None:
        for request, first, rows in chunks:
            if request not in self.running:  # preempted a moment ago
                continue
            request.done = first + rows
            if request.done < request.known:
                continue
            request.known += 1
            request.answer -= 1
            if request.answer == 0:
                self.write(EVENT_FINISH, request.slot, LENGTH)
                self.release(request)
                self.running.remove(request)
            elif request.known > 16 * len(request.pages) and request.pages and not self.grow(request):
                self.preempt(self.running[-1])

    def grow(self, request: Request) -> bool:
        if self.free:
            self.hold(request, self.free.pop())
        return bool(request.pages and request.known <= 16 * len(request.pages))

    def preempt(self, request: Request) -> None:
        self.write(EVENT_PREEMPT, request.slot, request.known)
        self.release(request)
        request.done = 0
        self.running.remove(request)
        self.waiting.insert(0, request)

    def words(self) -> np.ndarray:
        return np.array([pack_event(*event) for event in self.events], np.uint64)

    def recording(self, first: int = 0, last: int | None = None) -> Recording:
        """What a recorder sees of the events [first, last)."""
        part = Part(np.full(self.pages, -1), [self.words()[first:last]])
        return Recording([part], 0)


def rich_history(rows_first: bool = True) -> History:
    """All at once: a long prompt in chunks, a shared beginning, waiting, preemption, a step that gives way."""
    history = History(rows_first=rows_first)
    history.arrive(0, 200, 24, shared=6)
    history.arrive(1, 20, 40)
    history.run(6)
    history.arrive(2, 130, 60, shared=6)
    history.arrive(3, 30, 30)
    history.run(6)
    for slot in range(4, 12):
        history.arrive(
            slot, history.random.randrange(40, 300), history.random.randrange(10, 80), 6 * (slot % 3 == 0)
        )
        history.run(2)
    history.step(Request(12, 12, 3, 0, 12))
    history.run(200)
    return history
