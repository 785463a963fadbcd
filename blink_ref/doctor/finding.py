"""A finding of the doctor's, and the rule that no probe can stop the others."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import NamedTuple

OK, NOTE, WARNING, FAILURE = "ok", "note", "warning", "failure"
"""Fine; absent and not needed; works, but badly or in part; the main job, `generate`, cannot run."""


class Finding(NamedTuple):
    """What a probe found; ``mend`` is what to type or to do, empty where nothing is lacking."""

    name: str
    level: str
    found: str
    mend: str = ""


Probe = Callable[[], Iterator[Finding]]
"""A generator: what it has found before it fails is kept."""


def examine(probes: Mapping[str, str]) -> list[Finding]:
    """The findings of the probes of this folder, given as ``module.function`` by the name of what they look at.

    A probe that fails is a note: it may have asked for what this system has not. So is one whose module
    cannot be imported, since a package lacks: that is another probe's finding.
    """
    findings: list[Finding] = []
    for name, place in probes.items():
        try:
            module, _, function = place.partition(".")
            probe: Probe = getattr(import_module(f"{__package__}.{module}"), function)
            findings.extend(probe())
        except Exception as error:  # whatever a strange machine raises
            words = " ".join(str(error).split())[:100]
            findings.append(Finding(name, NOTE, f"cannot be told here ({type(error).__name__}: {words})"))
    return findings
