"""What the phases of a step of few rows hand on to each other, without a barrier of all blocks.

A grid barrier makes everything visible to everybody; to say so, a block waits for all weights that are on their
way to it (docs/performance.md). But a product needs no more than its activations, and attention no more than
queries, keys and values. So each of these numbers is *published* where it is made, and *awaited* where it is
used: it is there, or in its place is a NaN that no arithmetic makes. (The idea of NCCL's LL protocol, whose words
carry a flag.)

A number's place has to be cleared before it is published, and everybody has to know. So each layer has places of
its own, no place is written twice in a step, and all are cleared when a step begins, in front of its only barrier.
For to see a number published is not to know that whoever published it has read all that it came from.
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
    """Floats of a layer's places, for steps of so many rows."""
    of_row = 2 * (config.heads + config.kv_heads) * config.head_dim + config.ffn + 4 * config.hidden
    squares = rows * (config.hidden // 4)
    return (rows * of_row + 2 * (squares + WHOLE) + 2 * WHOLE) // WHOLE * WHOLE


@device
def of_layer(act, layer):
    """Where a layer's places begin. What lies before the first layer has those of number -1."""
    return (i64(layer) + 1) * opaque(i64(act.of_layer))


@device
def behind_attention(rows, model):
    """Where among them the normed rows begin that gate and up take, behind what attention gives.

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
def projected_at(rows, model):
    """Where the rows' queries, keys and values begin: all heads of a row, then the next ones; rotated."""
    return stop_at(rows, model) + WHOLE


@device
def projected_width(model):
    """How many numbers those are, of a row."""
    return (i64(model.heads) + 2 * i64(model.kv_heads)) * opaque(i64(model.head_dim))


@device
def stream_at(rows, model):
    """Where the residual stream begins as the MLP leaves it, a row after the other."""
    return projected_at(rows, model) + rows * projected_width(model)


@device
def clear(block, rows, first_layer, of_chunks, model, act):
    """All places of the layers from the first one on are yet to be published; and so are, of
    each, as many numbers of what attention's chunks give (see flash_decoding.py). All blocks share them out."""
    first, step = i64(block.id) * block_threads() + thread_id(), i64(block.blocks) * block_threads()
    end, layer = stream_at(rows, model) + rows * opaque(i64(model.hidden)), i64(first_layer)
    while layer < model.layers:
        at, i = of_layer(act, layer), first
        while i < end:
            unpublish(act.handed, at + i)
            i += step
        layer += 1
    i = first
    while i < of_chunks * model.layers:
        unpublish(act.partial, i)
        i += step


@device
def publish_four(x, at, a, b, c, d):
    """Four numbers next to each other. One lane."""
    publish(x, at, a)
    publish(x, at + 1, b)
    publish(x, at + 2, c)
    publish(x, at + 3, d)


@device
def put_four(x, at, a, b, c, d):
    """Likewise, for behind a barrier. One lane."""
    x[at] = a
    x[at + 1] = b
    x[at + 2] = c
    x[at + 3] = d


@device
def say_whether_to_stop(rows, layer, stops, model, act):
    """Whether the step stops behind a layer. One lane of the grid."""
    publish(act.handed, of_layer(act, layer) + stop_at(rows, model), f32(1.0) if stops else f32(0.0))


@device
def stops(rows, layer, model, act):
    """What that lane has said of the layer. One lane."""
    return awaited(act.handed, of_layer(act, layer) + stop_at(rows, model)) != f32(0.0)
