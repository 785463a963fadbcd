"""The OpenAI API's requests and errors: what a body may say, and what it means here.

Parameters of the API that are not served are accepted at the value at which they change nothing, so that
clients which always send them work, and refused at any other: an ignored parameter is a wrong answer.
"""

import math
import secrets
from dataclasses import dataclass
from typing import Any

MAX_TEMPERATURE = 2.0

METADATA = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Say nothing about the answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "suffix": ("",),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
"""The values, besides null, of parameters that are not served at which they change nothing."""

COMMON = {"model", "max_tokens", "temperature", "seed", "stream", "stream_options", "ignore_eos"}


class ApiError(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON that clients of the API know."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Call:
    """A request's parameters, checked and with defaults filled in."""

    prompt: str | list[int] | None
    """of a completion"""
    messages: list[dict[str, str]] | None
    """of a chat"""
    max_tokens: int | None
    """None: as many as fit"""
    temperature: float
    seed: int
    stream: bool
    include_usage: bool
    ignore_eos: bool


def parse(body: Any, chat: bool, model: str) -> Call:
    """Check the JSON value ``body`` of a completion, or of a chat, for the served ``model``.

    Raises ApiError: 400 with the parameter's name, or 404 for another model.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {_kind(body)}; it must be a JSON object")
    known = COMMON | ({"messages", "max_completion_tokens"} if chat else {"prompt"})
    given = {name: value for name, value in body.items() if value is not None}
    for name in body:
        if name not in known and name not in NEUTRAL and name not in METADATA:
            raise ApiError(400, f"{name!r} is not a parameter of this API", name, "unknown_parameter")
    for name, neutral in NEUTRAL.items():
        if name in given and not any(_same(given[name], value) for value in neutral):
            shown = " or ".join(map(repr, neutral))
            raise ApiError(400, f"{name} is not served yet; leave it out, or send {shown}", name)
    served = _get(given, "model", str, model)
    if served != model:
        raise ApiError(404, f"there is no model {served!r} here; {model!r} is served", "model", "model_not_found")
    stream = _get(given, "stream", bool, False)
    return Call(
        prompt=None if chat else _prompt(given.get("prompt")),
        messages=_messages(given.get("messages")) if chat else None,
        max_tokens=_max_tokens(given, chat),
        temperature=_temperature(given),
        seed=_seed(given),
        stream=stream,
        include_usage=_include_usage(given, stream),
        ignore_eos=_get(given, "ignore_eos", bool, False),
    )


def _get(given: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if not _is(value, kind) and value is not default:
        raise ApiError(400, f"{name} is {_kind(value)}; it must be {_ARTICLES[kind]}", name)
    return value


def _is(value: Any, kind: type) -> bool:
    # In Python a bool is an int, in JSON it is not; and every JSON number may be a float.
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


_ARTICLES = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return repr(value) if type(value) in (bool, int, float) else _ARTICLES[type(value)]


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(400, "prompt is missing; it must be a string or an array of token ids", "prompt")
    for item in value:
        if type(item) is not int:
            raise ApiError(
                400,
                f"prompt holds {_kind(item)}; it must be one string or one array of token ids "
                "(send several prompts as several requests)",
                "prompt",
            )
    return value


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages is missing or empty; it must be an array of objects", "messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} is {_kind(message)}; it must be an object", where)
    for name, value in message.items():
        if name not in ("role", "content", "name") and value is not None:
            raise ApiError(400, f"{where}.{name} is not served; only role, content and name are", where)
    checked = {name: value for name, value in message.items() if value is not None}
    for name in ("role", "content"):
        if name not in checked:
            raise ApiError(400, f"{where}.{name} is missing", where)
    if isinstance(checked["content"], list):
        checked["content"] = "".join(_text_part(part, where) for part in checked["content"])
    for name, value in checked.items():
        if not isinstance(value, str):
            raise ApiError(400, f"{where}.{name} is {_kind(value)}; it must be a string", where)
    return checked


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ApiError(400, f"{where}.content holds a part that is no text; this is a text model", where)


def _max_tokens(given: dict[str, Any], chat: bool) -> int | None:
    # 16 is the API's default for completions; a chat goes on until it ends.
    default = None if chat else 16
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len(names) == 2 and given[names[0]] != given[names[1]]:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
    name = names[0] if names else "max_tokens"
    value = _get(given, name, int, default)
    if value is not None and value < 1:
        raise ApiError(400, f"{name} is {value}; it must be at least 1", name)
    return value


def _temperature(given: dict[str, Any]) -> float:
    value = _get(given, "temperature", float, 1.0)
    if not (math.isfinite(value) and 0 <= value <= MAX_TEMPERATURE):
        raise ApiError(
            400, f"temperature is {value}; it must be between 0 (greedy) and {MAX_TEMPERATURE:g}", "temperature"
        )
    return float(value)


def _seed(given: dict[str, Any]) -> int:
    value = _get(given, "seed", int, None)
    if value is None:
        return secrets.randbits(64)
    if not -(2**63) <= value < 2**63:
        raise ApiError(400, f"seed is {value}; it must be a 64-bit integer", "seed")
    return value % 2**64


def _include_usage(given: dict[str, Any], stream: bool) -> bool:
    options = _get(given, "stream_options", dict, {})
    options = {name: value for name, value in options.items() if value is not None}
    if options and not stream:
        raise ApiError(400, "stream_options is only for stream: true", "stream_options")
    for name in options:
        if name != "include_usage":
            raise ApiError(400, f"stream_options.{name} is not served; include_usage is", "stream_options")
    return _get(options, "include_usage", bool, False)
