"""The linear layers of many rows, in tiles: held to the NumPy reference and to the kernels for a few rows."""

from dataclasses import replace

import numpy as np
import pytest
from engine_bench import SMALL, TARGETS, TINY, Bench, Request, answers_together, assert_greedy, chosen
from test_engine_model import SMALL_CLOSE, Steps, some_ids

from blink_ref import cli, simt
from blink_ref.engine import __main__ as engine_command
from blink_ref.engine.memory import tiles_fit
from blink_ref.kernels import tiles
from blink_ref.model.reference import Reference
from blink_ref.model.weights import Weights
from blink_ref.nic import engine_process as process
from blink_ref.simt import aligned, device
from blink_ref.simt.vocabulary import (
    DOTS_FLOATS,
    DOTS_PITCH,
    barrier,
    block_dots,
    block_threads,
    i64,
    row_put,
    thread_id,
)

FAST = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LANES = {"cpu": 1, "python": 4, "cuda": 512}
AT = 64


@device
def one_tile(block, w, second, outs, x, rows, n, first, columns, put, y):
    i = 2 * i64(thread_id())
    while i < rows * n:
        row_put(put, i // n * n, n, i % n, x[i], x[i + 1])
        i += 2 * block_threads()
    barrier()
    block_dots(block.shared, AT, w, i64(0), second * n, outs, put, i64(0), rows, n, first, columns)
    barrier()
    t = i64(thread_id())
    while t < rows:
        for r in range(outs):
            y[t, r] = block.shared[AT + t * DOTS_PITCH + r]
        t += block_threads()


def stored_as(dtype, values):
    """Weights in memory, and the float32 that they stand for."""
    if dtype == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.int16), values.astype(np.float16).astype(np.float32)
    return values, values


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("outs", "rows", "n", "first", "columns", "lanes"),
    [
        (128, 128, 64, 0, 64, 512),
        (128, 64, 512, 0, 512, 512),
        (128, 128, 768, 384, 384, 512),
        (96, 33, 160, 32, 96, 512),
        (2, 1, 32, 0, 32, 512),
        (50, 100, 96, 0, 96, 512),
        (40, 9, 96, 0, 96, 64),
    ],
)
def test_a_tile_is_the_product_of_its_rows(target, dtype, outs, rows, n, first, columns, lanes):
    if target == "python" and outs * rows > 1000:
        outs, rows = 12, 7
    draw = np.random.default_rng(outs + rows)
    gap = 3  # stored rows between the two halves
    stored, w = stored_as(dtype, draw.standard_normal((outs + gap, n)).astype(np.float32))
    flat = aligned(stored.size, stored.dtype)
    flat[:] = stored.reshape(-1)
    x = aligned(rows * n, np.float32)
    x[:] = draw.standard_normal(rows * n)
    y, half = np.full((rows, outs), np.nan, np.float32), outs // 2
    lanes = lanes if target == "cuda" else LANES[target]
    sizes = {"target": target, "shared": AT + DOTS_FLOATS}
    put = aligned(rows * n, np.float32)
    simt.launch(one_tile, 1, lanes, flat, half + gap, outs, x, rows, n, first, columns, put, y, **sizes)
    mine = np.concatenate([w[:half], w[half + gap :]]).astype(np.float64)
    some = slice(first, first + columns)
    expected = x.reshape(rows, n).astype(np.float64)[:, some] @ mine[:, some].T
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert error < 1e-5  # some 2e-6 where x is split in two bfloat16, of 2**-17; less where it is not
    assert np.abs(y - expected).max() < 4e-5 * n**0.5


WIDE = replace(SMALL, hidden=64, head_dim=32, ffn=96, vocab=131, context=400)
SHAPES = {
    "two heads a tile": {},
    "an odd number of heads": {"heads": 3, "kv_heads": 1, "head_dim": 32},
    "a head a tile": {"heads": 2, "kv_heads": 1, "head_dim": 96},
    "two tiles a head": {"heads": 2, "kv_heads": 1, "head_dim": 256},
    "wide": {"hidden": 288, "ffn": 544, "heads": 2, "kv_heads": 2, "head_dim": 128},
    "untied": {"tied": False},
}


