"""Embedding: a token's row of the embedding matrix becomes the residual stream's start."""

import numpy as np

from ..simt import device
from ..simt.vocabulary import block_threads, i64, thread_id, widen


def spec(embed: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """embed [vocab, D], tokens [T] -> [T, D], float32."""
    return embed[tokens]


@device
def embedding(block, plan, rows, model, x):
    """Fill `x` for the rows of the plan; blocks share out the rows. No barrier."""
    width = i64(model.hidden)
    weights = model.weights
    t = i64(block.id)
    while t < rows:
        at = i64(model.embed) + i64(plan.token[t]) * width
        i = i64(thread_id())
        while i < width:
            x[t * width + i] = widen(weights[at + i])
            i += block_threads()
        t += block.blocks


def cost(rows: int, hidden: int) -> tuple[int, int]:
    """(bytes, FLOPs): 16-bit rows read, float32 rows written."""
    return rows * hidden * (2 + 4), 0
