"""What a request asks for besides its prompt: how much, drawn how, and how soon."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blink_ref.errors import BlinkError
from blink_ref.ring.layout import IGNORE_EOS, MOST_BIASES, MOST_LOGPROBS, MOST_STOPS, URGENT

MAX_TEMPERATURE = MAX_REPETITION = 1e6
"""Hotter than this is uniform sampling, and float32 would overflow in the division."""
LEAST = 1e-30
"""Smaller than this, float32 would overflow in a division by it, or take it for 0, which means 'off'."""

MOST_MIN_P = 1 - 2**-24
"""The largest float32 below 1."""

WHOLE_TYPES = (int, np.integer)
WHOLE = {
    "max_tokens": (1, 2**32 - 1),
    "min_tokens": (0, 2**32 - 1),
    "seed": (0, 2**64 - 1),
    "priority": (0, 2**32 - 1),
    "time_ms": (0, 2**32 - 1),
    "top_k": (0, 2**32 - 1),
}
REAL = {
    "temperature": (0, MAX_TEMPERATURE),
    "min_p": (0, 1),
    "top_p": (0, 1),
    "repetition": (0, MAX_REPETITION),
    "presence": (-2, 2),
    "frequency": (-2, 2),
}
"""Limits of the values, both included, but for those in OPEN."""
OPEN = {"min_p": 1, "top_p": 0, "repetition": 0}
"""The limit that a value must not reach: no token would be left, or there is nothing to divide by."""
MAX_BIAS = 100


class BadParameter(BlinkError):
    """A parameter whose value cannot be served: its ``name``, and what the ``complaint`` about it is."""

    def __init__(self, name: str, complaint: str) -> None:
        super().__init__(f"{name} {complaint}")
        self.name, self.complaint = name, complaint


@dataclass(frozen=True)
class Parameters:
    """The parameters of a request; those with a default are off or greedy without it.

    Penalties and biases change the logits before the temperature does; the likeliest tokens are counted
    after it (the order of vLLM and of the OpenAI API).
    """

    max_tokens: int
    """tokens to generate, at most"""
    temperature: float = 0.0
    """0 is greedy"""
    seed: int = 0
    ignore_eos: bool = False
    """go on after an end token"""
    priority: int = 0
    """of two requests the smaller goes first"""
    urgent: bool = False
    """latency-sensitive: interrupts the others' step between two layers"""
    min_tokens: int = 0
    """no end token and no stop token before so many"""
    time_ms: int = 0
    """milliseconds from the GPU's first sight of it to its END; 0 is no limit"""
    top_k: int = 0
    """draw from so many of the likeliest tokens; 0 is from all"""
    top_p: float = 1.0
    """draw from the likeliest tokens whose probabilities together reach it"""
    min_p: float = 0.0
    """draw from tokens that are at least so likely as the likeliest times it"""
    repetition: float = 1.0
    """divide (below 0, multiply) the logits of tokens of prompt and answer by it (arXiv 1909.05858)"""
    presence: float = 0.0
    """subtract from the logits of the answer's tokens"""
    frequency: float = 0.0
    """subtract from the logits of the answer's tokens, as often as they occur in it"""
    stop_ids: Sequence[int] = ()
    """tokens that end the answer, and are its last"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """token: what to add to its logit"""
    logprobs: int | None = None
    """of how many of the likeliest tokens, besides the token itself, to say the log probability: the model's own,
    before all of the above"""

    def check(self, prompt: Sequence[int], context: int, vocab: int) -> None:
        """Refuse what no engine with this ``context`` (tokens) and ``vocab`` can serve.

        Raises BadParameter, BlinkError: which names the argument, its value and its limit.
        """
        if not len(prompt):
            raise BlinkError("the prompt is empty; send at least one token")
        stranger = next((token for token in prompt if not 0 <= token < vocab), None)
        if stranger is not None:
            raise BlinkError(f"token id {stranger} in the prompt is outside the vocabulary of {vocab}")
        self._check_numbers()
        self._check_tokens(vocab)
        if len(prompt) + self.max_tokens > context:
            raise BlinkError(
                f"the prompt of {len(prompt)} tokens and max_tokens {self.max_tokens} exceed the context of "
                f"{context}; shorten the prompt or ask for fewer tokens"
            )

    def record(self, vocab: int) -> dict[str, Any]:
        """The fields of ring.layout.REQUEST that come from here, where 0 is 'off'."""
        return {
            "max_tokens": self.max_tokens,
            "flags": (IGNORE_EOS if self.ignore_eos else 0) | (URGENT if self.urgent else 0),
            "temperature": self.temperature if self.temperature > LEAST else 0,
            "priority": self.priority,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "time_ms": self.time_ms,
            "top_k": self.top_k if self.top_k < vocab else 0,
            "top_p": max(self.top_p, LEAST) if self.top_p < 1 else 0,
            "min_p": min(self.min_p, MOST_MIN_P),
            "repetition": max(self.repetition, LEAST) if self.repetition != 1 else 0,
            "presence": self.presence,
            "frequency": self.frequency,
            "stops": len(self.stop_ids),
            "biases": len(self.logit_bias),
            "logprobs": 0 if self.logprobs is None else 1 + self.logprobs,
        }

    def tail(self) -> np.ndarray:
        """What lies behind the prompt in the arena, u32: the stop tokens, then (token, float32 bits) pairs."""
        biases = np.empty((len(self.logit_bias), 2), np.uint32)
        biases[:, 0] = list(self.logit_bias)
        biases[:, 1] = np.array(list(self.logit_bias.values()), np.float32).view(np.uint32)
        return np.concatenate([np.array(self.stop_ids, np.uint32), biases.reshape(-1)])

    def _check_numbers(self) -> None:
        for name, (low, high) in WHOLE.items():
            value = getattr(self, name)
            if not (isinstance(value, WHOLE_TYPES) and low <= value <= high):
                raise BadParameter(name, f"is {value}; it must be a whole number from {low} to {high}")
        for name, (least, most) in REAL.items():
            value, never = getattr(self, name), OPEN.get(name)
            if not least <= value <= most or value == never:  # NaN compares as false
                but = "" if never is None else f", and not {never}"
                raise BadParameter(name, f"is {value}; it must be between {least:g} and {most:g}{but}")
        if self.min_tokens > self.max_tokens:
            raise BadParameter(
                "min_tokens", f"is {self.min_tokens}; it must not be more than max_tokens, {self.max_tokens}"
            )
        n = self.logprobs
        if n is not None and not (isinstance(n, WHOLE_TYPES) and 0 <= n <= MOST_LOGPROBS):
            raise BadParameter("logprobs", f"is {n}; it must be a whole number from 0 to {MOST_LOGPROBS}")

    def _check_tokens(self, vocab: int) -> None:
        for name, most in (("stop_ids", MOST_STOPS), ("logit_bias", MOST_BIASES)):
            tokens = getattr(self, name)
            if len(tokens) > most:
                raise BadParameter(name, f"has {len(tokens)} tokens; it must have at most {most}")
            for token in tokens:
                if not (isinstance(token, WHOLE_TYPES) and 0 <= token < vocab):
                    raise BadParameter(name, f"has token id {token}; it must be one of the vocabulary of {vocab}")
        for token, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise BadParameter(
                    "logit_bias", f"of token {token} is {bias}; it must be between -{MAX_BIAS} and {MAX_BIAS}"
                )
