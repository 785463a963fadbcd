"""One step through the model: the phases of a plan, and what orders them."""

from ..kernels.attention import attend, project
from ..kernels.embedding import embedding
from ..kernels.filters import draw_filtered
from ..kernels.linear import add_linear
from ..kernels.logits import forget_draws, logits_and_draw
from ..kernels.mlp import gate_up
from ..kernels.tensors import DOWN, OUT
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
from ..scheduler.state import FILTERED, FIRST_LAYER, INTERRUPTED, ROWS, SAMPLES, SPARE, plan_of
from ..simt import device, grid_barrier
from ..simt.vocabulary import i64, opaque


@device
def forward(block, window, slots, queue, plans, now, sampling, cache, model, act):
    """Compute plan number `now` and draw its samples, or as much of it as is done when an urgent request rings.

    All blocks of a grid or a team, after a grid barrier of all; the caller ends it with another.
    """
    plan = plan_of(plans, now)
    rows, layer, interrupted = i64(plan.count[ROWS]), i64(plan.count[FIRST_LAYER]), False
    weights, matrix = model.weights, model.matrix
    timed = timed_layer(block, plan)
    forget_draws(block, plan, i64(plan.count[SAMPLES]))
    if layer == 0:
        embedding(block, plan, plan_of(plans, queue.count[SPARE]), rows, model, act.x)
    else:
        copy_stream(block, act.aside, act.x, rows * i64(model.hidden))
    grid_barrier(block)
    stamp(plan, EMBEDDED, timed >= 0 and layer == 0)
    while layer < model.layers and not interrupted:
        plan = plan_of(plans, now)
        stamp(plan, LAYER, layer == timed)
        hidden, ffn = opaque(i64(model.hidden)), opaque(i64(model.ffn))
        heads = opaque(i64(model.heads)) * i64(model.head_dim)

        project(block, plan, rows, layer, model, cache, act.x, act.q)
        grid_barrier(block)
        stamp(plan, PROJECTED, layer == timed)

        attend(block, plan, rows, layer, model, cache, act.q, act.attended)
        grid_barrier(block)
        stamp(plan, ATTENDED, layer == timed)

        add_linear(block, act.attended, rows, weights, matrix[layer, OUT], hidden, heads, act.x)
        grid_barrier(block)
        stamp(plan, OUTPUT, layer == timed)

        gate_up(block, rows, layer, model, act.x, act.gated)
        grid_barrier(block)
        stamp(plan, GATED, layer == timed)

        add_linear(block, act.gated, rows, weights, matrix[layer, DOWN], hidden, ffn, act.x)
        layer += 1
        if timed >= 0:
            watch(window, plan, layer, i64(model.layers))
        grid_barrier(block)
        stamp(plan, LOWERED, layer == timed + 1)
        interrupted = plan.count[INTERRUPTED] == layer
    plan = plan_of(plans, now)
    if interrupted:
        copy_stream(block, act.x, act.aside, rows * i64(model.hidden))
    else:
        stamp(plan, LAYERS, timed >= 0)
        samples = i64(plan.count[SAMPLES])
        logits_and_draw(block, plan, samples, sampling, model, act.x, act.logits)
        if plan.count[FILTERED] > 0:
            grid_barrier(block)
            draw_filtered(block, plan, samples, slots, sampling, model, act)
