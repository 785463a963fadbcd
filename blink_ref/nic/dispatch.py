"""One outbox, many waiting clients: an asyncio task that takes records and hands each to its request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from blink_ref.errors import BlinkError

from .client import EngineGone, Event, Handle, Nic
from .parameters import Parameters

logger = logging.getLogger(__name__)


class Generation:
    """A prompt's samples in flight. Iterate over it for their events: tokens, and why each of them ended."""

    def __init__(self, nic: Nic, handles: Sequence[Handle]) -> None:
        self._nic, self._handles = nic, handles
        self._arrived: asyncio.Queue[tuple[int, Event] | BlinkError] = asyncio.Queue()

    def cancel(self) -> None:
        """Nobody wants the rest. After the end it does nothing."""
        for handle in self._handles:
            self._nic.cancel(handle)

    def put(self, event: Event) -> None:
        """For the dispatcher: what came for one of the samples."""
        self._arrived.put_nowait((self._handles.index(event.handle), event))

    def fail(self, why: BlinkError) -> None:
        """For the dispatcher: nothing more will come."""
        self._arrived.put_nowait(why)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """(sample, event) in order of their coming, until all have ended. Raises EngineGone: it died first."""
        left = len(self._handles)
        while left:
            arrived = await self._arrived.get()
            if isinstance(arrived, BlinkError):
                raise arrived
            yield arrived
            left -= arrived[1].reason is not None


class Dispatcher:
    """Polls a Nic while requests run, and sleeps while none does."""

    def __init__(self, nic: Nic) -> None:
        self._nic = nic
        self._running: dict[Handle, Generation] = {}
        self._work = asyncio.Event()

    def start(self, prompt: Sequence[int], parameters: Parameters, n: int) -> Generation:
        """Submit requests, as :meth:`Nic.submit_samples`. Raises BlinkError, Busy, EngineGone."""
        self._nic.check()
        handles = self._nic.submit_samples(prompt, parameters, n)
        generation = Generation(self._nic, handles)
        self._running |= dict.fromkeys(handles, generation)
        self._work.set()
        return generation

    async def run(self) -> None:
        """Poll for ever. Requests that run when the engine dies learn it."""
        while True:
            await self._work.wait()
            try:
                events = self._nic.poll()
            except EngineGone as gone:
                logger.error("%s", gone)
                self.abandon(gone)
                continue
            for event in events:
                if generation := self._running.get(event.handle):  # else abandoned
                    generation.put(event)
                if event.reason is not None:
                    self._running.pop(event.handle, None)
            if not self._running:
                self._work.clear()
            else:
                # An event loop's sleeps are whole milliseconds: fine for people, who wait at its end.
                await asyncio.sleep(0 if events else self._nic.pause())

    def abandon(self, why: BlinkError) -> None:
        """End all running requests with an error."""
        for generation in set(self._running.values()):
            generation.fail(why)
            generation.cancel()
        self._running.clear()
        self._work.clear()
