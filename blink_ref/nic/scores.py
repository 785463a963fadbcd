"""Log probabilities in the OpenAI API's two shapes: a chat's and a completion's."""

from collections.abc import Callable, Sequence
from typing import Any

from .answer import Scored

UNLIKELY = -9999.0
"""The API's number for what JSON cannot say: minus infinity."""

TokenBytes = Callable[[int], bytes]


def of_chat(scored: Sequence[Scored], token_bytes: TokenBytes) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice: an object for each token, with its likeliest alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, UNLIKELY), "bytes": list(raw)}

    content = [
        {
            **entry(token, logprobs.token),
            "top_logprobs": [entry(*other) for other in logprobs.likeliest],
        }
        for token, logprobs, _ in scored
    ]
    return {"content": content, "refusal": None}


def of_completion(scored: Sequence[Scored], token_bytes: TokenBytes) -> dict[str, Any]:
    """The ``logprobs`` of a completion's choice: lists side by side, and the likeliest as a mapping.

    A token that is no whole character is written ``bytes:\\xe2\\x80``. The mapping also has the token itself.
    """

    def text(token: int) -> str:
        raw = token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    return {
        "tokens": [text(token) for token, _, _ in scored],
        "token_logprobs": [max(logprobs.token, UNLIKELY) for _, logprobs, _ in scored],
        "top_logprobs": [
            {
                text(other): max(logprob, UNLIKELY)
                for other, logprob in [*logprobs.likeliest, (token, logprobs.token)]
            }
            for token, logprobs, _ in scored
        ],
        "text_offset": [offset for _, _, offset in scored],
    }
