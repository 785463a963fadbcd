"""Attention for many rows: many queries at once over many positions (FlashAttention-2: Dao, 2023).

:func:`.attention.attend` reads a page for one query. Here up to 128 queries that see the same keys, those of
neighbouring rows of one request and of the heads of a group, are a tile. It goes through the positions, some
64 at a time, with a running maximum for each query (the word `tile_attend`: on a GPU, work for tensor cores); the
next ones are on their way to the arena meanwhile. It is held to the same specification, but the order of the
additions is another one.
"""

import math

from ..model.config import ModelConfig
from ..simt import device
from ..simt.vocabulary import (
    TILE_GAP,
    TILE_LANES,
    arena_view,
    barrier,
    block_put,
    block_threads,
    divide,
    f32,
    i32,
    i64,
    lane_id,
    opaque,
    packed_floats,
    thread_id,
    tile_ask,
    tile_attend,
    tile_begin,
    tile_end,
    tile_put,
    tile_take,
    warp_id,
    warp_width,
    warps,
)
from .attention import page_start
from .packing import block_row_at
from .staging import ENTRY, LISTED, SCRATCH, WORK
from .work_list import FIRST_TILE, entry_of, most_queries, rows_of_tile

LARGEST = 256
"""Most elements of a head."""

COLUMNS = 32
"""Elements of a head are a multiple of it, and so many positions are multiplied at a time."""

WAITING = 32 * TILE_LANES
"""Floats where keys and values wait on a GPU, half of them for each."""

STAGES = 2
"""Places for positions: what is multiplied, and what comes next."""


@device
def most_positions(d):
    """Positions that are multiplied between two barriers."""
    if d <= 64:
        return i64(128)
    return i64(64 if d <= 128 else 32)


@device
def pitch_of(d):
    """Floats from one row of a tile to the next."""
    return packed_floats(d) + TILE_GAP


@device
def keys_at(d, stage):
    """Where the keys of a stage begin in the arena, behind the queries."""
    return SCRATCH + (most_queries(d) + 2 * stage * most_positions(d)) * pitch_of(d)


@device
def values_at(d, stage):
    """Where its values begin."""
    return keys_at(d, stage) + most_positions(d) * pitch_of(d)


@device
def sums_at(d):
    """Where the sums begin. On a GPU that is where keys and values wait: it has sums only when all is done."""
    return keys_at(d, i64(STAGES))


def arena(head_dim: int, halves: bool) -> int:
    """Floats of arena that these kernels need; `halves`: tiles are float16, as on a GPU."""
    queries, positions = most_queries(head_dim), 2 * STAGES * most_positions(head_dim)
    row = (head_dim // 2 if halves else head_dim) + TILE_GAP
    return int(SCRATCH + (queries + positions) * row + max(WAITING, queries * (head_dim + TILE_GAP)))


def fits(config: ModelConfig) -> bool:
    """Whether these kernels serve a model's heads: their size, and that a tile has room for those of a group."""
    d, group = config.head_dim, config.heads // config.kv_heads
    return d % COLUMNS == 0 and d <= LARGEST and group <= most_queries(d)


@device
def attend_in_tiles(block, plan, chunks, rows, layer, model, cache, q, attended):
    """As :func:`.attention.attend`, for many rows: the tiles of so many chunks. Blocks share them out.

    What is attended is written as :func:`.vocabulary.block_put` does. All blocks call it, after a grid barrier
    behind the queries, keys and values, and :func:`.list_work`; it ends without one.
    """
    work, tile = arena_view(block.shared, WORK, LISTED, model.eos), i32(block.id)
    while tile < work[ENTRY * chunks + FIRST_TILE]:
        chunk = entry_of(work, chunks, FIRST_TILE, tile)
        before = work[ENTRY * chunk + FIRST_TILE]
        attend_tile(block, plan, chunk, i64(tile - before), rows, layer, model, cache, q, attended)
        tile = i32(tile + block.blocks)


@device
def attend_tile(block, plan, chunk, tile, across, layer, model, cache, q, attended):
    """One tile of queries over all positions that its last row sees; `across` rows are attended in all."""
    shared, d = block.shared, opaque(i64(model.head_dim))
    part, kv_head = divide(tile, opaque(i64(model.kv_heads)))
    most = rows_of_tile(model)
    t0, rows = i64(plan.chunk_row[chunk]) + part * most, min(most, i64(plan.chunk_rows[chunk]) - part * most)
    slot, length = plan.slot[t0], i64(plan.position[t0]) + rows
    group = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0]
    barrier()  # the tile before is finished with the arena
    ask_positions(shared, cache, slot, i64(0), length, i64(0), layer, kv_head, model)
    take_queries(shared, t0, rows * group, kv_head, model, q)
    take_positions(shared, cache, i64(0), length, i64(0), model)
    held = tile_begin(shared, sums_at(d), rows * group, d)
    first, stage = i64(0), i64(0)
    barrier()
    while first < length:
        n = min(most_positions(d), length - first)
        ask_positions(shared, cache, slot, first + n, length, stage ^ 1, layer, kv_head, model)
        held = tile_attend(
            shared, held, sums_at(d), i64(SCRATCH), rows * group, keys_at(d, stage), values_at(d, stage), n,
            length - rows + 1 - first, group, d,
        )  # fmt: skip
        take_positions(shared, cache, first + n, length, stage ^ 1, model)
        barrier()
        first, stage = first + n, stage ^ 1
    tile_end(shared, held, sums_at(d), keys_at(d, i64(0)), rows * group, d)
    barrier()
    query = i64(warp_id())
    while query < rows * group:
        t, head = divide(query, group)
        put_attended(shared, query, d, attended, across, t0 + t, kv_head * group + head)
        query += warps()


