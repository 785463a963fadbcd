"""Attention of single rows, cut in chunks of positions (Flash-Decoding: Dao et al., 2023).

:func:`.attention.attend` gives a row's head to one block. Here an item of work is a row, a group of heads that
read the same keys and values, and a chunk of CHUNK positions: a lone request keeps many blocks busy, and keys and
values are read once for all heads of their group. A warp takes PART positions of a chunk at a time, by the word
`heads_attend` (on a GPU: tensor cores). What the parts give is merged in their order, and what the chunks of a row
give in theirs, by the block that is the last to finish one. So a row's result depends on no other row, nor on the
number of blocks or warps. The KV cache holds bfloat16 here.

A block takes items that follow each other. Where the arena has room for it, a warp has places for keys and values
apart from those for what its parts give, and its next part, of the next item too, is on its way while an item is
multiplied and merged.

What there is to do is listed when a step begins (:mod:`.work_list`).
"""

from ..model.config import ModelConfig
from ..simt import device, first_of_share
from ..simt.vocabulary import (
    HEADS,
    PART,
    arena_view,
    atomic_add,
    barrier,
    block_copy,
    block_put,
    block_threads,
    divide,
    exp,
    f32,
    fragment_put,
    heads_ask,
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
from .packing import block_row_at, row_at
from .staging import ENTRY, LISTED, MOST_PARTS, OWN, SCRATCH, WORK
from .work_list import CHUNK, FIRST_ITEM, LENGTH, ROW, SLOT, chunks_of, entry_of, octets

OWN_FIRST, OWN_END, OWN_ENTRY, OWN_PLACES, OWN_PARTS = range(OWN, OWN + 5)
"""Words of the list of work: this block's first item, the one behind its last, the entry of its first, and where
keys and values lie in the arena (see :func:`places`). Then of each part of the first item: where it begins in a
layer of the cache, in positions, and how many it has (0 or less: none)."""

TOGETHER, APART = 0, -1
"""Whether the arena has room for one of a part's keys and values, or for both."""

LAST = SCRATCH
"""Where the arena says whether a block was the last of a row."""
WEIGHTS = SCRATCH + 4
"""Where the parts' weights begin, for each head."""
QUERIES = WEIGHTS + HEADS * MOST_PARTS
"""Where the queries of a unit begin, and behind them, at :func:`parts_at`, the parts' results."""


def part_size(head_dim: int) -> int:
    """Floats of what a part gives (see `heads_attend`)."""
    return int(span_of(head_dim)) + 2 * HEADS


def arena(head_dim: int) -> int:
    """Floats of arena that are needed at least."""
    return QUERIES + HEADS * head_dim + MOST_PARTS * part_size(head_dim)


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
def note_own(block, n, limit, beyond, model, cache):
    """Look up, once for all layers of a step, which items of n entries are this block's, and where its first lies.

    The arena is used up to `limit`, and from `beyond` to its end for what comes ahead, if that fits in. All lanes,
    behind :func:`.list_work` and a barrier; a barrier is to follow.
    """
    work, part = arena_view(block.shared, WORK, LISTED, model.eos), i64(thread_id())
    items = i64(work[ENTRY * n + FIRST_ITEM])
    first = i32(first_of_share(items, i64(block.id), i64(block.blocks)))
    end = i32(first_of_share(items, i64(block.id) + 1, i64(block.blocks)))
    entry = i32(entry_of(work, n, FIRST_ITEM, first))
    if first < end:
        entry = entry_from(work, entry, first)
        while part < MOST_PARTS:
            place, seen = find_part(block, entry, first, part, model, cache)
            work[OWN_PARTS + 2 * part] = place
            work[OWN_PARTS + 2 * part + 1] = seen
            part += block_threads()
    if thread_id() == 0:
        work[OWN_FIRST] = first
        work[OWN_END] = end
        work[OWN_ENTRY] = entry
        work[OWN_PLACES] = places(i64(block.shared.shape[0]), limit, beyond, opaque(i64(model.head_dim)))


@device
def attend_in_chunks(block, rows, layer, model, cache, act, in_fragments):
    """As :func:`.attention.attend`, for the listed rows that have items. `rows`: of the step. Blocks share items.

    All blocks call it, after :func:`note_own` and a grid barrier behind the queries, keys and values, when nobody
    uses the arena; it ends without one. `in_fragments`: `attended` is written as :func:`fragment_put` does,
    otherwise as :func:`block_put`.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    item, entry, place, seen = work[OWN_FIRST], work[OWN_ENTRY], i32(0), i32(0)
    if item < work[OWN_END] and warp_id() < MOST_PARTS:
        place, seen = work[OWN_PARTS + 2 * warp_id()], work[OWN_PARTS + 2 * warp_id() + 1]
        ask(block, i64(warp_id()), place, seen, layer, model, cache)
    while item < work[OWN_END]:
        entry = entry_from(work, entry, item)
        place, seen = attend_chunk(block, entry, item, place, seen, layer, model, cache, act)
        finish_chunk(block, entry, item, rows, model, act, in_fragments)
        item = i32(item + 1)


@device
def ask(block, part, place, seen, layer, model, cache):
    """One warp: `seen` keys and values from a place of the cache on are on their way to where a part has them."""
    d = opaque(i64(model.head_dim))
    of_keys, of_values = places_of(block, part, d, model)
    at = of_layer(place, layer, model, cache)
    heads_ask(block.shared, of_keys, of_values, cache.keys, cache.values, at, d, i64(seen))


@device
def of_layer(place, layer, model, cache):
    """Where a place, counted in positions, lies in a layer of the cache."""
    return page_start(cache, model, layer, i32(0), i64(0)) + i64(place) * opaque(i64(model.head_dim))


@device
def entry_from(work, entry, item):
    """The entry of an item that is not before the entry's own."""
    while work[ENTRY * i64(entry) + ENTRY + FIRST_ITEM] <= item:
        entry = i32(entry + 1)
    return entry


@device
def heads_of(model, unit):
    """A unit's first head, how many it has, and the head of keys and values that they read."""
    group, kv_head, octet = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0], unit, i64(0)
    if group > HEADS:
        kv_head, octet = divide(unit, (group + (HEADS - 1)) >> 3)
    return kv_head * group + HEADS * octet, min(i64(HEADS), group - HEADS * octet), kv_head


