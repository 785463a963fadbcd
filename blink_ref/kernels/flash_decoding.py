"""Attention of single rows, cut in chunks of positions (Flash-Decoding: Dao et al., 2023).

:func:`.attention.attend` gives a row's head to one block. Here an item of work is a row, a group of heads that
read the same keys and values, and a chunk of CHUNK positions: a lone request keeps many blocks busy, and keys and
values are read once for all heads of their group. A warp takes PART positions of a chunk at a time, by the word
`heads_attend` (on a GPU: tensor cores). What the parts give is merged in their order, a warp a head, and what the
chunks of a row give in theirs, by whoever is the last to merge one. So a row's result depends on no other row, nor
on the number of blocks or warps. The KV cache holds bfloat16 here.

A block takes items that follow each other; what it has to know of them is noted once for all layers of a step
(:mod:`.flash_items`), if they are not too many. Where the arena has room for it, a warp has places for keys and
values apart from those for what its parts give, and its next part, of the next item too, is on its way while an
item is multiplied; and there are two buffers for what parts give, so that some warps merge an item while the
others are at the next ones. A warp waits for others only where it takes what they give, or their place: mbarriers
tell of that.

What there is to do is listed when a step begins (:mod:`.work_list`).
"""

from ..simt import device
from ..simt.vocabulary import (
    HEADS,
    PART,
    arena_view,
    atomic_add,
    barrier,
    block_put,
    divide,
    exp,
    f32,
    fragment_put,
    heads_ask,
    heads_attend,
    heads_column,
    heads_pay,
    heads_queries,
    i32,
    i64,
    lane_broadcast,
    lane_id,
    lane_max,
    lane_sum,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    mix_of_fours,
    opaque,
    store_relaxed,
    thread_id,
    warp_barrier,
    warp_id,
    warp_width,
)
from .attention import NOTHING, page_start
from .flash_items import (
    AHEAD,
    BEHIND,
    BUFFERS,
    CHUNK_SIZE,
    CHUNKS,
    DONE,
    FETCHED,
    FRESH,
    GIVEN,
    INDEX,
    ITS_HEADS,
    KEYS_AT,
    MERGED,
    NOTED,
    OWN_COUNT,
    OWN_END,
    OWN_ENTRIES,
    OWN_FIRST,
    OWN_NOTED,
    PART_STEP,
    PARTS,
    PARTS_AT,
    PLACE,
    PLACE_STEP,
    POSITIONS,
    QUERIES,
    QUERY,
    READ,
    TURN,
    UNIT,
    UNITS_BEHIND,
    VALUES_AT,
    WEIGHTS,
    coming_at,
    note_items,
    team,
)
from .packing import block_row_at, row_at
from .staging import ITEM, LISTED, MEETINGS, MOST_NOTED, MOST_PARTS, WORK


