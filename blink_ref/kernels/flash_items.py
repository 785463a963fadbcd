"""What a block notes of its items of attention, once for all layers of a step: which they are, and where they lie.

An item is a row, a group of heads that read the same keys and values (a *unit*), and a chunk of positions
(:mod:`.flash_decoding`); :mod:`.work_list` numbers them. Their row, chunk and pages follow from the number by
divisions and by reads of the page table, which each warp would otherwise do in each layer.
"""

from ..model.config import ModelConfig
from ..simt import device, first_of_share
from ..simt.vocabulary import (
    HEADS,
    PART,
    arena_view,
    block_threads,
    divide,
    heads_begin,
    i32,
    i64,
    mbarrier_init,
    mbarriers,
    opaque,
    thread_id,
    warp_id,
    warps,
)
from .staging import COMING, COMING_SIZE, ENTRY, ITEM, LISTED, MEETINGS, MOST_NOTED, MOST_PARTS, OWN, SCRATCH, WORK
from .work_list import CHUNK, FIRST_ITEM, LENGTH, ROW, SLOT, chunks_of, entry_of, octets

(
    OWN_FIRST, OWN_END, OWN_ENTRIES, OWN_NOTED, OWN_COUNT,
    BEHIND, UNITS_BEHIND, AHEAD, BUFFERS, KEYS_AT, VALUES_AT, PLACE_STEP, PARTS_AT, PART_STEP, CHUNK_SIZE, NOTED,
) = range(OWN, OWN + 16)  # fmt: skip
"""Words of the list of work: this block's first item, the one behind its last, how many entries are listed, the
first item of which it is noted what is known of it, and of how many it is. How many items it has attended in this
step, and queries it has fetched. Whether keys and values come ahead, and
how many buffers there are for what parts give; where keys, values, and what parts give lie in the arena, and the
steps between them (see :func:`note_places`); the floats of what a chunk gives. Then what is noted of items."""

POSITIONS, PARTS, ITS_HEADS, QUERY, UNIT, INDEX, CHUNKS, DONE, FRESH, TURN, PLACE = range(11)
"""Words of what is noted of an item: how many positions, parts and heads it has, the first of these among the
heads of all rows, the number of its row's unit among all, that of its chunk, and how many the row has. How many of
these the block has done with this item, if no more follow; whether it has other queries than the item before;
which warp merges the first of its heads. Then where each part begins in a layer of the cache, in positions."""

WEIGHTS = SCRATCH
"""Where the parts' weights begin, for each warp."""
GIVEN, MERGED, FETCHED, READ = 0, 2, 4, 6
"""The mbarriers at MEETINGS, two each. Of a buffer for what parts give: all is there; it has been merged. Of a
place for queries: all are there; nobody needs them any more."""
QUERIES = WEIGHTS + MOST_PARTS * MOST_PARTS
"""Where the queries of a unit begin, those of another one behind them, and then, at :func:`parts_at`, the parts'
results."""


def span(head_dim: int) -> int:
    """Floats of the places of a part's keys, or of its values."""
    return head_dim * HEADS


def part_size(head_dim: int) -> int:
    """Floats of what a part gives (see `heads_attend`), or a chunk, of HEADS heads."""
    return span(head_dim) + 2 * HEADS


def arena(head_dim: int) -> int:
    """Floats of arena that are needed at least."""
    return QUERIES + 2 * HEADS * head_dim + MOST_PARTS * part_size(head_dim)


def fits(config: ModelConfig, page_size: int, room: int) -> bool:
    """Whether this serves a model's heads, pages of that size and `room` floats of arena."""
    return config.head_dim % 32 == 0 and page_size % PART == 0 and arena(config.head_dim) <= room


def units_of(config: ModelConfig) -> int:
    """Into how many groups of heads the heads of a row fall."""
    return config.kv_heads * -(-(config.heads // config.kv_heads) // HEADS)


@device
def span_of(d):
    """:func:`span`."""
    return i64(d) * HEADS


@device
def size_of(model):
    """Floats of what a part gives, or a chunk: :func:`part_size`, of as many heads as a unit has at most."""
    group = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0]
    return 2 * HEADS + opaque(i64(model.head_dim)) * min(group, i64(HEADS))


@device
def team():
    """How many warps of the block attend."""
    return i32(min(i32(warps()), i32(MOST_PARTS)))


@device
def parts_at(d):
    """Where the parts' results begin in the arena."""
    return QUERIES + 2 * HEADS * i64(d)


@device
def heads_of(model, unit):
    """A unit's first head, how many it has, and the head of keys and values that they read."""
    group, kv_head, octet = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0], unit, i64(0)
    if group > HEADS:
        kv_head, octet = divide(unit, (group + (HEADS - 1)) >> 3)
    return kv_head * group + HEADS * octet, min(i64(HEADS), group - HEADS * octet), kv_head


