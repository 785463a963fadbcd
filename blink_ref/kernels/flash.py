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
    TILE_POSITIONS,
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
from .packing import block_row_at
from .staging import ENTRY, LISTED, SCRATCH, WORK
from .work_list import ENTRIES, FIRST_TILE, LENGTH, ROW, SLOT, entry_of, most_queries, rows_of_tile

LARGEST = 256
"""Most elements of a head."""

COLUMNS = 32
"""Elements of a head are a multiple of it, and so many positions are multiplied at a time."""

WAITING = 32 * TILE_LANES
"""Floats where keys and values wait on a GPU, half of them for each."""

ROWS, KV_HEAD, GROUP, NUMBER = range(ENTRY, ENTRY + 4)
"""A tile is noted as an entry of the list is (see work_list.py): its first ROW, the LENGTH that its last row sees,
its SLOT. Behind that lies how many rows it has, which head of keys and values, how many heads read that, and the
tile's number."""
NOTED = ENTRY + 4
"""Words of it, at the beginning of the scratch."""
PLACES = SCRATCH + 32
"""Where that begins which is known of places in the cache: the rows of the positions that come next."""
NEAR = 512
"""So many, a power of two: those of four stages."""
QUERIES = PLACES + NEAR
"""Where the queries begin in the arena."""

STAGES = 2
"""Places for positions: what is multiplied, and what comes next."""


@device
def most_positions(d):
    """Positions that are multiplied between two barriers."""
    if d <= 64:
        return i64(TILE_POSITIONS)
    return i64(TILE_POSITIONS >> 1 if d <= 128 else TILE_POSITIONS >> 2)


@device
def pitch_of(d):
    """Floats from one row of a tile to the next."""
    return packed_floats(d) + TILE_GAP


@device
def stage_at(d, first):
    """Where the keys of positions from `first` on lie in the arena, before their values: two stages by turns."""
    most, at = most_positions(d), QUERIES + most_queries(d) * pitch_of(d)
    return at + (2 * most * pitch_of(d) if (first & most) > 0 else i64(0))


@device
def sums_at(d):
    """Where the sums begin. On a GPU that is where keys and values wait: it has sums only when all is done."""
    return QUERIES + (most_queries(d) + 2 * STAGES * most_positions(d)) * pitch_of(d)