def model_of(shape):
    config = replace(WIDE, **SHAPES[shape])
    return config, Weights.random(config, seed=3, scale=0.15)


def in_tiles(config, target, **changes):
    made = chosen(config, target, tiles=tiles.FEW, **changes)
    return replace(made, shared=max(made.shared, tiles.arena(config.head_dim)))


class StepsInTiles(Steps):
    """Of many rows, which all want a sample."""

    def __init__(self, model, target, rows, **how):
        super().__init__(model, target, rows=rows, **how)
        shared = max(self.settings.shared, tiles.arena(model[0].head_dim))
        self.settings = replace(self.settings, tiles=tiles.FEW, shared=shared)
        table = self.bench.cache.table.copy()
        self.bench = Bench(model, self.settings)
        self.bench.cache.table[:] = table
        assert self.bench.model.tiles == tiles.FEW


@pytest.mark.parametrize("target", FAST)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_many_rows_in_tiles_are_those_of_the_reference(target, shape):
    model, rows = model_of(shape), (150, 40, 9, 3)
    ids = some_ids(model[0], sum(rows))
    steps, seen = StepsInTiles(model, target, rows=max(rows), blocks=3), []
    for n in rows:
        logits, drawn = steps.step(ids[steps.done : steps.done + n])
        seen.append(logits)
        assert drawn == logits.argmax(axis=1).tolist()
    expected, logits = Reference(*model).logits(ids), np.concatenate(seen)
    if target == "cpu":
        np.testing.assert_allclose(logits, expected, **SMALL_CLOSE)
    # where x is split in two, 2**-17 of it is lost in each product
    assert np.linalg.norm(logits - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("target", TARGETS)
def test_requests_served_in_tiles_get_what_the_reference_gives(target):
    """Prompts in chunks, a batch that decodes, and requests that end one after the other."""
    model, count = model_of("two heads a tile"), 4 if target == "python" else 12
    draw = np.random.default_rng(1)
    requests = [
        Request(tuple(draw.integers(8, 131, 5 + 3 * n).tolist()), 3 + n % 4, ignore_eos=True) for n in range(count)
    ]
    made = Bench(model, in_tiles(model[0], target, rows=24, running=16, context=100))
    answers = answers_together(made, requests)
    assert_greedy(model, requests, answers)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float16"),
        ({"hidden": 72}, "bfloat16"),
        ({"ffn": 100}, "bfloat16"),
        ({"head_dim": 48}, "bfloat16"),
        ({"head_dim": 320}, "bfloat16"),
        ({"heads": 129, "kv_heads": 1}, "bfloat16"),
    ],
)
def test_what_the_tensor_cores_do_not_serve_is_computed_as_few_rows_are(changes, dtype):
    config = replace(WIDE, **changes)
    weights = Weights.random(config, dtype=dtype)
    sizes = in_tiles(config, "cpu")
    assert not tiles_fit(config, weights, sizes)
    assert Bench((config, weights), sizes).model.tiles == 0
    assert not tiles_fit(WIDE, Weights.random(WIDE), replace(sizes, shared=tiles.arena(WIDE.head_dim) - 1))


class Asked(Exception):
    """In the place of an engine's process."""


def test_what_starts_an_engine_can_leave_the_tiles_out(monkeypatch):
    def spawn(options):
        raise Asked(options)

    monkeypatch.setattr(process, "_spawn", spawn)
    for wanted in (True, False):
        with pytest.raises(Asked) as asked, process.engine_process(TINY, "cpu", batch_invariant=wanted):
            pass
        assert engine_command._parser().parse_args(asked.value.args[0]).batch_invariant == wanted
        arguments = ["generate", *["--batch-invariant"] * wanted, "text"]
        assert cli._parser().parse_args(arguments).batch_invariant == wanted


def test_on_a_cpu_nothing_is_packed_unless_it_is_asked_for():
    """Else the engine is compiled with its third for tensor cores: see forward.compute_layers."""
    weights = Weights.random(WIDE)
    assert Bench((WIDE, weights), chosen(WIDE)).model.packed is None
    assert Bench((WIDE, weights), in_tiles(WIDE, "cpu")).model.packed is not None
