"""One step through the model: the phases of a plan, and what orders them."""

from ..kernels.attention import attend, fetch_project_ahead, project
from ..kernels.embedding import embedding
from ..kernels.linear import add_linear, fetch_ahead
from ..kernels.logits import logits_and_draw
from ..kernels.mlp import gate_up
from ..kernels.tensors import DOWN, GATE, OUT, UP
from ..scheduler.state import ROWS, SAMPLES
from ..simt import device, grid_barrier
from ..simt.vocabulary import i64, opaque


@device
def forward(block, plan, model, cache, act):
    """Compute the plan's rows and draw its samples. All blocks, after a grid barrier; ends with one.

    Before each barrier a warp starts to fetch the weights it will read first after it.
    """
    rows, samples = i64(plan.count[ROWS]), i64(plan.count[SAMPLES])
    weights, matrix = model.weights, model.matrix
    embedding(block, plan, rows, model, act.x)
    fetch_project_ahead(block, model, i64(0))
    grid_barrier(block)
    for layer in range(model.layers):
        hidden, ffn = opaque(i64(model.hidden)), opaque(i64(model.ffn))
        heads = opaque(i64(model.heads)) * i64(model.head_dim)

        project(block, plan, rows, layer, model, cache, act.x, act.q)
        fetch_ahead(block, weights, matrix[layer, OUT], hidden, heads)
        grid_barrier(block)

        attend(block, plan, rows, layer, model, cache, act.q, act.attended)
        grid_barrier(block)

        add_linear(block, act.attended, rows, weights, matrix[layer, OUT], hidden, heads, act.x)
        fetch_ahead(block, weights, matrix[layer, GATE], ffn, hidden)
        fetch_ahead(block, weights, matrix[layer, UP], ffn, hidden)
        grid_barrier(block)

        gate_up(block, rows, layer, model, act.x, act.gated)
        fetch_ahead(block, weights, matrix[layer, DOWN], hidden, ffn)
        grid_barrier(block)

        add_linear(block, act.gated, rows, weights, matrix[layer, DOWN], hidden, ffn, act.x)
        if layer + 1 < model.layers:
            fetch_project_ahead(block, model, layer + 1)
        else:
            fetch_ahead(block, weights, i64(model.head), i64(model.vocab), hidden)
        grid_barrier(block)
    logits_and_draw(block, plan, samples, model, act.x, act.logits)
    fetch_project_ahead(block, model, i64(0))
    grid_barrier(block)
