"""Where what products hand on to each other lies."""

from dataclasses import replace

import pytest
from engine_bench import SMALL

from blink_ref.engine import memory
from blink_ref.kernels import handed
from blink_ref.model.weights import Weights

SHAPES = [
    {},
    {"hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "head_dim": 64},
    {"hidden": 80, "ffn": 112, "heads": 3, "kv_heads": 1, "head_dim": 16},
    {"hidden": 16, "ffn": 16, "heads": 1, "kv_heads": 1, "head_dim": 16},
]


@pytest.mark.parametrize("halves", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("rows", [1, 3, 7, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_everything_has_a_place_of_its_own_that_begins_with_whole_fragments(monkeypatch, shape, rows, halves):
    """16 columns' places follow from the address, so they have to begin at one (see `fragment_put`)."""
    monkeypatch.setattr(handed, "packed_floats", lambda n: n // 2 if halves else n)
    config = replace(SMALL, vocab=8, **shape)
    act = memory.activations(config, rows, 1, streamed=rows)
    model = memory.device_model(config, Weights.random(config), 16)
    of_fragment, heads, squares = 8 if halves else 16, config.heads * config.head_dim, config.hidden // 4

    def of(n):
        return rows * n // (2 if halves else 1)

    normed = handed.behind_attention(rows, model), handed.behind_mlp(rows, model)
    places = [(0, of(heads)), (handed.gated_at(rows, model), of(config.ffn))]
    places += [(at, of(config.hidden)) for at in normed]
    places += [(handed.squares_behind(rows, model, at), rows * squares) for at in normed]
    places += [(handed.middle_at(rows, model), rows * config.hidden), (handed.stop_at(rows, model), 1)]
    places += [
        (handed.projected_at(rows, model), rows * (heads + 2 * config.kv_heads * config.head_dim)),
        (handed.stream_at(rows, model), rows * config.hidden),
    ]
    places.sort()
    for (at, n), (behind, _) in zip(places, [*places[1:], (act.of_layer, 0)], strict=True):
        assert at + n <= behind
    assert all((at + handed.of_layer(act, layer)) % of_fragment == 0 for at, _ in places for layer in (-1, 0, 1))
    assert handed.of_layer(act, -1) == 0
    assert handed.of_layer(act, config.layers - 1) + act.of_layer == act.handed.size
