"""One step through the model: the phases of a plan, and what orders them."""

from ..kernels import handed, packing, stream, tiles
from ..kernels.attention import attend, project
from ..kernels.deal import note_deal
from ..kernels.embedding import embedding
from ..kernels.filters import draw_filtered
from ..kernels.flash import attend_in_tiles
from ..kernels.flash_decoding import ask_ahead, attend_in_chunks
from ..kernels.flash_items import awaits, is_free, note_own
from ..kernels.linear import add_linear
from ..kernels.logits import forget_draws, logits_and_draw
from ..kernels.mlp import gate_up
from ..kernels.tensors import DOWN, OUT
from ..kernels.work_list import list_work
from ..scheduler.pause import copy_stream, watch
from ..scheduler.sight import (
    ATTENDED,
    EMBEDDED,
    GATED,
    LAYER,
    LAYERS,
    LOWERED,
    OUTPUT,
    PROJECTED,
    stamp,
    timed_layer,
)
from ..scheduler.state import CHUNKS, FILTERED, FIRST_LAYER, INTERRUPTED, ROWS, SAMPLES, SPARE, plan_of
from ..simt import device, grid_arrive, grid_barrier, grid_wait
from ..simt.vocabulary import barrier, block_threads, heads_pay, i32, i64, opaque, thread_id


@device
def forward(block, window, slots, queue, plans, now, sampling, cache, model, act):
    """Compute plan number `now` and draw its samples, or as much of it as is done when an urgent request rings.

    All blocks of a grid or a team, after a grid barrier of all; the caller ends it with another.
    """
    plan = plan_of(plans, now)
    rows, first_layer = i64(plan.count[ROWS]), i64(plan.count[FIRST_LAYER])
    stage, parity, streamed = begin_step(block, plan, rows, first_layer, model, cache, act, model.packed)
    forget_draws(block, plan, i64(plan.count[SAMPLES]))
    if first_layer == 0:
        embedding(block, plan, plan_of(plans, queue.count[SPARE]), rows, model, act.x)
        barrier()
        begin_rows(block, plan, rows, first_layer, act.x, streamed, model, cache, act, model.packed)
    else:
        begin_rows(block, plan, rows, first_layer, act.aside, streamed, model, cache, act, model.packed)
    grid_barrier(block)
    stamp(plan, EMBEDDED, timed_layer(block, plan) >= 0 and first_layer == 0)
    rest = sampling, cache, model, act, model.packed
    compute_layers(block, window, plans, now, streamed, stage, parity, *rest)
    plan = plan_of(plans, now)
    rows = i64(plan.count[ROWS])
    if plan.count[INTERRUPTED] > 0:
        put_stream_aside(block, rows, plan.count[INTERRUPTED], model, act, model.packed)
    else:
        samples = i64(plan.count[SAMPLES])
        if not (stream.wanted(model, rows) or (tiles.wanted(model, rows) and tiles.wanted(model, samples))):
            stamp(plan, LAYERS, timed_layer(block, plan) >= 0)
            logits_and_draw(block, plan, samples, sampling, model, act.x, act.logits)
        if plan.count[FILTERED] > 0:
            grid_barrier(block)
            draw_filtered(block, plan, samples, slots, sampling, model, act)


@device
def put_stream_aside(block, rows, layer, model, act, packed):
    """The residual stream of a step that has been interrupted before a layer is kept. All blocks; no barrier."""
    x, at = act.x, i64(0)
    if packed is not None and stream.wanted(model, rows):
        x, at = act.handed, handed.of_layer(act, layer - 1) + handed.stream_at(rows, model)
    copy_stream(block, x, at, act.aside, rows * i64(model.hidden))


