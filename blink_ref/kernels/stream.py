"""The layers for a few rows, as one stream of weights that never waits for a barrier.

Packed weights (:mod:`.packing`) come by bulk copies into stages, of which each warp has its own, in the order in
which they will be multiplied: strip after strip of this block, product after product, layer after layer. A warp
that has multiplied a piece asks for the one after the last asked for, so while a block waits at a barrier or
attends, its stages fill up, and the memory is busy all the time. The idea is that of Hazy Research's megakernel
("Look Ma, No Bubbles!", 2025); docs/performance.md says what it brings.

A block takes strips of 16 outputs in turn, and its warps share a strip's columns; each leaves its sums in the
arena, and behind a barrier they are added up, in order. So a few rows cost hardly more than one, and a row's
results do not depend on the rows beside it. Activations lie as :func:`fragment_put` leaves them, written by
whoever makes them. A row is normalised where it is used: its columns are multiplied with the gains where they are
made, with the sums of their squares beside them, and the result with the row's scale.
"""

import math

from ..simt import device
from ..simt.vocabulary import (
    FRAGMENT,
    FRAGMENT_PITCH,
    arena_view,
    async_fence,
    atomic_max,
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
    lane_sum,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mbarriers,
    opaque,
    packed_floats,
    rank,
    sum_of_fours,
    thread_id,
    tiles_pay,
    warp_barrier,
    warp_copy,
    warp_id,
    warp_width,
    warps,
)
from . import attention
from .attention import store_pair
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
AT_ONCE = 512
"""Most floats of activations that a warp's lanes load by themselves. More are copied asynchronously: that takes a
fence and an mbarrier, but no lane waits for one load after the other."""
MOST_SLOTS = 8
"""Most strips whose sums wait in the arena at a time."""
SLOT_GAP = 16
"""Floats between the sums of two strips, which keep lanes apart in the arena's banks."""

PRODUCT, STRIPS_LEFT, DONE, OF_EACH, NEXT, HOP, STAGE_NOW, PARITY, ROWS_PARITY, STAGE_KEPT, PARITY_KEPT = range(11)
"""Words of a warp's cursor: the product that it asks for; this block's strips of it that are left; of the first of
them the fragments asked for, and of each the warp's share; the fragment to ask for next, and how far it is from
the last of a strip to the first of the next one. The stage that is next, and the parity of the phase that will be
over when the copy is there; the same of the mbarrier for activations. What :func:`keep_stage` keeps."""

WHOLE, REST, LONGEST, MOST_AT_ONCE = range(5, 9)
"""Words of a kind of products behind the columns of its row in :attr:`Model.stream`, those of the first layer: its
strips divided by the blocks, and what is left. And of a step: how many floats of activations each warp fetches
into the arena at most (0 = too many, and none does), and how many strips' sums may wait there."""
LAYER_AT, LAYER_TURN = 5 * KIND, 5 * KIND + 1
"""The words behind them: by how much AT and TURN grow from layer to layer."""
ALL_KINDS = 5 * KIND + 2
"""All these words, which lie at KINDS in the arena."""


def arena(rows: int, warps_in_block: int, head_dim: int, page_size: int) -> int:
    """Floats of arena that the stream needs for steps of `rows` rows: its stages, and below them room for the sums
    of a strip, or for attention, during which they fill up."""
    sums = SCRATCH + MOST_ROWS + warps_in_block * rows * FRAGMENT_PITCH + SLOT_GAP
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
def stages_at(block):
    """Where the stages begin in the arena, at its end."""
    return (i64(block.shared.shape[0]) - i64(warps()) * STAGES * (STAGE >> 1)) & -4


@device
def rope_at(block, model):
    """Where the rows' cosines and sines are kept during a step, below the stages."""
    return stages_at(block) - opaque(i64(model.stream_rows)) * i64(model.head_dim)


@device
def set_up(block, model):
    """Before anything else: all stages are empty. All lanes of the blocks that compute; a barrier is to follow."""
    if tiles_pay(model.weights) and model.stream_rows > 0:
        note_kinds(block, model)
        bars = mbarriers(block.shared, STAGE_BARRIERS, (STAGES + 1) * MOST_WARPS)
        cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
        if lane_id() == 0:
            for stage in range(STAGES):
                mbarrier_init(bars, warp_id() * STAGES + stage, 1)
            mbarrier_init(bars, STAGES * MOST_WARPS + warp_id(), 1)
            for word in (STAGE_NOW, PARITY, ROWS_PARITY):
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
    bars = mbarriers(block.shared, STAGE_BARRIERS, (STAGES + 1) * MOST_WARPS)
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
    bars, at = mbarriers(block.shared, STAGE_BARRIERS, (STAGES + 1) * MOST_WARPS), i64(warp_id()) * CURSOR
    while stage != cursors[at + STAGE_NOW] or parity != cursors[at + PARITY]:
        mbarrier_wait(bars, i64(warp_id()) * STAGES + stage, parity)
        stage, parity = next_stage(stage), next_parity(stage, parity)


