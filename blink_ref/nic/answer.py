"""The text of a prompt's samples as it comes, for the HTTP server."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from blink_ref.model.tokenizer import Tokenizer
from blink_ref.ring.layout import BAD_REQUEST, LENGTH, NO_PAGES, REASONS, SHUTDOWN, STOP, TIME, TOO_LONG

from .client import Event, Logprobs
from .detokenize import Detokenizer
from .dispatch import Generation
from .values import ApiError

STATUS_OF = {TOO_LONG: 400, NO_PAGES: 400, BAD_REQUEST: 500, SHUTDOWN: 503}


class Scored(NamedTuple):
    """A token with its log probabilities, and the number of characters of the answer before it."""

    token: int
    logprobs: Logprobs
    offset: int


class Piece(NamedTuple):
    """What one event adds to a sample: some text, maybe empty, and perhaps a scored token, or the end's reason."""

    sample: int
    text: str
    scored: Scored | None
    reason: int | None


@dataclass
class Sample:
    """One sample so far: its detokenizer, and how many tokens and characters it has."""

    detokenizer: Detokenizer
    tokens: int = 0
    characters: int = 0

    def add(self, n: int, event: Event) -> Piece:
        """The piece for an event of this sample, number ``n``. Raises ApiError: it failed."""
        if event.token is None:
            assert event.reason is not None
            if event.reason not in (STOP, LENGTH, TIME):
                raise ApiError(STATUS_OF[event.reason], f"the request {REASONS[event.reason]}")
            return Piece(n, self.detokenizer.finish(), None, event.reason)
        scored = Scored(event.token, event.logprobs, self.characters) if event.logprobs else None
        text = self.detokenizer.add(event.token)
        self.tokens += 1
        self.characters += len(text)
        return Piece(n, text, scored, None)


class Answer:
    """The samples of one prompt; ``tokens`` is how many have come for all of them."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, n: int) -> None:
        self._generation = generation
        self._samples = [Sample(Detokenizer(tokenizer)) for _ in range(n)]

    @property
    def tokens(self) -> int:
        """How many have come so far, for all samples."""
        return sum(sample.tokens for sample in self._samples)

    async def pieces(self) -> AsyncIterator[Piece]:
        """A piece for each token and each end. Raises ApiError, EngineGone: a sample failed."""
        async for n, event in self._generation:
            yield self._samples[n].add(n, event)
