"""Models that have a name, and whether they are here."""

from collections.abc import Iterator

from blink_ref.model.store import available

from .finding import NOTE, OK, Finding


def models() -> Iterator[Finding]:
    """One finding a model."""
    for model in available():
        if model.present:
            yield Finding("model", OK, f"{model.name}, {model.bytes / 1e6:.1f} MB")
        else:
            absent = f"{model.name} is not here yet; generate fetches it"
            yield Finding("model", NOTE, absent, f"blink-ref model pull {model.name}")
