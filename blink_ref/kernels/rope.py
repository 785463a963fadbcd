"""Rotary position embedding (Su et al., 2021), in the half-split form of the Llama checkpoints.

Element i of a head is rotated with element i + d/2 by the angle of (position, i). The table of cosines
and sines comes from the host, computed in float64 and rounded once.
"""

import numpy as np

from ..simt import device


def spec(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """x [T, heads, d] at the positions of table's rows [T, d] -> [T, heads, d]."""
    half = x.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@device
def rotate(a, b, cos, sin):
    """The rotated pair of one lane."""
    return a * cos - b * sin, b * cos + a * sin


def cost(rows: int, heads: int, head_dim: int) -> tuple[int, int]:
    """(bytes, FLOPs): fused into the projection, it only reads a row of the table."""
    return 4 * rows * head_dim, 3 * rows * heads * head_dim
