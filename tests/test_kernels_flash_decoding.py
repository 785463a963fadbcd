"""Attention of single rows, cut in chunks, held to the same specification as attention row by row."""

import itertools
from collections import Counter

import numpy as np
import pytest
from kernel_bench import floats, fragment_values, kept_exactly, model_of, plan_of, poison_arena, warps_of
from test_kernels_attention import LAYER, SPARE, empty_cache, put

from blink_ref.engine import memory
from blink_ref.engine.settings import CUDA_LANES
from blink_ref.kernels import attention, flash_decoding, flash_items, handed, stream
from blink_ref.kernels.staging import ITEM, LISTED, MOST_NOTED, MOST_PARTS, TEAMS, WORK
from blink_ref.kernels.work_list import CHUNK, ENTRY, FIRST_ITEM, FIRST_TILE, LENGTH, ROW, SLOT, list_work
from blink_ref.simt import aligned, device, grid_barrier, launch, vocabulary
from blink_ref.simt.capability import arena_bytes
from blink_ref.simt.on_python import me
from blink_ref.simt.vocabulary import (
    HEADS,
    HEADS_GAP,
    PART,
    arena_view,
    barrier,
    block_threads,
    heads_mix,
    heads_weigh,
    i64,
    mix_of_fours,
    publish,
    thread_id,
    warp_barrier,
    warp_id,
)

MOST_SHARED = 58000
"""Floats of arena that a block has on the GPUs for which this is made."""
CLOSE = {"python": 2e-6, "cpu": 2e-6, "cuda": 3e-4}
"""Relative, of a row; on a GPU the result is rounded to float16, by 2**-11 at most."""
BF16 = "bfloat16"


@device
def attend_alone(block, plan, rows, limit, beyond, awaiting, projected, layer, model, cache, act):
    """Queries, keys and values come when everybody waits for them, or lie there behind a barrier."""
    poison_arena(block)
    list_work(block, plan, rows, True, True, model)
    barrier()
    flash_items.note_own(block, limit, beyond, awaiting, model, cache, act)
    barrier()
    handed.clear(block, rows, i64(layer), flash_items.awaited_of_layer(block, model), model, act)
    grid_barrier(block)
    if awaiting:
        flash_decoding.ask_ahead(block, rows, layer, model, cache, act)
    at, i = handed.of_layer(act, layer) + handed.projected_at(rows, model), i64(thread_id())
    while block.id == block.blocks - 1 and i < projected.shape[0]:
        publish(act.handed, at + i, projected[i])
        i += block_threads()
    if not awaiting:
        grid_barrier(block)
    flash_decoding.attend_in_chunks(block, rows, layer, model, cache, act, True)


ONE, SOME, ALL, APART = ROOMS = "one", "some", "all", "apart"
"""Whether the arena has room for one warp and one buffer, for three warps, or for all of them and four buffers; or
for all too, but for keys and values at its end only."""


