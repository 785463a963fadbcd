"""The NumPy reference model: the specification that every other path of the package is held to.

The arithmetic is that of Hugging Face's ``LlamaForCausalLM`` in float32. T rows, D hidden, H heads,
K kv heads, d head size, F ffn, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig, rope_table
from blink_ref.model.weights import Weights, layer_shapes


def rmsnorm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x float32 [T, D] scaled to root mean square 1, times gain [D] (Zhang and Sennrich 2019)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * gain


def rotate(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """RoPE: x float32 [T, heads, d] by the angles of ``table`` [T, d], dimension i paired with i + d/2."""
    half = x.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Causal attention: query [T, H, d] are the last T of S positions; keys, values [S, K, d].

    Each kv head serves H/K query heads (Ainslie et al. 2023). Returns float32 [T, H*d].
    """
    rows, heads, size = query.shape
    positions, kv_heads, _ = keys.shape
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size).transpose(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * np.float32(size**-0.5)  # [K, H/K, T, S]
    future = np.arange(positions) > np.arange(positions - rows, positions)[:, None]
    scores[..., future] = -np.inf
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    mixed = weight @ values.transpose(1, 0, 2)[:, None]  # [K, H/K, T, d]
    return mixed.transpose(2, 0, 1, 3).reshape(rows, heads * size)


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """The MLP of x float32 [T, D]; gate, up [F, D], down [D, F] (Shazeer 2020)."""
    gated = x @ gate.T
    with np.errstate(over="ignore"):  # exp(-x) may overflow to inf, whose quotient is the right 0
        return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


class Reference:
    """The model in float32, its matrices converted once (so it needs 4 bytes a parameter)."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.norm = weights.norm
        self.layers = [
            [weights.dense(int(start), *shape) for start, shape in zip(row, layer_shapes(config), strict=True)]
            for row in weights.matrix
        ]
        self.embed = weights.dense(weights.embed, config.vocab, config.hidden)
        self.head = weights.dense(weights.head, config.vocab, config.hidden)
        self.table = rope_table(config, config.context)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of ``ids``, float32 [T, V]. Raises BlinkError: no ids, too many, or a bad one."""
        return self._hidden(ids, self._empty_cache()) @ self.head.T

    def generate(self, ids: Sequence[int], n: int, ignore_eos: bool = False) -> list[int]:
        """Up to ``n`` greedy tokens after ``ids``, ties to the smaller id; an end-of-text token is the last.

        Raises BlinkError: no ids, a bad one, or more positions than the context.
        """
        cache = self._empty_cache()
        fresh, out = list(ids), list[int]()
        while len(out) < n:
            logits = self._hidden(fresh, cache)[-1] @ self.head.T
            out.append(int(np.argmax(logits)))
            if out[-1] in self.config.eos_ids and not ignore_eos:
                break
            fresh = out[-1:]
        return out

    def _empty_cache(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of each layer, float32 [S, K, d], no position yet."""
        none = np.empty((0, self.config.kv_heads, self.config.head_dim), np.float32)
        return [(none, none)] * self.config.layers

    def _hidden(self, ids: Sequence[int], cache: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Run ``ids`` after the cached positions, extending ``cache``; float32 [T, D] after the last norm."""
        config, rows, past = self.config, len(ids), len(cache[0][0])
        self._check(ids, past)
        table = self.table[past : past + rows]
        x = self.embed[list(ids)]
        for layer, (q, k, v, o, gate, up, down) in enumerate(self.layers):
            h = rmsnorm(x, self.norm[2 * layer], config.rms_eps)
            query = rotate((h @ q.T).reshape(rows, config.heads, config.head_dim), table)
            key = rotate((h @ k.T).reshape(rows, config.kv_heads, config.head_dim), table)
            value = (h @ v.T).reshape(rows, config.kv_heads, config.head_dim)
            keys, values = cache[layer]
            keys, values = np.concatenate([keys, key]), np.concatenate([values, value])
            cache[layer] = keys, values
            x = x + attend(query, keys, values) @ o.T
            h = rmsnorm(x, self.norm[2 * layer + 1], config.rms_eps)
            x = x + swiglu(h, gate, up, down)
        return rmsnorm(x, self.norm[-1], config.rms_eps)

    def _check(self, ids: Sequence[int], past: int) -> None:
        if not ids:
            raise BlinkError("the prompt is empty; give at least one token")
        if past + len(ids) > self.config.context:
            raise BlinkError(f"{past + len(ids)} positions exceed the context of {self.config.context}")
        for token in ids:
            if not 0 <= token < self.config.vocab:
                raise BlinkError(f"token {token} is outside the vocabulary of {self.config.vocab}")
