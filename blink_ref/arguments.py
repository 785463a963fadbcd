"""Arguments of the command line: how a request is sampled and scheduled, and the types of values."""

import argparse
import math
from collections.abc import Callable


def add_request(parser: argparse.ArgumentParser) -> None:
    """The arguments that become a request's Parameters (nic/parameters.py, which has their limits)."""
    add = parser.add_argument
    add("--max-tokens", type=at_least(1), help="most tokens to generate (default 128, or what fits)")
    add("--min-tokens", type=at_least(0), default=0, help="no end before so many tokens (default 0)")
    add("--temperature", type=temperature, default=0.0, help="temperature of sampling; 0, the default, is greedy")
    add("--seed", type=at_least(0), default=0, help="seed of sampling (default 0)")
    add("--top-k", type=at_least(0), default=0, help="draw from so many of the likeliest tokens (0: from all)")
    add("--top-p", type=number, default=1.0, help="draw from the likeliest tokens that together reach it (1: all)")
    add("--min-p", type=number, default=0.0, help="draw from tokens as likely as the likeliest times it (0: all)")
    add("--repetition-penalty", type=number, default=1.0, help="divide logits of tokens said by it (1: off)")
    add("--presence-penalty", type=number, default=0.0, help="subtract from logits of the answer's tokens")
    add("--frequency-penalty", type=number, default=0.0, help="the same, as often as they occur in it")
    add("--stop-id", type=at_least(0), action="append", default=[], help="token id that ends it; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add(
        "--logprobs", type=at_least(0), metavar="N", help="with --json: log probabilities, also of the N likeliest"
    )
    add("--priority", type=at_least(0), default=0, help="of two requests the smaller goes first (default 0)")
    add("--urgent", action="store_true", help="latency-sensitive: interrupt other requests' steps")
    add("--timeout", type=seconds, default=0.0, help="seconds after which it ends with what it has (0: never)")


def at_least(least: int) -> Callable[[str], int]:
    """The type of an integer from `least` on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; it must be at least {least}")
        return value

    parse.__name__ = "integer"  # argparse names the type in its message
    return parse


def number(text: str) -> float:
    """The type of a number; argparse names it by this function."""
    return float(text)


def port(text: str) -> int:
    """The type of a TCP port."""
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{value} is no port; it must be between 0 and 65535")
    return value


def temperature(text: str) -> float:
    """The type of a temperature."""
    return _not_negative(text, "temperature; it must be 0 (greedy) or more")


def seconds(text: str) -> float:
    """The type of a time in seconds."""
    return _not_negative(text, "time; it must be 0 (no limit) or more seconds")


def _not_negative(text: str, what: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no {what}")
    return value
