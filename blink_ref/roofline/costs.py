"""What a step costs: the sum of its kernels' own cost functions."""

import numpy as np

from blink_ref.kernels import attention, embedding, linear, logits, mlp, rmsnorm, rope, sampling
from blink_ref.model.config import ModelConfig
from blink_ref.model.weights import layer_shapes

Cost = tuple[int, int]
"""(bytes, FLOPs)"""


def phases(
    config: ModelConfig, rows: int, samples: int, positions: int, requests: int = 0, kv_bytes: int = 4
) -> dict[str, Cost]:
    """Of a step of `rows` rows that see `positions` positions each on average, of which `samples` get a token.

    The rows are of so many requests; 0: each is of another. `kv_bytes`: of a number of the KV cache. By name, as
    in ring.layout.PHASES; scheduling, which reads no weights, is left out.
    """
    hidden, d, heads, kv_heads = config.hidden, config.head_dim, config.heads, config.kv_heads
    q, k, v, out, _, _, down = layer_shapes(config)
    norm = rmsnorm.cost(rows, hidden)
    turned = rope.cost(rows, heads + kv_heads, d)
    layer = {
        "project": [norm, *(linear.cost(rows, *shape) for shape in (q, k, v)), turned],
        "attend": [attention.cost(rows, positions, heads, kv_heads, d, requests, kv_bytes)],
        "output": [linear.cost(rows, *out)],
        "gate, up": [norm, mlp.cost(rows, hidden, config.ffn)],
        "down": [linear.cost(rows, *down)],
    }
    found = {"embed": embedding.cost(rows, hidden)}
    found |= {name: total(parts * config.layers) for name, parts in layer.items()}
    if samples:
        ends = rmsnorm.cost(samples, hidden), logits.cost(samples, hidden, config.vocab)
        found["logits"] = total([*ends, sampling.cost(samples, config.vocab)])
    return found


def step(
    config: ModelConfig, rows: int, samples: int, positions: int, requests: int = 0, kv_bytes: int = 4
) -> Cost:
    """All of :func:`phases`."""
    return total(list(phases(config, rows, samples, positions, requests, kv_bytes).values()))


def prefill(config: ModelConfig, prompt: int, rows: int, kv_bytes: int = 4) -> Cost:
    """A prompt taken in steps of up to `rows` rows, and its first token."""
    steps = []
    for first in range(0, prompt, rows):
        end = min(prompt, first + rows)
        steps.append(step(config, end - first, int(end == prompt), (first + end + 1) // 2, 1, kv_bytes))
    return total(steps)


def total(costs: list[Cost]) -> Cost:
    """The sum of costs."""
    size, flops = np.sum(costs, 0).tolist()
    return size, flops
