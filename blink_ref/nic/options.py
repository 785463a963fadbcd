"""The OpenAI API's names, and vLLM's for what that API lacks, of the parameters of a request.

Here are types and translations; the limits are those of :class:`.parameters.Parameters`, whose complaints
get the API's names on their way out.
"""

import math
import secrets
from typing import Any

from blink_ref.ring.layout import MOST_LOGPROBS

from .parameters import BadParameter
from .values import ApiError, as_float, get, kind_of

MAX_TEMPERATURE = 2.0
MAX_TIMEOUT = (2**32 - 1) // 1000
"""Seconds."""

PLAIN: dict[str, tuple[str, type]] = {
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition", float),
    "presence_penalty": ("presence", float),
    "frequency_penalty": ("frequency", float),
    "min_tokens": ("min_tokens", int),
    "priority": ("priority", int),
    "ignore_eos": ("ignore_eos", bool),
}
"""Those that only have another name in Parameters, with their type in JSON."""
NAMES = {
    "seed",
    "temperature",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "service_tier",
    "timeout",
    *PLAIN,
}
TIERS = ("auto", "default", "flex", "scale", "priority")
"""Of the API; only the last means anything here: the request is latency-sensitive."""


def options(given: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Fields of Parameters, but for max_tokens, from a body without nulls. Raises ApiError: 400."""
    found = {field: get(given, name, kind, None) for name, (field, kind) in PLAIN.items() if name in given}
    if found.get("top_k") == -1:  # vLLM's "all"
        found["top_k"] = 0
    return {
        **found,
        "temperature": _temperature(given),
        "seed": _seed(given),
        "stop_ids": _stop_ids(given),
        "logit_bias": _logit_bias(given),
        "logprobs": _chat_logprobs(given) if chat else _completion_logprobs(given),
        "urgent": _urgent(given),
        "time_ms": _time_ms(given),
    }


def renamed(error: BadParameter, chat: bool) -> ApiError:
    """What Parameters complain of, under the API's name."""
    names = {field: name for name, (field, _) in PLAIN.items()} | {"stop_ids": "stop_token_ids"}
    if chat:
        names["logprobs"] = "top_logprobs"
    name = names.get(error.name, error.name)
    return ApiError(400, f"{name} {error.complaint}", name)


def _temperature(given: dict[str, Any]) -> float:
    value = get(given, "temperature", float, 1.0)
    if not 0 <= value <= MAX_TEMPERATURE:
        raise ApiError(
            400, f"temperature is {value}; it must be between 0 (greedy) and {MAX_TEMPERATURE:g}", "temperature"
        )
    return value


def _seed(given: dict[str, Any]) -> int:
    value = get(given, "seed", int, None)
    if value is None:
        return secrets.randbits(64)
    if not -(2**63) <= value < 2**63:
        raise ApiError(400, f"seed is {value}; it must be a 64-bit integer", "seed")
    return value % 2**64


def _stop_ids(given: dict[str, Any]) -> tuple[int, ...]:
    ids = get(given, "stop_token_ids", list, [])
    for item in ids:
        if type(item) is not int:
            raise ApiError(
                400, f"stop_token_ids holds {kind_of(item)}; it must hold token ids only", "stop_token_ids"
            )
    return tuple(ids)


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    return dict(_bias(key, value) for key, value in get(given, "logit_bias", dict, {}).items())


def _bias(key: str, value: Any) -> tuple[int, float]:
    # Ten digits: Python refuses to read a number of thousands.
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ApiError(400, f"logit_bias has the key {key[:40]!r}; its keys must be token ids", "logit_bias")
    if type(value) not in (int, float):
        raise ApiError(400, f"logit_bias of token {key} is {kind_of(value)}; it must be a number", "logit_bias")
    return int(key), as_float(value)


def _chat_logprobs(given: dict[str, Any]) -> int | None:
    wanted, top = get(given, "logprobs", bool, False), get(given, "top_logprobs", int, 0)
    if top and not wanted:
        raise ApiError(400, "top_logprobs is only for logprobs: true", "top_logprobs")
    if not 0 <= top <= MOST_LOGPROBS:
        raise ApiError(400, f"top_logprobs is {top}; it must be between 0 and {MOST_LOGPROBS}", "top_logprobs")
    return top if wanted else None


def _completion_logprobs(given: dict[str, Any]) -> int | None:
    if get(given, "top_logprobs", int, 0):
        raise ApiError(400, "top_logprobs is only for chats; send logprobs: the number", "top_logprobs")
    return get(given, "logprobs", int, None)


def _urgent(given: dict[str, Any]) -> bool:
    tier = get(given, "service_tier", str, "auto")
    if tier not in TIERS:
        raise ApiError(400, f"service_tier is {tier[:40]!r}; it must be one of {', '.join(TIERS)}", "service_tier")
    return tier == "priority"


def _time_ms(given: dict[str, Any]) -> int:
    seconds = get(given, "timeout", float, None)
    if seconds is None:
        return 0
    if not 0 < seconds <= MAX_TIMEOUT:
        raise ApiError(
            400, f"timeout is {seconds}; it must be above 0 and at most {MAX_TIMEOUT} seconds", "timeout"
        )
    return math.ceil(seconds * 1000)
