"""Attention of many rows in tiles, held to the same specification as attention row by row, in a sea of NaN."""

import numpy as np
import pytest
from kernel_bench import (
    KV_DTYPES,
    block_values,
    floats,
    in_halves,
    kept_exactly,
    model_of,
    nans,
    plan_of,
    poison_arena,
)
from test_kernels_attention import LAYER, SPARE, empty_cache, put

from blink_ref.kernels import attention, flash
from blink_ref.kernels.work_list import list_work
from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import barrier

BLOCKS = 3
CLOSE = {"python": 2e-6, "cpu": 2e-6, "cuda": 2e-3}
"""Relative, of a row. On a GPU queries, keys, values, weights and the result are rounded to float16, by 2**-11 of
each at most. So a score is off by some 2**-11 of its size, 4 at most here, and its weight by 4 * 2**-11 of it."""


@device
def attend_alone(block, plan, chunks, rows, layer, model, cache, q, attended):
    poison_arena(block)
    list_work(block, plan, chunks, False, False, model)
    barrier()
    flash.attend_in_tiles(block, rows, layer, model, cache, q, attended)


LANES = {"python": 8, "cpu": 1, "cuda": 512}


def attend(target, model, cache, chunks, q, blocks=BLOCKS):
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
    shared = flash.arena(model.head_dim, in_halves(target))
    launch(attend_alone, blocks, LANES[target], *args, target=target, shared=shared)
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
    target, head_dim, kv_heads, group, page_size, kv_dtype
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
    close(target, chunks, given, q, attend(target, model, cache, chunks, q))
    assert np.array_equal(before, (cache.keys, cache.values), equal_nan=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_long_chunk_far_into_a_prompt(target, kv_dtype):
    """Several tiles of rows, over several tiles of positions, with scores that grow and grow."""
    model, *_ = model_of(heads=4, kv_heads=1, head_dim=64)
    chunks, n = [(0, 300, 150)], 450
    cache = empty_cache(model, 1, n, 32, kv_dtype)
    keys, values = floats(2, n, 1, 64, seed=1)
    keys *= np.linspace(0.1, 4, n, dtype=np.float32)[:, None, None]
    keys, values = kept_exactly(keys, kv_dtype), kept_exactly(values, kv_dtype)
    put(model, cache, 0, keys, values)
    q = floats(150, 4, 64, seed=2)
    close(target, chunks, {0: (keys, values)}, q, attend(target, model, cache, chunks, q))


def request(kv_dtype, n, head_dim=64, seed=1):
    """A model with a group of four heads, and its cache, with n positions of a request; what is in it."""
    model, *_ = model_of(heads=4, kv_heads=1, head_dim=head_dim)
    cache = empty_cache(model, 1, n, 32, kv_dtype)
    keys, values = (kept_exactly(x, kv_dtype) for x in floats(2, n, 1, head_dim, seed=seed))
    put(model, cache, 0, keys, values)
    return model, cache, keys, values


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_rows_bits_depend_neither_on_the_rows_beside_it_nor_on_the_number_of_blocks(target, head_dim):
    model, cache, *_ = request("bfloat16", 400, head_dim)
    q = floats(170, 4, head_dim, seed=2)
    whole = attend(target, model, cache, [(0, 230, 170)], q, blocks=5)
    cut = attend(target, model, cache, [(0, 230, 1), (0, 231, 70), (0, 301, 99)], q, blocks=2)
    np.testing.assert_array_equal(whole, cut)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_no_float16_can_be_is_the_largest(target, kv_dtype):
    model, cache, keys, values = request(kv_dtype, 40)
    keys[7], values[7] = kept_exactly(np.float32([1e5]), kv_dtype), kept_exactly(np.float32([-1e5]), kv_dtype)
    put(model, cache, 0, keys, values)
    attended = attend(target, model, cache, [(0, 30, 10)], np.full((10, 4, 64), 1e6, np.float32))
    assert (attended == (-65504 if in_halves(target) else values[7, 0, 0])).all()
