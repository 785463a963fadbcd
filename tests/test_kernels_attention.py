"""Attention over the paged cache: projection into pages and attention out of them, in a sea of NaN."""

from dataclasses import replace

import numpy as np
import pytest
from engine_bench import SMALL
from kernel_bench import (
    KV_DTYPES,
    U,
    check,
    floats,
    gamma,
    kept_exactly,
    model_of,
    nans,
    plan_of,
    poison_arena,
    room_for,
    warps_of,
)

from blink_ref.engine import memory
from blink_ref.kernels import attention, rmsnorm, rope
from blink_ref.kernels.tensors import K, Q, V
from blink_ref.kvcache import pages
from blink_ref.model.tensorfile import from_float32, to_float32
from blink_ref.simt import device, grid_barrier, launch

BLOCKS = 2
LAYER = 1
SPARE = 16
LENGTHS = {"one": lambda p: [1], "around pages": lambda p: [1, p - 1, p, p + 1, 2 * p, 3 * p + 5]}


def empty_cache(model, slots, positions, page_size, kv_dtype="float32"):
    """A cache full of NaN, with pages dealt to the slots in no order, and one page of nobody's.

    The tables' places behind a slot's last page name that page: who reads on, reads NaN.
    """
    each = pages.pages_spec(positions, page_size)
    cache = pages.allocate(
        model.layers, model.kv_heads, model.head_dim, slots, positions + page_size, slots * each + 1, page_size
    )
    order = np.random.default_rng(page_size).permutation(slots * each) + 1
    cache.table[:] = 0
    cache.table[:, :each] = order.reshape(slots, each)
    big = nans(cache.keys.size, kv_dtype), nans(cache.values.size, kv_dtype)
    return cache._replace(keys=big[0], values=big[1])


def paged(model, cache, flat):
    """Keys or values as [layers, pages, K, P, d], as they are stored."""
    return flat.reshape(model.layers, cache.pages, model.kv_heads, cache.page_size, model.head_dim)


