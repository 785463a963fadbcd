"""Weights in the order in which tensor cores take them: packed once, and streamed from then on.

A matrix is cut in *strips* of 16 stored rows, and a strip in fragments of 16 columns. A fragment's 512 bytes are
four matrices of 8 x 8, each row after row: of the first eight columns the first eight rows and the others, then
those of the other columns. The strips of a matrix follow each other, and the fragments of a strip, so what a warp
multiplies is one run of memory.

The eight rows in a strip's second half belong to those in its first: in gate and up, they are up's rows of the
same numbers; in queries, keys and values, the rows that rotate with them.

What is packed is float16, whatever was stored. It has three bits more than bfloat16, so one float16 is enough for
an activation, where two bfloat16 were needed; and of bfloat16 weights none is changed between 2**-14 and 65,504.
Smaller ones are changed by 2**-25 at most; a model with larger ones is refused.
"""

import numpy as np

from ..errors import BlinkError
from ..model.config import ModelConfig
from ..model.tensorfile import to_float32
from ..model.weights import Weights
from ..simt import device
from ..simt.vocabulary import (
    DOTS_COLUMNS,
    FRAGMENT,
    block_threads,
    divide,
    f32,
    i32,
    i64,
    narrow_put,
    opaque,
    packed_floats,
    store_relaxed,
    thread_id,
    u32,
    widen,
)
from .tensors import DOWN, GATE, OUT, UP, K, Q, V

PROJECT, ATTENDED, GATED, LOWERED, LOGITS = range(5)
"""The products of a layer, by what they are made of or make: queries, keys and values; the output projection; gate
and up; down. And behind the last layer, the logits."""

AT, STRIPS, STEPS, SHARE, TURN = range(5)
"""Columns of :attr:`Model.stream`, a row for each product: where its weights begin in :attr:`Model.packed`, in
fragments; its strips; fragments in a strip, and how many of them are each warp's, as far as there are any; the
block that has its first strip."""

SIZE = FRAGMENT * FRAGMENT

LARGEST = f32(65504.0)
"""Of float16."""


def fits(config: ModelConfig, dtype: np.dtype) -> bool:
    """Whether a model's matrices can be packed."""
    widths = config.hidden, config.ffn, config.heads * config.head_dim, config.head_dim
    return bool(dtype != np.float32) and all(width % FRAGMENT == 0 for width in widths)


def too_large() -> BlinkError:
    """What to raise where a weight is beyond float16's largest."""
    return BlinkError(
        f"the model has weights beyond {LARGEST:,.0f}, and tensor cores get them as float16; "
        "start it with --batch-invariant, which does without them"
    )


