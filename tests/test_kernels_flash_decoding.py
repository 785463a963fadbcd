"""Attention of single rows, cut in chunks, held to the same specification as attention row by row."""

import itertools

import numpy as np
import pytest
from kernel_bench import floats, fragment_values, kept_exactly, model_of, nans, plan_of, poison_arena, warps_of
from test_kernels_attention import LAYER, SPARE, empty_cache, put

from blink_ref.engine import memory
from blink_ref.kernels import attention, flash_decoding, flash_items
from blink_ref.kernels.staging import ITEM, LISTED, MOST_NOTED, MOST_PARTS, WORK
from blink_ref.kernels.work_list import CHUNK, ENTRY, FIRST_ITEM, FIRST_TILE, LENGTH, ROW, SLOT, list_work
from blink_ref.simt import aligned, device, launch, vocabulary
from blink_ref.simt.on_python import me
from blink_ref.simt.vocabulary import (
    HEADS,
    arena_view,
    barrier,
    heads_ask,
    heads_attend,
    heads_begin,
    heads_column,
    heads_queries,
    i64,
    lane_id,
    mix_of_fours,
    warp_barrier,
    warp_id,
    warps,
)

CLOSE = {"python": 2e-6, "cpu": 2e-6, "cuda": 3e-4}
"""Relative, of a row; on a GPU the result is rounded to float16, by 2**-11 at most."""
BF16 = "bfloat16"


@device
def attend_alone(block, plan, rows, limit, beyond, layer, model, cache, act):
    poison_arena(block)
    list_work(block, plan, rows, True, True, model)
    barrier()
    flash_items.note_own(block, rows, limit, beyond, model, cache, act)
    barrier()
    flash_decoding.attend_in_chunks(block, rows, layer, model, cache, act, True)


TOGETHER, APART, AHEAD = ROOMS = "together", "apart", "ahead"
"""Whether the arena has room for a part's keys and values at a time, and for those of the next one."""


def attend(target, lanes, config, model, cache, slots, lengths, q, blocks=3, room=AHEAD):
    """attended [rows, H, d] of a row at the end of each of these lengths, in an arena as large as it has to be."""
    rows, d = len(slots), config.head_dim
    chunks = -(-max(lengths) // CHUNK)
    act = memory.activations(config, rows, 1, most_chunks=chunks)
    act.q[: q.size] = q.reshape(-1)
    attended = nans(q.size + SPARE)
    act = act._replace(attended=attended)
    plan = plan_of(rows, slot=slots, position=[n - 1 for n in lengths])
    limit = flash_items.arena(d) + (room == APART and d < 256) * CHUNK // 16 * flash_items.part_size(d)
    shared = limit + (room == AHEAD) * 2 * warps_of(target, lanes) * flash_items.span_of.python(d)
    beyond = limit if room == AHEAD else shared + 1
    args = plan, rows, limit, beyond, LAYER, model, cache, act
    launch(attend_alone, blocks, lanes, *args, target=target, shared=shared)
    assert np.isnan(attended[q.size :]).all()
    assert (act.arrived == 0).all()
    return fragment_values(attended[: q.size], rows, target).reshape(q.shape)


SHAPES = [(32, 2, 1), (64, 1, 3), (64, 2, 4), (96, 1, 8), (128, 1, 11), (256, 1, 1)]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), SHAPES)
def test_a_row_sees_its_own_positions_and_no_others(target, lanes, head_dim, kv_heads, group, page_size, room):
    """Rows of requests of all lengths: within a part, a chunk, and over several of them."""
    lengths = [1, 16, 17, 255, 256, 257, 700]
    if target == "python":
        lengths = [1, 17, 257]
    model, _, config = model_of(heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim)
    cache = empty_cache(model, len(lengths), max(lengths), page_size, BF16)
    given = [kept_exactly(floats(2, n, kv_heads, head_dim, seed=n), BF16) for n in lengths]
    for slot, (keys, values) in enumerate(given):
        put(model, cache, slot, keys, values)
    q = floats(len(lengths), kv_heads * group, head_dim, seed=9)
    slots = range(len(lengths))
    attended = attend(target, lanes, config, model, cache, slots, lengths, q, room=room)
    for slot, (keys, values) in enumerate(given):
        exact = attention.spec(*(a.astype(np.float64) for a in (q[slot], keys, values)))
        assert np.linalg.norm(attended[slot] - exact) < CLOSE[target] * np.linalg.norm(exact), lengths[slot]


