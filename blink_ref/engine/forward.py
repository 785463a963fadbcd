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
from ..scheduler.state import FILTERED, FIRST_LAYER, INTERRUPTED, ROWS, SAMPLES
from ..simt import device, grid_barrier
from ..simt.vocabulary import i64, opaque


@device
def forward(block, window, slots, plan, paused, sampling, cache, model, act):
    """Compute the plan's rows and draw its samples, or as much of it as is done when an urgent request rings.

    All blocks of a grid or a team, after a grid barrier of all; the caller ends it with another.
    """
    rows, samples, layer = i64(plan.count[ROWS]), i64(plan.count[SAMPLES]), i64(plan.count[FIRST_LAYER])
    filtered, interrupted = plan.count[FILTERED] > 0, False
    weights, matrix = model.weights, model.matrix
    timed = timed_layer(block, plan)
    forget_draws(block, plan, samples)
    if layer == 0:
        embedding(block, plan, rows, model, act.x)
    else:
        copy_stream(block, paused.x, act.x, rows * i64(model.hidden))
    grid_barrier(block)
    stamp(plan, EMBEDDED, timed >= 0 and layer == 0)
    while layer < model.layers and not interrupted:
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
    if interrupted:
        copy_stream(block, act.x, paused.x, rows * i64(model.hidden))
    else:
        stamp(plan, LAYERS, timed >= 0)
        logits_and_draw(block, plan, samples, sampling, model, act.x, act.logits)
        if filtered:
            grid_barrier(block)
            draw_filtered(block, plan, samples, slots, sampling, model, act)
