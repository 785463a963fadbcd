"""What the machine can do at most, measured in the same run as what is compared with it."""

from typing import NamedTuple

import numba
import numpy as np

from blink_ref.engine.host import read_bandwidth, seconds_side_by_side

CHAIN = 16
"""Multiply-adds on an element between its load and its store, so that arithmetic is the limit."""
IN_CACHE = 2048
"""Elements: 8 KiB, which stay in the first-level cache."""
PASSES = 2000


class Ceilings(NamedTuple):
    """Of a number of threads."""

    bytes_per_s: float
    """read out of the memory, or cache, in which an array lies"""
    flops_per_s: float
    """float32 operations a second; a multiply-add is two; 0 = not known"""

    def seconds(self, size: float, flops: float) -> float:
        """The least time for a piece of work (Williams et al., 2009: the roofline)."""
        memory = size / self.bytes_per_s
        return max(memory, flops / self.flops_per_s) if self.flops_per_s else memory


def measure(array: np.ndarray, threads: int) -> Ceilings:
    """The ceilings for work that reads `array`."""
    return Ceilings(read_bandwidth(array, threads), multiply_adds(threads))


def multiply_adds(threads: int) -> float:
    """Float32 operations a second of `threads` threads in a loop of multiply-adds; the best of three."""
    _chains(np.zeros(IN_CACHE, np.float32), 1)
    work = [(np.zeros(IN_CACHE, np.float32), PASSES) for _ in range(threads)]
    return 2 * threads * PASSES * IN_CACHE * CHAIN / seconds_side_by_side(_chains, work)


@numba.njit(nogil=True, fastmath={"contract"})
def _chains(x, passes):
    a, b = np.float32(0.5), np.float32(1.0)
    for _ in range(passes):
        for i in range(x.shape[0]):
            y = x[i]
            for _ in range(CHAIN):
                y = y * a + b
            x[i] = y
