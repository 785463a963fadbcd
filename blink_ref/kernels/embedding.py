"""Embedding: a token's row of the embedding matrix becomes the residual stream's start."""

import numpy as np

from ..simt import device
from ..simt.vocabulary import block_threads, i32, i64, rank_index, thread_id, widen


def spec(embed: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """embed [vocab, D], tokens [T] -> [T, D], float32."""
    return embed[tokens]


@device
def embedding(block, plan, before, rows, model, x):
    """Fill `x` for the rows of the plan; blocks share out the rows. No barrier.

    A row's token may be a sample of the step before, whose plan is `before`; then it is noted in the plan.
    """
    width = i64(model.hidden)
    weights = model.weights
    t = i64(block.id)
    while t < rows:
        source = i64(plan.source[t])
        if source >= 0:
            token = rank_index(before.best[source])
            if thread_id() == 0:
                plan.token[t] = i32(token)
        else:
            token = i64(plan.token[t])
        at = i64(model.embed) + token * width
        i = i64(thread_id())
        while i < width:
            x[t * width + i] = widen(weights[at + i])
            i += block_threads()
        t += block.blocks


def cost(rows: int, hidden: int) -> tuple[int, int]:
    """(bytes, FLOPs): 16-bit rows read, float32 rows written."""
    return rows * hidden * (2 + 4), 0
