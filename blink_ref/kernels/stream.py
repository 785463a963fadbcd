"""The layers for a few rows, as one stream of weights that never waits for a barrier.

Packed weights (:mod:`.packing`) come by bulk copies into stages, of which each warp has its own, in the order in
which they will be multiplied: strip after strip of this block, product after product, layer after layer. A warp
that has multiplied a piece asks for the one after the last asked for, so while a block waits at a barrier or
attends, its stages fill up, and the memory is busy all the time. The idea is that of Hazy Research's megakernel
("Look Ma, No Bubbles!", 2025); docs/performance.md says what it brings.

A block takes strips of 16 outputs in turn, and its warps share a strip's columns; each leaves its sums in the
arena, and behind a barrier they are added up, in order. So a few rows cost hardly more than one, and a row's
results do not depend on the rows beside it. A row is normalised where it is used: its columns are multiplied with
the gains where they are made, with the sums of their squares beside them, and the result with the row's scale.
Activations lie as :func:`fragment_put` leaves them, and a product waits for them, not for a barrier
(:mod:`.handed`).
"""

import math

from ..scheduler.state import SAMPLES, plan_of
from ..simt import device
from ..simt.vocabulary import (
    FRAGMENT,
    FRAGMENT_PITCH,
    arena_view,
    async_fence,
    atomic_max,
    awaited_copy,
    awaited_four,
    awaited_sum,
    barrier,
    block_threads,
    copy_async,
    divide,
    f32,
    fragment_dots,
    fragment_put,
    i32,
    i64,
    lane_id,
    lane_max,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mbarriers,
    opaque,
    packed_floats,
    publish,
    rank,
    sum_of_fours,
    thread_id,
    tiles_pay,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)
from . import attention, handed
from .attention import keep_pair
from .flash_items import MOST_AWAITED, awaited_of_layer
from .handed import publish_four, put_four
from .logits import LOWEST
from .mlp import silu
from .packing import (
    AT,
    ATTENDED,
    GATED,
    LOGITS,
    LOWERED,
    PROJECT,
    SHARE,
    SIZE,
    STEPS,
    STRIPS,
    TURN,
    kind_of,
    row_at,
)
from .rope import rotate
from .sampling import score
from .staging import (
    BESTS,
    CURSOR,
    CURSORS,
    ENTRY,
    KIND,
    KINDS,
    LISTED,
    MOST_ROWS,
    MOST_WARPS,
    PLACES,
    SCRATCH,
    STAGE_BARRIERS,
    STAGES,
    WORK,
)
from .work_list import FIRST_ITEM

PIECE = 8
"""Most fragments in a stage."""
STAGE = PIECE * SIZE
"""Weights in a stage."""
LEAST = 4
"""Fragments whose activations a warp fetches at a time, at least: so many are one run of additions (see
:func:`fragment_dots`), however many follow."""
MOST_SLOTS = 8
"""Most strips whose sums wait in the arena at a time."""
SLOT_GAP = 16
"""Floats between the sums of two strips, which keep lanes apart in the arena's banks."""
ADDENDS = 2 * FRAGMENT
"""Floats for what a row's sums of a strip are added to, and for the gains behind it."""

PRODUCT, STRIPS_LEFT, DONE, OF_EACH, NEXT, HOP, STAGE_NOW, PARITY, STAGE_KEPT, PARITY_KEPT, OWED_KEPT = range(11)
STRIP, FIRST_FRAGMENT, FRAGMENTS = range(11, 14)
"""Words of a warp's cursor: the product that it asks for; this block's strips of it that are left; of the first of
them the fragments asked for, and of each the warp's share; the fragment to ask for next, and how far it is from
the last of a strip to the first of the next one. The stage that is next, and the parity of the phase that will be
over when the copy is there. What :func:`keep_stage` keeps, and :func:`prepare`."""

WHOLE, REST, TAKES, FETCHED, MOST_AT_ONCE = range(5, 10)
"""Words of a kind of products behind the columns of its row in :attr:`Model.stream`, those of the first layer: its
strips divided by the blocks, and what is left. And of a step: where among a layer's places its activations
lie, those of how many fragments a warp fetches at a time, and how many strips' sums the arena may hold."""
LAYER_AT, LAYER_TURN, MIDDLE_AT, PROJECTED_AT, STREAM_AT, STOPS = range(5 * KIND, 5 * KIND + 6)
"""The words behind them: by how much AT and TURN grow from layer to layer; where among a layer's places lie
the residual stream as attention leaves it, queries, keys and values, and the residual stream as the layer leaves
it; and whether the step stops behind this layer."""
ALL_KINDS = 5 * KIND + 6
"""All these words, which lie at KINDS in the arena."""