def test_a_row_gets_the_same_alone_in_any_batch_and_on_any_number_of_blocks(target, lanes):
    lengths = [300, 5, 530] if target != "python" else [260, 5]
    model, _, config = model_of(heads=4, kv_heads=2, head_dim=32)
    cache = empty_cache(model, len(lengths), max(lengths), 16, BF16)
    for slot, n in enumerate(lengths):
        put(model, cache, slot, *kept_exactly(floats(2, n, 2, 32, seed=n), BF16))
    q, slots = floats(len(lengths), 4, 32, seed=9), list(range(len(lengths)))
    together = attend(target, lanes, config, model, cache, slots, lengths, q)
    for blocks, room in ((1, APART), (7, TOGETHER), (2, AHEAD), (1, AHEAD)):
        again = attend(target, lanes, config, model, cache, slots, lengths, q, blocks, room)
        np.testing.assert_array_equal(again, together)
    for slot in slots:
        alone = attend(target, lanes, config, model, cache, [slot], [lengths[slot]], q[slot : slot + 1])
        np.testing.assert_array_equal(alone[0], together[slot])


def test_what_is_noted_fits_where_it_goes():
    assert flash_items.PLACE + MOST_PARTS == ITEM
    assert flash_items.NOTED + MOST_NOTED * ITEM == LISTED


