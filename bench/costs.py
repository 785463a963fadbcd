"""What a step costs: the sum of its kernels' own cost functions."""

import numpy as np

from blink_ref.kernels import attention, embedding, linear, logits, mlp, rmsnorm, rope
from blink_ref.model.config import ModelConfig
from blink_ref.model.weights import layer_shapes

Cost = tuple[int, int]
"""(bytes, FLOPs)"""


def step(config: ModelConfig, rows: int, samples: int, positions: int) -> Cost:
    """A step of `rows` rows that see `positions` positions each on average, of which `samples` get a token."""
    hidden, d, heads, kv_heads = config.hidden, config.head_dim, config.heads, config.kv_heads
    q, k, v, out, _, _, down = layer_shapes(config)
    layer = [
        rmsnorm.cost(rows, hidden),
        *(linear.cost(rows, *shape) for shape in (q, k, v)),
        rope.cost(rows, heads + kv_heads, d),
        attention.cost(rows, positions, heads, kv_heads, d),
        linear.cost(rows, *out),
        rmsnorm.cost(rows, hidden),
        mlp.cost(rows, hidden, config.ffn),
        linear.cost(rows, *down),
    ]
    ends = [embedding.cost(rows, hidden)]
    if samples:
        ends += [rmsnorm.cost(samples, hidden), logits.cost(samples, hidden, config.vocab)]
    return _sum([_sum(layer * config.layers), *ends])


def prefill(config: ModelConfig, prompt: int, rows: int) -> Cost:
    """A prompt taken in steps of up to `rows` rows, and its first token."""
    steps = []
    for first in range(0, prompt, rows):
        end = min(prompt, first + rows)
        steps.append(step(config, end - first, int(end == prompt), (first + end + 1) // 2))
    return _sum(steps)


def _sum(costs: list[Cost]) -> Cost:
    size, flops = np.sum(costs, 0).tolist()
    return size, flops