def arena(rows: int, warps_in_block: int, head_dim: int, page_size: int, halves: bool) -> int:
    """Floats of arena that the stream needs for steps of `rows` rows: its stages, and below them room for the sums
    of a strip, and for activations of LEAST fragments for each warp; or for attention, during which they fill up.

    `halves`: activations are float16, as on CUDA.
    """
    fetched = LEAST * FRAGMENT // (2 if halves else 1)
    sums = SCRATCH + MOST_ROWS + warps_in_block * rows * (FRAGMENT_PITCH + fetched) + SLOT_GAP + ADDENDS * rows
    below = max(sums, attention.arena(head_dim, page_size, warps_in_block))
    return below + rows * head_dim + 3 + warps_in_block * STAGES * STAGE // 2


def room(shared: int, warps_in_block: int, cosines: int) -> int:
    """Floats of an arena of `shared` that lie below the stages, and so many cosines and sines."""
    return ((shared - warps_in_block * STAGES * (STAGE >> 1)) & -4) - cosines


@device
def wanted(model, rows):
    """Whether a step of so many rows is computed from the stream."""
    return tiles_pay(model.weights) and rows <= model.stream_rows


@device
def pauses(block, rows, model):
    """Whether the stream stops at a step's attention, whose keys and values come ahead in place of the stages.

    That is where blocks have more than two items each. Any time behind :func:`.work_list.list_work` and a barrier.
    """
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    return work[ENTRY * rows + FIRST_ITEM] > 2 * block.blocks


@device
def awaits(block, rows, model):
    """Whether attention awaits what it takes: where blocks have MOST_AWAITED items each, at most. Likewise."""
    work = arena_view(block.shared, WORK, LISTED, model.eos)
    return work[ENTRY * rows + FIRST_ITEM] <= MOST_AWAITED * block.blocks


@device
def stages_at(block):
    """Where the stages begin in the arena, at its end."""
    return (opaque(i64(block.shared.shape[0])) - i64(warps()) * STAGES * (STAGE >> 1)) & -4


@device
def rope_at(block, model):
    """Where the rows' cosines and sines are kept during a step, below the stages."""
    return stages_at(block) - opaque(i64(model.stream_rows)) * i64(model.head_dim)


@device
def set_up(block, model):
    """Before anything else: all stages are empty. All lanes of the blocks that compute; a barrier is to follow."""
    if tiles_pay(model.weights) and model.stream_rows > 0:
        note_kinds(block, model)
        bars = mbarriers(block.shared, STAGE_BARRIERS, STAGES * MOST_WARPS)
        cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
        if lane_id() == 0:
            for stage in range(STAGES):
                mbarrier_init(bars, warp_id() * STAGES + stage, 1)
            for word in (STAGE_NOW, PARITY):
                cursors[warp_id() * CURSOR + word] = i32(0)


@device
def note_kinds(block, model):
    """Note what there is to know of the kinds of products, which else would come from memory in each phase."""
    kinds, layers = arena_view(block.shared, KINDS, ALL_KINDS, model.eos), i64(model.layers)
    kind = i64(thread_id())
    while kind <= LOGITS:
        number = 4 * layers if kind == LOGITS else kind
        for column in range(TURN + 1):
            kinds[kind * KIND + column] = model.stream[number, column]
        whole, rest = divide(i64(model.stream[number, STRIPS]), i64(block.blocks))
        kinds[kind * KIND + WHOLE] = i32(whole)
        kinds[kind * KIND + REST] = i32(rest)
        kind += block_threads()
    if thread_id() == 0:  # behind the first layer comes the second, or the logits
        turn = i32(model.stream[4, TURN] - model.stream[0, TURN])
        kinds[LAYER_AT] = i32(model.stream[4, AT] - model.stream[0, AT])
        kinds[LAYER_TURN] = i32(turn + i32(block.blocks)) if turn < 0 else turn


@device
def first_strip(block, kinds, kind, layer):
    """The first strip of a product that is this block's; then every `blocks`-th.

    The one behind the last of the product before belongs to the block behind the one that had that.
    """
    turn = i64(kinds[kind * KIND + TURN])
    if kind != LOGITS:
        turn = divide(turn + i64(layer) * i64(kinds[LAYER_TURN]), i64(block.blocks))[1]
    strip = i32(block.id - turn)
    return i32(strip + i32(block.blocks)) if strip < 0 else strip


