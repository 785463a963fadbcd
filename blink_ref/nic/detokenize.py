"""Token ids to text as they come, never with a broken character."""

from collections.abc import Sequence
from typing import Protocol

UNKNOWN = "\ufffd"
LONGEST_INCOMPLETE = 3
"""Bytes of a UTF-8 sequence that lacks its last one."""
KEEP = 8
"""Tokens kept as context. A decoder may treat the first token of a text in a special way (SentencePiece
strips its space), and a window that begins inside a character needs a few bytes to fall into step."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; an incomplete UTF-8 sequence shows as U+FFFD."""


class Detokenizer:
    """The text of one answer, piece by piece: the pieces joined are ``tokenizer.decode`` of all its ids.

    A short window of the last tokens is decoded for each new one, as in vLLM and Text Generation
    Inference, so a token costs the same however long the answer is. Text is counted from its end, where
    windows that begin at different tokens agree. (With SentencePiece's byte fallback, an answer that ends
    within a character can differ from the whole decoded at once: there a broken end spoils the run of
    bytes before it, which has been sent.)
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._text = ""  # of the window
        self._sent = 0  # characters of it
        self._broken = 0  # tokens since the text last ended with a whole character

    def add(self, token: int) -> str:
        """The text that is certain now that ``token`` has come; special tokens have none."""
        text = self._tokenizer.decode([*self._window, token])
        if text == self._text and self._special(token):
            return ""
        self._window.append(token)
        self._text = text
        self._broken = self._broken + 1 if text.endswith(UNKNOWN) else 0
        piece = text[self._sent : len(text) - self._uncertain()]
        self._sent += len(piece)
        # Not within a character: byte fallback then shows all of a run as U+FFFD, and windows that begin
        # in step and out of step look the same.
        if len(self._window) >= 2 * KEEP and not 0 < self._broken <= LONGEST_INCOMPLETE:
            self._shorten()
        return piece

    def finish(self) -> str:
        """The rest: what was held back and will never be completed."""
        rest = self._text[self._sent :]
        self._sent = len(self._text)
        return rest

    def _special(self, token: int) -> bool:
        return not self._tokenizer.decode([token]) and bool(self._tokenizer.decode([token], skip_special=False))

    def _uncertain(self) -> int:
        """How many characters at the end of the text the next token could change."""
        unknown = len(self._text) - len(self._text.rstrip(UNKNOWN))
        # Byte fallback shows every byte of a run as U+FFFD as long as its last character is incomplete.
        # But that takes three tokens at most: what has stayed broken for longer is broken for good.
        return unknown if self._broken <= LONGEST_INCOMPLETE else min(unknown, LONGEST_INCOMPLETE)

    def _shorten(self) -> None:
        """Forget the oldest tokens, if the text of the others is then the same but for its very start."""
        window = self._window[-KEEP:]
        text = self._tokenizer.decode(window)
        sent = len(text) - (len(self._text) - self._sent)
        # characters at the start that a window out of step with its first token may show otherwise
        start = 0 if self._text.endswith(text) else LONGEST_INCOMPLETE
        if sent >= start and self._text.endswith(text[start:]):
            self._window, self._text, self._sent = window, text, sent
