"""Attention of single rows, cut in chunks of positions (Flash-Decoding: Dao et al., 2023).

:func:`.attention.attend` gives a row's head to one block. Here an item of work is a row, a group of heads that
read the same keys and values, and a chunk of CHUNK positions: a lone request keeps many blocks busy, and keys and
values are read once for all heads of their group. A *team* of up to eight warps has items that follow each other
(:mod:`.flash_items`), and a warp takes PART positions of a chunk at a time, by the words `heads_weigh` and
`heads_mix` (on a GPU: tensor cores). What the parts give is merged in their order, a warp a head, and what the
chunks of a row give in theirs, by whoever is the last to merge one. So a row's result depends on no other row, nor
on the number of blocks or warps. The KV cache holds bfloat16 here.

In steps of few rows, where a block has one item at most, nobody waits at a barrier of all blocks: queries, and
keys and values of the rows' own positions, are awaited, those of all positions before come while these are being
made, and what chunks give is awaited by the team that has the row's last one (:mod:`.handed`).

A warp has places for keys, values and queries, to which they are copied asynchronously. As soon as it has read its
keys, those of its next part are on their way, of the next item too, and so with the values. There are up to four
buffers for what the parts of an item give, so that some warps merge an item while the others are at the next ones.
A warp waits for others only where it takes what they give, or their place: mbarriers tell of that.

What there is to do is listed when a step begins (:mod:`.work_list`).
"""

from ..simt import device
from ..simt.vocabulary import (
    HEADS,
    HEADS_GAP,
    PART,
    arena_view,
    async_fence,
    atomic_add,
    awaited_copy,
    awaited_four,
    awaited_mix,
    barrier,
    block_put,
    copy_async,
    exp,
    f32,
    fragment_put,
    heads_mix,
    heads_pay,
    heads_weigh,
    i32,
    i64,
    lane_broadcast,
    lane_id,
    lane_max,
    lane_sum,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_wait,
    mbarriers,
    mix_of_fours,
    narrow_put,
    opaque,
    store_relaxed,
    warp_barrier,
    warp_id,
    warp_width,
)
from . import handed
from .attention import NOTHING, page_start
from .flash_items import (
    AT_ONCE,
    AWAITING,
    BEHIND,
    BY_TEAM,
    CHUNKS,
    COUNT,
    DONE,
    FRESH,
    GIVEN,
    HALF,
    HEAD,
    ITEMS,
    ITS_CHUNK,
    ITS_HEADS,
    ITS_ROW,
    KEYS_CAME,
    MERGED,
    MERGERS,
    MOST,
    NOTED,
    OF_TEAM,
    OWN_AT,
    PARITY,
    PART_SIZE,
    PARTS,
    PARTS_AT,
    PLACE,
    PLACES_AT,
    POSITIONS,
    QUERIES_AT,
    STORED,
    TEAM,
    TURN,
    TURNS,
    UNIT,
    UNIT_SIZE,
    VALUES_CAME,
    WEIGHTS,
    attends,
    coming_at,
    meetings_at,
    member,
    merger,
    note_items,
    team,
)
from .handed import publish_four, put_four
from .packing import block_row_at, row_at
from .staging import COMING_SIZE, ENTRY, ITEM, LISTED, MOST_NOTED, MOST_PARTS, WORK
from .work_list import ENTRIES, FIRST_ITEM


@device
def attend_in_chunks(block, rows, layer, model, cache, act, streamed):
    """As :func:`.attention.attend`, for the listed rows that have items. `rows`: of the step. Teams share items.

    All blocks call it, after :func:`.note_own`, when nobody uses the arena; it ends without a grid barrier. Either
    what it takes is awaited, and :func:`ask_ahead` has been called, or a grid barrier stands behind queries, keys
    and values. `streamed`: the layer is computed from the stream, and queries and results lie in ``act.handed``
    (see handed.py); otherwise in `q`, and in `attended` as :func:`block_put` leaves them.
    """
    work, before = arena_view(block.shared, WORK, LISTED, model.eos), i32(0)
    while heads_pay(cache.keys) and before < work[MOST]:  # otherwise all this is left out of the kernel
        if before != work[NOTED]:
            barrier()
            note_items(block, before, model, cache, act)
            barrier()
        if attends(work) or merger(work) >= 0:
            attend_noted(block, rows, layer, model, cache, act, streamed)
        before = i32(work[NOTED] + MOST_NOTED)  # anew: attention needs the registers


