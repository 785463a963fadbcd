"""How much of an array a piece of work reads, by the bits that the processor sets in the page table."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

SELF = Path("/proc/self")
FORGET_READS, FORGET_WRITES = "1", "4"
"""See proc_pid_clear_refs(5)."""


def bytes_read(array: np.ndarray, work: Callable[[], object]) -> int | None:
    """Bytes of the pages of `array` that `work` touches, in whole pages; None where Linux does not tell."""
    try:
        (SELF / "clear_refs").write_text(FORGET_READS)
        # Of the two only this one flushes the TLB; a page that is still in there would not be marked again.
        (SELF / "clear_refs").write_text(FORGET_WRITES)
    except OSError:
        return None
    work()
    start, end, inside, total = array.ctypes.data, array.ctypes.data + array.nbytes, False, 0
    for line in (SELF / "smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            low, high = (int(address, 16) for address in name.split("-"))
            inside = low < end and high > start
        elif inside and name == "Referenced:":
            total += int(values[0]) * 1024
    return total
