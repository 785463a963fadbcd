"""Linear layer: y = x W^T, and the two places where it adds its result to the residual stream.

Warps share out the rows of W, so each weight is read once a tile of activations; the activations lie
in the arena. One warp makes one column with :func:`row_dots`, whose order of additions does not depend
on the batch, so that a row's result does not either.
"""

import numpy as np

from ..simt import device, first_of_share, grid_warp, grid_warps
from ..simt.vocabulary import barrier, block_copy, i64, lane_id, opaque, row_dots
from .staging import result_at, rows_at_once, staged_at


def spec(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [T, in], w [out, in] -> [T, out], float32."""
    return x @ w.T


@device
def add_linear(block, x, rows, weights, at, outs, ins, residual):
    """``residual[t, :outs] += x[t, :ins] @ W.T`` for `rows` rows; W [outs, ins] begins at ``weights[at]``.

    All blocks call it. It begins and ends without a grid barrier.
    """
    outs, ins = opaque(outs), opaque(ins)
    tile = rows_at_once(block, ins)
    warp, all_warps = grid_warp(block), grid_warps(block)
    first, end = first_of_share(outs, warp, all_warps), first_of_share(outs, warp + 1, all_warps)
    t0 = i64(0)
    while t0 < rows:
        n = min(tile, rows - t0)
        barrier()  # nobody reads the rows staged before
        block_copy(block.shared, staged_at(), x, t0 * ins, n * ins)
        barrier()
        for r in range(first, end):
            row_dots(weights, at + r * ins, block.shared, staged_at(), n, ins, block.shared, result_at(0))
            if lane_id() == 0:
                for t in range(n):
                    residual[(t0 + t) * outs + r] += block.shared[result_at(0) + t]
        t0 += tile


def cost(rows: int, outs: int, ins: int) -> tuple[int, int]:
    """(bytes, FLOPs): 16-bit weights once, activations read, results read and written."""
    return 2 * outs * ins + 4 * rows * (ins + 2 * outs), 2 * rows * outs * ins