@device
def ask_ahead(block, rows, layer, model, cache, act):
    """The first keys and values from the cache are on their way, where the rest is awaited. All lanes, when nobody
    uses the arena."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    if heads_pay(cache.keys) and work[MOST] > 0 and attends(work):
        ask_first(block, rows, layer, model, cache, act, True)


@device
def ask_first(block, rows, layer, model, cache, act, streamed):
    """One warp that attends: the keys and values of its part of the first noted item are on their way."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    j, part = part_from(work, i32(0), i32(member()))
    if lane_id() == asker():
        async_fence()  # others have written queries, keys and values; and anything may have been in the places
    ask_keys(block, j, part, rows, layer, model, cache, act, streamed)
    ask_values(block, j, part, layer, model, cache)


@device
def attend_noted(block, rows, layer, model, cache, act, streamed):
    """One warp that attends, or merges, or both: a team's noted items. `n` counts those of all layers.

    Who does both merges an item when it has been at the next one, if there are buffers: so all has been given.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    kept = arena_view(block.shared, coming_at(), COMING_SIZE, model.eos)
    meetings, j, n, parity = mbarriers(block.shared, meetings_at(work), 8), i32(0), kept[BEHIND], kept[PARITY]
    warp_barrier()  # all have read them
    count, late, at_parts, at_merging = work[own_at(work) + COUNT], i32(0), attends(work), merger(work) >= 0
    if at_parts and at_merging:
        late = i32(min(work[TURNS], i32(1)))
    if at_parts and work[AWAITING] == 0:
        ask_first(block, rows, layer, model, cache, act, streamed)
    while j < i32(count + late):
        if at_parts and j < count:
            at, part, buffer = item_at(work, j), i32(member()), i64(buffer_of(work, n))
            mbarrier_wait(meetings, MERGED + buffer, i32(turn_of(work, n) ^ 1))
            while part < work[at + PARTS]:
                next_j, next_part = part_from(work, j, i32(part + work[TEAM]))
                attend_part(
                    block, at, n, part, parity, next_j, next_part, rows, layer, model, cache, act, streamed
                )
                part, parity = i32(part + work[TEAM]), i32(parity ^ 1)
            warp_barrier()  # none waits any more: a phase may end twice before it has looked
            if lane_id() == 0:
                mbarrier_arrive(meetings, GIVEN + buffer)
        if at_merging and j >= late:
            merge_item(block, item_at(work, i32(j - late)), i32(n - late), rows, layer, model, act, streamed)
        j, n = i32(j + 1), i32(n + 1)
    if lane_id() == 0:
        kept[BEHIND] = i32(n - late)
        kept[PARITY] = parity


@device
def own_at(work):
    """Where the words of this warp's team begin in the list of work."""
    return i32(BY_TEAM + team(work) * OF_TEAM)


@device
def item_at(work, j):
    """Where it is noted there what is known of the team's j-th item."""
    return i32(own_at(work) + ITEMS + ITEM * j)


@device
def buffer_of(work, n):
    """Which buffer has what the parts of the n-th item give."""
    return i32(n & i32(i32(1 << work[TURNS]) - 1))


@device
def turn_of(work, n):
    """The parity of how often that has been used before."""
    return i32(i32(n >> work[TURNS]) & 1)