@pytest.mark.parametrize("room", ROOMS)
def test_a_block_may_have_more_items_than_it_has_noted_at_a_time(target, lanes, room, monkeypatch):
    lengths, noted = [600, 1, 300] * 5, MOST_NOTED
    if target == "python":
        lengths, noted = [260, 5], 2
        for module in (flash_decoding, flash_items):
            monkeypatch.setattr(module, "MOST_NOTED", noted)
    model, _, config = model_of(heads=4, kv_heads=2, head_dim=32)
    cache = empty_cache(model, len(lengths), max(lengths), 16, BF16)
    for slot, n in enumerate(lengths):
        put(model, cache, slot, *kept_exactly(floats(2, n, 2, 32, seed=n), BF16))
    q, slots = floats(len(lengths), 4, 32, seed=9), list(range(len(lengths)))
    assert sum(2 * -(-n // CHUNK) for n in lengths) > noted
    alone = attend(target, lanes, config, model, cache, slots, lengths, q, blocks=1, room=room)
    shared = attend(target, lanes, config, model, cache, slots, lengths, q, blocks=7)
    np.testing.assert_array_equal(alone, shared)


NONE = (0, 0, 0, 0), 0
"""What a warp that has not asked for anything has asked for."""


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_warp_attends_to_what_it_has_asked_for_and_asks_ahead_whenever_it_can(monkeypatch, blocks):
    """On a GPU `heads_attend` takes what lies in its places; in Python it reads what it is told to.

    So here a number stands in the places for what is on its way, which nobody else may have written over.
    """
    lengths, lanes, asked, seen, marks = [300, 5, 530, 1], 8, {}, [], itertools.count(1000)
    size = int(flash_items.span_of.python(32))

    def note(arena, of_keys, of_values, at, n):
        assert of_keys != of_values
        mark = np.float32(next(marks))
        for place in (of_keys, of_values):
            arena[place : place + size] = mark
        asked[me().warp] = (of_keys, of_values, int(at), int(n)), mark

    def heads_ask(arena, b, of_keys, of_values, keys, values, at, d, n):
        if lane_id() == 0:
            assert asked.get(me().warp, NONE)[0][3] <= 0
            note(arena, of_keys, of_values, at, n)

    def heads_attend(arena, b, k, of_keys, of_values, j, heads, d, keys, values, at, n, then, later):
        if lane_id() == 0:
            what, mark = asked[me().warp]
            assert what == (of_keys, of_values, at, n)
            assert all((arena[place : place + size] == mark).all() for place in (of_keys, of_values))
            seen.append((int(at), int(n)))
            note(arena, of_keys, of_values, then, later)
        vocabulary.heads_attend(
            arena, b, k, of_keys, of_values, j, heads, d, keys, values, at, n, then, later
        )  # fmt: skip

    monkeypatch.setattr(flash_decoding, "heads_ask", heads_ask)
    monkeypatch.setattr(flash_decoding, "heads_attend", heads_attend)
    model, _, config = model_of(heads=4, kv_heads=2, head_dim=32)
    cache = empty_cache(model, len(lengths), max(lengths), 16, BF16)
    for slot, n in enumerate(lengths):
        put(model, cache, slot, *kept_exactly(floats(2, n, 2, 32, seed=n), BF16))
    q = floats(len(lengths), 4, 32, seed=9)
    attend("python", lanes, config, model, cache, list(range(len(lengths))), lengths, q, blocks, AHEAD)
    assert len(set(seen)) == len(seen) == 2 * sum(-(-n // 16) for n in lengths)
    assert all(n <= 0 for (_, _, _, n), _ in asked.values())


def test_scores_that_grow_and_grow(target, lanes):
    n = 600 if target != "python" else 270
    model, _, config = model_of(heads=2, kv_heads=1, head_dim=32)
    cache = empty_cache(model, 1, n, 32, BF16)
    keys, values = floats(2, n, 1, 32, seed=1)
    keys *= np.linspace(0.1, 9, n, dtype=np.float32)[:, None, None]
    keys, values = kept_exactly(keys, BF16), kept_exactly(values, BF16)
    put(model, cache, 0, keys, values)
    q = floats(1, 2, 32, seed=2)
    exact = attention.spec(*(a.astype(np.float64) for a in (q[0], keys, values)))
    attended = attend(target, lanes, config, model, cache, [0], [n], q)
    assert np.linalg.norm(attended[0] - exact) < 10 * CLOSE[target] * np.linalg.norm(exact)


# --- the list of work


@device
def list_alone(block, plan, n, of_rows, in_items, model, out):
    list_work(block, plan, n, of_rows, in_items, model)
    barrier()
    if block.id == 0:
        work = arena_view(block.shared, WORK, LISTED, model.eos)
        for i in range(ENTRY * (n + 1)):
            out[i] = work[i]


def listed(target, lanes, model, plan, n, of_rows, in_items):
    out = np.zeros(ENTRY * (n + 1), np.int32)
    model = model._replace(eos=np.zeros(1, np.int32))
    launch(list_alone, 1, lanes, plan, n, of_rows, in_items, model, out, target=target, shared=8000)
    return out.reshape(n + 1, ENTRY)


def test_the_list_has_items_of_single_rows_and_tiles_of_others(target, lanes):
    model, *_ = model_of(heads=20, kv_heads=2, head_dim=64)  # two units a head, twelve rows a tile
    chunks = [(3, 300, 1), (1, 0, 13), (2, 255, 1), (0, 40, 12)]
    rows, first = sum(n for *_, n in chunks), np.cumsum([0] + [n for *_, n in chunks])[:-1]
    plan = plan_of(
        rows,
        slot=np.concatenate([[slot] * n for slot, _, n in chunks]),
        position=np.concatenate([np.arange(at, at + n) for _, at, n in chunks]),
        chunk_row=first,
        chunk_rows=[n for *_, n in chunks],
    )
    got = listed(target, lanes, model, plan, 4, False, True)
    np.testing.assert_array_equal(got[:4, ROW], first)
    np.testing.assert_array_equal(got[:4, SLOT], [3, 1, 2, 0])
    np.testing.assert_array_equal(got[:4, LENGTH], [301, 1, 256, 41])
    np.testing.assert_array_equal(got[:, FIRST_ITEM], np.cumsum([0, 2 * 2 * 2, 0, 2 * 2, 0]))
    np.testing.assert_array_equal(got[:, FIRST_TILE], np.cumsum([0, 0, 2 * 2, 0, 2]))
    tiled = listed(target, lanes, model, plan, 4, False, False)
    np.testing.assert_array_equal(tiled[:, FIRST_ITEM], np.zeros(5))
    np.testing.assert_array_equal(tiled[:, FIRST_TILE], np.cumsum([0, 2, 2 * 2, 2, 2]))
    by_row = listed(target, lanes, model, plan, rows, True, True)
    np.testing.assert_array_equal(by_row[:rows, ROW], np.arange(rows))
    assert by_row[rows, FIRST_ITEM] == 2 * 2 * (rows + 1)


# --- the words


@device
def words_alone(block, b, k, of_keys, of_values, ahead, j, x, heads, d, keys, values, at, n, out, weights, mixed):
    poison_arena(block)
    heads_queries(block.shared, j, x, i64(0), heads, d, keys, i64(warp_id()), i64(warps()))
    barrier()
    if warp_id() == 0:
        heads_begin(block.shared, b)
        then, later = at, n
        if ahead:  # behind the cache's first position
            heads_ask(block.shared, b, of_keys, of_values, keys, values, i64(0), d, i64(1))
            heads_attend(
                block.shared, b, k, of_keys, of_values, j, heads, d, keys, values, i64(0), i64(1), at, n
            )  # fmt: skip
            warp_barrier()
        else:
            heads_ask(block.shared, b, of_keys, of_values, keys, values, at, d, n)
        if of_keys != of_values:
            then, later = i64(0), i64(0)
        heads_attend(
            block.shared, b, k, of_keys, of_values, j, heads, d, keys, values, at, n, then, later
        )  # fmt: skip
    barrier()
    if block.id == 0:
        for i in range(out.shape[0]):
            out[i] = block.shared[k + i]
        a, b, c, e = mix_of_fours(weights, i64(0), x, i64(4), i64(8), i64(n))
        mixed[0] = a
        mixed[1] = b
        mixed[2] = c
        mixed[3] = e


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("heads", "d", "n"), [(1, 32, 1), (3, 64, 7), (8, 96, 16), (5, 128, 9), (8, 256, 15)])
def test_heads_attend_as_the_specification_says(target, lanes, heads, d, n, room):
    span = d * HEADS
    k = 2 * span
    of_part = k + 2 * HEADS
    places = {TOGETHER: (of_part, of_part), APART: (0, of_part), AHEAD: (0, span)}[room]
    x, weights = floats(max(heads * d, 8 * n + 8), seed=1), floats(n, seed=4)
    stored = [aligned((n + 2) * d, np.uint16) for _ in range(2)]
    of_keys, of_values = (kept_exactly(floats(n + 2, d, seed=seed), BF16) for seed in (2, 3))
    for bits, numbers in zip(stored, (of_keys, of_values), strict=True):
        bits[:] = numbers.reshape(-1).view(np.uint32) >> 16
    queries = k + span + 2 * HEADS
    out, mixed = np.full(span + 2 * HEADS, np.nan, np.float32), np.zeros(4, np.float32)
    coming = queries + HEADS * d
    launch(
        words_alone, 1, lanes, coming, k, *places, room == AHEAD, queries, x, heads, d, *stored, d, n,
        out, weights, mixed, target=target, shared=coming + 8,
    )  # fmt: skip
    q = x[: heads * d].reshape(heads, d).astype(np.float64)
    scores = q @ of_keys[1 : n + 1].T.astype(np.float64) / np.sqrt(d)
    highest = scores.max(1)
    exact = np.exp(scores - highest[:, None])
    sums = exact @ of_values[1 : n + 1].astype(np.float64)
    got = np.array([[out[2 * HEADS + heads_column(d, h, i)] for i in range(d)] for h in range(heads)])
    assert np.linalg.norm(got - sums) < CLOSE[target] * np.linalg.norm(sums)
    np.testing.assert_allclose(out[: 2 * heads : 2], highest, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out[1 : 2 * heads : 2], exact.sum(1), rtol=1e-4)
    fours = np.stack([x[4 + 8 * m : 8 + 8 * m] for m in range(n)])
    np.testing.assert_allclose(mixed, weights @ fours, rtol=1e-4, atol=1e-5)
