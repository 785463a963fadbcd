"""The OpenAI API's requests and errors: what a body may say, and what it means here.

Parameters of the API that are not served are accepted at the value at which they change nothing, so that
clients which always send them work, and refused at any other: an ignored parameter is a wrong answer.
"""

from dataclasses import dataclass
from typing import Any

from .options import NAMES, options
from .values import ApiError, get, kind_of

METADATA = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
"""Say nothing about the answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stop": ([], ""),
    "suffix": ("",),
    "echo": (False,),
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

COMMON = {"model", "max_tokens", "n", "stream", "stream_options"} | NAMES


@dataclass(frozen=True)
class Call:
    """A request's parameters, checked and with defaults filled in."""

    prompt: str | list[int] | None
    """of a completion"""
    messages: list[dict[str, str]] | None
    """of a chat"""
    max_tokens: int | None
    """None: as many as fit"""
    options: dict[str, Any]
    """the other fields of Parameters"""
    n: int
    """answers to give"""
    stream: bool
    include_usage: bool


def parse(body: Any, chat: bool, model: str) -> Call:
    """Check the JSON value ``body`` of a completion, or of a chat, for the served ``model``.

    Raises ApiError: 400 with the parameter's name, or 404 for another model.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {kind_of(body)}; it must be a JSON object")
    known = COMMON | ({"messages", "max_completion_tokens"} if chat else {"prompt"})
    given = {name: value for name, value in body.items() if value is not None}
    for name in body:
        if name not in known and name not in NEUTRAL and name not in METADATA:
            raise ApiError(400, f"{name!r} is not a parameter of this API", name, "unknown_parameter")
    for name, neutral in NEUTRAL.items():
        if name in given and not any(_same(given[name], value) for value in neutral):
            shown = " or ".join(map(repr, neutral))
            raise ApiError(400, f"{name} is not served yet; leave it out, or send {shown}", name)
    served = get(given, "model", str, model)
    if served != model:
        raise ApiError(404, f"there is no model {served!r} here; {model!r} is served", "model", "model_not_found")
    stream = get(given, "stream", bool, False)
    return Call(
        prompt=None if chat else _prompt(given.get("prompt")),
        messages=_messages(given.get("messages")) if chat else None,
        max_tokens=_max_tokens(given, chat),
        options=options(given, chat),
        n=get(given, "n", int, 1),
        stream=stream,
        include_usage=_include_usage(given, stream),
    )


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
                f"prompt holds {kind_of(item)}; it must be one string or one array of token ids "
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
        raise ApiError(400, f"{where} is {kind_of(message)}; it must be an object", where)
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
            raise ApiError(400, f"{where}.{name} is {kind_of(value)}; it must be a string", where)
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
    value = get(given, name, int, default)
    if value is not None and value < 1:
        raise ApiError(400, f"{name} is {value}; it must be at least 1", name)
    return value


def _include_usage(given: dict[str, Any], stream: bool) -> bool:
    asked = get(given, "stream_options", dict, {})
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked and not stream:
        raise ApiError(400, "stream_options is only for stream: true", "stream_options")
    for name in asked:
        if name != "include_usage":
            raise ApiError(400, f"stream_options.{name} is not served; include_usage is", "stream_options")
    return get(asked, "include_usage", bool, False)
