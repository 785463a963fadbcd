"""Attention of many rows in tiles, held to the same specification as attention row by row, in a sea of NaN."""

import numpy as np
import pytest
from kernel_bench import KV_DTYPES, block_values, floats, kept_exactly, model_of, nans, plan_of, poison_arena
from test_kernels_attention import LAYER, SPARE, empty_cache, put

from blink_ref.kernels import attention, flash
from blink_ref.kernels.work_list import list_work
from blink_ref.model.tensorfile import from_float32
from blink_ref.model.weights import STORED_AS
from blink_ref.simt import aligned, device, launch
from blink_ref.simt.vocabulary import (
    TILE_GAP,
    barrier,
    block_threads,
    i64,
    thread_id,
    tile_dots,
    tile_mix,
    tile_put,
)

BLOCKS = 3
CLOSE = {"python": 2e-6, "cpu": 2e-6, "cuda": 3e-4}
"""Relative, of a row; on a GPU the result is rounded to float16, by 2**-11 at most."""


@device
def attend_alone(block, plan, chunks, rows, layer, model, cache, q, attended):
    poison_arena(block)
    list_work(block, plan, chunks, False, False, model)
    barrier()
    flash.attend_in_tiles(block, plan, chunks, rows, layer, model, cache, q, attended)


def attend(target, lanes, model, cache, chunks, q, blocks=BLOCKS):
    """attended [rows, H, d] of chunks (slot, first position, rows), in an arena just as large as it has to be."""
    rows = sum(n for _, _, n in chunks)
    first = np.cumsum([0] + [n for _, _, n in chunks])[:-1]
    plan = plan_of(
        rows,
        slot=np.concatenate([[slot] * n for slot, _, n in chunks]),
        position=np.concatenate([np.arange(at, at + n) for _, at, n in chunks]),
        chunk_row=first,
        chunk_rows=[n for _, _, n in chunks],
    )
    attended = nans(q.size + SPARE)
    args = plan, len(chunks), rows, LAYER, model, cache, q.reshape(-1), attended
    launch(attend_alone, blocks, lanes, *args, target=target, shared=flash.arena(model.head_dim))
    assert np.isnan(attended[q.size :]).all()
    return block_values(attended[: q.size], rows, target).reshape(q.shape)


def close(target, chunks, given, q, attended):
    row = 0
    for slot, at, n in chunks:
        keys, values = (a.astype(np.float64) for a in given[slot])
        for length in range(at + 1, at + n + 1):
            exact = attention.spec(q[row].astype(np.float64), keys[:length], values[:length])
            error = np.linalg.norm(attended[row] - exact) / np.linalg.norm(exact)
            assert error < CLOSE[target], (slot, length)
            row += 1