@device
def keep_stage(block, model, stage, parity):
    """Keep the stage that is waited for next, and its parity, in the arena. All lanes of a warp."""
    cursors, at = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos), i64(warp_id()) * CURSOR
    if lane_id() == 0:
        cursors[at + STAGE_KEPT] = stage
        cursors[at + PARITY_KEPT] = parity


@device
def kept_stage(block, model):
    """What :func:`keep_stage` has kept; behind a barrier."""
    cursors, at = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos), i64(warp_id()) * CURSOR
    return i32(cursors[at + STAGE_KEPT]), i32(cursors[at + PARITY_KEPT])


@device
def gains_of(model, gain):
    """Four gains. One lane."""
    norm = model.norm
    return norm[gain], norm[gain + 1], norm[gain + 2], norm[gain + 3]


@device
def put_stream(rows, row, column, gains, model, act, a, b, c, d):
    """Four columns of the residual stream, and what the next product takes of them. One lane."""
    at, (g0, g1, g2, g3) = row * i64(model.hidden) + column, gains
    act.x[at] = a
    act.x[at + 1] = b
    act.x[at + 2] = c
    act.x[at + 3] = d
    act.squares[at >> 2] = a * a + b * b + (c * c + d * d)
    fragment_put(act.normed, row_at(rows, row, column), a * g0, b * g1, c * g2, d * g3)


@device
def begin_rows(block, plan, rows, layer, x, model, cache, act):
    """The rows of x are the residual stream before a layer. Blocks share out rows; no barrier.

    And each block notes what all layers ask for: the rows' pages, their places in them, their cosines and sines.
    """
    note_room(block, rows, model)
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
            a, b, c, d = x[at + column], x[at + column + 1], x[at + column + 2], x[at + column + 3]
            put_stream(rows, t, column, gains_of(model, 2 * layer * width + column), model, act, a, b, c, d)
            column += 4 * block_threads()
        t += block.blocks


@device
def measure_rows(block, rows, model, squares):
    """One over the root mean square of each row, into the arena, for behind a barrier. A warp a row."""
    quads, t = opaque(i64(model.hidden)) >> 2, i64(i32(warps()) - 1 - i32(warp_id()))  # the others finish rows
    step, first = 4 * i64(warp_width()), 4 * i64(lane_id())
    n = divide(max(i64(0), quads - first) + step - 1, step)[0]
    while t < rows:
        a, b, c, d = sum_of_fours(squares, t * quads + first, step, n)
        total = lane_sum(a + b + (c + d))
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
    size = i64(warps()) * rows * FRAGMENT_PITCH + SLOT_GAP
    return SCRATCH + MOST_ROWS + slot * size


@device
def fetch_rows(block, model, x, first, n, longest):
    """Copy this warp's columns of the rows, ``x[first:first+n]``, or begin to; where they go to in the arena.

    Its place is below the rows' cosines, where each warp has `longest` floats.
    """
    at = rope_at(block, model) - (i64(warps()) - warp_id()) * longest
    if longest <= AT_ONCE:
        warp_copy(block.shared, at, x, first, n)
        warp_barrier()
    elif lane_id() == 0 and n > 0:
        bars = mbarriers(block.shared, STAGE_BARRIERS, (STAGES + 1) * MOST_WARPS)
        async_fence()  # others have written x, and lanes have used the place
        mbarrier_expect_bytes(bars, STAGES * MOST_WARPS + warp_id(), 4 * n)
        copy_async(block.shared, at, x, first, n, bars, STAGES * MOST_WARPS + warp_id())
    return at


@device
def await_rows(block, model, share):
    """Wait for what :func:`fetch_rows` has begun to copy. All lanes of a warp."""
    cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
    bars, at = mbarriers(block.shared, STAGE_BARRIERS, (STAGES + 1) * MOST_WARPS), i64(warp_id()) * CURSOR
    if share > 0:
        parity = cursors[at + ROWS_PARITY]
        mbarrier_wait(bars, STAGES * MOST_WARPS + warp_id(), parity)
        warp_barrier()  # all have read it
        if lane_id() == 0:
            cursors[at + ROWS_PARITY] = i32(parity ^ 1)


