"""SwiGLU MLP (Shazeer, 2020): down(silu(gate(x)) * up(x)); the down projection is in :mod:`.linear`."""

import numpy as np

from ..simt import device, first_of_share, grid_warp, grid_warps
from ..simt.vocabulary import barrier, exp, f32, i64, lane_id, opaque, row_dots_of_two
from .rmsnorm import rmsnorm
from .staging import result_at, rows_at_once, staged_at
from .tensors import GATE, UP


def spec(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """x [T, D] normalised, gate and up [F, D] -> silu(gate x) * (up x) [T, F], float32."""
    g = x @ gate.T
    with np.errstate(over="ignore"):
        return g / (1 + np.exp(-g)) * (x @ up.T)


@device
def silu(x):
    """x * sigmoid(x), one lane."""
    return x / (f32(1.0) + exp(-x))


@device
def gate_up(block, rows, layer, model, x, gated):
    """``gated = silu(gate(norm(x))) * up(norm(x))``. A warp makes both numbers of an element, and so fuses them.

    All blocks call it. It begins and ends without a grid barrier.
    """
    width, ffn, weights = opaque(i64(model.hidden)), opaque(i64(model.ffn)), model.weights
    gate, up = model.matrix[layer, GATE], model.matrix[layer, UP]
    tile = rows_at_once(block, width)
    warp, all_warps = grid_warp(block), grid_warps(block)
    first, end = first_of_share(ffn, warp, all_warps), first_of_share(ffn, warp + 1, all_warps)
    t0 = i64(0)
    while t0 < rows:
        n = min(tile, rows - t0)
        for t in range(n):
            rmsnorm(block, x, (t0 + t) * width, model.norm, (2 * layer + 1) * width, width, model.eps, t)
        barrier()
        for r in range(first, end):
            g_at, u_at, shared = gate + r * width, up + r * width, block.shared
            row_dots_of_two(weights, g_at, u_at, shared, staged_at(), n, width, shared, result_at(0), result_at(1))
            if lane_id() == 0:
                for t in range(n):
                    g, u = block.shared[result_at(0) + t], block.shared[result_at(1) + t]
                    gated[(t0 + t) * ffn + r] = silu(g) * u
        t0 += tile


def cost(rows: int, hidden: int, ffn: int) -> tuple[int, int]:
    """(bytes, FLOPs) of gate and up: 16-bit weights once, activations in and out."""
    return 4 * hidden * ffn + 4 * rows * (hidden + ffn), 4 * rows * hidden * ffn