@device
def parts_at(d):
    """Where the parts' results begin in the arena."""
    return QUERIES + HEADS * i64(d)


@device
def places(size, limit, beyond, d):
    """Where each warp's places for keys and values that come ahead begin, at the end of an arena of that size.

    Without room for them: APART or TOGETHER, and keys and values come to where a part leaves what it gives.
    """
    at, span = (size - 2 * i64(warps()) * span_of(d)) & -4, span_of(d)
    if at >= beyond and parts_at(d) + MOST_PARTS * (span + 2 * HEADS) <= min(at, limit):
        return i32(at)
    return i32(APART if parts_at(d) + MOST_PARTS * (2 * span + 2 * HEADS) <= limit else TOGETHER)


@device
def own_places(block, model):
    """What :func:`places` has said."""
    return arena_view(block.shared, WORK, LISTED, model.eos)[OWN_PLACES]


@device
def part_step(block, d, model):
    """Floats of the arena that a part takes."""
    return span_of(d) + 2 * HEADS + (span_of(d) if own_places(block, model) == APART else i64(0))


@device
def part_at(block, part, d, model):
    """Where what a part gives begins in the arena; its keys, if they lie APART, before."""
    before = span_of(d) if own_places(block, model) == APART else i64(0)
    return parts_at(d) + part * part_step(block, d, model) + before


@device
def places_of(block, part, d, model):
    """Where a part's keys lie in the arena, and its values: in places of the warp, or of the part."""
    ahead, span = i64(own_places(block, model)), span_of(d)
    if ahead > 0:
        at = ahead + i64(warp_id()) * (2 * span)
        return at, at + span
    at = part_at(block, part, d, model)
    return at - (span if ahead == APART else i64(0)), at


@device
def find_part(block, entry, item, part, model, cache):
    """Where a part of an item begins in a layer of the cache, in positions, and how many it has, if it has any."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    length, place = i64(work[ENTRY * i64(entry) + LENGTH]), i64(0)
    unit, chunk = divide(i64(item - work[ENTRY * i64(entry) + FIRST_ITEM]), chunks_of(length))
    seen = min(i64(PART), min(i64(CHUNK), length - chunk * CHUNK) - part * PART)
    if seen > 0:
        n_page, inside = divide(chunk * CHUNK + part * PART, i64(cache.page_size))
        page = i64(cache.table[i64(work[ENTRY * i64(entry) + SLOT]), n_page])
        place = (page * i64(model.kv_heads) + heads_of(model, unit)[2]) * i64(cache.page_size) + inside
    return i32(place), i32(seen)


@device
def find_ahead(block, entry, item, part, n, model, cache):
    """As :func:`find_part`, of what comes behind a warp's part of an item of n positions.

    That is its next part of the item, or its first of this block's next one.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    part += warps()
    if part * PART >= n:
        item, part = i32(item + 1), i64(warp_id())
    place, seen = i32(0), i32(0)
    if item < work[OWN_END]:
        place, seen = find_part(block, entry_from(work, entry, item), item, part, model, cache)
    return place, seen


