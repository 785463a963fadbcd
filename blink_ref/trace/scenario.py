"""The requests that a trace shows when nobody names others: a little of all that a scheduler does."""

from typing import NamedTuple

PASSAGE = (
    "The letter came on a wet morning in November, when the roads were so bad that nobody had been expected, "
    "and it was carried up to the house by a boy who would say nothing but that he had been paid to make haste. "
    "Mrs. Lane read it standing, by the window of the small parlour; she read it again in her chair; and then "
    "she sent for her two daughters, for her brother, and for the lawyer, and told them that the family of whom "
    "they had heard nothing for eleven years would be with them before dinner. It was a large family. There "
    "would have to be beds for nine, and she had not so much as a pair of clean sheets in the house."
)
"""Long enough to be computed in several chunks, and to fill several pages, which those who begin with it share."""


class Planned(NamedTuple):
    """A request of a scenario."""

    prompt: str
    max_tokens: int
    after: int = 0
    """tokens of all answers that have come before it is submitted"""
    urgent: bool = False
    ignore_eos: bool = True


SCENARIO = (
    Planned("It was a truth", 72),
    Planned(PASSAGE, 40),
    Planned("She had been", 56),
    Planned("The evening was", 44, after=24),
    Planned(PASSAGE + " The elder daughter", 40, after=48),
    Planned("In the garden", 64, after=64),
    Planned(PASSAGE + " The lawyer", 48, after=96),
    Planned("Quick:", 8, after=120, urgent=True),
    Planned("His sister", 40, after=150),
    Planned("A walk of two miles", 48, after=180),
    Planned(PASSAGE[: len(PASSAGE) // 2] + " It was dark", 32, after=220),
    Planned("Now:", 8, after=260, urgent=True),
)
"""Requests that come and go (continuous batching), a long prompt in chunks beside the others' rows, prompts that
begin as an earlier one, and two that do not wait for the end of a step."""


def scenario(prompts: list[str], max_tokens: int | None) -> list[Planned]:
    """The requests for some prompts, all at once; without any, SCENARIO. ``max_tokens`` None is their own."""
    planned = [Planned(prompt, 64, ignore_eos=False) for prompt in prompts] or SCENARIO
    return [request._replace(max_tokens=max_tokens or request.max_tokens) for request in planned]