@device
def note_own(block, n, limit, beyond, model, cache, act):
    """Note, once for all layers of a step, which items of n entries are this block's, and what is known of them.

    The arena is used up to `limit`, and from `beyond` to its end for what comes ahead, if that fits in. All lanes,
    behind :func:`.list_work` and a barrier; a barrier is to follow.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    items = i64(work[ENTRY * n + FIRST_ITEM])
    first = i32(first_of_share(items, i64(block.id), i64(block.blocks)))
    end = i32(first_of_share(items, i64(block.id) + 1, i64(block.blocks)))
    if thread_id() == 0:
        work[OWN_FIRST] = first
        work[OWN_END] = end
        work[OWN_ENTRIES] = i32(n)
        work[BEHIND] = i32(0)
        work[UNITS_BEHIND] = i32(0)
        for meeting in range(8):
            mbarrier_init(mbarriers(block.shared, MEETINGS, 8), meeting, i64(team()))
        note_places(work, i64(block.shared.shape[0]), limit, beyond, model)
    if warp_id() < team():
        heads_begin(block.shared, i64(coming_at()))
    note_items(block, n, first, first, end, model, cache, act)


@device
def coming_at():
    """Where this warp tells what has come of what it has asked for."""
    return i32(COMING + COMING_SIZE * i32(warp_id()))


@device
def note_places(work, size, limit, beyond, model):
    """Where keys, values, and what parts give lie in an arena of that size. One lane.

    If there is room for them at the arena's end, keys and values have places of each warp, and come ahead.
    Without, a part's values come to where it leaves what it gives, behind the first 2 * HEADS floats of it, and
    its keys too, or, with room for them, behind that.
    """
    d, first = opaque(i64(model.head_dim)), parts_at(model.head_dim)
    span, step = span_of(d), size_of(model)
    at = (size - 2 * team() * span) & -4
    most = min(at, limit) - first
    ahead, buffers, keys, values, place_step = i32(1), i32(1), at, at + span, 2 * span
    if at >= beyond and MOST_PARTS * step <= most:
        buffers = i32(2 if 2 * MOST_PARTS * step <= most else 1)
    else:
        ahead, step, values = i32(0), span + 2 * HEADS, first + 2 * HEADS
        keys = values
        if first + MOST_PARTS * (step + span) <= limit:
            keys, step = values + span, step + span
        place_step = step
    work[AHEAD] = ahead
    work[BUFFERS] = buffers
    work[KEYS_AT] = i32(keys)
    work[VALUES_AT] = i32(values)
    work[PLACE_STEP] = i32(place_step)
    work[PARTS_AT] = i32(first)
    work[PART_STEP] = i32(step)
    work[CHUNK_SIZE] = i32(size_of(model))


@device
def note_items(block, n, own, noted, end, model, cache, act):
    """Note what is known of the items from `noted` on, up to MOST_NOTED of those from `own` to `end`."""
    work, e = arena_view(block.shared, WORK, LISTED, model.eos), i64(thread_id())
    count = min(i64(MOST_NOTED), i64(end) - i64(noted))
    if thread_id() == 0:
        work[OWN_NOTED] = noted
        work[OWN_COUNT] = i32(count)
    while e < count * MOST_PARTS:
        j, part = divide(e, i64(MOST_PARTS))
        item, at = i32(i64(noted) + j), NOTED + ITEM * j
        entry = entry_of(work, n, FIRST_ITEM, item)
        length = i64(work[ENTRY * entry + LENGTH])
        chunks = chunks_of(length)
        unit, chunk = divide(i64(item - work[ENTRY * entry + FIRST_ITEM]), chunks)
        head, heads, kv_head = heads_of(model, unit)
        positions, place = min(i64(CHUNK), length - chunk * CHUNK), i64(0)
        if part * PART < positions:
            n_page, inside = divide(chunk * CHUNK + part * PART, i64(cache.page_size))
            page = i64(cache.table[i64(work[ENTRY * entry + SLOT]), n_page])
            place = (page * i64(model.kv_heads) + kv_head) * i64(cache.page_size) + inside
        work[at + PLACE + part] = i32(place)
        if part == 0:
            work[at + POSITIONS] = i32(positions)
            work[at + PARTS] = i32(divide(positions + (PART - 1), i64(PART))[0])
            work[at + ITS_HEADS] = i32(heads)
            work[at + QUERY] = i32(i64(work[ENTRY * entry + ROW]) * i64(model.heads) + head)
            of_all = entry * i64(model.kv_heads) * octets(model) + unit
            work[at + UNIT] = i32(of_all)
            work[at + INDEX] = i32(of_all * act.most_chunks + chunk)
            work[at + CHUNKS] = i32(chunks)
            work[at + FRESH] = i32(int(chunk == 0) | int(item == noted))
            work[at + TURN] = i32(divide(j * heads, i64(team()))[1])
            done = min(chunk, i64(item) - i64(own)) + 1
            if chunk + 1 < chunks and i32(item + 1) < end:
                done = i64(0)
            work[at + DONE] = i32(done)
        e += block_threads()
