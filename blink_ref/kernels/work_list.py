"""The attention's work in a step, listed in the arena when the step begins, where all layers find it at once.

An entry is a *chunk* of one request's rows that follow each other or, in a step of few rows, a row. One of a
single row has *items* (:mod:`.flash_decoding`), if the attention of single rows is cut in them; all others have
*tiles* (:mod:`.flash`). Items and tiles are numbered through, and dealt to the blocks.
"""

from ..simt import device
from ..simt.vocabulary import HEADS, arena_view, barrier, block_threads, divide, i32, i64, opaque, thread_id
from .staging import ENTRY, LISTED, OWN, WORK

CHUNK = 256
"""Positions of an item of work: fixed, since the order of a row's additions follows from it."""

ROW, LENGTH, SLOT, FIRST_ITEM, FIRST_TILE = range(ENTRY)
"""Words of an entry: its first row, how many positions that sees, its slot; how many items and how many tiles the
entries before it have."""
ENTRIES = OWN
"""Where it is noted in the list how many entries it has."""


@device
def list_work(block, plan, n, of_rows, in_items, model):
    """List the attention's work: of n chunks of requests' rows or, with `of_rows`, of n rows.

    `in_items`: that of single rows is cut in items.

    All lanes; a barrier is to follow. Behind the last entry lies one that has neither items nor tiles. Its first
    row is the one behind all others, which follow each other.
    """
    work, i = arena_view(block.shared, WORK, LISTED, model.eos), i64(thread_id())
    while i < n:
        row, rows = i, i64(1)
        if not of_rows:
            row, rows = i64(plan.chunk_row[i]), i64(plan.chunk_rows[i])
        length, tiles, items = i64(plan.position[row]) + 1, tiles_of_rows(rows, model), i64(0)
        if in_items and rows == 1:
            items, tiles = octets(model) * chunks_of(length), i64(0)
        work[ENTRY * i + ROW] = i32(row)
        work[ENTRY * i + LENGTH] = i32(length)
        work[ENTRY * i + SLOT] = i32(plan.slot[row])
        work[ENTRY * i + FIRST_ITEM] = i32(items * opaque(i64(model.kv_heads)))
        work[ENTRY * i + FIRST_TILE] = i32(tiles * opaque(i64(model.kv_heads)))
        if i == n - 1:
            work[ENTRY * n + ROW] = i32(row + rows)
        i += block_threads()
    barrier()
    if thread_id() == 0:
        work[ENTRIES] = i32(n)
        first_item, first_tile, i = i32(0), i32(0), i64(0)
        while i < n:
            of_entry, tiles_of_entry = work[ENTRY * i + FIRST_ITEM], work[ENTRY * i + FIRST_TILE]
            work[ENTRY * i + FIRST_ITEM] = first_item
            work[ENTRY * i + FIRST_TILE] = first_tile
            first_item, first_tile = i32(first_item + of_entry), i32(first_tile + tiles_of_entry)
            i += 1
        work[ENTRY * n + FIRST_ITEM] = first_item
        work[ENTRY * n + FIRST_TILE] = first_tile


@device
def entry_of(work, n, column, number):
    """The entry, of n, that has the item, or tile, of a number; `column` is FIRST_ITEM or FIRST_TILE."""
    low, high = i32(0), i32(n)
    while i32(low + 1) < high:
        middle = i32(i32(low + high) >> 1)
        if work[ENTRY * i64(middle) + column] <= number:
            low = middle
        else:
            high = middle
    return i64(low)


@device
def chunks_of(length):
    """How many chunks so many positions are."""
    return divide(i64(length) + (CHUNK - 1), i64(CHUNK))[0]


@device
def octets(model):
    """Into how many parts, of up to HEADS heads, a group of heads is cut for items."""
    group = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0]
    return (group + (HEADS - 1)) >> 3


@device
def most_queries(d):
    """Queries of a tile, at most."""
    return i64(128 if d <= 128 else 64)


@device
def rows_of_tile(model):
    """How many rows of a request a tile has, at most, each with the heads of one group."""
    return divide(most_queries(opaque(i64(model.head_dim))) * i64(model.kv_heads), i64(model.heads))[0]


@device
def tiles_of_rows(rows, model):
    """How many tiles have so many rows of a request, for each group of heads."""
    most = rows_of_tile(model)
    return divide(rows + most - 1, most)[0]
