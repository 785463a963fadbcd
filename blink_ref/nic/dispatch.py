"""One outbox, many waiting clients: an asyncio task that takes records and hands each to its request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from blink_ref.errors import BlinkError

from .client import EngineGone, Event, Handle, Nic

logger = logging.getLogger(__name__)


class Generation:
    """A request in flight. Iterate over it for its events: tokens, then the reason for its end."""

    def __init__(self, nic: Nic, handle: Handle) -> None:
        self._nic, self._handle = nic, handle
        self._arrived: asyncio.Queue[Event | BlinkError] = asyncio.Queue()

    def cancel(self) -> None:
        """Nobody wants the rest. After the end it does nothing."""
        self._nic.cancel(self._handle)

    def put(self, arrived: Event | BlinkError) -> None:
        """For the dispatcher: an event, or why none will follow."""
        self._arrived.put_nowait(arrived)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The events. Raises EngineGone: it died first."""
        while True:
            arrived = await self._arrived.get()
            if isinstance(arrived, BlinkError):
                raise arrived
            yield arrived
            if arrived.reason is not None:
                return


class Dispatcher:
    """Polls a Nic while requests run, and sleeps while none does."""

    def __init__(self, nic: Nic) -> None:
        self._nic = nic
        self._running: dict[Handle, Generation] = {}
        self._work = asyncio.Event()

    def start(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Generation:
        """Submit a request, as :meth:`Nic.submit`. Raises BlinkError, Busy, EngineGone."""
        self._nic.check()
        handle = self._nic.submit(prompt, max_tokens, **options)
        generation = self._running[handle] = Generation(self._nic, handle)
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
        for generation in self._running.values():
            generation.put(why)
            generation.cancel()
        self._running.clear()
        self._work.clear()
