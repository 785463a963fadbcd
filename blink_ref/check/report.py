"""``blink-ref check``: the engine under the checker, once for each seed."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..simt.checker import Count, Finding
from . import scenario


class Run(NamedTuple):
    """What one seed brought."""

    seed: int
    counts: list[Count]
    finding: Finding | None
    seconds: float


def run(args: argparse.Namespace) -> int:
    """The command: 1 if there is a finding, at which it stops."""
    found = False
    for result in runs(args.seed, args.seeds):
        found = result.finding is not None
        print(json.dumps(as_dict(result)) if args.json else text(result), flush=True)
    return int(found)


def runs(first: int, n: int) -> Iterator[Run]:
    """One run for each of n seeds, until one has a finding."""
    for seed in range(first, first + n):
        begin, counts, finding = time.monotonic(), list[Count](), None
        try:
            counts = scenario.run(seed)
        except Finding as fault:
            finding = fault
        yield Run(seed, counts, finding, time.monotonic() - begin)
        if finding is not None:
            return


def accesses(counts: list[Count]) -> dict[str, int]:
    """Loads and stores of all lanes, by kind of memory."""
    total: Counter[str] = Counter()
    for count in counts:
        memory = "shared" if count.shared else "global"
        total[f"{memory} loads"] += count.loads
        total[f"{memory} stores"] += count.stores
    return dict(total)


def text(result: Run) -> str:
    """A run for people."""
    if result.finding is not None:
        return str(result.finding)
    total = ", ".join(f"{n} {what}" for what, n in sorted(accesses(result.counts).items()))
    return f"seed {result.seed}: no finding; {total}; {result.seconds:.1f} s"


def as_dict(result: Run) -> dict[str, Any]:
    """A run for JSON."""
    finding = result.finding.as_dict() if result.finding is not None else None
    return {"seed": result.seed, "finding": finding, "accesses": accesses(result.counts)}