@device
def note_room(block, rows, model):
    """Note how many activations, and how many sums, there is room for in a step of so many rows, for each kind."""
    kinds, kind, size = (
        arena_view(block.shared, KINDS, ALL_KINDS, model.eos),
        i64(thread_id()),
        results_at(rows, 1) - results_at(rows, 0),
    )
    while kind <= LOGITS:
        room = rope_at(block, model) - results_at(rows, 0)
        longest, most = packed_floats(i64(kinds[kind * KIND + SHARE]) * rows * FRAGMENT), i32(MOST_SLOTS)
        if longest * warps() + size > room:
            longest = i64(0)
        room -= longest * warps()
        while most * size > room:
            most = i32(most >> 1)
        kinds[kind * KIND + LONGEST] = i32(longest)
        kinds[kind * KIND + MOST_AT_ONCE] = most
        kind += block_threads()


@device
def prepare(block, number, model):
    """What a product takes to know, found out before the barrier in front of it: a tuple of int32.

    The first of this block's strips, the strips of all blocks, this warp's first fragment, how many it has; and
    the step's LONGEST and MOST_AT_ONCE.
    """
    kinds, kind = arena_view(block.shared, KINDS, ALL_KINDS, model.eos), kind_of(model, number)
    first, share = share_of(kinds, kind)
    strip, strips = first_strip(block, kinds, kind, number >> 2), kinds[kind * KIND + STRIPS]
    return strip, strips, first, share, kinds[kind * KIND + LONGEST], kinds[kind * KIND + MOST_AT_ONCE]


@device
def product(block, plan, rows, samples, number, products, prepared, stage, parity, model, sampling, cache, act):
    """One product for all rows, and what is made of it; the stage and parity of the next piece, and what it owes.

    The first piece of the next one, if there is one before number `products`, is asked for before the last sums
    are added up. All blocks call it. It begins and ends without a grid barrier. :func:`settle` is to follow.
    """
    kind, layer = kind_of(model, number), number >> 2
    strip, strips, first, share, longest, most = prepared
    x, row = act.normed, packed_floats(i64(first) * rows * FRAGMENT)
    if kind == ATTENDED:
        x = act.attended
    elif kind == LOWERED:
        x = act.gated
    if longest > 0:
        row = fetch_rows(block, model, x, row, packed_floats(i64(share) * rows * FRAGMENT), i64(longest))
    if kind != ATTENDED and kind != LOWERED:
        measure_rows(block, rows, model, act.squares)
    if longest > 0:
        x = block.shared
        if longest > AT_ONCE:
            await_rows(block, model, share)
    size = results_at(rows, i64(1)) - results_at(rows, i64(0))
    begun, owed = False, i32(0)
    while strip < strips:
        if begun:
            barrier()  # the sums before have been read
        begun, slot, here = True, i32(0), strip
        to = results_at(rows, i64(0)) + i64(warp_id()) * rows * FRAGMENT_PITCH
        while here < strips and slot < most:
            stage, parity, owed = multiply_strip(block, rows, to, x, row, i64(share), stage, parity, owed, model)
            slot, here, to = i32(slot + 1), i32(here + block.blocks), to + size
        if owed > 0 and here >= strips and not (kind == PROJECT and pauses(block, rows, model)):
            ask(block, model, products)  # for one: a release waits for all that is on its way to the block
            owed = i32(owed - 1)
        barrier()
        finish(block, plan, rows, samples, kind, layer, i64(strip), i64(slot), model, sampling, cache, act)
        strip = here
    if kind == LOGITS:
        bring_bests(block, plan, samples)
    return stage, parity, owed


@device
def settle(block, model, products, owed):
    """Ask for the pieces that :func:`multiply_strip` has not asked for, so many in lane 0."""
    while owed > 0:
        ask(block, model, products)
        owed = i32(owed - 1)


