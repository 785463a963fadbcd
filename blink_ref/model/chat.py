"""Chat templates: Jinja2 programs that come with a model and so are not to be trusted."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from blink_ref.errors import BlinkError

# Breaks up a control token that a user wrote into a message. Noncharacters are not exchanged as text
# (Unicode, section 23.7), and 80 random bits cannot be guessed by who writes the message.
MARK = "".join(chr(0xFDD0 + secrets.randbelow(32)) for _ in range(16))


class ChatTemplate:
    """A template in the dialect of transformers' ``apply_chat_template``.

    The sandbox forbids underscored attributes and changing what is passed in; the template sees
    messages, the names of the special tokens, ``raise_exception`` and ``strftime_now``.
    """

    def __init__(self, model: str, source: str, special: Mapping[str, str]) -> None:
        self.model, self.source, self.special = model, source, special

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt for ``messages`` (each with ``role`` and ``content``).

        Raises BlinkError: the template has a syntax error, refuses the messages, or leaves the sandbox.
        """
        # A template can fail with any exception: it indexes, adds and calls what the messages hold.
        try:
            return self._compiled.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special
            )
        except Exception as error:
            text = " ".join(str(error).split())
            raise BlinkError(f"{self.model}: the chat template refused the messages: {text}") from None

    @cached_property
    def _compiled(self) -> Template:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self.source)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox lets a template name an unsafe attribute as long as it only prints it; not here."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to attribute {attribute!r} is unsafe")


def quote(value: Any, control: re.Pattern[str]) -> Any:
    """``value`` (strings, lists, dicts) with MARK put inside everything that ``control`` matches."""
    if isinstance(value, str):
        return control.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
    if isinstance(value, Mapping):
        return {key: quote(inner, control) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [quote(inner, control) for inner in value]
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