@device
def query_at(t0, query, kv_head, model):
    """Where a query of a tile begins in the rows' queries."""
    heads = opaque(i64(model.heads))
    group = divide(heads, i64(model.kv_heads))[0]
    t, head = divide(query, group)
    return ((t0 + t) * heads + kv_head * group + head) * i64(model.head_dim)


@device
def take_queries(shared, t0, queries, kv_head, model, q):
    """Queries into the arena, scaled as their scores are to be. All lanes."""
    d = opaque(i64(model.head_dim))
    e, scale = i64(thread_id()), f32(1.0) / f32(math.sqrt(f32(d)))
    while e < queries * (d >> 4):
        query, i = divide(e, d >> 4)
        tile_put(shared, i64(SCRATCH), query, d, 16 * i, q, query_at(t0, query, kv_head, model) + 16 * i, scale)
        e += block_threads()


@device
def rows_of_stage(d, first, length):
    """How many rows a stage has of the positions from `first` on, of a request of that length: none behind it."""
    n = min(most_positions(d), length - first)
    return (n + COLUMNS - 1) & ~i64(COLUMNS - 1)


@device
def ask_positions(shared, cache, slot, first, length, stage, layer, kv_head, model):
    """Begin to bring the keys and values of a stage; behind the last, the last once more, which weighs nothing.

    All lanes.
    """
    d, size, e = opaque(i64(model.head_dim)), i64(cache.page_size), i64(thread_id())
    while e < rows_of_stage(d, first, length) * (d >> 4):
        row, i = divide(e, d >> 4)
        n_page, inside = divide(min(first + row, length - 1), size)
        at = page_start(cache, model, layer, cache.table[slot, n_page], kv_head) + inside * d
        waiting = sums_at(d)
        tile_ask(shared, keys_at(d, stage), row, d, 8 * i, cache.keys, at, waiting)
        tile_ask(shared, values_at(d, stage), row, d, 8 * i, cache.values, at, waiting + WAITING // 2)
        e += block_threads()


@device
def take_positions(shared, cache, first, length, stage, model):
    """What :func:`ask_positions` has asked for is in the stage. All lanes; a barrier is to follow."""
    d, e = opaque(i64(model.head_dim)), i64(thread_id())
    while e < rows_of_stage(d, first, length) * (d >> 4):
        row, i = divide(e, d >> 4)
        waiting = sums_at(d)
        tile_take(shared, keys_at(d, stage), row, d, 8 * i, cache.keys, waiting)
        tile_take(shared, values_at(d, stage), row, d, 8 * i, cache.values, waiting + WAITING // 2)
        e += block_threads()


@device
def put_attended(shared, query, d, attended, across, row, head):
    """One warp: what a query attends to, as part of a row of all heads."""
    at = sums_at(d) + query * (d + TILE_GAP)
    i = 4 * i64(lane_id())
    while i < d:
        a, b, c, e = shared[at + i], shared[at + i + 1], shared[at + i + 2], shared[at + i + 3]
        block_put(attended, block_row_at(across, row, head * d + i), a, b, c, e)
        i += 4 * warp_width()
