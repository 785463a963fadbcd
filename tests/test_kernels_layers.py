"""RMSNorm, RoPE, embedding, linear layers and the MLP, each launched alone, against their specifications."""

import numpy as np
import pytest
from kernel_bench import U, check, floats, gamma, model_of, nans, plan_of, poison_arena, room_for, warps_of

from blink_ref.kernels import embedding, linear, mlp, rmsnorm, rope
from blink_ref.kernels.staging import arena, rows_at_once, staged_at
from blink_ref.kernels.tensors import DOWN, GATE, OUT, UP
from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import barrier, block_copy, i64, rank, thread_id

BLOCKS = 2
ROWS = pytest.mark.parametrize("rows", [1, 3, 33])
SPARE = 16
"""Floats behind the end of a buffer that no kernel may write."""


# --- RMSNorm


@device
def norm_alone(block, x, rows, gain, g, width, eps, out):
    poison_arena(block)
    for t in range(rows):
        rmsnorm.rmsnorm(block, x, i64(t) * width, gain, g, width, eps, i64(t))
    barrier()
    if block.id == 0:
        block_copy(out, i64(0), block.shared, staged_at(), rows * width)


@ROWS
@pytest.mark.parametrize("width", [8, 72, 576])
def test_rmsnorm_stages_rows_of_unit_mean_square_times_the_gain(target, lanes, rows, width):
    x, gain, eps = floats(rows, width, seed=rows), floats(2 * width, seed=1), 1e-5
    out = nans(rows * width + SPARE)
    args = x.reshape(-1), rows, gain, width, width, np.float32(eps), out
    launch(norm_alone, BLOCKS, lanes, *args, target=target, shared=room_for(rows, width, target, lanes))
    exact = rmsnorm.spec(x.astype(np.float64), gain[width:].astype(np.float64), eps)
    # The sum of squares is off by gamma(width) at most, its root by half that; six more roundings follow:
    # the mean, the addition of eps, root, reciprocal, and two products.
    check(out[: rows * width].reshape(rows, width), exact, (gamma(width) / 2 + 6 * U) * np.abs(exact))
    assert np.isnan(out[rows * width :]).all()


def test_rmsnorm_of_zeros_is_zero(target, lanes):
    x, gain, out = np.zeros(72, np.float32), floats(72, seed=1), nans(72)
    launch(norm_alone, 1, lanes, x, 1, gain, 0, 72, np.float32(1e-5), out, target=target)
    assert (out == 0).all()


# --- RoPE


@device
def rotate_alone(block, x, table, out):
    rows, heads, half = x.shape[0], x.shape[1], x.shape[2] // 2
    if thread_id() == 0 and block.id == 0:
        for t in range(rows):
            for h in range(heads):
                for i in range(half):
                    pair = rope.rotate(x[t, h, i], x[t, h, half + i], table[t, i], table[t, half + i])
                    out[t, h, i] = pair[0]
                    out[t, h, half + i] = pair[1]


@ROWS
def test_rope_rotates_each_element_with_the_one_half_a_head_further(target, lanes, rows):
    x = floats(rows, 2, 24, seed=2)
    model, *_ = model_of(head_dim=24)
    table = model.rope[10 : 10 + rows]
    out = np.full_like(x, np.nan)
    launch(rotate_alone, 1, lanes, x, table, out, target=target)
    exact = rope.spec(x.astype(np.float64), table.astype(np.float64))
    # two products and a sum, each rounded, of numbers no larger than the pair
    pair = np.abs(x) + np.abs(np.roll(x, 12, axis=-1))
    check(out, exact, 2 * U * 1.01 * pair)


def test_rope_keeps_lengths_and_position_zero_turns_nothing():
    x = floats(1, 2, 24, seed=3).astype(np.float64)
    model, *_ = model_of(head_dim=24)
    assert (rope.spec(x, model.rope[:1].astype(np.float64)) == x).all()
    turned = rope.spec(x, model.rope[40:41].astype(np.float64))
    # the table's cosines and sines are rounded once
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(x), rel=4 * U)


# --- embedding


@device
def embed_alone(block, plan, before, rows, model, x):
    embedding.embedding(block, plan, before, rows, model, x)