@device
def part_from(work, j, part):
    """Which part this warp takes next: this one of the j-th item or, if there is none, a later item's."""
    count, at, first = work[own_at(work) + COUNT], item_at(work, j), i32(member())
    while j < count and part >= work[at + PARTS]:
        j, at, part = i32(j + 1), i32(at + ITEM), first
    return j, part


@device
def attend_part(block, at, n, part, parity, next_j, next_part, rows, layer, model, cache, act, streamed):
    """One warp: a part of the n-th item, which is noted at `at`; and its next part is on its way."""
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim))
    came, to, heads = mbarriers(block.shared, coming_at(), 2), part_at(work, n, part), i64(work[at + ITS_HEADS])
    seen = seen_of(work, at, part)
    if work[AWAITING] != 0:
        await_own(block, at, part, rows, layer, model, cache, act)
    mbarrier_wait(came, KEYS_CAME, parity)
    keys = arena_view(block.shared, keys_at(work, d), PART * d, cache.keys)
    weights = heads_weigh(block.shared, to, keys, queries_at(work), heads, d, seen)
    warp_barrier()  # all have read the keys and the queries
    ask_keys(block, next_j, next_part, rows, layer, model, cache, act, streamed)
    mbarrier_wait(came, VALUES_CAME, parity)
    values = arena_view(block.shared, values_at(work, d), PART * d, cache.values)
    heads_mix(block.shared, to, values, weights, heads, d, seen)
    warp_barrier()  # all have read the values, and the results are there
    ask_values(block, next_j, next_part, layer, model, cache)


@device
def await_own(block, at, part, rows, layer, model, cache, act):
    """One warp: new queries, and a part's keys and values of the step's own positions, come to their places."""
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), opaque(i64(model.head_dim))
    source, width = handed.of_layer(act, layer) + handed.projected_at(rows, model), handed.projected_width(model)
    if part < work[TEAM] and work[at + FRESH] != 0:
        query = source + work[at + ITS_ROW] * width + work[at + HEAD] * d
        awaited_copy(block.shared, queries_at(work), act.handed, query, work[at + ITS_HEADS] * d)
    i, seen = stored_of(work, at, part), seen_of(work, at, part)
    if i < seen:
        keys = arena_view(block.shared, keys_at(work, d), PART * d, cache.keys)
        values = arena_view(block.shared, values_at(work, d), PART * d, cache.values)
        while i < seen:
            own, e = source + work[at + OWN_AT] + (part * PART + i) * width, 4 * i64(lane_id())
            while e < 2 * d:  # a key, and behind all keys a value
                further = i64(model.kv_heads) * d - d if e >= d else i64(0)
                four = awaited_four(act.handed, own + further + e)
                if e < d:
                    narrow_four(keys, i * d + e, four)
                else:
                    narrow_four(values, i * d + e - d, four)
                e += 4 * warp_width()
            i += 1
        async_fence()  # copies come to the same places afterwards
    warp_barrier()  # they are there


@device
def narrow_four(to, at, four):
    """Four numbers next to each other, as the cache keeps them. One lane."""
    a, b, c, d = four
    narrow_put(to, at, a)
    narrow_put(to, at + 1, b)
    narrow_put(to, at + 2, c)
    narrow_put(to, at + 3, d)


@device
def asker():
    """The lane that asks. Lane 0 asks for weights, and a fence waits for what its lane has on its way."""
    return i32(int(warp_width() > 1))


