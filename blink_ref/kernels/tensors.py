"""What the kernels work on: the model's weights and one step's activations, as named tuples of arrays."""

from typing import Any, NamedTuple

Q, K, V, OUT, GATE, UP, DOWN = range(7)
"""Columns of :attr:`Model.matrix`."""


class Model(NamedTuple):
    """A Llama-architecture model in memory. Shapes: see docs/notation.md."""

    weights: Any
    """flat, 16-bit (or float32) as stored: every matrix, row-major [out, in]"""
    matrix: Any
    """int64 [layers, 7]: where each layer's Q, K, V, OUT, GATE, UP, DOWN begin in `weights`"""
    norm: Any
    """float32 [(2 * layers + 1) * D]: gains before attention and before the MLP of each layer, then the last"""
    rope: Any
    """float32 [context, d]: cosines, then sines, of each position's d/2 angles"""
    eos: Any
    """int32 [n]: tokens that end an answer"""
    embed: int
    """where the embedding matrix [vocab, D] begins in `weights`"""
    head: int
    """where the output matrix [vocab, D] begins; the same place where they are tied"""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: Any
    """float32: added to the mean square in RMSNorm"""


class Activations(NamedTuple):
    """One step's intermediate results, float32, flat; row t of a step starts at t * width."""

    x: Any
    """[T, D]: the residual stream"""
    q: Any
    """[T, H * d]: rotated queries"""
    attended: Any
    """[T, H * d]: what the heads read from the KV cache"""
    gated: Any
    """[T, F]: silu(gate) * up"""
    logits: Any
    """[S, vocab], for the rows that want a sample"""