@device
def share_of(kinds, kind):
    """This warp's share of a strip's columns: (first fragment, fragments)."""
    share, steps = kinds[kind * KIND + SHARE], kinds[kind * KIND + STEPS]
    first = i32(i32(warp_id()) * share)
    return first, i32(max(i32(0), min(share, i32(steps - first))))


@device
def begin(block, model, product, products):
    """Start the stream with a product, to end before number `products` of them. All lanes of a block.

    Returns the stage that the first piece comes to, and the parity of its phase.
    """
    cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
    at = i64(warp_id()) * CURSOR
    stage, parity = i32(cursors[at + STAGE_NOW]), i32(cursors[at + PARITY])
    warp_barrier()  # all have read it
    if lane_id() == 0:
        cursors[at + PRODUCT] = i32(product - 1)
        cursors[at + STRIPS_LEFT] = i32(0)
        async_fence()  # a step before this one, or attention, may have written where the stages are
        asked = i32(0)
        while asked < STAGES:
            ask(block, model, products)
            asked = i32(asked + 1)
    return stage, parity


@device
def ask(block, model, products):
    """Start the copy of this warp's next piece of weights, if there is one, to the free stage. One lane."""
    cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
    at = i64(warp_id()) * CURSOR
    if cursors[at + STRIPS_LEFT] == 0:
        turn_to_next(block, model, products, cursors, at)
    left = cursors[at + STRIPS_LEFT]
    if left > 0:
        ask_piece(block, model, cursors, at, left)


@device
def ask_piece(block, model, cursors, at, left):
    """:func:`ask`, where `left` strips are left of the product at which the cursor is. One lane."""
    stage, parity, hop = cursors[at + STAGE_NOW], cursors[at + PARITY], cursors[at + HOP]
    done, share, source = cursors[at + DONE], cursors[at + OF_EACH], cursors[at + NEXT]
    bars = mbarriers(block.shared, STAGE_BARRIERS, STAGES * MOST_WARPS)
    stages = arena_view(block.shared, stages_at(block), i64(warps()) * (STAGES * STAGE), model.packed)
    bar, n = i64(warp_id()) * STAGES + stage, i32(min(i32(share - done), i32(PIECE)))
    mbarrier_expect_bytes(bars, bar, i64(n) * (2 * SIZE))
    copy_async(stages, bar * STAGE, model.packed, i64(source) * SIZE, i64(n) * SIZE, bars, bar)
    done, source = i32(done + n), i32(source + n)
    if done == share:
        done, source, left = i32(0), i32(source + hop), i32(left - 1)
    cursors[at + STRIPS_LEFT] = left
    cursors[at + DONE] = done
    cursors[at + NEXT] = source
    cursors[at + STAGE_NOW] = next_stage(stage)
    cursors[at + PARITY] = next_parity(stage, parity)


@device
def turn_to_next(block, model, products, cursors, at):
    """The cursor goes to the next product of which this warp has a share, if there is one. One lane."""
    kinds, product = arena_view(block.shared, KINDS, ALL_KINDS, model.eos), i64(cursors[at + PRODUCT]) + 1
    while product < products:
        kind, layer = kind_of(model, product), i32(product >> 2)
        first, share = share_of(kinds, kind)
        strip, word = first_strip(block, kinds, kind, layer), kind * KIND
        left = i32(kinds[word + WHOLE] + i32(strip < kinds[word + REST]))
        if left > 0 and share > 0:
            steps, source = kinds[word + STEPS], kinds[word + AT]
            if kind != LOGITS:
                source = i32(source + layer * kinds[LAYER_AT])
            cursors[at + STRIPS_LEFT] = left
            cursors[at + DONE] = i32(0)
            cursors[at + OF_EACH] = i32(share)
            cursors[at + NEXT] = i32(source + strip * steps + first)
            cursors[at + HOP] = i32(i32(block.blocks) * steps - share)
            break
        product += 1
    cursors[at + PRODUCT] = i32(product)


@device
def next_stage(stage):
    """The stage after a stage."""
    return i32(0 if stage == STAGES - 1 else stage + 1)


@device
def next_parity(stage, parity):
    """The parity of the phase of the stage after a stage: the other one if it is the first stage again."""
    return i32(parity ^ i32(stage == STAGES - 1))


@device
def drain(block, model, stage, parity):
    """Wait for what has been asked for and will not be multiplied. All lanes, behind a barrier."""
    cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
    bars, at = mbarriers(block.shared, STAGE_BARRIERS, STAGES * MOST_WARPS), i64(warp_id()) * CURSOR
    while stage != cursors[at + STAGE_NOW] or parity != cursors[at + PARITY]:
        mbarrier_wait(bars, i64(warp_id()) * STAGES + stage, parity)
        stage, parity = next_stage(stage), next_parity(stage, parity)


