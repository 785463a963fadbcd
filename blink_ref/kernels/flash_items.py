"""What a block notes of its items of attention, once for all layers of a step: which they are, and where they lie.

An item is a row, a group of heads that read the same keys and values (a *unit*), and a chunk of positions
(:mod:`.flash_decoding`); :mod:`.work_list` numbers them. They are dealt to *teams* of warps, of which a block has
one or two, as there is room for them in its arena. An item's row, chunk and pages follow from its number by
divisions and by reads of the page table, which each warp would otherwise do in each layer.
"""

from ..model.config import ModelConfig
from ..simt import device, first_of_share
from ..simt.vocabulary import (
    HEADS,
    HEADS_GAP,
    PART,
    arena_view,
    async_fence,
    barrier,
    block_threads,
    divide,
    i32,
    i64,
    lane_id,
    mbarrier_init,
    mbarriers,
    opaque,
    thread_id,
    warp_id,
    warps,
)
from . import handed
from .staging import (
    COMING,
    COMING_SIZE,
    ENTRY,
    ITEM,
    LISTED,
    MEETINGS,
    MEETINGS_OF_TEAM,
    MOST_NOTED,
    MOST_PARTS,
    SCRATCH,
    TEAMS,
    WORK,
)
from .work_list import CHUNK, ENTRIES, FIRST_ITEM, LENGTH, ROW, SLOT, chunks_of, entry_of, octets

(
    AWAITING, NOTED, MOST, TEAM, IN_BLOCK, FIRST_MERGER, MERGERS, TURNS,
    PLACES_AT, QUERIES_AT, UNIT_SIZE, PARTS_AT, PART_SIZE, BY_TEAM,
) = range(ENTRIES + 1, ENTRIES + 15)  # fmt: skip
"""Words of the list of work, behind its entries and their number: whether what attention takes is awaited, as
:mod:`.handed` says, and what its chunks give too; otherwise grid barriers stand before and behind. How many of a
team's items come before those that are noted, and how many the team that has most of them has. The warps of a
team, and the teams; which warp is the first that merges, or 0 if teams do that themselves, and how many merge for
a team; how many buffers there are for what the parts of an item give, as a power of two. Where the warps' places
for keys and values lie in the arena, those for queries, the floats of one of these; where the teams' buffers lie,
and the floats of what a part gives. Then the words of each team."""

FIRST, END, COUNT, ITEMS = range(4)
"""Words of a team: its first item and the one behind its last; how many are noted. Then what is noted of them."""

(
    POSITIONS, STORED, OWN_AT, PARTS, ITS_ROW, HEAD, ITS_HEADS,
    CHUNKS, ITS_CHUNK, UNIT, DONE, FRESH, TURN, PLACE,
) = range(14)  # fmt: skip
"""Words of what is noted of an item: how many positions it has; how many of them lie in the cache, and where,
among queries, keys and values that are awaited, the key of its first position would. How many parts it has; its
row, the first of its heads and how many there are. How many chunks the row has, and which this is; the number of
the row's unit among all or, where chunks are awaited, of its first item. How many of the row's chunks are done
with this item, if it is the last one that the team has of them or, where they are awaited, the row. Whether it has
other queries than the item before; which warp merges the first of its heads. Then where each half of a part begins
in a layer of the cache, in positions."""

OF_TEAM = ITEMS + MOST_NOTED * ITEM
"""Words of a team."""
HALF = PART >> 1
"""Positions that lie side by side: pages have a multiple of them."""

MOST_TURNS = 2
"""There are at most four buffers for what the parts of an item give: as a power of two."""

MOST_AWAITED = 1
"""Items of a step for each block, at most, where what they take and give is awaited: with more, a block that waits
could go on with the next one, as what is copied asynchronously lets it."""

AT_ONCE = MOST_PARTS
"""Chunks that are merged at a time."""
WEIGHTS = SCRATCH
"""Where those weights begin by which parts or chunks are merged, AT_ONCE of a warp, and two words of each."""
FREE = WEIGHTS + 3 * AT_ONCE * TEAMS * MOST_PARTS
"""Where that begins of which :func:`note_places` disposes."""