@device
def ask_keys(block, j, part, rows, layer, model, cache, act, streamed):
    """One warp: the keys of a part of the j-th item are on their way to its place, and new queries to theirs."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    at = item_at(work, j)
    if lane_id() == asker() and j < work[own_at(work) + COUNT]:
        came, d, size = mbarriers(block.shared, coming_at(), 2), opaque(i64(model.head_dim)), i64(0)
        if work[AWAITING] == 0 and part < work[TEAM] and work[at + FRESH] != 0:
            size = i64(work[at + ITS_HEADS]) * d
        mbarrier_expect_bytes(came, KEYS_CAME, 2 * stored_of(work, at, part) * d + 4 * size)
        if size > 0:
            row, head = i64(work[at + ITS_ROW]), i64(work[at + HEAD])
            if streamed:
                query = handed.of_layer(act, layer) + handed.projected_at(rows, model) + head * d
                query += row * handed.projected_width(model)
                copy_async(block.shared, queries_at(work), act.handed, query, size, came, KEYS_CAME)
            else:
                query = (row * i64(model.heads) + head) * d
                copy_async(block.shared, queries_at(work), act.q, query, size, came, KEYS_CAME)
        to = arena_view(block.shared, keys_at(work, d), PART * d, cache.keys)
        copy_part(work, at, part, to, cache.keys, layer, model, cache, came, KEYS_CAME)


@device
def ask_values(block, j, part, layer, model, cache):
    """One warp: the values of a part of the j-th item are on their way to its place."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    at = item_at(work, j)
    if lane_id() == asker() and j < work[own_at(work) + COUNT]:
        came, d = mbarriers(block.shared, coming_at(), 2), opaque(i64(model.head_dim))
        mbarrier_expect_bytes(came, VALUES_CAME, 2 * stored_of(work, at, part) * d)
        to = arena_view(block.shared, values_at(work, d), PART * d, cache.values)
        copy_part(work, at, part, to, cache.values, layer, model, cache, came, VALUES_CAME)


@device
def copy_part(work, at, part, to, stored, layer, model, cache, came, which):
    """One lane: a part's keys or values are on their way: at once if both halves lie side by side."""
    d, n = opaque(i64(model.head_dim)), stored_of(work, at, part)
    place, further = work[at + PLACE + 2 * part], work[at + PLACE + 2 * part + 1]
    first = min(n, i64(HALF)) if further != i32(place + HALF) else n
    if first > 0:
        copy_async(to, i64(0), stored, of_layer(place, layer, model, cache), first * d, came, which)
    if first < n:
        behind = of_layer(further, layer, model, cache)
        copy_async(to, HALF * d, stored, behind, (n - HALF) * d, came, which)


@device
def seen_of(work, at, part):
    """How many positions a part of an item has."""
    return i64(min(i32(PART), i32(work[at + POSITIONS] - part * PART)))


@device
def stored_of(work, at, part):
    """How many of them lie in the cache: the first ones."""
    return i64(max(i32(0), min(i32(PART), i32(work[at + STORED] - part * PART))))


@device
def of_layer(place, layer, model, cache):
    """Where a place, counted in positions, lies in a layer of the cache."""
    return page_start(cache, model, layer, i32(0), i64(0)) + i64(place) * opaque(i64(model.head_dim))


@device
def keys_at(work, d):
    """Where this warp's place for keys begins in the arena."""
    return work[PLACES_AT] + warp_id() * (PART * d)


@device
def values_at(work, d):
    """Where its place for values begins."""
    return keys_at(work, d) + (PART * d >> 1)


@device
def queries_at(work):
    """Where its place for queries begins."""
    return i64(i32(work[QUERIES_AT] + i32(warp_id()) * work[UNIT_SIZE]))


@device
def part_at(work, n, part):
    """Where what a part of the team's n-th item gives begins in the arena."""
    buffer = i32(i32(team(work) << work[TURNS]) + buffer_of(work, n))
    return i64(i32(work[PARTS_AT] + i32(buffer * MOST_PARTS + part) * work[PART_SIZE]))


