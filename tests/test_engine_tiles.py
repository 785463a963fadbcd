"""The linear layers of many rows, in tiles: held to the NumPy reference and to the kernels for a few rows."""

from dataclasses import replace

import numpy as np
import pytest
from engine_bench import SMALL, TARGETS, TINY, Bench, Request, answers_together, assert_greedy, chosen
from kernel_bench import in_halves, packed_values
from test_engine_model import SMALL_CLOSE, Steps, some_ids

from blink_ref import cli, simt
from blink_ref.engine import __main__ as engine_command
from blink_ref.engine.memory import tiles_fit
from blink_ref.kernels import tiles
from blink_ref.kernels.packing import block_row_at
from blink_ref.model.reference import Reference
from blink_ref.model.weights import Weights
from blink_ref.nic import engine_process as process
from blink_ref.simt import aligned, device
from blink_ref.simt.vocabulary import (
    DOTS_FLOATS,
    DOTS_PITCH,
    DOTS_RESULTS,
    FRAGMENT,
    Tile,
    async_fence,
    barrier,
    block_dots,
    block_put,
    block_threads,
    divide,
    dots_ask,
    dots_forget,
    f32,
    i64,
    packed_floats,
    thread_id,
)

FAST = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LANES = {"cpu": 1, "python": 4, "cuda": 512}
AT = 64
TURNS = 3
"""Tiles that follow each other."""


@device
def one_tile(block, w, at, steps, strips, x, t0, rows, put, first, n, y):
    across, width, e = i64(x.shape[0]), 16 * steps, 4 * i64(thread_id())
    while e < across * width:
        t, i = divide(e, width)
        block_put(put, block_row_at(across, t, i), x[t, i], x[t, i + 1], x[t, i + 2], x[t, i + 3])
        e += 4 * block_threads()
    async_fence()
    barrier()
    most = i64(64) if rows <= 64 else i64(128)
    tile = Tile(at, steps, strips, block_row_at(across, t0, i64(0)), across, rows, most, first, n)
    dots_ask(block.shared, AT, w, put, tile, True)
    barrier()
    dots_forget(block.shared, AT, w, tile)
    barrier()
    dots_ask(block.shared, AT, w, put, tile, True)
    for turn in range(TURNS):
        barrier()
        block_dots(block.shared, AT, w, put, tile)
        barrier()
        if turn + 1 < TURNS:
            dots_ask(block.shared, AT, w, put, tile, False)
        t = i64(thread_id())
        while t < rows:
            for r in range(FRAGMENT * strips):
                y[turn, t, r] = block.shared[AT + DOTS_RESULTS + t * DOTS_PITCH + r]
                block.shared[AT + DOTS_RESULTS + t * DOTS_PITCH + r] = f32(0.0)
            t += block_threads()


CASES = [
    # strips, rows, of them in all, from, fragments, of them first, n
    (8, 128, 128, 0, 4, 0, 4),
    (8, 64, 130, 64, 32, 0, 32),
    (8, 128, 300, 128, 48, 24, 24),
    (8, 100, 100, 0, 65, 1, 64),
    (6, 33, 40, 2, 10, 2, 7),
    (1, 1, 1, 0, 2, 0, 1),
    (4, 17, 17, 0, 6, 0, 6),
    (3, 9, 9, 0, 30, 0, 30),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("strips", "rows", "across", "t0", "steps", "first", "n"), CASES)
def test_a_tile_is_the_product_of_its_rows(target, strips, rows, across, t0, steps, first, n):
    if target == "python" and strips * rows * n > 2000:
        strips, rows, n = 2, 5, 3
    draw = np.random.default_rng(strips + rows)
    w = draw.standard_normal((strips, FRAGMENT, FRAGMENT * steps)).astype(np.float16)
    x = draw.standard_normal((across, FRAGMENT * steps), np.float32)
    if in_halves(target):
        x = x.astype(np.float16).astype(np.float32)
    before = 8 * 256
    packed = aligned(before + w.size, np.int16)
    cut = w.reshape(strips, 2, 8, steps, 2, 8).transpose(0, 3, 4, 1, 2, 5)
    packed[before:] = cut.reshape(-1).view(np.int16)
    y, put = np.full((TURNS, rows, FRAGMENT * strips), np.nan, np.float32), aligned(x.size, np.float32)
    sizes = {"target": target, "shared": AT + DOTS_FLOATS}
    simt.launch(one_tile, 1, LANES[target], packed, before, steps, strips, x, t0, rows, put, first, n, y, **sizes)
    some = slice(FRAGMENT * first, FRAGMENT * (first + n))
    mine = w.reshape(-1, FRAGMENT * steps).astype(np.float64)[:, some]
    expected = x[t0 : t0 + rows].astype(np.float64)[:, some] @ mine.T
    error = np.linalg.norm(y[0] - expected) / np.linalg.norm(expected)
    assert error < 2e-6
    for turn in range(1, TURNS):
        np.testing.assert_array_equal(y[turn], y[0])
    y = y[0]
    assert np.abs(y - expected).max() < 4e-5 * n**0.5


@device
def put_and_take(block, x, put):
    i = 4 * i64(thread_id())
    while i < x.shape[0]:
        block_put(put, packed_floats(i), x[i], x[i + 1], x[i + 2], x[i + 3])
        i += 4 * block_threads()


@pytest.mark.parametrize("target", TARGETS)
def test_an_activation_loses_what_its_word_says(target):
    large = np.array([65504, 7e4, 1e6, -1e6, 3e6, -1e30, np.float32(2**-30), 0], np.float32)
    x = aligned(4096, np.float32)
    x[:] = np.random.default_rng(0).standard_normal(4096) * 10.0 ** np.linspace(-8, 5, 4096)
    x[: large.size] = large
    put = aligned(4096, np.float32)
    simt.launch(put_and_take, 1, LANES[target], x, put, target=target)
    kept = packed_values(put, target)
    if not in_halves(target):
        np.testing.assert_array_equal(kept, x)
        return
    exact = np.clip(x.astype(np.float64), -65504 * 16, 65504 * 16)
    assert (np.abs(kept - exact) <= np.maximum(np.abs(exact) * 2.0**-11, 2.0**-21)).all()


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
    return replace(made, shared=max(made.shared, tiles.arena(config.head_dim, target == "cuda")))


class StepsInTiles(Steps):
    """Of many rows, which all want a sample."""

    def __init__(self, model, target, rows, **how):
        super().__init__(model, target, rows=rows, **how)
        shared = max(self.settings.shared, tiles.arena(model[0].head_dim, target == "cuda"))
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
    # where x is float16, 2**-11 of it is lost in each product, at most
    assert np.linalg.norm(logits - expected) < 4e-3 * np.linalg.norm(expected)


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
    assert_greedy(model, requests, answers, close=0.03 if target == "cuda" else 1e-3)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        ({"hidden": 72}, "bfloat16"),
        ({"ffn": 100}, "bfloat16"),
        ({"head_dim": 48}, "float16"),
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
    small = replace(sizes, shared=tiles.arena(WIDE.head_dim, halves=False) - 1)
    assert not tiles_fit(WIDE, Weights.random(WIDE), small)


def test_tiles_on_cuda_are_made_by_blocks_of_one_size():
    shared = tiles.arena(WIDE.head_dim, halves=True)
    sizes = replace(in_tiles(WIDE, "cpu"), target="cuda", lanes=512, shared=shared)
    assert tiles_fit(WIDE, Weights.random(WIDE), sizes)
    assert not tiles_fit(WIDE, Weights.random(WIDE), replace(sizes, lanes=256))


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
