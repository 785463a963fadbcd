"""What the products of a step of few rows hand on to each other, without a barrier of all blocks.

A grid barrier makes everything visible to everybody; to say so, a block waits for all weights that are on their
way to it (docs/performance.md). But a product needs no more than its activations. So each of their numbers is
*published* where it is made, and *awaited* where it is multiplied: it is there, or in its place is a NaN that no
arithmetic makes. (The idea of NCCL's LL protocol, whose words carry a flag.) Only queries, keys and values, which
attention copies asynchronously, go through a barrier: one in a layer.

Before a number is published its place has to be cleared. There are two halves, for layers by turns, and behind
the barrier of a layer everybody is finished with that of the layer before: then it is cleared, for the layer
behind, which has a barrier of its own in front of it. In each half, too, lies what goes through the barrier: the
queries, and the residual stream before the layer behind. For to see a number published is not to know that whoever
published it has read all that it came from.
"""

from ..model.config import ModelConfig
from ..simt import device
from ..simt.vocabulary import (
    FRAGMENT,
    awaited,
    block_threads,
    f32,
    i64,
    opaque,
    packed_floats,
    publish,
    thread_id,
    unpublish,
)

WHOLE = FRAGMENT
"""Everything begins at a multiple of so many floats."""


def size(config: ModelConfig, rows: int) -> int:
    """Floats of both halves, for steps of so many rows."""
    of_row = 2 * config.heads * config.head_dim + config.ffn + 4 * config.hidden
    squares = rows * (config.hidden // 4)
    return 2 * (rows * of_row + 2 * (squares + WHOLE) + 2 * WHOLE)


@device
def half_of(act, layer):
    """Where a layer's half begins."""
    return (i64(layer) & 1) * ((opaque(i64(act.handed.shape[0])) >> 1) & -WHOLE)


@device
def behind_attention(rows, model):
    """Where in a half the normed rows begin that gate and up take, behind what attention gives.

    That lies at its beginning, as :func:`fragment_put` leaves it, and so do they.
    """
    return packed_floats(rows * i64(model.heads) * opaque(i64(model.head_dim)))


@device
def squares_behind(rows, model, normed):
    """Where the sums of squares of each four columns begin, of rows that are normed at `normed`."""
    return normed + packed_floats(rows * opaque(i64(model.hidden)))


@device
def behind_rows(rows, model, normed):
    """What lies behind both."""
    return squares_behind(rows, model, normed) + ((rows * (opaque(i64(model.hidden)) >> 2) + (WHOLE - 1)) & -WHOLE)


@device
def gated_at(rows, model):
    """Where gate times up begins."""
    return behind_rows(rows, model, behind_attention(rows, model))


@device
def behind_mlp(rows, model):
    """Where the normed rows begin that the next layer takes, or the logits; their sums of squares lie behind."""
    return gated_at(rows, model) + packed_floats(rows * opaque(i64(model.ffn)))


@device
def middle_at(rows, model):
    """Where the residual stream begins as attention leaves it, a row after the other."""
    return behind_rows(rows, model, behind_mlp(rows, model))


@device
def stop_at(rows, model):
    """Where it says whether the step stops behind the layer."""
    return middle_at(rows, model) + rows * opaque(i64(model.hidden))


@device
def queries_at(rows, model):
    """Where the rows' queries begin, which are not published, as those of all layers (see attention.py)."""
    return stop_at(rows, model) + WHOLE


@device
def stream_at(rows, model):
    """Where the residual stream begins as the MLP leaves it, a row after the other: not published either."""
    return queries_at(rows, model) + rows * i64(model.heads) * opaque(i64(model.head_dim))


@device
def clear(block, rows, layer, model, act):
    """A layer's half is yet to be published. All blocks share it out."""
    at = half_of(act, layer)
    end = at + stop_at(rows, model) + 1
    at += i64(block.id) * block_threads() + thread_id()
    while at < end:
        unpublish(act.handed, at)
        at += i64(block.blocks) * block_threads()


@device
def say_whether_to_stop(rows, layer, stops, model, act):
    """Whether the step stops behind a layer. One lane of the grid."""
    publish(act.handed, half_of(act, layer) + stop_at(rows, model), f32(1.0) if stops else f32(0.0))


@device
def stops(rows, layer, model, act):
    """What that lane has said of the layer. One lane."""
    return awaited(act.handed, half_of(act, layer) + stop_at(rows, model)) != f32(0.0)
