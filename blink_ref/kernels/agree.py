"""What the lanes of a block agree on: sums and maxima of integers, which are the same in any order.

A sum of floats depends on how many lanes share it out; what these return does not.
"""

import numpy as np

from ..simt import device
from ..simt.vocabulary import barrier, i64, lane_id, lane_max, lane_sum, warp_id, warps

LOW_BITS = i64(0x7FFFFFFF)

NOTHING = i64(-(2**62))
"""The maximum over nothing: no :func:`rank` key is below it."""


@device
def block_sum(block, x):
    """The sum of x over the block's lanes, int64 from 0 to 2**62 - 1. All lanes call it, and all get it.

    A barrier stands at its start, for those who still read the scratch, and one before the reading.
    """
    put_integer(block, lane_sum(i64(x)))
    total = i64(0)
    for w in range(warps()):
        total += integer(block, w)
    return total


@device
def block_max(block, x):
    """The maximum of x, int64 from NOTHING to 2**62 - 1, as :func:`block_sum`."""
    put_integer(block, lane_max(i64(x)))
    best = NOTHING
    for w in range(warps()):
        best = max(best, integer(block, w))
    return best


@device
def put_integer(block, x):
    """Leave the warp's x in the scratch for all to read; barriers before and after."""
    words = block.shared.view(np.int32)
    barrier()
    if lane_id() == 0:
        # two words: an arena of an odd number of floats could not be seen as 64-bit ones
        words[2 * warp_id()] = x >> 31
        words[2 * warp_id() + 1] = x & LOW_BITS
    barrier()


@device
def integer(block, w):
    """What warp w left. Any lane."""
    words = block.shared.view(np.int32)
    return (i64(words[2 * w]) << 31) + i64(words[2 * w + 1])
