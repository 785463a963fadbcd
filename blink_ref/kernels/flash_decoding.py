"""Attention of single rows, cut in chunks of positions (Flash-Decoding: Dao et al., 2023).

:func:`.attention.attend` gives a row's head to one block. Here an item of work is a row, a group of heads that
read the same keys and values, and a chunk of CHUNK positions: a lone request keeps many blocks busy, and keys and
values are read once for all heads of their group. A warp takes PART positions of a chunk at a time, by the word
`heads_attend` (on a GPU: tensor cores). What the parts give is merged in their order, and what the chunks of a row
give in theirs, by the block that is the last to finish one. So a row's result depends on no other row, nor on the
number of blocks or warps. The KV cache holds bfloat16 here.

What there is to do is listed when a step begins (:mod:`.work_list`).
"""

from ..model.config import ModelConfig
from ..simt import device
from ..simt.vocabulary import (
    HEADS,
    PART,
    arena_view,
    atomic_add,
    barrier,
    divide,
    exp,
    f32,
    fragment_put,
    heads_attend,
    i32,
    i64,
    lane_id,
    lane_max,
    lane_sum,
    mix_of_fours,
    opaque,
    store_relaxed,
    thread_id,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)
from .attention import NOTHING, page_start
from .packing import row_at
from .staging import ENTRY, LISTED, SCRATCH, WORK
from .work_list import CHUNK, FIRST_ITEM, LENGTH, ROW, SLOT, chunks_of, entry_of, octets

MOST_PARTS = CHUNK // PART
"""Parts of a chunk."""

LAST = SCRATCH
"""Where the arena says whether a block was the last of a row."""
WEIGHTS = SCRATCH + 4
"""Where the parts' weights begin, for each head."""
PARTS = WEIGHTS + HEADS * MOST_PARTS
"""Where the parts' results begin."""


def part_size(head_dim: int) -> int:
    """Floats of what a part gives (see `heads_attend`)."""
    return int(span_of(head_dim)) + 2 * HEADS


def arena(head_dim: int) -> int:
    """Floats of arena that are needed at least."""
    return PARTS + MOST_PARTS * part_size(head_dim)


def fits(config: ModelConfig, page_size: int, room: int) -> bool:
    """Whether this serves a model's heads, pages of that size and `room` floats of arena."""
    return config.head_dim % 32 == 0 and page_size % PART == 0 and arena(config.head_dim) <= room


def units_of(config: ModelConfig) -> int:
    """Into how many groups of heads the heads of a row fall."""
    return config.kv_heads * -(-(config.heads // config.kv_heads) // HEADS)


@device
def span_of(d):
    """Floats of the sums of all heads of a unit."""
    return ((i64(d) + 63) >> 6) * (64 * HEADS)


@device
def attend_in_chunks(block, n, rows, limit, layer, model, cache, act):
    """As :func:`.attention.attend`, for the rows of n entries of the list that have items. Blocks share them out.

    The arena is used up to `limit`. All blocks call it, after a grid barrier behind the queries, keys and values;
    it ends without one. `attended` is written as :func:`fragment_put` does.
    """
    work, item = arena_view(block.shared, WORK, LISTED, model.eos), i32(block.id)
    while item < work[ENTRY * n + FIRST_ITEM]:
        entry = entry_of(work, n, FIRST_ITEM, item)
        of_entry = i64(item - work[ENTRY * entry + FIRST_ITEM])
        attend_chunk(block, entry, of_entry, limit, layer, model, cache, act)
        finish_chunk(block, entry, of_entry, limit, rows, model, act)
        item = i32(item + block.blocks)


@device
def heads_of(model, unit):
    """A unit's first head, how many it has, and the head of keys and values that they read."""
    group, cut = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0], octets(model)
    kv_head, octet = divide(unit, cut)
    return kv_head * group + HEADS * octet, min(i64(HEADS), group - HEADS * octet), kv_head


@device
def are_apart(d, limit):
    """Whether the arena has room for keys and values at a time."""
    return limit - PARTS >= MOST_PARTS * (2 * span_of(d) + 2 * HEADS)


@device
def part_at(part, d, limit):
    """Where what a part gives begins in the arena; its keys, if they lie apart, come before."""
    span = span_of(d)
    if are_apart(d, limit):
        return PARTS + part * (2 * span + 2 * HEADS) + span
    return PARTS + part * (span + 2 * HEADS)


@device
def attend_chunk(block, entry, item, limit, layer, model, cache, act):
    """An item of an entry: what each part of it gives, in the arena, once a barrier is behind it."""
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim))
    unit, chunk = divide(item, chunks_of(work[ENTRY * entry + LENGTH]))
    head, heads, kv_head = heads_of(model, unit)
    first, slot = chunk * CHUNK, i64(work[ENTRY * entry + SLOT])
    query = (i64(work[ENTRY * entry + ROW]) * i64(model.heads) + head) * d
    n, part = min(i64(CHUNK), work[ENTRY * entry + LENGTH] - first), i64(warp_id())
    n_page, inside = divide(first + part * PART, i64(cache.page_size))
    page = i32(0)
    if part * PART < n:
        page = i32(cache.table[slot, n_page])  # on its way while the others come to the barrier
    barrier()  # the item before is finished with the arena
    while part * PART < n:
        at = page_start(cache, model, layer, page, kv_head) + inside * d
        to, seen = part_at(part, d, limit), min(i64(PART), n - part * PART)
        apart = are_apart(d, limit)
        heads_attend(block.shared, to, apart, act.q, query, heads, d, cache.keys, cache.values, at, seen)
        part += warps()
        if part * PART < n:
            n_page, inside = divide(first + part * PART, i64(cache.page_size))
            page = i32(cache.table[slot, n_page])
    barrier()


