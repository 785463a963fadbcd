"""What the checker reports: each finding is an exception, whose text names lines, lanes and a mend."""

from typing import Any, NamedTuple

from .lines import Line


class Place(NamedTuple):
    """One side of a finding: who did what, on which line."""

    who: str
    """such as "block 0, lane 3", or the name of an outside agent"""
    did: str
    line: Line


class Finding(Exception):
    """A fault of device code, or of its use of memory. Replays from `seed`."""

    kind = "finding"

    def __init__(self, about: str, places: list[Place], advice: str = "", array: str = "") -> None:
        super().__init__(about)
        self.about, self.places, self.advice, self.array = about, places, advice, array
        self.seed: int | None = None

    def __str__(self) -> str:
        text = [f"{self.kind}: {self.about}"]
        for who, did, line in self.places:
            text += [f"  {who} {did}", f"    {line}", f"      {line.text}"]
        if self.advice:
            text.append(f"  {self.advice}")
        if self.seed is not None:
            text.append(f"  seed {self.seed} replays it")
        return "\n".join(text)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        places = [
            {"who": who, "did": did, "file": line.file, "line": line.number, "text": line.text}
            for who, did, line in self.places
        ]
        return {"kind": self.kind, "about": self.about, "places": places, "advice": self.advice, "seed": self.seed}


class Race(Finding):
    """Two accesses to one element, at least one a write, that nothing orders."""

    kind = "data race"


class Unwritten(Finding):
    """A read of memory that nobody has written since the launch."""

    kind = "read of unwritten memory"


class OutOfBounds(Finding):
    """An index outside its array; a negative one too, which a GPU does not count from the end."""

    kind = "out of bounds"


class Divergence(Finding):
    """Lanes that should meet at one place of the source do not."""

    kind = "divergence"


class InFlight(Finding):
    """An asynchronous copy that may go on when its block has ended."""

    kind = "copy in flight"


class Deadlock(Finding):
    """Every agent that is left waits, or spins and sees nothing change."""

    kind = "deadlock"