@device
def keep_stage(block, model, stage, parity, owed):
    """Keep the stage that is waited for next, its parity and what is owed in the arena. All lanes of a warp."""
    cursors, at = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos), i64(warp_id()) * CURSOR
    if lane_id() == 0:
        cursors[at + STAGE_KEPT] = stage
        cursors[at + PARITY_KEPT] = parity
        cursors[at + OWED_KEPT] = owed


@device
def kept_stage(block, model):
    """What :func:`keep_stage` has kept, what is owed in lane 0; behind a barrier."""
    cursors, at = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos), i64(warp_id()) * CURSOR
    owed = cursors[at + OWED_KEPT] if lane_id() == 0 else i32(0)
    return i32(cursors[at + STAGE_KEPT]), i32(cursors[at + PARITY_KEPT]), i32(owed)


@device
def four_of(x, at):
    """Four numbers next to each other. One lane."""
    return x[at], x[at + 1], x[at + 2], x[at + 3]


@device
def hand_on(rows, row, column, gains, normed, model, act, a, b, c, d):
    """What the next product takes of four columns of the residual stream, to the rows at `normed`. One lane."""
    squares = handed.squares_behind(rows, model, normed) + (row * i64(model.hidden) + column >> 2)
    g0, g1, g2, g3 = gains
    publish(act.handed, squares, a * a + b * b + (c * c + d * d))
    fragment_put(act.handed, normed + row_at(rows, row, column), a * g0, b * g1, c * g2, d * g3)


@device
def layer_taken(act, kind, layer):
    """Where the layer's places begin of which a product takes its activations: its own, or the one before."""
    return handed.of_layer(act, i64(layer) - i64(int(kind == PROJECT) | int(kind == LOGITS)))


@device
def begin_rows(block, plan, rows, layer, x, model, cache, act):
    """The rows of x are the residual stream before a layer. Blocks share out rows; no barrier.

    All that is published from here on is cleared, and each block notes what all layers ask for: the rows' pages,
    their places in them, their cosines and sines.
    """
    note_room(block, rows, model)
    of_chunks = i64(0)
    if act.most_chunks > 0:
        of_chunks = awaited_of_layer(block, model)
    handed.clear(block, rows, layer, of_chunks, model, act)
    before = layer_taken(act, PROJECT, layer)
    normed, stream = before + handed.behind_mlp(rows, model), before + handed.stream_at(rows, model)
    bests = arena_view(block.shared, BESTS, 2 * MOST_ROWS, plan.best)
    places, t = arena_view(block.shared, PLACES, 2 * MOST_ROWS, model.eos), i64(thread_id())
    while t < rows:
        n_page, inside = divide(i64(plan.position[t]), i64(cache.page_size))
        places[2 * t] = i32(inside)
        places[2 * t + 1] = cache.table[plan.slot[t], n_page]
        bests[t] = LOWEST
        t += block_threads()
    d, e = opaque(i64(model.head_dim)), i64(thread_id())
    while e < rows * d:
        t, i = divide(e, d)
        block.shared[rope_at(block, model) + e] = model.rope[plan.position[t], i]
        e += block_threads()
    width, t = opaque(i64(model.hidden)), i64(block.id)
    while t < rows:
        column, at = 4 * i64(thread_id()), t * width
        while column < width:
            a, b, c, d = four_of(x, at + column)
            publish_four(act.handed, stream + at + column, a, b, c, d)
            gains = four_of(model.norm, 2 * layer * width + column)
            hand_on(rows, t, column, gains, normed, model, act, a, b, c, d)
            column += 4 * block_threads()
        t += block.blocks


@device
def measure_rows(block, rows, squares, model, act):
    """One over the root mean square of each row, into the arena, for behind a barrier. A warp a row."""
    quads, t = opaque(i64(model.hidden)) >> 2, i64(i32(warps()) - 1 - i32(warp_id()))  # the others finish rows
    while t < rows:
        total = awaited_sum(act.handed, squares + t * quads, quads)
        if lane_id() == 0:
            block.shared[SCRATCH + t] = f32(1.0) / f32(math.sqrt(total / f32(model.hidden) + model.eps))
        t += warps()