@device
def attend_in_chunks(block, rows, layer, model, cache, act, in_fragments):
    """As :func:`.attention.attend`, for the listed rows that have items. `rows`: of the step. Blocks share items.

    All blocks call it, after :func:`.note_own` and a grid barrier behind the queries, keys and values, when nobody
    uses the arena; it ends without one. `in_fragments`: `attended` is written as :func:`fragment_put` does,
    otherwise as :func:`block_put`.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    noted = work[OWN_FIRST]
    while heads_pay(cache.keys) and noted < work[OWN_END]:  # otherwise all this is left out of the kernel
        if noted != work[OWN_NOTED]:
            first, end, n = work[OWN_FIRST], work[OWN_END], i64(work[OWN_ENTRIES])
            barrier()
            note_items(block, n, first, noted, end, model, cache, act)
            barrier()
        if warp_id() < team():
            attend_noted(block, rows, layer, model, cache, act, in_fragments)
        noted = i32(work[OWN_NOTED] + MOST_NOTED)  # anew: attention needs the registers


@device
def attend_noted(block, rows, layer, model, cache, act, in_fragments):
    """One warp of the team: the noted items. `n` counts items of all layers, and `unit` what has own queries."""
    work, j, bars = arena_view(block.shared, WORK, LISTED, model.eos), i32(0), mbarriers(block.shared, MEETINGS, 8)
    n, unit = work[BEHIND], work[UNITS_BEHIND]
    ask(block, noted_at(j), i32(warp_id()), layer, model, cache)
    fetch_queries(block, noted_at(j), unit, model, cache, act)
    while j < work[OWN_COUNT]:
        at, part = noted_at(j), i32(warp_id())
        parts, ahead, more = work[at + PARTS], work[AHEAD] != 0, i32(j + 1) < work[OWN_COUNT]
        if work[at + FRESH] != 0:
            mbarrier_wait(bars, FETCHED + i64(unit & 1), i32(i32(unit >> 1) & 1))
        mbarrier_wait(bars, MERGED + i64(buffer_of(work, n)), i32(turn_of(work, n) ^ 1))
        if ahead and part >= parts and more:
            ask(block, i32(at + ITEM), part, layer, model, cache)
        if not ahead and j > 0:
            ask(block, at, part, layer, model, cache)
        while part < parts:
            attend_part(block, j, n, part, unit, more, layer, model, cache)
            part = i32(part + team())
            if not ahead:
                ask(block, at, part, layer, model, cache)
        fresh = more and work[at + ITEM + FRESH] != 0
        warp_barrier()
        if lane_id() == 0:
            mbarrier_arrive(bars, GIVEN + i64(buffer_of(work, n)))
            if fresh or not more:
                mbarrier_arrive(bars, READ + i64(unit & 1))
        if fresh:
            unit = i32(unit + 1)
            fetch_queries(block, i32(at + ITEM), unit, model, cache, act)
        merge_item(block, j, n, rows, model, act, in_fragments)
        j, n = i32(j + 1), i32(n + 1)
    if thread_id() == 0:  # all have read them who will say that queries are there
        work[BEHIND] = n
        work[UNITS_BEHIND] = i32(unit + 1)


@device
def buffer_of(work, n):
    """Which buffer has what the parts of the n-th item give."""
    return i32(n & i32(work[BUFFERS] - 1))


@device
def turn_of(work, n):
    """The parity of how often that has been used before."""
    return i32(i32(n >> i32(work[BUFFERS] - 1)) & 1)


@device
def noted_at(j):
    """Where it is noted what is known of the j-th noted item."""
    return i32(NOTED + ITEM * j)


@device
def fetch_queries(block, at, unit, model, cache, act):
    """One warp: its share of the queries of a unit, whose item is noted at `at`."""
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim))
    bars, query, heads = mbarriers(block.shared, MEETINGS, 8), i64(work[at + QUERY]) * d, i64(work[at + ITS_HEADS])
    mbarrier_wait(bars, READ + i64(unit & 1), i32(i32(unit >> 1) & 1 ^ 1))
    heads_queries(
        block.shared, i64(queries_at(unit, d)), act.q, query, heads, d, cache.keys, i64(warp_id()), i64(team())
    )
    warp_barrier()
    if lane_id() == 0:
        mbarrier_arrive(bars, FETCHED + i64(unit & 1))


@device
def queries_at(unit, d):
    """Where a unit's queries lie in the arena."""
    return i32(QUERIES + i32(unit & 1) * (HEADS * i32(d)))


@device
def places_of(work, part):
    """Where a part's keys lie in the arena, and its values: in places of the warp, or of the part."""
    step = i32(work[PLACE_STEP] * (i32(warp_id()) if work[AHEAD] != 0 else part))
    return i32(work[KEYS_AT] + step), i32(work[VALUES_AT] + step)


@device
def part_at(work, n, part):
    """Where what a part of the n-th item gives begins in the arena."""
    return i32(work[PARTS_AT] + i32(buffer_of(work, n) * MOST_PARTS + part) * work[PART_STEP])


@device
def seen_of(work, at, part):
    """How many positions a part of an item has: 0 or less, if it has none."""
    return i32(min(i32(PART), i32(work[at + POSITIONS] - part * PART)))