def arena(head_dim: int, halves: bool) -> int:
    """Floats of arena that these kernels need; `halves`: tiles are float16, as on a GPU."""
    queries, positions = most_queries(head_dim), 2 * STAGES * most_positions(head_dim)
    row = (head_dim // 2 if halves else head_dim) + TILE_GAP
    return int(QUERIES + (queries + positions) * row + max(WAITING, queries * (head_dim + TILE_GAP)))


def fits(config: ModelConfig) -> bool:
    """Whether these kernels serve a model's heads: their size, and that a tile has room for those of a group."""
    d, group = config.head_dim, config.heads // config.kv_heads
    return d % COLUMNS == 0 and d <= LARGEST and group <= most_queries(d)


@device
def of_tile(shared, model, what):
    """What :func:`note_tile` has noted of the tile."""
    return i64(arena_view(shared, SCRATCH, NOTED, model.eos)[what])


@device
def queries_of(shared, model):
    """How many queries the tile has."""
    return of_tile(shared, model, ROWS) * of_tile(shared, model, GROUP)


@device
def note_tile(shared, tile, model):
    """What a tile is of: in the arena, since the sums take the registers. One lane."""
    work, of = arena_view(shared, WORK, LISTED, model.eos), arena_view(shared, SCRATCH, NOTED, model.eos)
    entry = ENTRY * entry_of(work, i64(work[ENTRIES]), FIRST_TILE, tile)
    part, kv_head = divide(i64(tile - work[entry + FIRST_TILE]), opaque(i64(model.kv_heads)))
    before = part * rows_of_tile(model)
    of[NUMBER] = i32(tile)
    rows = min(rows_of_tile(model), work[entry + ENTRY + ROW] - work[entry + ROW] - before)
    of[ROW] = i32(work[entry + ROW] + before)
    of[ROWS] = i32(rows)
    of[KV_HEAD] = i32(kv_head)
    of[GROUP] = i32(divide(opaque(i64(model.heads)), i64(model.kv_heads))[0])
    of[SLOT] = i32(work[entry + SLOT])
    of[LENGTH] = i32(work[entry + LENGTH] - 1 + before + rows)


@device
def take_queries(shared, model, q):
    """Queries into the arena, scaled as their scores are to be. All lanes."""
    d, group = opaque(i64(model.head_dim)), of_tile(shared, model, GROUP)
    e, scale = i64(thread_id()), f32(1.0) / f32(math.sqrt(f32(d)))
    while e < queries_of(shared, model) * (d >> 4):
        query, i = divide(e, d >> 4)
        t, head = divide(query, group)
        row, head = of_tile(shared, model, ROW) + t, of_tile(shared, model, KV_HEAD) * group + head
        at = (row * i64(model.heads) + head) * d + 16 * i
        tile_put(shared, i64(QUERIES), query, d, 16 * i, q, at, scale)
        e += block_threads()


@device
def attend_stage(shared, held, first, model):
    """All queries and the positions of a stage, from `first` on, by :func:`.vocabulary.tile_attend`. All lanes."""
    d, group = opaque(i64(model.head_dim)), of_tile(shared, model, GROUP)
    rows, length = of_tile(shared, model, ROWS), of_tile(shared, model, LENGTH)
    n, sees = min(most_positions(d), length - first), length - rows + 1 - first
    return tile_attend(shared, held, sums_at(d), i64(QUERIES), rows * group, stage_at(d, first), n, sees, group, d)


@device
def lanes_of_row(d):
    """As a power of two, how many lanes bring a row, with 16 elements each: a few have none."""
    return i64(d > 32) + i64(d > 64) + i64(d > 128) + 1


@device
def rows_of_stage(d, left):
    """How many rows a stage has, where so many positions are left; behind those lies the last once more."""
    return (min(most_positions(d), left) + COLUMNS - 1) & ~i64(COLUMNS - 1)


@device
def note_positions(shared, first, n, layer, model, cache):
    """In which row of the cache n positions lie, from `first` on; behind the last position, that of the last.

    All lanes; a barrier is to follow.
    """
    rows, t = arena_view(shared, PLACES, NEAR, model.eos), i64(thread_id())
    last = of_tile(shared, model, LENGTH) - 1
    while t < n:
        size = opaque(i64(cache.page_size))
        n_page, inside = divide(min(first + t, last), size)
        page = opaque(i64(layer)) * i64(cache.pages) + i64(cache.table[of_tile(shared, model, SLOT), n_page])
        page = page * i64(model.kv_heads) + of_tile(shared, model, KV_HEAD)
        rows[(first + t) & (NEAR - 1)] = i32(page * size + inside)
        t += block_threads()


@device
def ask_row(shared, position, i, d, model, cache):
    """One lane: begin to bring its i-th share of the keys and values of a position."""
    at = i64(arena_view(shared, PLACES, NEAR, model.eos)[position & (NEAR - 1)]) * d
    tile_ask(shared, sums_at(d), d, 8 * i, cache.keys, at)
    tile_ask(shared, sums_at(d) + (WAITING >> 1), d, 8 * i, cache.values, at)


@device
def take_row(shared, first, row, i, d, model, cache):
    """One lane: what it has asked for is in a row of the stage of the positions from `first` on."""
    to = stage_at(d, first)
    at = i64(arena_view(shared, PLACES, NEAR, model.eos)[(first + row) & (NEAR - 1)]) * d
    tile_take(shared, to, row, d, 8 * i, cache.keys, at, sums_at(d))
    to += most_positions(d) * pitch_of(d)
    tile_take(shared, to, row, d, 8 * i, cache.values, at, sums_at(d) + (WAITING >> 1))


@device
def ask_first(shared, model, cache):
    """Begin to bring the first positions. All lanes."""
    d, e = opaque(i64(model.head_dim)), i64(thread_id())
    rows, of_row = rows_of_stage(d, of_tile(shared, model, LENGTH)), lanes_of_row(d)
    while (e >> of_row) < rows:
        i = e & ((1 << of_row) - 1)
        if i < d >> 4:
            ask_row(shared, e >> of_row, i, d, model, cache)
        e += block_threads()


@device
def bring(shared, first, layer, model, cache):
    """Take the positions from `first` on, ask for those of the next stage, and note where those behind it lie.

    All lanes; a barrier is to follow.
    """
    d, e = opaque(i64(model.head_dim)), i64(thread_id())
    most, of_row = most_positions(d), lanes_of_row(d)
    left = of_tile(shared, model, LENGTH) - first
    rows, later = rows_of_stage(d, left), rows_of_stage(d, left - most)
    while (e >> of_row) < rows:
        row, i = e >> of_row, e & ((1 << of_row) - 1)
        if i < d >> 4:
            take_row(shared, first, row, i, d, model, cache)
            if row < later:
                ask_row(shared, first + most + row, i, d, model, cache)
        e += block_threads()
    if left > 2 * most:
        note_positions(shared, first + 2 * most, most, layer, model, cache)


@device
def put_attended(shared, across, model, attended):
    """What the queries attend to, each as part of a row of all heads. A warp takes a query at a time."""
    d, group = opaque(i64(model.head_dim)), of_tile(shared, model, GROUP)
    query = i64(warp_id())
    while query < queries_of(shared, model):
        t, head = divide(query, group)
        row, head = of_tile(shared, model, ROW) + t, of_tile(shared, model, KV_HEAD) * group + head
        at, i = sums_at(d) + query * (d + TILE_GAP), 4 * i64(lane_id())
        while i < d:
            a, b, c, e = shared[at + i], shared[at + i + 1], shared[at + i + 2], shared[at + i + 3]
            block_put(attended, block_row_at(across, row, head * d + i), a, b, c, e)
            i += 4 * warp_width()
        query += warps()


@device
def begin_tile(shared, tile, layer, model, cache, q):
    """The tile's queries and first positions, once a barrier is behind it; nothing is known of its sums."""
    most = most_positions(opaque(i64(model.head_dim)))
    barrier()  # the tile before is finished with the arena
    if thread_id() == 0:
        note_tile(shared, tile, model)
    barrier()
    note_positions(shared, i64(0), 2 * most, layer, model, cache)
    barrier()
    ask_first(shared, model, cache)
    take_queries(shared, model, q)
    bring(shared, i64(0), layer, model, cache)
    d = opaque(i64(model.head_dim))
    held = tile_begin(shared, sums_at(d), queries_of(shared, model), d)
    barrier()
    return held


@device
def attend_tile(block, tile, across, layer, model, cache, q, attended):
    """One tile of queries over all positions that its last row sees; `across` rows are attended in all.

    While the positions of one stage are multiplied, those of the next come. In every other warp that is seen to
    first, in the others last, so that tensor cores have something to do at all times.
    """
    shared = block.shared
    held, first = begin_tile(shared, tile, layer, model, cache, q), i32(0)
    while first < of_tile(shared, model, LENGTH):
        most = most_positions(opaque(i64(model.head_dim)))
        brings_first = ((warp_id() ^ (warp_id() >> 2)) & 1) > 0  # of the four warps of a scheduler, two
        if brings_first:
            bring(shared, first + most, layer, model, cache)
        held = attend_stage(shared, held, i64(first), model)
        first = i32(first + most_positions(opaque(i64(model.head_dim))))
        if not brings_first:
            bring(shared, i64(first), layer, model, cache)
        barrier()
    d = opaque(i64(model.head_dim))
    tile_end(shared, held, sums_at(d), stage_at(d, i64(0)), queries_of(shared, model), d)
    barrier()
    put_attended(shared, across, model, attended)


@device
def attend_in_tiles(block, rows, layer, model, cache, q, attended):
    """As :func:`.attention.attend`, for many rows: the tiles of the listed chunks. Blocks share them out.

    What is attended is written as :func:`.vocabulary.block_put` does. All blocks call it, after a grid barrier
    behind the queries, keys and values, and :func:`.list_work`; it ends without one.
    """
    work, tile = arena_view(block.shared, WORK, LISTED, model.eos), i32(block.id)
    while tile < work[ENTRY * i64(work[ENTRIES]) + FIRST_TILE]:  # anew each time: sums need the registers
        attend_tile(block, tile, rows, layer, model, cache, q, attended)
        tile = i32(of_tile(block.shared, model, NUMBER) + block.blocks)