@device
def sum_of_shares(shared, at, step):
    """The sum of a number of each warp's, in order; four of them are loaded at once. One lane."""
    total, left = f32(0.0), i32(warps())
    while left > 3:
        a, b, c, d = shared[at], shared[at + step], shared[at + 2 * step], shared[at + 3 * step]
        total = total + a + b + c + d
        at += 4 * step
        left = i32(left - 4)
    while left > 0:
        total += shared[at]
        at += step
        left = i32(left - 1)
    return total


@device
def results_at(rows, slot):
    """Where the warps' sums of a strip begin in the arena."""
    size = i64(warps()) * rows * FRAGMENT_PITCH + SLOT_GAP + rows * ADDENDS
    return SCRATCH + MOST_ROWS + slot * size


@device
def addends_at(rows, slot):
    """Where in the arena that begins which the sums of a strip are added to, of the rows."""
    return results_at(rows, slot) + i64(warps()) * rows * FRAGMENT_PITCH + SLOT_GAP


@device
def note_room(block, rows, model):
    """Note for each kind where its activations lie, and how many of them, and how many sums, there is room for."""
    kinds, kind = arena_view(block.shared, KINDS, ALL_KINDS, model.eos), i64(thread_id())
    size = results_at(rows, 1) - results_at(rows, 0)
    while kind <= LOGITS:
        room, of_each = rope_at(block, model) - results_at(rows, 0), warps() * packed_floats(rows * FRAGMENT)
        fetched, most = kinds[kind * KIND + SHARE], i32(MOST_SLOTS)
        if fetched * of_each + size > room:
            fetched = i32(PIECE)
        while fetched > LEAST and fetched * of_each + size > room:
            fetched = i32(fetched >> 1)
        room -= fetched * of_each
        while most * size > room:
            most = i32(most >> 1)
        kinds[kind * KIND + FETCHED] = fetched
        kinds[kind * KIND + MOST_AT_ONCE] = most
        takes = i64(0)
        if kind == GATED:
            takes = handed.behind_attention(rows, model)
        elif kind == LOWERED:
            takes = handed.gated_at(rows, model)
        elif kind != ATTENDED:
            takes = handed.behind_mlp(rows, model)
        kinds[kind * KIND + TAKES] = i32(takes)
        kind += block_threads()
    if thread_id() == 0:
        kinds[MIDDLE_AT] = i32(handed.middle_at(rows, model))
        kinds[PROJECTED_AT] = i32(handed.projected_at(rows, model))
        kinds[STREAM_AT] = i32(handed.stream_at(rows, model))


@device
def prepare(block, number, model):
    """Find out what a product takes to know, before it begins, and keep it in the arena. All lanes of a warp.

    The first of this block's strips, this warp's first fragment of each, and how many it has.
    """
    cursors, at = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos), i64(warp_id()) * CURSOR
    warp_barrier()  # all have read what was there
    if lane_id() == 0:
        kinds, kind = arena_view(block.shared, KINDS, ALL_KINDS, model.eos), kind_of(model, number)
        first, share = share_of(kinds, kind)
        cursors[at + STRIP] = first_strip(block, kinds, kind, number >> 2)
        cursors[at + FIRST_FRAGMENT] = first
        cursors[at + FRAGMENTS] = share
    warp_barrier()


@device
def rows_taken(kinds, kind, layer, act):
    """Where the activations begin that a product takes of what has been handed on."""
    return layer_taken(act, kind, layer) + kinds[kind * KIND + TAKES]


@device
def place_of(block, rows, fetched, model):
    """Where a warp's place for activations begins in the arena, of so many fragments, below the rows' cosines."""
    return rope_at(block, model) - (i64(warps()) - warp_id()) * packed_floats(i64(fetched) * rows * FRAGMENT)


@device
def adds(kind):
    """Whether a product is added to the residual stream."""
    return int(kind == ATTENDED) | int(kind == LOWERED)


@device
def bring_addends(block, rows, kind, layer, strip, model, act):
    """What the sums of the next strips are added to, and the next gains, come to the arena. A warp a row.

    That is while the activations are being made, and not when others wait for what comes of it.
    """
    kinds, its = arena_view(block.shared, KINDS, ALL_KINDS, model.eos), handed.of_layer(act, layer)
    before, width = its - i64(act.of_layer) + kinds[STREAM_AT], opaque(i64(model.hidden))
    if kind == LOWERED:
        before = its + kinds[MIDDLE_AT]
    gain, strips = (2 * i64(layer) + 1 + i64(kind == LOWERED)) * width, i64(kinds[kind * KIND + STRIPS])
    t, most = i64(warp_id()), i64(kinds[kind * KIND + MOST_AT_ONCE])
    while t < rows:
        e = i64(lane_id())
        while e < 4 * most:
            slot, quad = e >> 2, 4 * (e & 3)
            of = strip + slot * block.blocks
            if of < strips:
                to, column = addends_at(rows, slot) + t * ADDENDS + quad, FRAGMENT * of + quad
                g, h, i, j = four_of(model.norm, gain + column)
                a, b, c, d = awaited_four(act.handed, before + t * width + column)
                put_four(block.shared, to, a, b, c, d)
                put_four(block.shared, to + FRAGMENT, g, h, i, j)
            e += warp_width()
        t += warps()


