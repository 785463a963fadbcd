"""The OpenAI API's answers: a completion or a chat, whole or in chunks."""

import json
import secrets
import time
from typing import Any


class Reply:
    """The JSON objects of one answer, which share their id, time and model.

    ``counted`` chunks have a ``usage``, which is null in all but :meth:`usage` itself.
    """

    def __init__(self, chat: bool, model: str, prompt_tokens: int, counted: bool) -> None:
        self._chat, self._model, self._prompt_tokens = chat, model, prompt_tokens
        self._extra = {"usage": None} if counted else {}
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, text: str, reason: str, tokens: int) -> dict[str, Any]:
        """The answer in one object; ``tokens`` were generated."""
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._object([self._choice(said, reason)]), "usage": self._usage(tokens)}

    def first(self) -> dict[str, Any] | None:
        """The chunk that opens a chat: who speaks."""
        if not self._chat:
            return None
        return self._object([self._choice({"delta": {"role": "assistant", "content": ""}}, None)], ".chunk")

    def piece(self, text: str) -> dict[str, Any]:
        """The chunk for some text."""
        said: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._object([self._choice(said, None)], ".chunk")

    def last(self, reason: str) -> dict[str, Any]:
        """The chunk that says why it ends."""
        said: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._object([self._choice(said, reason)], ".chunk")

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

    def _choice(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

    def _usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }


DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event that carries ``value``."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