def attend(target, lanes, config, model, cache, slots, lengths, q, blocks=3, room=ALL, own=None):
    """attended [rows, H, d] of a row at the end of each of these lengths, in an arena as large as it has to be.

    `own`: the rows' own keys and values [2, rows, K, d], where these are awaited; otherwise all lie in the cache.
    """
    rows, d, heads = len(slots), config.head_dim, flash_items.heads_of_unit(config)
    chunks, items = -(-max(lengths) // CHUNK), sum(-(-n // CHUNK) for n in lengths) * flash_items.units_of(config)
    if own is not None:
        blocks = max(blocks, -(-items // flash_items.MOST_AWAITED))
    act = memory.activations(config, rows, 1, most_chunks=chunks, streamed=rows, blocks=blocks)
    keys, values = np.full((2, rows, config.kv_heads, d), np.nan, np.float32) if own is None else own
    projected = np.concatenate([q.reshape(rows, -1, d), keys, values], 1).astype(np.float32).reshape(-1)
    at = act.of_layer * (1 + LAYER)
    plan = plan_of(rows, slot=slots, position=[n - 1 for n in lengths])
    warps = min(warps_of(target, lanes), TEAMS * MOST_PARTS)
    size = d * flash_items.PART
    limit = {
        ONE: flash_items.arena(d, heads),
        SOME: flash_items.arena(d, heads, min(warps, 3)),
        ALL: flash_items.arena(d, heads, warps, 4),
        APART: flash_items.arena(d, heads, warps, 1) - warps * size,
    }[room]
    beyond = limit = min(limit, MOST_SHARED)
    shared = limit + (room == APART) * warps * size
    if shared > MOST_SHARED:
        pytest.skip("the arena of a block has no room for this")
    args = plan, rows, limit, beyond, own is not None, projected, LAYER, model, cache, act
    launch(attend_alone, blocks, lanes, *args, target=target, shared=shared)
    taken = q.size >> int(target == "cuda")  # float16 there
    attended, behind = act.handed[at : at + q.size], act.handed[at + taken :][:SPARE]
    assert np.isnan(act.handed[:at]).all()
    assert np.isnan(behind).all()
    assert (act.arrived == 0).all()
    return fragment_values(attended, rows, target).reshape(q.shape)


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


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), [(32, 2, 1), (64, 2, 4), (128, 1, 11)])
def test_what_a_step_makes_itself_is_awaited(target, lanes, head_dim, kv_heads, group, room):
    """Rows of one request see each other's keys and values, which the cache does not have yet, in a new chunk too.

    Results are the same, bit by bit, as when all lies in the cache.
    """
    runs = [(1, 1), (20, 3), (258, 4), (256, 1), (600, 1), (530, 2), (9 * CHUNK + 1, 1)]  # positions, new ones
    if target == "python":
        runs = [(5, 1), (258, 3)]
    model, _, config = model_of(heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim)
    whole = empty_cache(model, len(runs), max(n for n, _ in runs), 16, BF16)
    before = empty_cache(model, len(runs), max(n for n, _ in runs), 16, BF16)
    slots, lengths, own = [], [], []
    for slot, (n, rows) in enumerate(runs):
        given = kept_exactly(floats(2, n, kv_heads, head_dim, seed=n), BF16)
        put(model, whole, slot, *given)
        put(model, before, slot, *given[:, : n - rows])
        slots += [slot] * rows
        lengths += range(n - rows + 1, n + 1)
        own.append(given[:, n - rows :])
    q = floats(len(slots), kv_heads * group, head_dim, seed=9)
    exact = attend(target, lanes, config, model, whole, slots, lengths, q, room=room)
    own = np.concatenate(own, 1)
    awaited = attend(target, lanes, config, model, before, slots, lengths, q, room=room, own=own)
    np.testing.assert_array_equal(awaited, exact)


def test_a_row_gets_the_same_alone_in_any_batch_and_on_any_number_of_blocks(target, lanes):
    lengths = [300, 5, 530] if target != "python" else [260, 5]
    model, _, config = model_of(heads=4, kv_heads=2, head_dim=32)
    cache = empty_cache(model, len(lengths), max(lengths), 16, BF16)
    for slot, n in enumerate(lengths):
        put(model, cache, slot, *kept_exactly(floats(2, n, 2, 32, seed=n), BF16))
    q, slots = floats(len(lengths), 4, 32, seed=9), list(range(len(lengths)))
    together = attend(target, lanes, config, model, cache, slots, lengths, q)
    for blocks, room in ((1, APART), (7, ONE), (2, SOME), (1, ALL), (1, SOME)):
        again = attend(target, lanes, config, model, cache, slots, lengths, q, blocks, room)
        np.testing.assert_array_equal(again, together)
    for slot in slots:
        alone = attend(target, lanes, config, model, cache, [slot], [lengths[slot]], q[slot : slot + 1])
        np.testing.assert_array_equal(alone[0], together[slot])


def test_what_is_noted_fits_where_it_goes():
    assert flash_items.PLACE + CHUNK // flash_items.HALF == ITEM
    assert MOST_PARTS == CHUNK // flash_items.PART
    assert flash_items.BY_TEAM + TEAMS * flash_items.OF_TEAM == LISTED
    assert flash_items.OF_TEAM == flash_items.ITEMS + MOST_NOTED * ITEM


@device
def note_places_alone(block, limit, model, out):
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    if thread_id() == 0:
        flash_items.note_places(work, i64(block.shared.shape[0]), limit, i64(block.shared.shape[0]), model)
        out[0] = work[flash_items.TEAM]


@pytest.mark.parametrize(("head_dim", "heads", "warps"), [(64, 32, 8), (128, 32, 3)])
def test_so_many_warps_of_a_hopper_attend_beside_the_stages_of_the_stream(head_dim, heads, warps):
    """Of Llama-3.2-1B and 3.1-8B. With one word more in the list for each item, seven of eight had room: then one
    of them takes two parts of each item, which was 3 % of a step."""
    model, *_ = model_of(heads=heads, kv_heads=8, head_dim=head_dim)
    model, out = model._replace(eos=np.zeros(1, np.int32)), np.zeros(1, np.int32)
    shared, in_block = arena_bytes((9, 0)) // 4, CUDA_LANES // 32
    limit, lanes = stream.room(shared, in_block, stream.MOST_ROWS * head_dim), 4 * in_block
    assert warps_of("python", lanes) == in_block
    launch(note_places_alone, 1, lanes, limit, model, out, target="python", shared=shared)
    assert out[0] == warps


@pytest.mark.parametrize("room", ROOMS)
def test_a_team_may_have_more_items_than_it_has_noted_at_a_time(target, lanes, room, monkeypatch):
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


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_each_part_is_taken_once_and_its_keys_and_values_are_its_own(monkeypatch, blocks, room):
    """Each key says of which request, head and position it is, and that it is one; and so does each value."""
    lengths, seen = [300, 5, 530, 1], Counter()

    def note(stored, n):
        marks = (stored[: n * 32].astype(np.uint32) << 16).view(np.float32).reshape(n, 32)[:, :5]
        if me().lane % me().warp.width == 0:
            seen[tuple(map(tuple, marks.astype(int).tolist()))] += 1

    def heads_weigh(arena, k, keys, j, heads, d, n):
        note(keys, n)
        return vocabulary.heads_weigh(arena, k, keys, j, heads, d, n)

    def heads_mix(arena, k, values, weights, heads, d, n):
        note(values, n)
        vocabulary.heads_mix(arena, k, values, weights, heads, d, n)

    monkeypatch.setattr(flash_decoding, "heads_weigh", heads_weigh)
    monkeypatch.setattr(flash_decoding, "heads_mix", heads_mix)
    model, _, config = model_of(heads=4, kv_heads=2, head_dim=32)
    cache = empty_cache(model, len(lengths), max(lengths), 16, BF16)
    expected = Counter()
    for slot, n in enumerate(lengths):
        numbers = np.zeros((2, n, 2, 32), np.float32)
        for which, position, head in itertools.product(range(2), range(n), range(2)):
            numbers[which, position, head, :5] = which, slot, head, position // 256, position % 256
        put(model, cache, slot, *kept_exactly(numbers, BF16))
        for which, head, first in itertools.product(range(2), range(2), range(0, n, flash_items.PART)):
            part = numbers[which, first : first + flash_items.PART, head, :5].astype(int)
            expected[tuple(map(tuple, part.tolist()))] += 1
    q = floats(len(lengths), 4, 32, seed=9)
    attend("python", 8, config, model, cache, list(range(len(lengths))), lengths, q, blocks, room)
    assert seen == expected


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
def words_alone(block, k, x, heads, d, keys, values, n, out, weights, mixed):
    poison_arena(block)
    size, e = PART * d, i64(thread_id())
    of_keys = arena_view(block.shared, i64(0), size, keys)
    of_values = arena_view(block.shared, size >> 1, size, values)
    while e < n * d:
        of_keys[e] = keys[e]
        of_values[e] = values[e]
        e += block_threads()
    e = i64(thread_id())
    while e < heads * d:
        block.shared[size + e] = x[e]
        e += block_threads()
    barrier()
    if warp_id() == 0:
        taken = heads_weigh(block.shared, k, of_keys, size, heads, d, n)
        warp_barrier()
        heads_mix(block.shared, k, of_values, taken, heads, d, n)
    barrier()
    if block.id == 0:
        for i in range(out.shape[0]):
            out[i] = block.shared[k + i]
        a, b, c, e = mix_of_fours(weights, i64(0), x, i64(4), i64(8), n)
        mixed[0] = a
        mixed[1] = b
        mixed[2] = c
        mixed[3] = e


@pytest.mark.parametrize(
    ("heads", "d", "n"), [(1, 32, 1), (3, 64, 7), (8, 96, 32), (5, 128, 17), (8, 256, 31), (4, 64, 16)]
)
def test_a_warp_weighs_and_mixes_as_the_specification_says(target, lanes, heads, d, n):
    x, weights = floats(max(heads * d, 8 * n + 8), seed=1), floats(n, seed=4)
    stored = [aligned(n * d, np.uint16) for _ in range(2)]
    of_keys, of_values = (kept_exactly(floats(n, d, seed=seed), BF16) for seed in (2, 3))
    for bits, numbers in zip(stored, (of_keys, of_values), strict=True):
        bits[:] = numbers.reshape(-1).view(np.uint32) >> 16
    size, k = flash_items.part_size(d, heads), PART * d + HEADS * d
    out, mixed = np.full(size, np.nan, np.float32), np.zeros(4, np.float32)
    launch(
        words_alone, 1, lanes, k, x, heads, d, *stored, n, out, weights, mixed, target=target, shared=k + size
    )  # fmt: skip
    q = x[: heads * d].reshape(heads, d).astype(np.float64)
    scores = q @ of_keys.T.astype(np.float64) / np.sqrt(d)
    highest = scores.max(1)
    exact = np.exp(scores - highest[:, None])
    sums = exact @ of_values.astype(np.float64)
    got = out[2 * HEADS :].reshape(heads, d + HEADS_GAP)[:, :d]
    assert np.linalg.norm(got - sums) < CLOSE[target] * np.linalg.norm(sums)
    np.testing.assert_allclose(out[: 2 * heads : 2], highest, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out[1 : 2 * heads : 2], exact.sum(1), rtol=1e-4)
    fours = np.stack([x[4 + 8 * m : 8 + 8 * m] for m in range(n)])
    np.testing.assert_allclose(mixed, weights @ fours, rtol=1e-4, atol=1e-5)