@device
def fetch(block, rows, number, model, act):
    """Wait for the activations that a warp takes, and bring them to its place in the arena, if all fit there.

    All blocks call it, behind :func:`prepare` and a barrier of the block; one without a strip of the product waits
    for nothing.
    """
    kinds = arena_view(block.shared, KINDS, ALL_KINDS, model.eos)
    cursors, mine = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos), i64(warp_id()) * CURSOR
    kind, layer = kind_of(model, number), number >> 2
    if cursors[mine + STRIP] < kinds[kind * KIND + STRIPS]:
        if adds(kind):
            bring_addends(block, rows, kind, layer, i64(cursors[mine + STRIP]), model, act)
        first, share = cursors[mine + FIRST_FRAGMENT], cursors[mine + FRAGMENTS]
        at, fetched = rows_taken(kinds, kind, layer, act), kinds[kind * KIND + FETCHED]
        if share <= fetched:
            place, n = place_of(block, rows, fetched, model), packed_floats(i64(share) * rows * FRAGMENT)
            awaited_copy(block.shared, place, act.handed, at + packed_floats(i64(first) * rows * FRAGMENT), n)
        if kind != ATTENDED and kind != LOWERED:
            measure_rows(block, rows, handed.squares_behind(rows, model, at), model, act)
        warp_barrier()  # the warp's activations are there
    if kind == LOWERED and thread_id() == block_threads() - 1:
        kinds[STOPS] = i32(int(handed.stops(rows, layer, model, act)))


@device
def stops(block, model):
    """Whether the step stops behind the layer whose last product has been computed. Behind a barrier."""
    return arena_view(block.shared, KINDS, ALL_KINDS, model.eos)[STOPS] != 0


@device
def product(block, plans, now, rows, number, products, stage, parity, model, sampling, cache, act):
    """One product for all rows, and what is made of it; the stage and parity of the next piece, and what it owes.

    The first piece of the next one, if there is one before number `products`, is asked for before the last sums
    are added up. All blocks call it, behind :func:`fetch`. :func:`settle` is to follow, and a barrier.
    """
    kinds = arena_view(block.shared, KINDS, ALL_KINDS, model.eos)
    cursors, mine = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos), i64(warp_id()) * CURSOR
    kind, layer, size = kind_of(model, number), number >> 2, results_at(rows, i64(1)) - results_at(rows, i64(0))
    strip, share = cursors[mine + STRIP], cursors[mine + FRAGMENTS]
    strips, most = kinds[kind * KIND + STRIPS], kinds[kind * KIND + MOST_AT_ONCE]
    begun, owed = False, i32(0)
    while strip < strips:
        if begun:
            barrier()  # the sums before have been read
            if adds(kind):
                bring_addends(block, rows, kind, layer, i64(strip), model, act)
        begun, slot, here = True, i32(0), strip
        to = results_at(rows, i64(0)) + i64(warp_id()) * rows * FRAGMENT_PITCH
        while here < strips and slot < most:
            stage, parity, owed = multiply_strip(
                block, rows, kind, layer, to, share, stage, parity, owed, model, act
            )
            slot, here, to = i32(slot + 1), i32(here + block.blocks), to + size
        if owed > 0 and here >= strips and kind != PROJECT:
            ask(block, model, products)  # for one: whoever loads, or releases, waits behind what is on its way
            owed = i32(owed - 1)
        barrier()
        finish(block, plans, now, rows, kind, layer, i64(strip), i64(slot), model, sampling, cache, act)
        strip = here
    if kind == LOGITS:
        bring_bests(block, plan_of(plans, now))
    return stage, parity, owed


@device
def settle(block, model, products, owed, left):
    """Ask for the pieces that :func:`multiply_strip` has not asked for, so many in lane 0, but for what is left.

    Returns how many it is, there.
    """
    while owed > left:
        ask(block, model, products)
        owed = i32(owed - 1)
    return owed