@device
def ask(block, at, part, layer, model, cache):
    """One warp: a part's keys and values are on their way to its places, if the item noted at `at` has it."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    if part < work[at + PARTS]:
        of_keys, of_values = places_of(work, part)
        first, d = of_layer(work[at + PLACE + part], layer, model, cache), opaque(i64(model.head_dim))
        seen = i64(seen_of(work, at, part))
        heads_ask(
            block.shared, i64(coming_at()), i64(of_keys), i64(of_values), cache.keys, cache.values, first, d, seen
        )


@device
def of_layer(place, layer, model, cache):
    """Where a place, counted in positions, lies in a layer of the cache."""
    return page_start(cache, model, layer, i32(0), i64(0)) + i64(place) * opaque(i64(model.head_dim))


@device
def attend_part(block, j, n, part, unit, more, layer, model, cache):
    """One warp: a part of the j-th noted item, the n-th in all, whose keys and values are on their way.

    If they come ahead, so is behind it what the warp takes next: of this item or, if there are `more`, of the
    next.
    """
    work, d, at = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim)), noted_at(j)
    of_keys, of_values = places_of(work, part)
    seen, later, place = seen_of(work, at, part), i32(0), work[at + PLACE + part]
    behind = place
    if work[AHEAD] != 0:
        next_at, next_part = at, i32(part + team())
        if next_part >= work[at + PARTS]:
            next_at, next_part = i32(at + ITEM), i32(warp_id())
        if next_at == at or more:
            later, behind = seen_of(work, next_at, next_part), work[next_at + PLACE + next_part]
    elif of_keys == of_values:
        later = seen  # the values, in the keys' place
    first, then = of_layer(place, layer, model, cache), of_layer(behind, layer, model, cache)
    heads_attend(
        block.shared, i64(coming_at()), i64(part_at(work, n, part)), i64(of_keys), i64(of_values),
        i64(queries_at(unit, d)), i64(work[at + ITS_HEADS]), d,
        cache.keys, cache.values, first, i64(seen), then, i64(later),
    )  # fmt: skip


@device
def merge_item(block, j, n, rows, model, act, in_fragments):
    """One warp: merge what the parts of the j-th noted item give, a warp a head.

    Behind its last chunk of a row's unit a block says how many it had, and the last to do so merges the chunks.
    """
    work, at = arena_view(block.shared, WORK, LISTED, model.eos), noted_at(j)
    bars, buffer = mbarriers(block.shared, MEETINGS, 8), i64(buffer_of(work, n))
    first = i32(i32(warp_id()) - work[at + TURN])
    if first < 0:
        first = i32(first + team())
    head = first
    if head < work[at + ITS_HEADS]:
        mbarrier_wait(bars, GIVEN + buffer, turn_of(work, n))
    while head < work[at + ITS_HEADS]:
        merge_parts(block, j, n, head, rows, model, act, in_fragments)
        head = i32(head + team())
        warp_barrier()  # all have read the weights, and what parts have given
    if lane_id() == 0:
        mbarrier_arrive(bars, MERGED + buffer)
    if work[at + DONE] > 0 and work[at + CHUNKS] > 1:
        head = first
        while head < work[at + ITS_HEADS]:
            chunks = i32(work[at + CHUNKS])
            last = is_last(act.arrived, work[at + UNIT] * HEADS + i64(head), work[at + DONE], chunks)
            if last:
                merge_chunks(block, at, head, rows, model, act, in_fragments)
            head = i32(head + team())
            warp_barrier()  # all have read the weights


@device
def merge_parts(block, j, n, head, rows, model, act, in_fragments):
    """One warp: what parts of the j-th noted item give for a head, brought to one maximum, and added up in order.

    Of a row's only chunk, that is divided by the total and goes to `attended`; otherwise it is itself what a chunk
    gives.
    """
    work, d, at = arena_view(block.shared, WORK, LISTED, model.eos), i32(opaque(i64(model.head_dim))), noted_at(j)
    parts, here, step = work[at + PARTS], part_at(work, n, i32(0)), work[PART_STEP]
    highest = highest_of(block.shared, here + 2 * head, step, parts)
    weights = WEIGHTS + MOST_PARTS * i32(warp_id())
    total = weigh(block.shared, weights, block.shared, here + 2 * head, step, parts, highest)
    warp_barrier()
    mine = i32(4 * i32(lane_id()))
    while mine < d:
        column = i32(2 * HEADS + heads_column(d, head, mine))
        sums = mix_of_fours(
            block.shared, i64(weights), block.shared, i64(here + column), i64(step), i64(parts)
        )  # fmt: skip
        if work[at + CHUNKS] == 1:
            put_attended(act.attended, rows, work[at + QUERY] + head, mine, sums, total, model, in_fragments)
        else:
            put_partial(act.partial, i64(work[at + INDEX]) * work[CHUNK_SIZE] + column, sums)
        mine = i32(mine + 4 * i32(warp_width()))
    if lane_id() == 0 and work[at + CHUNKS] > 1:
        to = i64(work[at + INDEX]) * work[CHUNK_SIZE] + 2 * head
        act.partial[to] = highest
        act.partial[to + 1] = total


@device
def merge_chunks(block, at, head, rows, model, act, in_fragments):
    """One warp: what all chunks of a row's unit give for a head, to `attended`. MOST_PARTS of them at a time."""
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), i32(opaque(i64(model.head_dim)))
    chunks, size = work[at + CHUNKS], i64(work[CHUNK_SIZE])
    first = i64(work[at + UNIT]) * act.most_chunks * size
    highest = highest_of(act.partial, first + 2 * head, size, chunks)
    weights, mine = WEIGHTS + MOST_PARTS * i32(warp_id()), i32(4 * i32(lane_id()))
    begin = i32(0)
    while begin < d:  # all lanes, for they share the weights
        column = 2 * HEADS + i64(heads_column(d, head, i32(min(mine, i32(d - 4)))))
        sums, total, done = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), f32(0.0), i32(0)
        while done < chunks:
            n, here = i32(min(i32(MOST_PARTS), i32(chunks - done))), first + i64(done) * size
            warp_barrier()  # all have read the weights before
            total += weigh(block.shared, weights, act.partial, here + 2 * head, size, n, highest)
            warp_barrier()
            a, b, c, e = mix_of_fours(block.shared, i64(weights), act.partial, here + column, size, i64(n))
            sums = sums[0] + a, sums[1] + b, sums[2] + c, sums[3] + e
            done = i32(done + MOST_PARTS)
        if mine < d:
            put_attended(act.attended, rows, work[at + QUERY] + head, mine, sums, total, model, in_fragments)
        begin, mine = i32(begin + 4 * i32(warp_width())), i32(mine + 4 * i32(warp_width()))