def put(model, cache, slot, keys, values):
    """Write keys and values [n, K, d] of a slot's first n positions into its pages of LAYER."""
    for flat, what in ((cache.keys, keys), (cache.values, values)):
        view = paged(model, cache, flat)[LAYER]
        for position, row in enumerate(what):
            page = cache.table[slot, position // cache.page_size]
            view[page, :, position % cache.page_size] = from_float32(row, flat.dtype)


# --- attend

NOTHING_YET = memory.activations(replace(SMALL, hidden=16, ffn=16, vocab=1), 1, 1)


@device
def attend_alone(block, plan, rows, layer, model, cache, act):
    poison_arena(block)
    attention.attend(block, plan, rows, layer, model, cache, act, False)


def run_attend(target, lanes, plan, rows, model, cache, q, blocks=BLOCKS):
    """attended as [rows, H, d]; the arena is just as large as attention.arena says."""
    attended = nans(q.size + SPARE)
    shared = attention.arena(model.head_dim, cache.page_size, warps_of(target, lanes))
    act = NOTHING_YET._replace(q=q.reshape(-1), attended=attended)
    args = plan, rows, LAYER, model, cache, act
    launch(attend_alone, blocks, lanes, *args, target=target, shared=shared)
    assert np.isnan(attended[q.size :]).all()
    return attended[: q.size].reshape(q.shape)


def attention_bound(q, keys, values, page_size):
    """How far :func:`attention.attend` may be off, for one row.

    A score is off by gamma(d + 2) of the sum of its products' sizes (d products, the scale and its
    product). A weight is exp of a difference of two scores, shrunk again as the maximum grows, once a page
    and once more at the end: its relative error is twice the score's, plus u times the differences of
    scores, which add up to at most twice their spread, plus 8 u (exp, two roundings) each time. Weighted
    values and their total are sums of n products, and are divided: the errors of both count.
    """
    group = q.shape[0] // keys.shape[1]
    keys, values = (a.astype(np.float64).repeat(group, 1) for a in (keys, values))
    n, d = len(keys), q.shape[1]
    scores = np.einsum("hd,nhd->hn", q, keys) / np.sqrt(d)
    sizes = np.einsum("hd,nhd->hn", np.abs(q), np.abs(keys)).max(1) / np.sqrt(d)
    times = -(-n // page_size) + 1
    weight_off = 2 * gamma(d + 2) * sizes + 2 * U * (scores.max(1) - scores.min(1)) + 8 * U * times
    weights = np.exp(scores - scores.max(1, keepdims=True))
    mean_size = np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), np.abs(values))
    return 1.01 * 2 * (weight_off + gamma(n + times + 2))[:, None] * mean_size


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), [(64, 3, 1), (96, 1, 3), (128, 1, 8)])
def test_attend_is_softmax_over_the_rows_own_positions_and_reads_no_others(
    target, lanes, head_dim, kv_heads, group, page_size, lengths, kv_dtype
):
    heads = kv_heads * group
    model, *_ = model_of(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    lengths = LENGTHS[lengths](page_size)
    cache = empty_cache(model, len(lengths), max(lengths), page_size, kv_dtype)
    q = floats(len(lengths), heads, head_dim, seed=1)
    given = [kept_exactly(floats(2, n, kv_heads, head_dim, seed=n), kv_dtype) for n in lengths]
    for slot, (keys, values) in enumerate(given):
        put(model, cache, slot, keys, values)
    # row t is of slot S - 1 - t, so that neither stands for the other
    slots = np.arange(len(lengths))[::-1]
    plan = plan_of(len(lengths), slot=slots, position=np.array(lengths)[slots] - 1)
    before = cache.keys.copy(), cache.values.copy()
    attended = run_attend(target, lanes, plan, len(lengths), model, cache, q)
    for row, slot in enumerate(slots):
        keys, values = given[slot]
        exact = attention.spec(*(a.astype(np.float64) for a in (q[row], keys, values)))
        check(attended[row], exact, attention_bound(q[row], keys, values, page_size))
    assert np.array_equal(before, (cache.keys, cache.values), equal_nan=True)


def chunk(rows, target, lanes, kv_dtype, blocks=BLOCKS, only=slice(None)):
    """A chunk of a prompt: `rows` rows of one slot, each seeing one position more than the row before."""
    model, *_ = model_of(heads=6, kv_heads=2, head_dim=24)
    cache = empty_cache(model, 1, rows, 16, kv_dtype)
    keys, values = kept_exactly(floats(2, rows, 2, 24, seed=2), kv_dtype)
    put(model, cache, 0, keys, values)
    q, position = floats(rows, 6, 24, seed=3)[only], np.arange(rows)[only]
    plan = plan_of(len(q), position=position)
    return run_attend(target, lanes, plan, len(q), model, cache, q.copy(), blocks), (q, keys, values)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_a_row_of_a_chunk_sees_positions_up_to_its_own(target, lanes, rows, kv_dtype):
    attended, (q, keys, values) = chunk(rows, target, lanes, kv_dtype)
    for t in range(rows):
        seen = q[t], keys[: t + 1], values[: t + 1]
        exact = attention.spec(*(a.astype(np.float64) for a in seen))
        check(attended[t], exact, attention_bound(*seen, 16))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_an_attended_row_has_the_same_bits_in_any_batch_and_grid(target, lanes, kv_dtype):
    together, _ = chunk(33, target, lanes, kv_dtype)
    for blocks in (1, 3):
        assert (chunk(33, target, lanes, kv_dtype, blocks)[0] == together).all()
    for t in (0, 15, 16, 32):
        assert (chunk(33, target, lanes, kv_dtype, only=slice(t, t + 1))[0] == together[t]).all()


@pytest.mark.parametrize("scale", [0, 1e3], ids=["all alike", "far apart"])
def test_scores_all_alike_or_far_apart_stay_finite(target, lanes, scale):
    model, *_ = model_of(heads=2, kv_heads=1, head_dim=24)
    cache = empty_cache(model, 1, 40, 16)
    q, (keys, values) = floats(1, 2, 24, seed=4) * np.float32(scale), floats(2, 40, 1, 24, seed=5)
    put(model, cache, 0, keys, values)
    attended = run_attend(target, lanes, plan_of(1, position=[39]), 1, model, cache, q)
    exact = attention.spec(*(a.astype(np.float64) for a in (q[0], keys, values)))
    check(attended[0], exact, attention_bound(q[0], keys, values, 16))


# --- project


@device
def project_alone(block, plan, rows, layer, model, cache, x, q):
    poison_arena(block)
    attention.project(block, plan, rows, layer, model, cache, x, q)


def run_project(target, lanes, plan, x, model, cache, tile, blocks=BLOCKS):
    """Queries as [T, H, d]; keys and values go into the cache."""
    size = len(x) * model.heads * model.head_dim
    q = nans(size + SPARE)
    shared = room_for(tile, model.hidden, target, lanes)
    args = plan, len(x), LAYER, model, cache, x.reshape(-1), q
    launch(project_alone, blocks, lanes, *args, target=target, shared=shared)
    assert np.isnan(q[size:]).all()
    return q[:size].reshape(len(x), model.heads, model.head_dim)


def projected(model, weights, config, x, positions):
    """What project should make of x, in float64, and how far it may be off: for q, k, v each [T, heads, d]."""
    normed = rmsnorm.spec(x.astype(np.float64), weights.norm[2 * LAYER].astype(np.float64), config.rms_eps)
    # a normalised number is off by gamma(D) / 2 + 6 u (see test_kernels_layers.py), a sum by gamma(D) more
    off = 1.01 * (1.5 * gamma(config.hidden) + 6 * U)
    table = model.rope[positions].astype(np.float64)
    for matrix, heads in ((Q, config.heads), (K, config.kv_heads), (V, config.kv_heads)):
        w = weights.dense(weights.matrix[LAYER, matrix], heads * config.head_dim, config.hidden).astype(np.float64)
        shape = len(x), heads, config.head_dim
        exact, bound = (normed @ w.T).reshape(shape), off * (np.abs(normed) @ np.abs(w).T).reshape(shape)
        if matrix != V:
            # the pair's errors turn with it; two products and a sum are rounded
            both = bound + 2 * U * (np.abs(exact) + bound)
            exact, bound = rope.spec(exact, table), both + np.roll(both, config.head_dim // 2, axis=-1)
        yield exact, bound


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_project_writes_rotated_queries_and_fills_its_positions_pages_only(target, lanes, rows, dtype, kv_dtype):
    model, weights, config = model_of(dtype, heads=6, kv_heads=2)
    # two slots: the first gets a chunk that ends in the middle of a page, the second a single row
    slots = np.array([0] * (rows - 1) + [1])
    positions = np.array([*range(13, 13 + rows - 1), 16])
    cache = empty_cache(model, 2, 64, 16, kv_dtype)
    x = floats(rows, config.hidden, seed=rows)
    q = run_project(target, lanes, plan_of(rows, slot=slots, position=positions), x, model, cache, tile=4)
    (q_exact, q_bound), *stored = projected(model, weights, config, x, positions)
    check(q, q_exact, q_bound)
    for flat, (exact, bound) in zip((cache.keys, cache.values), stored, strict=True):
        view = paged(model, cache, flat)
        got = to_float32(view[LAYER, cache.table[slots, positions // 16], :, positions % 16])
        if kv_dtype == "bfloat16":  # of whose eight bits half the last one is lost
            bound = bound + 2**-8 * (np.abs(exact) + bound)
        check(got, exact, bound)
        assert (~np.isnan(to_float32(flat))).sum() == got.size


def test_a_projected_row_has_the_same_bits_in_any_batch_tile_and_grid(target, lanes):
    model, *_ = model_of("bfloat16")
    x, positions = floats(5, model.hidden, seed=6), np.arange(5)

    def run(rows, tile, blocks):
        cache = empty_cache(model, 1, 64, 16)
        plan = plan_of(len(rows), position=positions[rows])
        q = run_project(target, lanes, plan, x[rows].copy(), model, cache, tile, blocks)
        kept = [paged(model, cache, a)[LAYER, cache.table[0, 0]][:, rows] for a in (cache.keys, cache.values)]
        return q, *(a.swapaxes(0, 1) for a in kept)

    everything = list(range(5))
    together = run(everything, 3, 2)
    for tile, blocks in ((5, 1), (1, 3)):
        for one, other in zip(run(everything, tile, blocks), together, strict=True):
            assert (one == other).all()
    for one, other in zip(run([3], 1, 2), together, strict=True):
        assert (one[0] == other[3]).all()


@device
def project_then_attend(block, plan, rows, layer, model, cache, x, act):
    poison_arena(block)
    attention.project(block, plan, rows, layer, model, cache, x, act.q)
    grid_barrier(block)
    attention.attend(block, plan, rows, layer, model, cache, act, False)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_is_projected_in_pieces_is_attended_as_if_it_had_come_at_once(target, lanes, kv_dtype):
    model, *_ = model_of("bfloat16", heads=4, kv_heads=2, head_dim=24)
    x, size = floats(20, model.hidden, seed=7), 4 * 24

    def run(pieces):
        cache, attended = empty_cache(model, 1, 32, 16, kv_dtype), nans(20 * size)
        for piece in np.split(np.arange(20), pieces):
            rows = len(piece)
            q, part = nans(rows * size), nans(rows * size)
            act = NOTHING_YET._replace(q=q, attended=part)
            args = plan_of(rows, position=piece), rows, LAYER, model, cache, x[piece].reshape(-1), act
            launch(project_then_attend, BLOCKS, lanes, *args, target=target, shared=4800)
            attended[piece[0] * size :][: rows * size] = part
        return attended

    at_once = run([])
    assert not np.isnan(at_once).any()
    assert (run([7, 18, 19]) == at_once).all()


# --- cost


def test_the_cost_of_attention_is_that_counted_by_hand():
    # 2 rows that see 5 positions each, 6 heads over 3 kv heads of 4: keys and values are 4 bytes a number;
    # a score and a share of the sum are a product and a sum for each of 4 numbers, position and head
    assert attention.cost(2, 5, 6, 3, 4) == (2 * 5 * 3 * 4 * 4 * 2, 2 * 5 * 6 * 4 * 2 * 2)
    assert attention.cost(2, 5, 6, 3, 4, kv_bytes=2) == (2 * 5 * 3 * 4 * 2 * 2, 2 * 5 * 6 * 4 * 2 * 2)