@device
def multiply_strip(block, rows, kind, layer, to, share, stage, parity, owed, model, act):
    """This warp's columns of the strip whose weights come next; its sums lie in the arena then.

    `share` fragments. Their activations lie in its place, or come there as they are published, if there is no room
    for all. Returns the stage and parity of the next piece, and in lane 0, how many pieces it has yet to ask for:
    where the next one is another product's, which takes time to find out, that waits until nobody waits for these
    sums (:func:`settle`).
    """
    cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
    kinds = arena_view(block.shared, KINDS, ALL_KINDS, model.eos)
    bars = mbarriers(block.shared, STAGE_BARRIERS, STAGES * MOST_WARPS)
    weights = arena_view(block.shared, stages_at(block), i64(warps()) * (STAGES * STAGE), model.packed)
    bar, fetched = i64(warp_id()) * STAGES, kinds[kind * KIND + FETCHED]
    place, done = place_of(block, rows, fetched, model), i32(0)
    if share == 0:
        fragment_dots(block.shared, to, weights, i64(0), i64(0), block.shared, place, rows, False)
    while done < share:
        left, at = i32(min(share - done, i32(PIECE))), (bar + stage) * STAGE
        mbarrier_wait(bars, bar + stage, parity)
        while left > 0:
            n = i32(min(left, fetched))
            floats = packed_floats(i64(n) * rows * FRAGMENT)
            if share > fetched:
                fetch_some(block, rows, kind, layer, done, place, floats, model, act)
            fragment_dots(block.shared, to, weights, at, i64(n), block.shared, place, rows, done > 0)
            if share > fetched:
                warp_barrier()  # the place has been read
            else:
                place += floats
            left, done, at = i32(left - n), i32(done + n), at + i64(n) * SIZE
        warp_barrier()  # the stage has been read
        if lane_id() == 0:
            mine = i64(warp_id()) * CURSOR
            strips_left = cursors[mine + STRIPS_LEFT]
            if strips_left > 0:
                ask_piece(block, model, cursors, mine, strips_left)
            else:
                owed = i32(owed + 1)
        stage, parity = next_stage(stage), next_parity(stage, parity)
    return stage, parity, owed


@device
def fetch_some(block, rows, kind, layer, done, place, floats, model, act):
    """Wait for the activations of the next fragments of a warp's share, of which so many are done. All lanes."""
    kinds = arena_view(block.shared, KINDS, ALL_KINDS, model.eos)
    first = i64(share_of(kinds, kind)[0]) + done
    source = rows_taken(kinds, kind, layer, act) + packed_floats(first * rows * FRAGMENT)
    awaited_copy(block.shared, place, act.handed, source, floats)
    warp_barrier()


@device
def finish(block, plans, now, rows, kind, layer, strip, slots, model, sampling, cache, act):
    """What is made of the sums of `slots` strips, the first of which is `strip`. A warp takes a row at a time."""
    t = i64(warp_id())
    if kind == LOGITS:
        plan = plan_of(plans, now)
        while t < plan.count[SAMPLES]:
            finish_logits(block, plan, rows, t, strip, slots, model, sampling, act.logits)
            t += warps()
    else:
        kinds, its = arena_view(block.shared, KINDS, ALL_KINDS, model.eos), handed.of_layer(act, layer)
        while t < rows:
            if kind == PROJECT:
                finish_pairs(block, rows, t, its + kinds[PROJECTED_AT], layer, strip, slots, model, cache, act)
            elif kind == GATED:
                finish_gated(block, rows, t, its + kinds[LOWERED * KIND + TAKES], strip, slots, model, act)
            else:
                normed = its + kinds[(GATED if kind == ATTENDED else PROJECT) * KIND + TAKES]
                after = its + kinds[MIDDLE_AT if kind == ATTENDED else STREAM_AT]
                finish_sums(block, rows, t, after, normed, strip, slots, model, act)
            t += warps()