@device
def begin_step(block, plan, rows, first_layer, model, cache, act, packed):
    """List the attention's work, and ask for the first weights of a step, if it is computed from the stream.

    Returns the stage to wait for and its parity, and whether there is one. A barrier is to follow.
    """
    stage, parity, streamed = i32(0), i32(0), False
    if packed is not None:
        streamed = stream.wanted(model, rows)
        if streamed:
            stage, parity = stream.begin(block, model, 4 * first_layer, products_of(plan, model))
        if streamed or tiles.wanted(model, rows):
            entries = rows if streamed else i64(plan.count[CHUNKS])
            if not streamed:
                note_deal(block, rows, i64(plan.count[SAMPLES]), model)
            list_work(block, plan, entries, streamed, act.most_chunks > 0, model)
            barrier()
            if act.most_chunks > 0:
                limit = beyond = i64(block.shared.shape[0])
                pauses = streamed and stream.pauses(block, rows, model)
                if streamed:
                    limit = stream.rope_at(block, model)
                if pauses:
                    beyond = stream.stages_at(block)
                awaiting = streamed and stream.awaits(block, rows, model)
                note_own(block, limit, beyond, awaiting, model, cache, act)
    return stage, parity, streamed


@device
def begin_rows(block, plan, rows, first_layer, x, streamed, model, cache, act, packed):
    """The rows of x are the residual stream: in `act.x`, and as the layers take it. Blocks share out rows."""
    in_tiles = False
    if packed is not None:
        in_tiles = not streamed and tiles.wanted(model, rows)
        if streamed:
            stream.begin_rows(block, plan, rows, first_layer, x, model, cache, act)
        elif in_tiles:
            tiles.begin_rows(block, rows, first_layer, x, model, act)
    if first_layer > 0 and not streamed and not in_tiles:
        copy_stream(block, x, i64(0), act.x, rows * i64(model.hidden))


@device
def compute_layers(block, window, plans, now, streamed, stage, parity, sampling, cache, model, act, packed):
    """The plan's layers, as suits its rows: from the stream of packed weights, in tiles, or a number at a time.

    Where `packed` is None there is the last way only, and numba compiles nothing of the others: they are a third
    of the engine, and of no use without tensor cores.
    """
    if packed is None:
        layers_of_few_rows(block, window, plans, now, cache, model, act)
        return
    if streamed:
        layers_in_stream(block, window, plans, now, stage, parity, sampling, cache, model, act)
    elif tiles.wanted(model, i64(plan_of(plans, now).count[ROWS])):
        layers_in_tiles(block, window, plans, now, sampling, cache, model, act)
    else:
        layers_of_few_rows(block, window, plans, now, cache, model, act)


@device
def products_of(plan, model):
    """How many products the stream has for a step: the logits are the last, if anybody wants a sample."""
    return i32(4 * opaque(i64(model.layers)) + int(plan.count[SAMPLES] > 0))


@device
def asked_until(block, plan, number, model):
    """How far the stream asks during a product: up to that behind the next attention, if it stops there."""
    products = products_of(plan, model)
    if stream.pauses(block, i64(plan.count[ROWS]), model):
        products = i32(min(products, i32(((number + 3) & -4) + 1)))
    return products


@device
def attention_awaits(block, model, act):
    """Whether attention awaits queries, keys and values, in this step of few rows."""
    return opaque(i64(act.most_chunks)) > 0 and awaits(block, model)


