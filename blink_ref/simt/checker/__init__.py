"""Runs device code as Python and reports data races and other faults of order; see docs/checker.md."""

from .findings import Deadlock, Divergence, Finding, InFlight, OutOfBounds, Race, Unwritten
from .run import Count, check

__all__ = ["Count", "Deadlock", "Divergence", "Finding", "InFlight", "OutOfBounds", "Race", "Unwritten", "check"]