@device
def is_last(arrived, at, done, chunks):
    """Whether this warp, whose block has done so many of a row's chunks, is the last to say so. All its lanes."""
    warp_barrier()
    last = i32(0)
    if lane_id() == 0:
        before = i32(chunks - done)
        if done < chunks:
            before = i32(atomic_add(arrived, at, i32(done)))
            if before == i32(chunks - done):
                store_relaxed(arrived, at, i32(0))  # for the next layer
        last = i32(before == i32(chunks - done))
    last = lane_broadcast(last, 0)
    warp_barrier()
    return last > 0


@device
def put_attended(attended, rows, head, column, sums, total, model, in_fragments):
    """Four columns of a head, counted among those of all rows, divided by the total of their weights. One lane."""
    (a, b, c, e), scale = sums, f32(1.0) / total
    row, of_row = divide(i64(head), opaque(i64(model.heads)))
    at = of_row * i64(model.head_dim) + column
    if in_fragments:
        fragment_put(attended, row_at(rows, row, at), a * scale, b * scale, c * scale, e * scale)
    else:
        block_put(attended, block_row_at(rows, row, at), a * scale, b * scale, c * scale, e * scale)


@device
def put_partial(partial, at, sums):
    """Four columns of what a chunk gives. One lane."""
    a, b, c, e = sums
    partial[at] = a
    partial[at + 1] = b
    partial[at + 2] = c
    partial[at + 3] = e


@device
def highest_of(source, at, step, parts):
    """One warp: the highest of the parts' maxima. `at`: the first one's."""
    highest, p = NOTHING, i32(lane_id())
    while p < parts:
        highest = max(highest, source[at + p * step])
        p = i32(p + i32(warp_width()))
    return lane_max(highest)


@device
def weigh(shared, weights, source, at, step, parts, highest):
    """One warp: the parts' weights into the arena, for behind a barrier of the warp; and the total."""
    total, p = f32(0.0), i32(lane_id())
    while p < parts:
        weight = exp(source[at + p * step] - highest)
        shared[weights + p] = weight
        total += weight * source[at + p * step + 1]
        p = i32(p + i32(warp_width()))
    return lane_sum(total)