@device
def multiply_strip(block, rows, to, x, row, share, stage, parity, owed, model):
    """This warp's columns of the strip whose weights come next; its sums lie in the arena then.

    `share` fragments; those of x begin at `row`. Returns the stage and parity of the next piece, and in lane 0,
    how many pieces it has yet to ask for: where the next one is another product's, which takes time to find out,
    that waits until nobody waits for these sums (:func:`settle`).
    """
    cursors = arena_view(block.shared, CURSORS, CURSOR * MOST_WARPS, model.eos)
    bars = mbarriers(block.shared, STAGE_BARRIERS, (STAGES + 1) * MOST_WARPS)
    weights = arena_view(block.shared, stages_at(block), i64(warps()) * (STAGES * STAGE), model.packed)
    bar, more = i64(warp_id()) * STAGES, False
    if share == 0:
        fragment_dots(block.shared, to, weights, i64(0), i64(0), x, row, rows, False)
    while share > 0:
        steps = min(share, i64(PIECE))
        mbarrier_wait(bars, bar + stage, parity)
        fragment_dots(block.shared, to, weights, (bar + stage) * STAGE, steps, x, row, rows, more)
        warp_barrier()  # the stage has been read
        if lane_id() == 0:
            at = i64(warp_id()) * CURSOR
            left = cursors[at + STRIPS_LEFT]
            if left > 0:
                ask_piece(block, model, cursors, at, left)
            else:
                owed = i32(owed + 1)
        stage, parity = next_stage(stage), next_parity(stage, parity)
        more, share, row = True, share - steps, row + packed_floats(steps * rows * FRAGMENT)
    return stage, parity, owed


@device
def finish(block, plan, rows, samples, kind, layer, strip, slots, model, sampling, cache, act):
    """What is made of the sums of `slots` strips, the first of which is `strip`. A warp takes a row at a time."""
    t = i64(warp_id())
    if kind == LOGITS:
        while t < samples:
            finish_logits(block, plan, rows, t, strip, slots, model, sampling, act.logits)
            t += warps()
    else:
        while t < rows:
            if kind == PROJECT:
                finish_pairs(block, rows, t, layer, strip, slots, model, cache, act.q)
            elif kind == GATED:
                finish_gated(block, rows, t, strip, slots, model, act.gated)
            else:
                gain = (2 * i64(layer) + 1 + i64(kind == LOWERED)) * i64(model.hidden)
                finish_sums(block, rows, t, gain, strip, slots, model, act)
            t += warps()


@device
def finish_pairs(block, rows, t, layer, strip, slots, model, cache, q):
    """One warp: a row's queries, keys and values, rotated, to where they belong."""
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
        store_pair(page, inside, t, layer, head, i, a, b, model, cache, q)
        e += warp_width()


@device
def finish_gated(block, rows, t, strip, slots, model, gated):
    """One warp: silu(gate) * up of a row."""
    scale, e = block.shared[SCRATCH + t], i64(lane_id())
    step = rows * FRAGMENT_PITCH
    while e < 2 * slots:
        slot, quad = e >> 1, 4 * (e & 1)
        at = results_at(rows, slot) + t * FRAGMENT_PITCH + quad
        g, u = sum_of_fours(block.shared, at, step, warps()), sum_of_fours(block.shared, at + 8, step, warps())
        a, b = silu(g[0] * scale) * (u[0] * scale), silu(g[1] * scale) * (u[1] * scale)
        c, d = silu(g[2] * scale) * (u[2] * scale), silu(g[3] * scale) * (u[3] * scale)
        fragment_put(gated, row_at(rows, t, 8 * (strip + slot * block.blocks) + quad), a, b, c, d)
        e += warp_width()


@device
def finish_sums(block, rows, t, gain, strip, slots, model, act):
    """One warp: a row's sums are added to the residual stream."""
    e, x = i64(lane_id()), act.x
    while e < 4 * slots:
        slot, quad = e >> 2, 4 * (e & 3)
        at = results_at(rows, slot) + t * FRAGMENT_PITCH + quad
        column = FRAGMENT * (strip + slot * block.blocks) + quad
        i = t * i64(model.hidden) + column
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        gains = gains_of(model, gain + column)
        y = sum_of_fours(block.shared, at, rows * FRAGMENT_PITCH, warps())
        put_stream(rows, t, column, gains, model, act, a + y[0], b + y[1], c + y[2], d + y[3])
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
def bring_bests(block, plan, samples):
    """What the block has seen may be the best of all. Each warp brings what it has seen.

    Once a step: an atomic that releases waits for all weights that are on their way to the block.
    """
    bests, s = arena_view(block.shared, BESTS, 2 * MOST_ROWS, plan.best), i64(warp_id())
    while s < samples:
        if lane_id() == 0 and bests[s] > LOWEST:
            atomic_max(plan.best, s, bests[s])
        s += warps()