@device
def merge_item(block, at, n, rows, layer, model, act, streamed):
    """One warp: merge what the parts of the n-th item give, which is noted at `at`, a warp a head.

    Chunks are merged by the team that has a row's last one, if they are awaited. Otherwise, behind its last chunk
    of a row's unit a team says how many it had, and the last to do so merges them.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    meetings = mbarriers(block.shared, meetings_at(work), 8)
    first, buffer = i32(merger(work) - work[at + TURN]), i64(buffer_of(work, n))
    if first < 0:
        first = i32(first + work[MERGERS])
    head = first
    if head < work[at + ITS_HEADS] and work[at + DONE] > 1:  # the chunks before have been merged, by all warps
        mbarrier_wait(meetings, MERGED + i64(buffer_of(work, i32(n - 1))), turn_of(work, i32(n - 1)))
    mbarrier_wait(meetings, GIVEN + buffer, turn_of(work, n))  # also where there is no head: not to be too early
    while head < work[at + ITS_HEADS]:
        merge_parts(block, at, n, head, rows, layer, model, act, streamed)
        if work[AWAITING] != 0 and work[at + DONE] > 0 and work[at + CHUNKS] > 1:
            merge_chunks(block, at, head, rows, layer, model, act, streamed)
        head = i32(head + work[MERGERS])
        warp_barrier()  # all have read the weights, and what parts have given
    warp_barrier()  # none waits any more, as above
    if lane_id() == 0:
        mbarrier_arrive(meetings, MERGED + buffer)
    if work[AWAITING] == 0 and work[at + DONE] > 0 and work[at + CHUNKS] > 1:
        head = first
        while head < work[at + ITS_HEADS]:
            chunks = i32(work[at + CHUNKS])
            last = is_last(act.arrived, work[at + UNIT] * HEADS + i64(head), work[at + DONE], chunks)
            if last:
                merge_chunks(block, at, head, rows, layer, model, act, streamed)
            head = i32(head + work[MERGERS])
            warp_barrier()  # all have read the weights


@device
def merge_parts(block, at, n, head, rows, layer, model, act, streamed):
    """One warp: what parts of the n-th item give for a head, brought to one maximum, and added up in order.

    Of a row's only chunk, that is divided by the total, and a result; otherwise it is itself what a chunk gives.
    """
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), i32(opaque(i64(model.head_dim)))
    parts, here, step = work[at + PARTS], i32(part_at(work, n, i32(0))), work[PART_SIZE]
    highest = highest_of(block.shared, here + 2 * head, step, parts)
    weights = weights_at()
    total = weigh(block.shared, weights, block.shared, here + 2 * head, step, parts, highest)
    warp_barrier()
    mine, given = i32(4 * i32(lane_id())), chunk_at(work, at, head, work[at + ITS_CHUNK], layer, model, act)
    while mine < d:
        column = i32(2 * HEADS + head * i32(d + HEADS_GAP) + mine)
        sums = mix_of_fours(
            block.shared, i64(weights), block.shared, i64(here + column), i64(step), i64(parts)
        )  # fmt: skip
        if work[at + CHUNKS] == 1:
            row, head_in_row = work[at + ITS_ROW], i32(work[at + HEAD] + head)
            put_attended(act, rows, row, head_in_row, mine, sums, total, layer, model, streamed)
        else:
            put_partial(act.partial, given + mine, sums, work[AWAITING] != 0)
        mine = i32(mine + 4 * i32(warp_width()))
    if lane_id() == 0 and work[at + CHUNKS] > 1:
        put_partial(act.partial, given + d, (highest, total, f32(0.0), f32(0.0)), work[AWAITING] != 0)


@device
def chunk_at(work, at, head, chunk, layer, model, act):
    """Where in ``act.partial`` that begins what a chunk of an item's unit gives for a head."""
    d, chunks, before = opaque(i64(model.head_dim)) + HEADS_GAP, i64(work[at + CHUNKS]), i64(work[at + UNIT])
    if work[AWAITING] != 0:
        before += i64(layer) * work[ENTRY * i64(work[ENTRIES]) + FIRST_ITEM]
    else:
        chunks = i64(act.most_chunks)
        before *= chunks
    return before * (work[PART_SIZE] - 2 * HEADS) + (head * chunks + chunk) * d