def table(config: ModelConfig, blocks: int, warps: int) -> np.ndarray:
    """:attr:`Model.stream` for a grid of so many blocks that compute: int32 [4 * layers + 1, 8].

    The strips of all products are dealt to the blocks in turn, one product's after the other's. A row fills 32
    bytes, so that it is in one sector of memory.
    """
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    ins = config.hidden, config.heads * config.head_dim, config.hidden, config.ffn, config.hidden
    outs = heads, config.hidden, 2 * config.ffn, config.hidden, config.vocab
    kinds = [*range(LOGITS)] * config.layers + [LOGITS]
    strips = np.array([-(-outs[kind] // FRAGMENT) for kind in kinds])
    steps = np.array([ins[kind] // FRAGMENT for kind in kinds])
    at, turn = np.cumsum(strips * steps) - strips * steps, np.cumsum(strips) - strips
    columns = at, strips, steps, -(-steps // warps), turn % blocks
    return np.pad(np.stack(columns, 1), ((0, 0), (0, 3))).astype(np.int32)


def size(stream: np.ndarray) -> int:
    """Weights in all, with what the last strip of the logits has too many."""
    return int((stream[:, STRIPS].astype(np.int64) * stream[:, STEPS]).sum()) * SIZE


def spec(config: ModelConfig, weights: Weights) -> np.ndarray:
    """The packed weights, float16 as int16 bits; rows behind the vocabulary's last are 0.

    Raises BlinkError where one is beyond float16's largest.
    """

    def rows(layer: int, column: int, n: int, width: int) -> np.ndarray:
        at = weights.matrix[layer, column]
        return as_halves(weights.flat[at : at + n * width]).reshape(n, width)

    def as_halves(stored: np.ndarray) -> np.ndarray:
        values = to_float32(stored)
        if np.abs(values).max() > LARGEST:
            raise too_large()
        return values.astype(np.float16).view(np.int16)

    def paired(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.stack([each.reshape(-1, 8, each.shape[1]) for each in (first, second)], 1).reshape(
            -1, first.shape[1]
        )

    def packed(rows: np.ndarray) -> np.ndarray:
        cut = rows.reshape(-1, 2, 8, rows.shape[1] // FRAGMENT, 2, 8)
        return cut.transpose(0, 3, 4, 1, 2, 5).reshape(-1)

    hidden, ffn, d = config.hidden, config.ffn, config.head_dim
    parts = []
    for layer in range(config.layers):
        heads = [rows(layer, Q, config.heads * d, hidden)]
        heads += [rows(layer, column, config.kv_heads * d, hidden) for column in (K, V)]
        halves = np.concatenate(heads).reshape(-1, 2, d // 2, hidden)
        parts.append(packed(paired(*(halves[:, n].reshape(-1, hidden) for n in (0, 1)))))
        parts.append(packed(rows(layer, OUT, hidden, config.heads * d)))
        parts.append(packed(paired(rows(layer, GATE, ffn, hidden), rows(layer, UP, ffn, hidden))))
        parts.append(packed(rows(layer, DOWN, hidden, ffn)))
    head = np.zeros((-(-config.vocab // FRAGMENT) * FRAGMENT, hidden), np.int16)
    output = weights.flat[weights.head : weights.head + config.vocab * hidden]
    head[: config.vocab] = as_halves(output).reshape(-1, hidden)
    return np.concatenate([*parts, packed(head)])


@device
def pack(block, model, large):
    """Fill ``model.packed``, as :func:`spec`. All blocks share out runs of 16 bytes.

    ``large[0]`` becomes 1 if a weight is beyond float16's largest.
    """
    step = i64(block.blocks) * block_threads()
    for product in range(4 * model.layers + 1):
        kind, layer = kind_of(model, product), product >> 2
        steps, strips = i64(model.stream[product, STEPS]), i64(model.stream[product, STRIPS])
        n = i64(block.id) * block_threads() + thread_id()
        while n < strips * steps * 32:
            strip, column = divide(n >> 5, steps)
            column = column * FRAGMENT + ((n >> 4) & 1) * 8
            to, row = i64(model.stream[product, AT]) * SIZE + 8 * n, stored_row(model, kind, layer, strip, n & 15)
            for c in range(8):
                value = f32(0.0)
                if row >= 0:
                    value = widen(model.weights[row + column + c])
                narrow_put(model.packed, to + c, value)
                if abs(value) > LARGEST:
                    store_relaxed(large, i64(0), u32(1))
            n += step


@device
def kind_of(model, product):
    """Which of the five kinds a product of the stream is."""
    return i64(LOGITS if i32(product) == i32(4 * opaque(i64(model.layers))) else product & 3)


@device
def stored_row(model, kind, layer, strip, r):
    """Where row r of a strip begins in the weights as they were stored; -1 behind the vocabulary's last."""
    hidden, second = i64(model.hidden), i64(r >> 3)
    if kind == PROJECT:
        head, i = divide(strip, i64(model.head_dim) >> 4)
        row = head * model.head_dim + 8 * i + (r & 7) + second * (i64(model.head_dim) >> 1)
        queries, keys = i64(model.heads) * model.head_dim, i64(model.kv_heads) * model.head_dim
        if row < queries:
            return model.matrix[layer, Q] + row * hidden
        if row < queries + keys:
            return model.matrix[layer, K] + (row - queries) * hidden
        return model.matrix[layer, V] + (row - queries - keys) * hidden
    if kind == GATED:
        return model.matrix[layer, UP if second == 1 else GATE] + (8 * strip + (r & 7)) * hidden
    row = FRAGMENT * strip + r
    if kind == ATTENDED:
        return model.matrix[layer, OUT] + row * i64(model.heads) * model.head_dim
    if kind == LOWERED:
        return model.matrix[layer, DOWN] + row * model.ffn
    return model.head + row * hidden if row < model.vocab else i64(-1)


@device
def row_at(rows, row, column):
    """Where a column of a row lies in activations, as :func:`fragment_dots` takes them; a multiple of 4."""
    return packed_floats(((column >> 4) * rows + row) * FRAGMENT + (column & 15))


@device
def block_row_at(rows, row, column):
    """The same as :func:`block_dots` takes them."""
    return packed_floats(((column >> 3) * rows + row) * DOTS_COLUMNS + (column & 7))