@ROWS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_embedding_looks_up_each_rows_token_exactly(target, lanes, rows, dtype):
    model, weights, config = model_of(dtype)
    tokens = np.random.default_rng(4).integers(0, config.vocab, rows)
    tokens[0] = config.vocab - 1
    plan, x = plan_of(rows + 1, token=[*tokens, 5]), nans((rows + 1) * config.hidden)
    before = plan_of(rows + 1, best=[rank(0.5, token) for token in tokens])
    drawn = np.arange(rows) % 2 == 1  # in the step before, by sample number `source`
    plan.source[:rows] = np.where(drawn, np.arange(rows), -1)
    plan.token[:rows][drawn] = 0
    launch(embed_alone, BLOCKS, lanes, plan, before, rows, model, x, target=target)
    assert plan.token[:rows].tolist() == tokens.tolist(), "it is noted"
    embed = weights.dense(weights.embed, config.vocab, config.hidden)
    x = x.reshape(-1, config.hidden)
    assert (x[:rows] == embedding.spec(embed, tokens)).all()
    assert np.isnan(x[rows:]).all()


# --- linear


@device
def add_linear_alone(block, x, rows, weights, at, outs, ins, residual):
    poison_arena(block)
    linear.add_linear(block, x, rows, weights, at, outs, ins, residual)


def run_add_linear(target, lanes, x, model, matrix, shape, before, tile, blocks=BLOCKS):
    """Residual after one linear layer, as [rows, outs]."""
    outs, ins = shape
    residual = nans(before.size + SPARE)
    residual[: before.size] = before.reshape(-1)
    args = x.reshape(-1), len(x), model.weights, int(model.matrix[1, matrix]), outs, ins, residual
    launch(add_linear_alone, blocks, lanes, *args, target=target, shared=room_for(tile, ins, target, lanes))
    assert np.isnan(residual[before.size :]).all()
    return residual[: before.size].reshape(before.shape)


@ROWS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("matrix", "shape"), [(OUT, (72, 96)), (DOWN, (72, 104))], ids=["out", "down"])
def test_add_linear_adds_to_the_residual_tile_by_tile(target, lanes, rows, dtype, matrix, shape):
    model, weights, _ = model_of(dtype)
    x, before = floats(rows, shape[1], seed=rows), floats(rows, shape[0], seed=5)
    # an arena of 4 rows: 33 rows make nine tiles, the last of one row
    after = run_add_linear(target, lanes, x, model, matrix, shape, before, tile=4)
    w = weights.dense(weights.matrix[1, matrix], *shape).astype(np.float64)
    exact = before + linear.spec(x.astype(np.float64), w)
    sizes = np.abs(before) + np.abs(x) @ np.abs(w).T
    check(after, exact, gamma(shape[1] + 1) * sizes)


def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_batch_tile_and_grid(target, lanes):
    model, *_ = model_of("bfloat16")
    x, before = floats(7, 96, seed=6), floats(7, 72, seed=7)
    together = run_add_linear(target, lanes, x, model, OUT, (72, 96), before, tile=3)
    for blocks, tile in ((1, 7), (3, 1)):
        again = run_add_linear(target, lanes, x, model, OUT, (72, 96), before, tile, blocks)
        assert (again == together).all()
    for t in (0, 3, 6):
        alone = run_add_linear(target, lanes, x[t : t + 1], model, OUT, (72, 96), before[t : t + 1], tile=1)
        assert (alone == together[t]).all()


def test_nan_in_one_row_stays_in_that_row(target, lanes):
    model, *_ = model_of("bfloat16")
    x, before = floats(5, 96, seed=8), floats(5, 72, seed=9)
    x[2, 95] = np.nan
    after = run_add_linear(target, lanes, x, model, OUT, (72, 96), before, tile=3)
    assert np.isnan(after[2]).all()
    assert not np.isnan(np.delete(after, 2, axis=0)).any()


@device
def how_many_rows(block, width, out):
    out[0] = rows_at_once(block, width)


@pytest.mark.parametrize(("floats_more", "rows"), [(-1, 2), (0, 3), (71, 3), (72, 4)])
def test_the_arena_holds_whole_rows_beside_its_scratch(target, lanes, floats_more, rows):
    out = np.zeros(1, np.int64)
    shared = arena(3, 72, warps_of(target, lanes)) + floats_more
    launch(how_many_rows, 1, lanes, 72, out, target=target, shared=shared)
    assert out[0] == rows