@device
def attend_chunk(block, entry, item, place, seen, layer, model, cache, act):
    """An item of an entry: what each part of it gives, in the arena, once a barrier is behind it.

    This warp's first part of the block's first item, `seen` positions from a place of the cache on, is on its way.
    If keys and values come ahead, so it is with all items, and returned is the same for the item behind this one.
    """
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim))
    length, first, ahead = i64(work[ENTRY * i64(entry) + LENGTH]), item == work[OWN_FIRST], work[OWN_PLACES] > 0
    unit, chunk = divide(i64(item - work[ENTRY * i64(entry) + FIRST_ITEM]), chunks_of(length))
    head, heads, _ = heads_of(model, unit)
    n, part, then, later = min(i64(CHUNK), length - chunk * CHUNK), i64(warp_id()), i32(0), i32(0)
    if ahead:
        then, later = find_ahead(block, entry, item, part, n, model, cache)
    elif not first:
        place, seen = find_part(block, entry, item, part, model, cache)
    if chunk == 0 or first:  # the items behind it have the same
        query = (i64(work[ENTRY * i64(entry) + ROW]) * i64(model.heads) + head) * d
        block_copy(block.shared, i64(QUERIES), act.q, query, heads * d)
    barrier()  # the queries are there, and the item before is finished with the arena
    if ahead and part * PART >= n:
        ask(block, part, then, later, layer, model, cache)
        place, seen = then, later
    elif not ahead and not first:
        ask(block, part, place, seen, layer, model, cache)
    while part * PART < n:
        attend_part(block, part, heads, place, seen, then, later, layer, model, cache)
        place, seen = then, later
        part += warps()
        if part * PART < n:
            if ahead:
                then, later = find_ahead(block, entry, item, part, n, model, cache)
            else:
                place, seen = find_part(block, entry, item, part, model, cache)
                ask(block, part, place, seen, layer, model, cache)
    barrier()
    return place, seen


@device
def attend_part(block, part, heads, place, seen, then, later, layer, model, cache):
    """One warp: a part of `seen` positions, which are on their way, and so are behind it `later` positions."""
    d = opaque(i64(model.head_dim))
    of_keys, of_values = places_of(block, part, d, model)
    if of_keys == of_values:
        then, later = place, seen  # its values
    heads_attend(
        block.shared, part_at(block, part, d, model), of_keys, of_values, block.shared, i64(QUERIES), heads, d,
        cache.keys, cache.values, of_layer(place, layer, model, cache), i64(seen),
        of_layer(then, layer, model, cache), i64(later),
    )  # fmt: skip


@device
def finish_chunk(block, entry, item, rows, model, act, in_fragments):
    """What the parts of an item give, merged.

    Behind its last chunk of a row's unit a block says how many it had; the last to do so merges the row's chunks.
    """
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim))
    chunks = chunks_of(work[ENTRY * i64(entry) + LENGTH])
    unit, chunk = divide(i64(item - work[ENTRY * i64(entry) + FIRST_ITEM]), chunks)
    n = min(i64(CHUNK), work[ENTRY * i64(entry) + LENGTH] - chunk * CHUNK)
    of_row = i64(entry) * i64(model.kv_heads) * octets(model) + unit
    source, at, step = block.shared, part_at(block, i64(0), d, model), part_step(block, d, model)
    parts, weights, final = divide(n + (PART - 1), i64(PART))[0], i64(WEIGHTS), chunks == 1
    to = (of_row * act.most_chunks + chunk) * (span_of(d) + 2 * HEADS)
    more = chunk + 1 < chunks and i32(item + 1) < work[OWN_END]
    done = min(chunk, i64(i32(item - work[OWN_FIRST]))) + 1
    while True:
        merge(block, source, at, step, parts, weights, entry, unit, to, final, rows, model, act, in_fragments)
        if final or more or not last_of_row(block, of_row, done, chunks, act.arrived):
            break
        source, parts, weights, final = act.partial, chunks, parts_at(d), True
        step = span_of(d) + 2 * HEADS
        at = of_row * act.most_chunks * step


@device
def last_of_row(block, of_row, done, chunks, arrived):
    """Whether this block, which has done so many of a row's chunks, is the last to come here. All its lanes."""
    barrier()
    if thread_id() == 0:
        before = chunks - done
        if done < chunks:
            before = i64(atomic_add(arrived, of_row, i32(done)))
            if before == chunks - done:
                store_relaxed(arrived, of_row, i32(0))  # for the next layer
        block.shared[LAST] = f32(before == chunks - done)
    barrier()
    return block.shared[LAST] > f32(0.0)


@device
def merge(block, source, at, step, parts, weights, entry, unit, to, final, rows, model, act, in_fragments):
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
                row = i64(work[ENTRY * i64(entry) + ROW])
                of_all, scale = (first + head) * d + i, f32(1.0) / total
                a, b, c, e = a * scale, b * scale, c * scale, e * scale
                if in_fragments:
                    fragment_put(act.attended, row_at(rows, row, of_all), a, b, c, e)
                else:
                    block_put(act.attended, block_row_at(rows, row, of_all), a, b, c, e)
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
