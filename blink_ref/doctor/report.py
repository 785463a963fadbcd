"""``blink-ref doctor``: what this machine can run, what it lacks, and what mends it."""

import argparse
import json
from collections.abc import Sequence

from .finding import FAILURE, NOTE, OK, WARNING, Finding, examine

MARKS = {OK: "ok", NOTE: "-", WARNING: "!", FAILURE: "FAIL"}


PROBES = {
    "system": "machine.system",
    "Python": "software.python",
    "packages": "software.packages",
    "cores": "machine.cores",
    "vector units": "machine.vectors",
    "memory": "machine.memory",
    "window folder": "machine.window_folder",
    "cache folder": "machine.cache_folder",
    "model": "models.models",
    "HTTP": "software.http",
    "GPU": "gpu.gpu",
    "ptxas": "gpu.ptxas",
    "RDMA": "machine.rdma",
}
"""In the order of the report."""


def run(args: argparse.Namespace) -> int:
    """The command: 1 if the main job, ``blink-ref generate``, cannot run on any target."""
    findings = examine(PROBES)
    able = targets(findings)
    if args.json:
        print(json.dumps({"targets": able, "findings": [finding._asdict() for finding in findings]}))
    else:
        print("\n".join(lines(findings)))
        print(f"\ngenerate runs on: {', '.join(able)}" if able else "\ngenerate cannot run; mend what FAILs")
    return 0 if able else 1


def targets(findings: Sequence[Finding]) -> list[str]:
    """The targets that can run, the one that ``--target auto`` takes first; none where anything fails."""
    if any(finding.level == FAILURE for finding in findings):
        return []
    cuda = any(finding.name == "cuda target" and finding.level == OK for finding in findings)
    return ["cuda", "cpu", "python"] if cuda else ["cpu", "python"]


def lines(findings: Sequence[Finding]) -> list[str]:
    """The report as text: a line a finding, and one below it where there is something to do."""
    text = []
    for finding in findings:
        text.append(f"{MARKS[finding.level]:>4}  {finding.name:14} {finding.found}")
        if finding.mend:
            text.append(f"{'':21} -> {finding.mend}")
    return text