@device
def finish_chunk(block, entry, item, limit, rows, model, act):
    """What the parts of an item give, merged; the last block to come to one of a row merges its chunks."""
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim))
    chunks = chunks_of(work[ENTRY * entry + LENGTH])
    unit, chunk = divide(item, chunks)
    n = min(i64(CHUNK), work[ENTRY * entry + LENGTH] - chunk * CHUNK)
    of_row = entry * i64(model.kv_heads) * octets(model) + unit
    step = part_at(i64(1), d, limit) - part_at(i64(0), d, limit)
    source, at, parts = block.shared, part_at(i64(0), d, limit), divide(n + (PART - 1), i64(PART))[0]
    weights, final = i64(WEIGHTS), chunks == 1
    to = (of_row * act.most_chunks + chunk) * (span_of(d) + 2 * HEADS)
    while True:
        merge(block, source, at, step, parts, weights, entry, unit, to, final, rows, model, act)
        if final or not last_of_row(block, of_row, chunks, act.arrived):
            break
        source, parts, weights, final = act.partial, chunks, i64(PARTS), True
        step = span_of(d) + 2 * HEADS
        at = of_row * act.most_chunks * step


@device
def last_of_row(block, of_row, chunks, arrived):
    """Whether this block is the last to come here with a chunk of a row. All lanes of a block."""
    barrier()
    if thread_id() == 0:
        before = i64(atomic_add(arrived, of_row, i32(1)))
        if before == chunks - 1:
            store_relaxed(arrived, of_row, i32(0))  # for the next layer
        block.shared[LAST] = f32(before == chunks - 1)
    barrier()
    return block.shared[LAST] > f32(0.0)


@device
def merge(block, source, at, step, parts, weights, entry, unit, to, final, rows, model, act):
    """Bring what parts give, `step` apart in the source, to one maximum, and add it up in order. A warp a head.

    The parts' weights lie at `weights` in the arena then, for each head. `final`: it is divided by the total and
    goes to `attended`; otherwise it is itself what a part gives, ``partial[to:]``.
    """
    d, shared = opaque(i64(model.head_dim)), block.shared
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    first, heads, _ = heads_of(model, unit)
    head = i64(warp_id())
    while head < heads:
        mine = weights + head * parts
        highest, total = weigh_parts(shared, source, at + span_of(d) + 2 * head, step, parts, mine)
        i = 4 * i64(lane_id())
        while i < d:
            column = column_at(head, i)
            a, b, c, e = mix_of_fours(shared, mine, source, at + column, step, parts)
            if final:
                row = i64(work[ENTRY * entry + ROW])
                of_all, scale = (first + head) * d + i, f32(1.0) / total
                a, b, c, e = a * scale, b * scale, c * scale, e * scale
                put_attended(act.attended, row, of_all, a, b, c, e, rows, model)
            else:
                act.partial[to + column] = a
                act.partial[to + column + 1] = b
                act.partial[to + column + 2] = c
                act.partial[to + column + 3] = e
            i += 4 * warp_width()
        if lane_id() == 0 and not final:
            act.partial[to + span_of(d) + 2 * head] = highest
            act.partial[to + span_of(d) + 2 * head + 1] = total
        head += warps()


@device
def column_at(head, i):
    """Where a column of a head lies in what a part gives: 64 columns of all heads, then the next 64."""
    return (i >> 6) * (64 * HEADS) + head * 64 + (i & 63)


@device
def weigh_parts(shared, source, at, step, parts, weights):
    """One warp: the parts' weights into the arena; their maximum, and the total. `at`: the first one's maximum."""
    highest, p = NOTHING, i64(lane_id())
    while p < parts:
        highest = max(highest, source[at + p * step])
        p += warp_width()
    highest, total, p = lane_max(highest), f32(0.0), i64(lane_id())
    while p < parts:
        weight = exp(source[at + p * step] - highest)
        shared[weights + p] = weight
        total += weight * source[at + p * step + 1]
        p += warp_width()
    total = lane_sum(total)
    warp_barrier()
    return highest, total


@device
def put_attended(attended, row, column, a, b, c, e, rows, model):
    """One lane: four columns of a row that is done."""
    fragment_put(attended, row_at(rows, row, column), a, b, c, e)
