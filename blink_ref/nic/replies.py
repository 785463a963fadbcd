"""The OpenAI API's answers: a completion or a chat, whole or in chunks."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from blink_ref.ring.layout import LENGTH, REASONS, TIME

from . import scores
from .answer import Piece


class Reply:
    """The JSON objects of one answer, which share their id, time and model.

    ``counted`` chunks have a ``usage``, which is null in all but :meth:`usage` itself.
    """

    def __init__(
        self, chat: bool, model: str, prompt_tokens: int, counted: bool, token_bytes: scores.TokenBytes
    ) -> None:
        self._chat, self._model, self._prompt_tokens = chat, model, prompt_tokens
        self._token_bytes = token_bytes
        self._extra = {"usage": None} if counted else {}
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, samples: Sequence[Sequence[Piece]], tokens: int) -> dict[str, Any]:
        """The answer in one object, from all pieces of each sample; ``tokens`` were generated for all of them."""
        choices = []
        for pieces in samples:
            text = "".join(piece.text for piece in pieces)
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(self._choice(said, pieces))
        return {**self._object(choices), "usage": self._usage(tokens)}

    def first(self, sample: int) -> dict[str, Any] | None:
        """The chunk that opens a chat's sample: who speaks."""
        if not self._chat:
            return None
        opening = Piece(sample, "", None, None)
        return self._object([self._choice({"delta": {"role": "assistant", "content": ""}}, [opening])], ".chunk")

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks for a piece: its text, if it has one or is scored; and why the sample ends, if it does."""
        chunks = []
        if piece.text or piece.scored:
            said: dict[str, Any] = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
            chunks.append(self._object([self._choice(said, [piece._replace(reason=None)])], ".chunk"))
        if piece.reason is not None:
            said = {"delta": {}} if self._chat else {"text": ""}
            chunks.append(self._object([self._choice(said, [piece])], ".chunk"))
        return chunks

    def usage(self, tokens: int) -> dict[str, Any]:
        """The chunk with the counts, for those who asked for it."""
        return {**self._object([], ".chunk"), "usage": self._usage(tokens)}

    def _object(self, choices: list[dict[str, Any]], suffix: str = "") -> dict[str, Any]:
        kind = "chat.completion" + suffix if self._chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **self._extra,
        }

    def _choice(self, said: dict[str, Any], pieces: Sequence[Piece]) -> dict[str, Any]:
        """A choice of one sample's pieces, the last of which may be its end."""
        scored = [piece.scored for piece in pieces if piece.scored]
        shape = scores.of_chat if self._chat else scores.of_completion
        reason = pieces[-1].reason
        return {
            "index": pieces[-1].sample,
            **said,
            "logprobs": shape(scored, self._token_bytes) if scored else None,
            **_end(reason),
        }

    def _usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }


def _end(reason: int | None) -> dict[str, Any]:
    """Why a sample ended. The API knows no end by time: it is a "length", cut by a limit of the client's own,
    and vLLM's ``stop_reason`` tells the two apart."""
    if reason == TIME:
        return {"finish_reason": REASONS[LENGTH], "stop_reason": "timeout"}
    return {"finish_reason": None if reason is None else REASONS[reason]}


DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event that carries ``value``."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