@device
def layers_in_stream(block, window, plans, now, stage, parity, sampling, cache, model, act):
    """The plan's layers from FIRST_LAYER on, until it is interrupted, and the logits: for a few rows.

    Each phase waits for what it takes. A barrier of all blocks there is only in front of attention, where that is
    not cut in chunks, or a block has several of them.
    """
    plan = plan_of(plans, now)
    rows, products = i64(plan.count[ROWS]), products_of(plan, model)
    number, interrupted, owed = i32(4 * plan.count[FIRST_LAYER]), False, i32(0)
    stream.prepare(block, number, model)
    while number < products and not interrupted:
        kind, layer = packing.kind_of(model, number), i32(number >> 2)
        if kind == packing.ATTENDED:
            watch_and_say(block, window, plan, rows, layer, model, act)
            if stream.pauses(block, rows, model):
                stream.drain(block, model, stage, parity)
            stream.keep_stage(block, model, stage, parity, owed)  # attention needs the registers
            if act.most_chunks > 0:
                attend_in_chunks(block, rows, layer, model, cache, act, True)
            else:
                attend(block, plan, rows, layer, model, cache, act, True)
            barrier()
            number = i32(4 * opaque(i64(layer)) + packing.ATTENDED)
            stage, parity, owed = stream.kept_stage(block, model)
            plan = plan_of(plans, now)
            rows = i64(plan.count[ROWS])
            if stream.pauses(block, rows, model):
                stage, parity = stream.begin(block, model, number, asked_until(block, plan, number, model))
                owed = i32(0)
        stream.fetch(block, rows, number, model, act)
        if owed > 0:
            stream.settle(block, model, asked_until(block, plan, number, model), owed, i32(0))
        stamp_begin(block, plans, now, number, model)
        stage, parity, owed = stream.product(
            block, plans, now, rows, number, products, stage, parity, model, sampling, cache, act
        )
        number = i32(opaque(i64(number)) + 1)
        kind, layer = packing.kind_of(model, number - 1), i32((number - 1) >> 2)  # anew, as the plan
        plan = plan_of(plans, now)
        rows, products = i64(plan.count[ROWS]), products_of(plan, model)
        if kind < packing.LOGITS:
            awaiting, left = kind == packing.PROJECT and attention_awaits(block, model, act), i32(0)
            if awaiting:
                left = i32(1 if is_free(block, model) else 2)  # attention's loads would wait behind these weights
                barrier()  # the sums have been read
                ask_ahead(block, rows, layer, model, cache, act)
            elif kind == packing.PROJECT:
                grid_arrive(block)
            owed = stream.settle(block, model, asked_until(block, plan, number - 1, model), owed, left)
            stream.prepare(block, min(number, i32(4 * opaque(i64(model.layers)))), model)
            if kind == packing.PROJECT:
                if not awaiting:
                    grid_wait(block)
                plan = plan_of(plans, now)
                stamp(plan, PROJECTED, layer == timed_layer(block, plan))
            else:
                barrier()  # the sums have been read
                interrupted = kind == packing.LOWERED and stream.stops(block, model)
    if interrupted:
        stream.drain(block, model, stage, parity)
        grid_barrier(block)  # the residual stream is there
    elif plan.count[SAMPLES] == 0:
        stamp_begin(block, plans, now, 4 * model.layers, model)


@device
def stamp_begin(block, plans, now, number, model):
    """The stamp of a product that begins: what it multiplies is there, so what was before has ended."""
    plan, kind, layer = plan_of(plans, now), packing.kind_of(model, number), i32(number >> 2)
    timed = timed_layer(block, plan)
    if kind == packing.PROJECT or kind == packing.LOGITS:
        stamp(plan, LOWERED, timed >= 0 and layer == timed + 1)
        if kind == packing.PROJECT:
            stamp(plan, LAYER, layer == timed)
        else:
            stamp(plan, LAYERS, timed >= 0)
    elif kind == packing.ATTENDED:
        stamp(plan, ATTENDED, layer == timed)
    else:
        stamp(plan, OUTPUT if kind == packing.GATED else GATED, layer == timed)


@device
def watch_and_say(block, window, plan, rows, layer, model, act):
    """:func:`watch_aside`, and the same lane tells the other blocks whether the step stops behind this layer."""
    watch_aside(block, window, plan, layer, model)
    if block.id == 0 and thread_id() == block_threads() - 1:
        handed.say_whether_to_stop(rows, layer, plan.count[INTERRUPTED] == layer + 1, model, act)


@device
def watch_aside(block, window, plan, layer, model):
    """During attention, see whether an urgent request has rung: by the last lane of the first block.

    It takes a while to read what lies across PCIe. No block has fewer items of single rows than the first one.
    """
    if block.id == 0 and thread_id() == block_threads() - 1:
        watch(window, plan, layer + 1, i64(model.layers))