# --- MLP


@device
def silu_alone(block, x, out):
    if thread_id() == 0:
        for i in range(x.shape[0]):
            out[i] = mlp.silu(x[i])


def test_silu_is_finite_at_both_ends(target, lanes):
    x, out = np.array([-1e4, -100, 0, 100, 1e4, np.nan], np.float32), nans(6)
    launch(silu_alone, 1, lanes, x, out, target=target)
    assert out[[0, 2, 3, 4]].tolist() == [0, 0, 100, 1e4]
    assert -1e-30 < out[1] <= 0
    assert np.isnan(out[5])


@device
def gate_up_alone(block, rows, layer, model, x, gated):
    poison_arena(block)
    mlp.gate_up(block, rows, layer, model, x, gated)


def run_gate_up(target, lanes, x, model, tile, blocks=BLOCKS):
    gated = nans(len(x) * model.ffn + SPARE)
    args = len(x), 1, model, x.reshape(-1), gated
    launch(gate_up_alone, blocks, lanes, *args, target=target, shared=room_for(tile, model.hidden, target, lanes))
    assert np.isnan(gated[len(x) * model.ffn :]).all()
    return gated[: len(x) * model.ffn].reshape(len(x), model.ffn)


@ROWS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gate_up_is_silu_of_gate_times_up_of_the_normalised_rows(target, lanes, rows, dtype):
    model, weights, config = model_of(dtype)
    x = floats(rows, config.hidden, seed=rows)
    gated = run_gate_up(target, lanes, x, model, tile=4)
    normed = rmsnorm.spec(x.astype(np.float64), weights.norm[3].astype(np.float64), config.rms_eps)
    gate, up = (
        weights.dense(weights.matrix[1, m], config.ffn, config.hidden).astype(np.float64) for m in (GATE, UP)
    )
    # g and u: sums of products whose one factor is off as test_rmsnorm says. silu is steeper than 1.1 nowhere;
    # computing it adds 8 u (exp, a sum, a quotient), the last product one more.
    off = gamma(config.hidden) + gamma(config.hidden) / 2 + 6 * U
    g, u = normed @ gate.T, normed @ up.T
    g_off, u_off = (1.01 * off * (np.abs(normed) @ np.abs(w).T) for w in (gate, up))
    silu = g / (1 + np.exp(-g))
    bound = 1.1 * g_off * (np.abs(u) + u_off) + np.abs(silu) * u_off + 9 * U * np.abs(silu * u)
    check(gated, mlp.spec(normed, gate, up), bound)


def test_a_row_of_the_mlp_has_the_same_bits_in_any_batch_tile_and_grid(target, lanes):
    model, *_ = model_of("bfloat16")
    x = floats(7, model.hidden, seed=10)
    together = run_gate_up(target, lanes, x, model, tile=3)
    for blocks, tile in ((1, 7), (3, 1)):
        assert (run_gate_up(target, lanes, x, model, tile, blocks) == together).all()
    for t in (0, 3, 6):
        assert (run_gate_up(target, lanes, x[t : t + 1], model, tile=1) == together[t]).all()


# --- what they cost, counted by hand for 2 rows


def test_the_costs_are_those_counted_by_hand():
    # D = 8: read 2 x 8 floats, the gain's 8, write 2 x 8; square, add, and two products an element
    assert rmsnorm.cost(2, 8) == (4 * (16 + 8 + 16), 4 * 16)
    # 3 heads of 4: a row of the table is 4 floats; 4 products and 2 sums for each of 6 pairs a row
    assert rope.cost(2, 3, 4) == (2 * 4 * 4, 2 * 6 * 6)
    # 16-bit rows read, float32 rows written
    assert embedding.cost(2, 8) == (2 * 8 * 2 + 2 * 8 * 4, 0)
    # W [5, 8] in 16 bits; 2 x 8 floats in, 2 x 5 read and written; a product and a sum for each weight and row
    assert linear.cost(2, 5, 8) == (2 * 40 + 4 * (16 + 10 + 10), 2 * 2 * 40)
    # two matrices [5, 8] in 16 bits; 2 x 8 floats in, 2 x 5 out
    assert mlp.cost(2, 8, 5) == (2 * 2 * 40 + 4 * (16 + 10), 2 * 2 * 2 * 40)