@device
def finish_pairs(block, rows, t, projected, layer, strip, slots, model, cache, act):
    """One warp: a row's queries, keys and values, rotated, handed on from `projected` on, and kept in pages."""
    e, step, d = i64(lane_id()), rows * FRAGMENT_PITCH, opaque(i64(model.head_dim))
    places = arena_view(block.shared, PLACES, 2 * MOST_ROWS, model.eos)
    inside, page, rope = i64(places[2 * t]), i64(places[2 * t + 1]), rope_at(block, model) + t * d
    scale = block.shared[SCRATCH + t]
    while e < 8 * slots:
        slot, pair = e >> 3, e & 7
        head, part = divide(strip + slot * block.blocks, d >> 4)
        i, cos, sin = 8 * part + pair, f32(1.0), f32(0.0)
        if head < i64(model.heads) + model.kv_heads:
            cos, sin = block.shared[rope + i], block.shared[rope + (d >> 1) + i]
        at = results_at(rows, slot) + t * FRAGMENT_PITCH + pair
        a = sum_of_shares(block.shared, at, step) * scale
        b = sum_of_shares(block.shared, at + 8, step) * scale
        a, b = rotate(a, b, cos, sin)
        to = projected + t * handed.projected_width(model) + head * d + i
        publish(act.handed, to, a)
        publish(act.handed, to + (d >> 1), b)
        if head >= i64(model.heads):
            keep_pair(page, inside, layer, head, i, a, b, model, cache)
        e += warp_width()


@device
def finish_gated(block, rows, t, gated, strip, slots, model, act):
    """One warp: silu(gate) * up of a row, handed on from `gated` on."""
    scale, e = block.shared[SCRATCH + t], i64(lane_id())
    step = rows * FRAGMENT_PITCH
    while e < 2 * slots:
        slot, quad = e >> 1, 4 * (e & 1)
        at = results_at(rows, slot) + t * FRAGMENT_PITCH + quad
        g, u = sum_of_fours(block.shared, at, step, warps()), sum_of_fours(block.shared, at + 8, step, warps())
        a, b = silu(g[0] * scale) * (u[0] * scale), silu(g[1] * scale) * (u[1] * scale)
        c, d = silu(g[2] * scale) * (u[2] * scale), silu(g[3] * scale) * (u[3] * scale)
        to = gated + row_at(rows, t, 8 * (strip + slot * block.blocks) + quad)
        fragment_put(act.handed, to, a, b, c, d)
        e += warp_width()


@device
def finish_sums(block, rows, t, after, normed, strip, slots, model, act):
    """One warp: a row's sums are added to the residual stream, and handed on to the rows at `normed`.

    What they are added to lies in the arena (:func:`bring_addends`); what comes of it is published at `after`.
    """
    e = i64(lane_id())
    while e < 4 * slots:
        slot, quad = e >> 2, 4 * (e & 3)
        at = results_at(rows, slot) + t * FRAGMENT_PITCH + quad
        column = FRAGMENT * (strip + slot * block.blocks) + quad
        its = addends_at(rows, slot) + t * ADDENDS + quad
        gains, (a, b, c, d) = four_of(block.shared, its + FRAGMENT), four_of(block.shared, its)
        y = sum_of_fours(block.shared, at, rows * FRAGMENT_PITCH, warps())
        a, b, c, d = a + y[0], b + y[1], c + y[2], d + y[3]
        hand_on(rows, t, column, gains, normed, model, act, a, b, c, d)
        publish_four(act.handed, after + t * i64(model.hidden) + column, a, b, c, d)
        e += warp_width()


@device
def finish_logits(block, plan, rows, s, strip, slots, model, sampling, logits):
    """One warp: logits of a sample, and the best of them, if it has no filters."""
    bests = arena_view(block.shared, BESTS, 2 * MOST_ROWS, plan.best)
    t, e, best = i64(plan.sample_row[s]), i64(lane_id()), LOWEST
    scale, drawn = block.shared[SCRATCH + t], sampling.filtered[plan.sample_slot[s]] == 0
    temperature, seed, position = plan.temperature[s], plan.seed[s], plan.draw[s]
    while e < FRAGMENT * slots:
        slot, r = e >> 4, e & 15
        at = results_at(rows, slot) + t * FRAGMENT_PITCH + r
        logit = sum_of_shares(block.shared, at, rows * FRAGMENT_PITCH) * scale
        token = FRAGMENT * (strip + slot * block.blocks) + r
        if token < model.vocab:
            logits[s * model.vocab + token] = logit
            if drawn:
                best = max(best, rank(score(logit, temperature, seed, position, token), token))
        e += warp_width()
    best = lane_max(best)
    if lane_id() == 0:
        bests[s] = max(best, bests[s])


@device
def bring_bests(block, plan):
    """What the block has seen may be the best of all. Each warp brings what it has seen.

    Once a step: an atomic that releases waits for all weights that are on their way to the block.
    """
    bests, s = arena_view(block.shared, BESTS, 2 * MOST_ROWS, plan.best), i64(warp_id())
    while s < plan.count[SAMPLES]:
        if lane_id() == 0 and bests[s] > LOWEST:
            atomic_max(plan.best, s, bests[s])
        s += warps()