@device
def layers_of_few_rows(block, window, plans, now, cache, model, act):
    """The plan's layers from FIRST_LAYER on, until it is interrupted: for a few rows, at the memory's speed."""
    plan = plan_of(plans, now)
    layer, interrupted = i32(plan.count[FIRST_LAYER]), False
    weights, matrix = model.weights, model.matrix
    while layer < model.layers and not interrupted:
        plan = plan_of(plans, now)
        rows, timed = i64(plan.count[ROWS]), timed_layer(block, plan)
        stamp(plan, LAYER, layer == timed)
        hidden, ffn = opaque(i64(model.hidden)), opaque(i64(model.ffn))
        heads = opaque(i64(model.heads)) * i64(model.head_dim)

        project(block, plan, rows, layer, model, cache, act.x, act.q)
        grid_barrier(block)
        stamp(plan_of(plans, now), PROJECTED, layer == timed)

        attend(block, plan, rows, layer, model, cache, act, False)
        grid_barrier(block)
        stamp(plan_of(plans, now), ATTENDED, layer == timed)

        add_linear(block, act.attended, rows, weights, matrix[opaque(i64(layer)), OUT], hidden, heads, act.x)
        grid_barrier(block)
        stamp(plan_of(plans, now), OUTPUT, layer == timed)

        gate_up(block, rows, layer, model, act.x, act.gated)
        plan = plan_of(plans, now)
        rows, timed = i64(plan.count[ROWS]), timed_layer(block, plan)
        grid_barrier(block)
        stamp(plan, GATED, layer == timed)

        add_linear(block, act.gated, rows, weights, matrix[opaque(i64(layer)), DOWN], hidden, ffn, act.x)
        plan, layer = plan_of(plans, now), i32(layer + 1)
        timed = timed_layer(block, plan)
        if timed >= 0:
            watch(window, plan, layer, i64(model.layers))
        grid_barrier(block)
        stamp(plan, LOWERED, layer == timed + 1)
        interrupted = plan.count[INTERRUPTED] == layer


@device
def layers_in_tiles(block, window, plans, now, sampling, cache, model, act):
    """As :func:`layers_of_few_rows`, for many rows; then, if there are many samples, the logits and the draw.

    A product is `ready` when nothing else stands before it: attention or, for the logits, the norm of their rows.
    While the grid meets in front of it, each block asks for its first weights.
    """
    plan = plan_of(plans, now)
    kind, layer, ready = i32(tiles.PROJECT), i32(plan.count[FIRST_LAYER]), True
    tiles.ask(block, i64(plan.count[ROWS]), kind, layer, i32(block.id), True, model, act)
    while True:
        plan, place = plan_of(plans, now), i32(ATTENDED)
        rows = rows_of(plan, kind)
        stamp(plan, LAYER, layer == timed_layer(block, plan) and kind == tiles.PROJECT)
        if ready:
            tiles.product(block, plan, rows, kind, layer, model, sampling, cache, act)
            if kind == tiles.LOGITS:
                break
            plan, place = plan_of(plans, now), i32(stamp_after(kind))
            kind = i32(kind + 1)
            if kind == tiles.LOGITS and layer + 1 < model.layers:
                kind = i32(tiles.PROJECT)
            ready = kind != tiles.ATTENDED and kind != tiles.LOGITS
        elif kind == tiles.ATTENDED:
            watch_aside(block, window, plan, layer, model)
            attend_in_tiles(block, rows, layer, model, cache, act.q, act.attended)
            if act.most_chunks > 0:
                barrier()  # tiles are finished with the arena
                attend_in_chunks(block, rows, layer, model, cache, act, False)
            if heads_pay(cache.keys):
                kind = i32(opaque(i64(tiles.ATTENDED)))  # anew, where it is cut in chunks: it needs the registers
            ready = True
        else:
            tiles.normalise(block, plan, rows, model, act)
            ready, place = True, i32(LAYERS)
        grid_arrive(block)
        plan = plan_of(plans, now)
        if ready:
            behind = i32(layer + i32(kind == tiles.PROJECT))
            tiles.ask(block, rows_of(plan, kind), kind, behind, i32(block.id), True, model, act)
        grid_wait(block)
        stamp(plan, place, place != LAYERS and layer == timed_layer(block, plan))
        if place == LOWERED:
            layer = i32(layer + 1)
            stamp(plan, LAYERS, layer == model.layers and timed_layer(block, plan) >= 0)
            if plan.count[INTERRUPTED] == layer:
                if ready:
                    tiles.forget(block, rows_of(plan, kind), kind, layer, model)
                    barrier()
                break
            if layer == model.layers and not tiles.wanted(model, plan.count[SAMPLES]):
                break


@device
def rows_of(plan, kind):
    """How many rows a product has."""
    return i64(plan.count[SAMPLES if kind == tiles.LOGITS else ROWS])


@device
def stamp_after(kind):
    """The place of the stamp that ends a product of a layer."""
    if kind == tiles.PROJECT:
        return PROJECTED
    if kind == tiles.ATTENDED:
        return OUTPUT
    return GATED if kind == tiles.GATED else LOWERED
