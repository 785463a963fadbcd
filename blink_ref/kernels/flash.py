"""Attention for many rows: many queries at once over many positions (FlashAttention: Dao et al., 2022).

:func:`.attention.attend` reads a page for one query. Here up to 128 queries that see the same keys, those of
neighbouring rows of one request and of the heads of a group, are a tile, and so are up to 128 positions. Their
scores are a product of two tiles, what the queries make of the values is another (the words `tile_dots` and
`tile_mix`: on a GPU, work for tensor cores), and between the two, row by row, lies the softmax with its running
maximum. It is held to the same specification, but the order of the additions is another one.
"""

import math

from ..model.config import ModelConfig
from ..simt import device
from ..simt.vocabulary import (
    TILE_GAP,
    arena_view,
    barrier,
    block_put,
    block_threads,
    divide,
    exp,
    f32,
    i32,
    i64,
    lane_id,
    opaque,
    row_weigh,
    thread_id,
    tile_dots,
    tile_mix,
    tile_put,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)
from .attention import NOTHING, page_start
from .packing import block_row_at
from .staging import ENTRY, LISTED, SCRATCH, WORK
from .work_list import FIRST_TILE, entry_of, most_queries, rows_of_tile

WIDEST = 96
"""Elements of a head up to which all tiles have 128 rows; beyond it the arena holds fewer."""

LARGEST = 256
"""Most elements of a head for which the arena of a GPU has room."""

COLUMNS = 32
"""Elements of a head are a multiple of it, and as many positions as a tile has."""


@device
def most_positions(d):
    """Positions whose keys, or values, are a tile."""
    return i64(128 if d <= WIDEST else 64)


@device
def queries_at(d):
    """Where the queries begin in the arena, behind each one's maximum and total."""
    return SCRATCH + 2 * most_queries(d)


@device
def positions_at(d):
    """Where the keys begin, and, after them, the values."""
    return queries_at(d) + most_queries(d) * (d + TILE_GAP)


@device
def sums_at(d):
    """Where the sums of weighted values begin."""
    return positions_at(d) + most_positions(d) * (d + TILE_GAP)


@device
def scores_at(d):
    """Where the scores begin, which become weights."""
    return sums_at(d) + most_queries(d) * (d + TILE_GAP)


def arena(head_dim: int) -> int:
    """Floats of arena that these kernels need."""
    queries, positions = most_queries(head_dim), most_positions(head_dim)
    return int(scores_at(head_dim) + queries * (positions + TILE_GAP))


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
    slot, length = plan.slot[t0], i64(plan.position[t0 + rows - 1]) + 1
    group = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0]
    barrier()  # the tile before is finished with the arena
    take_queries(block, t0, rows * group, kv_head, model, q)
    first = i64(0)
    while first < length:
        n = min(most_positions(d), length - first)
        seen = (n + COLUMNS - 1) & ~i64(COLUMNS - 1)
        take_positions(shared, cache.keys, cache, slot, first, n, seen, layer, kv_head, model)
        barrier()
        tile_dots(shared, scores_at(d), queries_at(d), rows * group, positions_at(d), seen, d)
        barrier()
        weigh(shared, plan, t0, rows * group, group, first, seen, d)
        take_positions(shared, cache.values, cache, slot, first, n, seen, layer, kv_head, model)
        barrier()
        tile_mix(shared, sums_at(d), scores_at(d), rows * group, seen, positions_at(d), d)
        barrier()
        first += n
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
def take_queries(block, t0, queries, kv_head, model, q):
    """Queries into the arena; nothing is known of their scores, and their sums are 0. All lanes."""
    shared, d = block.shared, opaque(i64(model.head_dim))
    e = i64(thread_id())
    while e < queries * (d >> 4):
        query, i = divide(e, d >> 4)
        tile_put(shared, queries_at(d), query, d, 16 * i, q, query_at(t0, query, kv_head, model) + 16 * i)
        e += block_threads()
    e = i64(thread_id())
    while e < queries * (d + TILE_GAP):
        shared[sums_at(d) + e] = f32(0.0)
        e += block_threads()
    e = i64(thread_id())
    while e < queries:
        shared[SCRATCH + 2 * e] = NOTHING
        shared[SCRATCH + 2 * e + 1] = f32(0.0)
        e += block_threads()


@device
def take_positions(shared, stored, cache, slot, first, n, across, layer, kv_head, model):
    """Keys, or values, of n positions into the arena; behind them the last one again, which weighs nothing.

    All lanes.
    """
    d, size = opaque(i64(model.head_dim)), i64(cache.page_size)
    e = i64(thread_id())
    while e < across * (d >> 4):
        position, i = divide(e, d >> 4)
        n_page, inside = divide(first + min(position, n - 1), size)
        at = page_start(cache, model, layer, cache.table[slot, n_page], kv_head) + inside * d
        tile_put(shared, positions_at(d), position, d, 16 * i, stored, at + 16 * i)
        e += block_threads()


@device
def weigh(shared, plan, t0, queries, group, first, across, d):
    """Scores of positions from `first` on become weights, and sums and totals shrink as a maximum grows.

    A warp takes a query at a time, which sees positions up to its row's own.
    """
    scale = f32(1.0) / f32(math.sqrt(f32(d)))
    query = i64(warp_id())
    while query < queries:
        seen = i64(plan.position[t0 + divide(query, group)[0]]) + 1 - first
        at, known = scores_at(d) + query * (across + TILE_GAP), SCRATCH + 2 * query
        maximum, total = shared[known], shared[known + 1]
        highest, part = row_weigh(shared, at, across, seen, scale, maximum)
        if highest > maximum:
            shrink = exp(maximum - highest)
            total *= shrink
            i = i64(lane_id())
            while i < d:
                shared[sums_at(d) + query * (d + TILE_GAP) + i] *= shrink
                i += warp_width()
        warp_barrier()  # all lanes have seen what was known
        if lane_id() == 0:
            shared[known] = highest
            shared[known + 1] = total + part
        query += warps()


@device
def put_attended(shared, query, d, attended, across, row, head):
    """One warp: a query's sums, over their total, as part of a row of all heads."""
    at, total = sums_at(d) + query * (d + TILE_GAP), shared[SCRATCH + 2 * query + 1]
    i = 4 * i64(lane_id())
    while i < d:
        a, b, c, e = shared[at + i], shared[at + i + 1], shared[at + i + 2], shared[at + i + 3]
        block_put(attended, block_row_at(across, row, head * d + i), a / total, b / total, c / total, e / total)
        i += 4 * warp_width()