SHAPES = [(32, 2, 1), (64, 1, 3), (64, 2, 4), (96, 1, 2), (128, 1, 8), (256, 1, 1)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), SHAPES)
def test_rows_in_tiles_see_their_own_positions_and_no_others(
    target, lanes, head_dim, kv_heads, group, page_size, kv_dtype
):
    """Chunks of prompts from their start and from the middle, and single rows, of requests of all lengths."""
    chunks = [(2, 0, 1), (0, 131, 1), (1, 0, 33), (3, 127, 2), (4, 60, 50)]
    if target == "python":
        chunks = [(2, 0, 1), (0, 131, 1), (1, 3, 6)]
    model, *_ = model_of(heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim)
    lengths = {slot: at + n for slot, at, n in chunks}
    cache = empty_cache(model, max(lengths) + 1, max(lengths.values()), page_size, kv_dtype)
    given = {
        slot: kept_exactly(floats(2, n, kv_heads, head_dim, seed=slot), kv_dtype) for slot, n in lengths.items()
    }
    for slot, (keys, values) in given.items():
        put(model, cache, slot, keys, values)
    q = floats(sum(n for _, _, n in chunks), kv_heads * group, head_dim, seed=9)
    before = cache.keys.copy(), cache.values.copy()
    close(target, chunks, given, q, attend(target, lanes, model, cache, chunks, q))
    assert np.array_equal(before, (cache.keys, cache.values), equal_nan=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_long_chunk_far_into_a_prompt(target, lanes, kv_dtype):
    """Several tiles of rows, over several tiles of positions, with scores that grow and grow."""
    model, *_ = model_of(heads=4, kv_heads=1, head_dim=64)
    chunks, n = [(0, 300, 150)], 450
    cache = empty_cache(model, 1, n, 32, kv_dtype)
    keys, values = floats(2, n, 1, 64, seed=1)
    keys *= np.linspace(0.1, 4, n, dtype=np.float32)[:, None, None]
    keys, values = kept_exactly(keys, kv_dtype), kept_exactly(values, kv_dtype)
    put(model, cache, 0, keys, values)
    q = floats(150, 4, 64, seed=2)
    close(target, chunks, {0: (keys, values)}, q, attend(target, lanes, model, cache, chunks, q))


# --- the words


@device
def products(block, a, b, weights, rows, across, n, dots, mixed):
    """`dots` = a b', and `mixed` += weights b, of tiles."""
    shared, gap = block.shared, n + TILE_GAP
    at_a, at_b = i64(64), i64(64) + 128 * gap
    at_mixed = at_b + 128 * gap
    results = at_mixed + 128 * gap
    poison_arena(block)
    e = i64(thread_id()) * 16
    while e < rows * n:
        tile_put(shared, at_a, e // n, n, e % n, a, e)
        for m in range(16):
            shared[at_mixed + e // n * gap + e % n + m] = mixed[e + m]
        e += 16 * block_threads()
    e = i64(thread_id()) * 16
    while e < across * n:
        tile_put(shared, at_b, e // n, n, e % n, b, e)
        e += 16 * block_threads()
    barrier()
    tile_dots(shared, results, at_a, rows, at_b, across, n)
    barrier()
    e = i64(thread_id())
    while e < rows * across:
        dots[e] = shared[results + e // across * (across + TILE_GAP) + e % across]
        e += block_threads()
    barrier()
    e = i64(thread_id()) * 16
    while e < rows * across:
        tile_put(shared, results, e // across, across, e % across, weights, e)
        e += 16 * block_threads()
    barrier()
    tile_mix(shared, at_mixed, results, rows, across, at_b, n)
    barrier()
    e = i64(thread_id())
    while e < rows * n:
        mixed[e] = shared[at_mixed + e // n * gap + e % n]
        e += block_threads()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("warps", [2, 16])
@pytest.mark.parametrize(
    ("rows", "across", "n"), [(128, 128, 64), (1, 32, 32), (33, 96, 96), (17, 64, 96), (20, 32, 96)]
)
def test_products_of_tiles(target, rows, across, n, warps, dtype):
    """`dtype` is that of the tile on the right, which stands for keys and values."""
    if target == "python":
        rows = min(rows, 5)
    lanes = {"python": 4, "cpu": 1, "cuda": 32 * warps}[target]
    a, b, weights, mixed = (
        floats(*shape, seed=seed) for seed, shape in enumerate([(rows, n), (across, n), (rows, across), (rows, n)])
    )
    b = kept_exactly(b, dtype)
    stored = aligned(b.size, STORED_AS[dtype])
    stored[:] = from_float32(b.reshape(-1), stored.dtype)
    dots, given = aligned(rows * across, np.float32), mixed.copy()
    shared = 64 + 3 * 128 * (n + TILE_GAP) + 32 * 4 * (across + TILE_GAP)
    args = a.reshape(-1), stored, weights.reshape(-1), rows, across, n, dots, mixed.reshape(-1)
    launch(products, 1, lanes, *args, target=target, shared=shared)
    a, b, weights, given = (x.astype(np.float64) for x in (a, b, weights, given))
    for got, exact, size in (
        (dots.reshape(rows, across), a @ b.T, np.abs(a) @ np.abs(b).T),
        (mixed, given + weights @ b, np.abs(given) + np.abs(weights) @ np.abs(b)),
    ):
        assert (np.abs(got - exact) <= CLOSE[target] * size).all()
