"""RMSNorm: scale a row to unit mean square, then by a learned gain (Zhang and Sennrich, 2019)."""

import math

import numpy as np

from ..simt import device
from ..simt.vocabulary import barrier, block_scale, f32
from .staging import add_up, partial_square, put_partial, staged_at


def spec(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x [T, D], gain [D] -> [T, D], float32."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * gain


@device
def rmsnorm(block, x, at, gain, g, width, eps, row):
    """Stage row `row` of the arena: the normalised ``x[at:at+width]``, gains at ``gain[g:g+width]``.

    All lanes of the block call it; it begins and has inside a barrier, and leaves the staged row to be
    published by the caller's next one.
    """
    barrier()  # the scratch is free again
    put_partial(block, partial_square(x, at, width))
    barrier()
    scale = f32(1.0) / f32(math.sqrt(add_up(block) / f32(width) + eps))
    block_scale(block.shared, staged_at() + row * width, x, at, scale, gain, g, width)


def cost(rows: int, hidden: int) -> tuple[int, int]:
    """(bytes, FLOPs): a row read and written, the gain read."""
    return 4 * hidden * (2 * rows + 1), 4 * rows * hidden