@device
def merge_chunks(block, at, head, rows, layer, model, act, streamed):
    """One warp: what all chunks of a row's unit give for a head. AT_ONCE of them at a time."""
    work, d = arena_view(block.shared, WORK, LISTED, model.eos), i32(opaque(i64(model.head_dim)))
    chunks, step, awaiting = work[at + CHUNKS], i64(d) + HEADS_GAP, work[AWAITING] != 0
    first, weights = chunk_at(work, at, head, i32(0), layer, model, act), weights_at()
    if awaiting:
        highest = await_pairs(block.shared, weights + AT_ONCE, act.partial, first + d, step, chunks)
    else:
        highest = highest_of(act.partial, first + d, step, chunks)
    begin, mine = i32(0), i32(4 * i32(lane_id()))
    while begin < d:  # all lanes, for they share the weights
        column = i64(min(mine, i32(d - 4)))
        sums, total, done = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), f32(0.0), i32(0)
        while done < chunks:
            n, here = i32(min(i32(AT_ONCE), i32(chunks - done))), first + i64(done) * step
            if awaiting and chunks > AT_ONCE:
                warp_barrier()  # all have read the pairs before
                await_pairs(block.shared, weights + AT_ONCE, act.partial, here + d, step, n)
            warp_barrier()  # all have read the weights before, and pairs are there
            if awaiting:
                total += weigh(block.shared, weights, block.shared, weights + AT_ONCE, 2, n, highest)
                warp_barrier()
                a, b, c, e = awaited_mix(block.shared, i64(weights), act.partial, here + column, step, i64(n))
            else:
                total += weigh(block.shared, weights, act.partial, here + d, step, n, highest)
                warp_barrier()
                a, b, c, e = mix_of_fours(block.shared, i64(weights), act.partial, here + column, step, i64(n))
            sums = sums[0] + a, sums[1] + b, sums[2] + c, sums[3] + e
            done = i32(done + AT_ONCE)
        if mine < d:
            row, head_in_row = work[at + ITS_ROW], i32(work[at + HEAD] + head)
            put_attended(act, rows, row, head_in_row, mine, sums, total, layer, model, streamed)
        begin, mine = i32(begin + 4 * i32(warp_width())), i32(mine + 4 * i32(warp_width()))


@device
def await_pairs(shared, to, partial, at, step, chunks):
    """One warp: the chunks' maxima and totals, of AT_ONCE at most, come to the arena; and the highest of all.

    `at`: the first chunk's maximum. A barrier is to follow.
    """
    highest, p = NOTHING, i32(lane_id())
    while p < chunks:
        maximum, total, _, _ = awaited_four(partial, at + p * step)
        highest = max(highest, maximum)
        if p < AT_ONCE:
            shared[to + 2 * p] = maximum
            shared[to + 2 * p + 1] = total
        p = i32(p + i32(warp_width()))
    return lane_max(highest)


@device
def weights_at():
    """Where this warp's weights begin in the arena by which it merges, and behind them the chunks' pairs."""
    return i32(WEIGHTS + 3 * AT_ONCE * i32(warp_id()))


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
def put_attended(act, rows, row, head, column, sums, total, layer, model, streamed):
    """Four columns of a row's head, divided by the total of their weights. One lane."""
    (a, b, c, e), scale = sums, f32(1.0) / total
    at = i64(head) * opaque(i64(model.head_dim)) + column
    if streamed:
        to = handed.of_layer(act, layer) + row_at(rows, i64(row), at)
        fragment_put(act.handed, to, a * scale, b * scale, c * scale, e * scale)
    else:
        block_put(act.attended, block_row_at(rows, i64(row), at), a * scale, b * scale, c * scale, e * scale)


@device
def put_partial(partial, at, sums, awaited):
    """Four columns of what a chunk gives, to be published if they are awaited. One lane."""
    a, b, c, e = sums
    if awaited:
        publish_four(partial, at, a, b, c, e)
    else:
        put_four(partial, at, a, b, c, e)


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