GIVEN, MERGED = 0, 4
"""A team's mbarriers, one for each buffer: all parts' results are there; they have been merged."""
KEYS_CAME, VALUES_CAME = 0, 1
"""A warp's mbarriers at :func:`coming_at`."""
PARITY, BEHIND = 4, 5
"""Its words behind these: the parity of their phases, and how many items it has attended to in this step."""


def heads_of_unit(config: ModelConfig) -> int:
    """Heads of a unit, at most."""
    return min(HEADS, config.heads // config.kv_heads)


def units_of(config: ModelConfig) -> int:
    """Into how many groups of heads the heads of a row fall."""
    return config.kv_heads * -(-(config.heads // config.kv_heads) // HEADS)


def part_size(head_dim: int, heads: int) -> int:
    """Floats of what a part gives (see `heads_weigh` and `heads_mix`), of so many heads."""
    return 2 * HEADS + of_chunk(head_dim, heads)


def of_chunk(head_dim: int, heads: int) -> int:
    """Floats of what a chunk gives: of each head the sums, and in the gap behind them its maximum and total."""
    return heads * (head_dim + HEADS_GAP)


def arena(head_dim: int, heads: int, warps_at_once: int = 1, buffers: int = 1) -> int:
    """Floats of arena that so many warps need, for units of so many heads: one at least."""
    teams = -(-warps_at_once // MOST_PARTS)
    of_warp = PART * head_dim + heads * head_dim
    return FREE + warps_at_once * of_warp + teams * buffers * MOST_PARTS * part_size(head_dim, heads)


def fits(config: ModelConfig, page_size: int, room: int) -> bool:
    """Whether this serves a model's heads, pages of that size and `room` floats of arena."""
    enough = arena(config.head_dim, heads_of_unit(config)) <= room
    return config.head_dim % 32 == 0 and page_size % HALF == 0 and enough


@device
def team(work):
    """The number of this warp's team in its block."""
    return i32(min(i32(i32(warp_id()) >> 3), i32(work[IN_BLOCK] - 1)))


@device
def member():
    """The number of this warp in its team, if it attends."""
    return i32(i32(warp_id()) & i32(MOST_PARTS - 1))


@device
def attends(work):
    """Whether this warp attends to parts of items."""
    return i32(i32(warp_id()) >> 3) == team(work) and member() < work[TEAM]


@device
def merger(work):
    """The number of this warp among those that merge what its team's parts give; less than 0, if it is none.

    Those are the team itself or, where a block has one team and more warps, others.
    """
    n = i32(warp_id())
    if work[FIRST_MERGER] == 0:
        n = member()
    n = i32(n - work[FIRST_MERGER])
    return n if n < work[MERGERS] else i32(-1)


@device
def coming_at():
    """Where this warp tells what has come of what it has asked for."""
    return i64(i32(COMING + COMING_SIZE * i32(warp_id())))


@device
def meetings_at(work):
    """Where the mbarriers of this warp's team begin."""
    return i64(i32(MEETINGS + MEETINGS_OF_TEAM * team(work)))


@device
def heads_of(model, unit):
    """A unit's first head, how many it has, and the head of keys and values that they read."""
    group, kv_head, octet = divide(opaque(i64(model.heads)), i64(model.kv_heads))[0], unit, i64(0)
    if group > HEADS:
        kv_head, octet = divide(unit, (group + (HEADS - 1)) >> 3)
    return kv_head * group + HEADS * octet, min(i64(HEADS), group - HEADS * octet), kv_head


@device
def awaits(block, model):
    """Whether this step's attention awaits what it takes. Behind :func:`note_own` and a barrier."""
    return arena_view(block.shared, WORK, LISTED, model.eos)[AWAITING] != 0


@device
def is_free(block, model):
    """Whether the block has no items. Behind :func:`note_own` and a barrier."""
    return arena_view(block.shared, WORK, LISTED, model.eos)[MOST] == 0


@device
def awaited_of_layer(block, model):
    """How many numbers chunks give in a layer of this step that are awaited. Behind :func:`note_own`."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    items = i64(work[ENTRY * i64(work[ENTRIES]) + FIRST_ITEM])
    return items * (work[PART_SIZE] - 2 * HEADS) if work[AWAITING] != 0 else i64(0)


@device
def note_own(block, limit, beyond, awaiting, model, cache, act):
    """Note, once for all layers of a step, which of the listed items are each team's, and what is known of them.

    The arena is used up to `limit`; and from `beyond` on to its end for keys and values, if those of more warps go
    there. `awaiting`: see AWAITING; each entry is a row then, and there are MOST_AWAITED items for each block, at
    most. All lanes, behind :func:`.list_work` and a barrier; a barrier is to follow.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    if thread_id() == 0:
        work[AWAITING] = i32(int(awaiting))
        note_places(work, i64(block.shared.shape[0]), limit, beyond, model)
        deal_items(work, i64(block.id), i64(block.blocks))
        meetings = mbarriers(block.shared, MEETINGS, TEAMS * MEETINGS_OF_TEAM >> 1)
        for meeting in range(TEAMS * MEETINGS_OF_TEAM >> 1):
            merged = i32(meeting & 7) >= i32(MERGED)
            mbarrier_init(meetings, meeting, i64(work[MERGERS] if merged else work[TEAM]))
    if lane_id() == 0 and warp_id() < TEAMS * MOST_PARTS:
        came = mbarriers(block.shared, coming_at(), 2)
        kept = arena_view(block.shared, coming_at(), COMING_SIZE, model.eos)
        mbarrier_init(came, KEYS_CAME, i64(1))
        mbarrier_init(came, VALUES_CAME, i64(1))
        kept[PARITY] = i32(0)
        kept[BEHIND] = i32(0)
        async_fence()
    barrier()
    note_items(block, i32(0), model, cache, act)


@device
def deal_items(work, block, blocks):
    """Which items the teams of a block have. One lane."""
    items, teams, most = i64(work[ENTRY * i64(work[ENTRIES]) + FIRST_ITEM]), i64(work[IN_BLOCK]), i32(0)
    for team in range(teams):
        first = i32(first_of_share(items, block * teams + team, blocks * teams))
        end = i32(first_of_share(items, block * teams + team + 1, blocks * teams))
        work[BY_TEAM + team * OF_TEAM + FIRST] = first
        work[BY_TEAM + team * OF_TEAM + END] = end
        most = i32(max(most, i32(end - first)))
    work[MOST] = most


@device
def note_places(work, size, limit, beyond, model):
    """How many warps attend, and where their places and buffers lie in an arena of that size. One lane.

    Two teams, if there is room for all their warps; otherwise as many warps of one as there is room for.
    """
    d, group = opaque(i64(model.head_dim)), divide(opaque(i64(model.heads)), i64(model.kv_heads))[0]
    queries, place, room = d * min(group, i64(HEADS)), d * PART, limit - FREE
    given, keys = 2 * HEADS + (d + HEADS_GAP) * min(group, i64(HEADS)), (beyond + 3) & -4
    near = warps_in(room, place + queries, given)
    apart = min(warps_in(room, queries, given), divide(size - keys, place)[0])
    if apart > near:
        near, place = apart, i64(0)
    else:
        keys = i64(FREE)
    both = near >= TEAMS * MOST_PARTS and warps() >= TEAMS * MOST_PARTS
    team, teams = min(near, i64(min(warps(), MOST_PARTS))), i64(TEAMS if both else 1)
    at, turns = FREE + teams * team * place, i32(MOST_TURNS)
    while turns > 0 and at + teams * (team * queries + (MOST_PARTS << turns) * given) > limit:
        turns = i32(turns - 1)
    work[IN_BLOCK] = i32(teams)
    work[TEAM] = i32(team)
    others = i64(0) if both else min(i64(warps()) - team, i64(MOST_PARTS))
    work[FIRST_MERGER] = i32(team if others > 0 else i64(0))
    work[MERGERS] = i32(others if others > 0 else team)
    work[TURNS] = turns
    work[PLACES_AT] = i32(keys)
    work[QUERIES_AT] = i32(at)
    work[UNIT_SIZE] = i32(queries)
    work[PARTS_AT] = i32(at + teams * team * queries)
    work[PART_SIZE] = i32(given)


@device
def warps_in(room, of_warp, given):
    """How many warps have `of_warp` floats each in so many, beside a buffer for each team's results."""
    most = i64(TEAMS * MOST_PARTS)
    if most * (of_warp + given) > room:
        most = divide(max(i64(0), room - MOST_PARTS * given), of_warp)[0]
    return most


@device
def note_items(block, before, model, cache, act):
    """Note what is known of the teams' items, MOST_NOTED of each at most, `before` of which come before those."""
    work, e = arena_view(block.shared, WORK, LISTED, model.eos), i64(thread_id())
    if thread_id() == 0:
        work[NOTED] = before
    while e < work[IN_BLOCK] * (MOST_NOTED * 2 * MOST_PARTS):
        j, half = divide(e, i64(2 * MOST_PARTS))
        of_team, j = divide(j, i64(MOST_NOTED))
        own = BY_TEAM + of_team * OF_TEAM
        item = i32(work[own + FIRST] + before + i32(j))
        if j == 0 and half == 0:
            work[own + COUNT] = i32(min(i32(MOST_NOTED), max(i32(0), i32(work[own + END] - item))))
        if item < work[own + END]:
            note_half(work, own + ITEMS + ITEM * j, item, half, model, cache)
            if half == 0:
                note_item(work, own + ITEMS + ITEM * j, item, j, own, model, act)
        e += block_threads()


@device
def entry_and_chunk(work, item):
    """Of an item: its entry in the list, its unit and its chunk."""
    entry = entry_of(work, i64(work[ENTRIES]), FIRST_ITEM, item)
    chunks = chunks_of(i64(work[ENTRY * entry + LENGTH]))
    unit, chunk = divide(i64(item - work[ENTRY * entry + FIRST_ITEM]), chunks)
    return entry, unit, chunk


@device
def rows_before(work, entry):
    """How many rows of its request this step has before a row, which see earlier positions."""
    first = entry
    while first > 0 and work[ENTRY * (first - 1) + SLOT] == work[ENTRY * entry + SLOT]:
        first -= 1
    return entry - first


@device
def note_half(work, at, item, half, model, cache):
    """Where half a part of an item lies in a layer of the cache, or 0 if it has none. One lane."""
    entry, unit, chunk = entry_and_chunk(work, item)
    position, place = chunk * CHUNK + half * HALF, i64(0)
    if half * HALF < CHUNK and position < i64(work[ENTRY * entry + LENGTH]):
        n_page, inside = divide(position, i64(cache.page_size))
        page = i64(cache.table[i64(work[ENTRY * entry + SLOT]), n_page])
        place = (page * i64(model.kv_heads) + heads_of(model, unit)[2]) * i64(cache.page_size) + inside
    work[at + PLACE + half] = i32(place)


@device
def note_item(work, at, item, j, own, model, act):
    """Everything else of the j-th that is noted. One lane."""
    entry, unit, chunk = entry_and_chunk(work, item)
    head, heads, kv_head = heads_of(model, unit)
    length, row = i64(work[ENTRY * entry + LENGTH]), i64(work[ENTRY * entry + ROW])
    positions, chunks = min(i64(CHUNK), length - chunk * CHUNK), chunks_of(length)
    of_all = entry * i64(model.kv_heads) * octets(model) + unit
    stored, own_at = positions, i64(0)
    done = min(chunk, i64(item - work[own + FIRST])) + 1
    if chunk + 1 < chunks and i32(item + 1) < work[own + END]:
        done = i64(0)
    if work[AWAITING] != 0:
        stored = max(i64(0), min(positions, length - rows_before(work, entry) - 1 - chunk * CHUNK))
        own_at = (row - length + 1 + chunk * CHUNK) * handed.projected_width(model)
        own_at += (i64(model.heads) + kv_head) * i64(model.head_dim)
        of_all, done = i64(item) - chunk, i64(int(chunk + 1 == chunks))
    work[at + POSITIONS] = i32(positions)
    work[at + STORED] = i32(stored)
    work[at + OWN_AT] = i32(own_at)
    work[at + PARTS] = i32(divide(positions + (PART - 1), i64(PART))[0])
    work[at + ITS_ROW] = i32(row)
    work[at + HEAD] = i32(head)
    work[at + ITS_HEADS] = i32(heads)
    work[at + CHUNKS] = i32(chunks)
    work[at + ITS_CHUNK] = i32(chunk)
    work[at + UNIT] = i32(of_all)
    work[at + DONE] = i32(done)
    work[at + FRESH] = i32(int(chunk == 0) | int(j == 0))
    work[at + TURN] = i32(divide(j * heads, i64(work[MERGERS]))[1])
