"""Logits of the rows that want a sample, and the draw: the last norm, the output matrix, and a maximum."""

import numpy as np

from ..simt import device, first_of_share, grid_warp, grid_warps
from ..simt.vocabulary import (
    atomic_max,
    barrier,
    block_threads,
    i64,
    lane_id,
    lane_max,
    opaque,
    rank,
    row_dots,
    thread_id,
    warp_barrier,
    warp_width,
)
from .rmsnorm import rmsnorm
from .sampling import score
from .staging import result_at, rows_at_once, staged_at

LOWEST = i64(-(2**63))
"""Below every :func:`rank` key."""


def spec(x: np.ndarray, head: np.ndarray) -> np.ndarray:
    """x [S, D] normalised, head [vocab, D] -> [S, vocab], float32."""
    return x @ head.T


@device
def logits_and_draw(block, plan, samples, sampling, model, x, logits):
    """``logits[s]`` of row ``plan.sample_row[s]``, and in ``plan.best[s]`` the rank key of the token drawn.

    Samples whose slots have filters are left to :func:`.filters.draw_filtered`. Warps share out the vocabulary;
    each brings its best to ``plan.best``, where a maximum of keys is the same in any order. All blocks call it.
    It begins and ends without a grid barrier.
    """
    width, vocab, weights = opaque(i64(model.hidden)), opaque(i64(model.vocab)), model.weights
    gain = 2 * i64(model.layers) * width
    tile = rows_at_once(block, width)
    warp, all_warps = grid_warp(block), grid_warps(block)
    first, end = first_of_share(vocab, warp, all_warps), first_of_share(vocab, warp + 1, all_warps)
    s0 = i64(0)
    while s0 < samples:
        n = min(tile, samples - s0)
        for s in range(n):
            rmsnorm(block, x, i64(plan.sample_row[s0 + s]) * width, model.norm, gain, width, model.eps, s)
        barrier()
        for token in range(first, end):
            at = i64(model.head) + token * width
            row_dots(weights, at, block.shared, staged_at(), n, width, block.shared, result_at(0))
            if lane_id() == 0:
                for s in range(n):
                    logits[(s0 + s) * vocab + token] = block.shared[result_at(0) + s]
        warp_barrier()  # the warp's lanes see the logits that lane 0 wrote
        for s in range(s0, s0 + n):
            if sampling.filtered[plan.sample_slot[s]] == 0:
                draw(plan, s, logits, s * vocab, first, end)
        s0 += tile


@device
def forget_draws(block, plan, samples):
    """Begin the maxima in ``plan.best`` anew. All blocks call it, a grid barrier or more before they draw."""
    if block.id == 0:
        s = i64(thread_id())
        while s < samples:
            plan.best[s] = LOWEST
            s += block_threads()


@device
def draw(plan, s, logits, at, first, end):
    """One warp: the best of tokens first to end - 1, whose logits begin at ``logits[at]``, for sample s."""
    temperature, seed, position = plan.temperature[s], plan.seed[s], plan.draw[s]
    best = LOWEST
    token = first + lane_id()
    while token < end:
        best = max(best, rank(score(logits[at + token], temperature, seed, position, token), token))
        token += warp_width()
    take_best(plan, s, best)


@device
def take_best(plan, s, best):
    """One warp: the best that its lanes have seen for sample s may be the best of all."""
    best = lane_max(best)
    if lane_id() == 0 and best > LOWEST:
        atomic_max(plan.best, s, best)


def cost(samples: int, hidden: int, vocab: int) -> tuple[int, int]:
    """(bytes, FLOPs): the 16-bit output matrix once, logits written."""
    return 2 * vocab * hidden + 4 * samples * (hidden + vocab), 2 * samples * vocab * hidden
