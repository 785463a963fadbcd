"""The layers of a few rows as a stream of packed weights: held to the NumPy reference, and to themselves."""

from dataclasses import replace

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Bench, Request, answers_together, assert_greedy, chosen
from engine_bench import interruptible as interruptible
from test_engine_model import SMALL_CLOSE, Steps, some_ids

from blink_ref import simt
from blink_ref.engine import memory
from blink_ref.errors import BlinkError
from blink_ref.kernels import packing, staging, stream, tiles
from blink_ref.kernels.packing import kind_of
from blink_ref.model.reference import Reference
from blink_ref.model.weights import Weights
from blink_ref.scheduler import state
from blink_ref.simt import aligned, device
from blink_ref.simt.capability import STATIC_SHARED
from blink_ref.simt.vocabulary import (
    FRAGMENT,
    FRAGMENT_PITCH,
    arena_view,
    barrier,
    block_threads,
    fragment_dots,
    fragment_put,
    i64,
    packed_floats,
    sum_of_fours,
    thread_id,
    warp_barrier,
    warp_id,
)

FAST = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
targets = pytest.mark.parametrize("target", TARGETS)

FITS = replace(SMALL, hidden=64, head_dim=32, ffn=96, vocab=131, context=400)
SHAPES = {
    "plain": {},
    "more fragments than warps": {"hidden": 288, "ffn": 2080, "heads": 2, "kv_heads": 2, "head_dim": 128},
    "heads of 16": {"heads": 6, "kv_heads": 3, "head_dim": 16},
    "heads of 96": {"heads": 2, "kv_heads": 1, "head_dim": 96},
    "heads of 256": {"heads": 1, "kv_heads": 1, "head_dim": 256},
    "untied": {"tied": False, "vocab": 16},
}


def model_of(shape):
    config = replace(FITS, **SHAPES[shape])
    return config, Weights.random(config, seed=3, scale=0.15)


def streaming(settings, config, rows=stream.MOST_ROWS, room=4000):
    """The settings with the stream on, and some more floats in the arena than it needs."""
    sizes = rows, settings.warps, config.head_dim, settings.page_size
    needed = stream.arena(*sizes, halves=settings.target == "cuda") + room
    if settings.target == "cuda":
        from blink_ref.simt import on_cuda

        needed = min(needed, (on_cuda.limits().shared_bytes - STATIC_SHARED) // 4)
    return replace(settings, stream_rows=rows, shared=max(settings.shared, needed))


class StepsInStream(Steps):
    """Of a few rows, which all want a sample."""

    def __init__(self, model, target, rows, room=4000, **how):
        super().__init__(model, target, rows=rows, **how)
        self.settings = streaming(self.settings, model[0], rows, room)
        if target == "cuda":
            self.settings = replace(self.settings, lanes=512)
            self.settings = streaming(self.settings, model[0], rows, room)
        table = self.bench.cache.table.copy()
        self.bench = Bench(model, self.settings)
        self.bench.cache.table[:] = table
        assert self.bench.model.stream_rows == rows


# --- the words


@device
def words_alone(block, packed, steps, x, put, rows, y, fours):
    """Products of a strip in two calls, and sums of fours of them."""
    quad = 4 * i64(thread_id())
    to = block.shared.shape[0] - steps * 128 - rows * FRAGMENT_PITCH - 64
    weights = arena_view(block.shared, block.shared.shape[0] - steps * 128, steps * 256, packed)
    i = i64(thread_id())
    while i < steps * 256:
        weights[i] = packed[i]
        i += block_threads()
    while quad < steps * rows * FRAGMENT:
        fragment_put(put, packed_floats(quad), x[quad], x[quad + 1], x[quad + 2], x[quad + 3])
        quad += 4 * block_threads()
    barrier()
    if warp_id() == 0:
        fragment_dots(block.shared, to, weights, i64(0), i64(1), put, i64(0), rows, False)
        warp_barrier()
        second = packed_floats(rows * FRAGMENT)
        fragment_dots(block.shared, to, weights, i64(256), steps - 1, put, second, rows, True)
    barrier()
    t = i64(thread_id())
    while t < rows:
        for r in range(FRAGMENT):
            y[t, r] = block.shared[to + t * FRAGMENT_PITCH + r]
        t += block_threads()
    if thread_id() == 0:
        a, b, c, d = sum_of_fours(block.shared, to, i64(FRAGMENT_PITCH), i64(rows))
        fours[0] = a
        fours[1] = b
        fours[2] = c
        fours[3] = d


@targets
@pytest.mark.parametrize(("rows", "steps"), [(1, 2), (7, 6), (8, 9), (9, 5), (16, 13)])
def test_fragments_are_the_product_of_their_rows(target, rows, steps):
    draw = np.random.default_rng(rows)
    w = draw.standard_normal((FRAGMENT, steps * FRAGMENT)).astype(np.float16)
    packed, x = aligned(w.size, np.int16), aligned(rows * steps * FRAGMENT, np.float32)
    packed[:] = w.view(np.int16).reshape(2, 8, steps, 2, 8).transpose(2, 3, 0, 1, 4).reshape(-1)
    rows_of_x = draw.standard_normal((rows, steps * FRAGMENT)).astype(np.float16).astype(np.float32)
    x[:] = rows_of_x.reshape(rows, steps, FRAGMENT).transpose(1, 0, 2).reshape(-1)
    y, fours = np.full((rows, FRAGMENT), np.nan, np.float32), np.full(4, np.nan, np.float32)
    shared, put = steps * 128 + rows * FRAGMENT_PITCH + 128, aligned(x.size, np.float32)
    simt.launch(words_alone, 1, LANES[target], packed, steps, x, put, rows, y, fours, target=target, shared=shared)
    expected = rows_of_x.astype(np.float64) @ w.astype(np.float64).T
    assert np.linalg.norm(y - expected) < 2e-6 * np.linalg.norm(expected)
    np.testing.assert_allclose(fours, y[:, :4].sum(0), rtol=1e-5, atol=1e-5)


# --- packing


def packed_by(target, config, weights):
    """(what :func:`packing.pack` makes of weights, whether it has found one too large)"""
    table, large = packing.table(config, 5, 3), np.zeros(1, np.uint32)
    packed = aligned(packing.size(table), np.int16)
    model = memory.device_model(config, weights, config.context, 0, 1, packed, table)
    simt.launch(packing.pack, 2, LANES[target], model, large, target=target)
    return packed, large[0] > 0


@pytest.mark.parametrize("target", FAST)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_packed_as_specified(target, shape, dtype):
    config, _ = model_of(shape)
    weights = Weights.random(config, seed=3, scale=0.15, dtype=dtype)
    packed, large = packed_by(target, config, weights)
    assert not large
    np.testing.assert_array_equal(packed, packing.spec(config, weights))


@pytest.mark.parametrize("target", FAST)
def test_a_weight_that_float16_does_not_have_is_refused(target):
    config, weights = model_of("plain")
    weights.flat[int(weights.matrix[1, 3]) + 77] = 0x4780  # 65,536
    assert packed_by(target, config, weights)[1]
    with pytest.raises(BlinkError, match=r"beyond 65,504.*--batch-invariant"):
        packing.spec(config, weights)
    weights.flat[int(weights.matrix[1, 3]) + 77] = 0xC77F  # -65,280
    packed, large = packed_by(target, config, weights)
    assert not large
    np.testing.assert_array_equal(packed, packing.spec(config, weights))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_says_where_each_product_is_and_deals_its_strips_in_turn(shape):
    config = model_of(shape)[0]
    blocks, warps_in_block = 7, 16
    table = packing.table(config, blocks, warps_in_block)
    ends = table[:, packing.AT] + table[:, packing.STRIPS] * table[:, packing.STEPS]
    np.testing.assert_array_equal(table[1:, packing.AT], ends[:-1])
    assert ends[-1] * packing.SIZE == packing.size(table)
    inner = config.parameters - config.vocab * config.hidden * (1 + (not config.tied))
    norms = (2 * config.layers + 1) * config.hidden
    head = -(-config.vocab // FRAGMENT) * FRAGMENT * config.hidden
    assert packing.size(table) == inner - norms + head
    before = np.cumsum(table[:, packing.STRIPS]) - table[:, packing.STRIPS]
    np.testing.assert_array_equal(table[:, packing.TURN], before % blocks)
    assert (table[:, packing.SHARE] * warps_in_block >= table[:, packing.STEPS]).all()


@device
def find_strips(block, model, first, left, source):
    """Each block's first strip of each product, as it follows from what is noted; how many, and where they lie."""
    stream.set_up(block, model)
    barrier()
    kinds = arena_view(block.shared, stream.KINDS, stream.ALL_KINDS, model.eos)
    cursors = arena_view(block.shared, stream.CURSORS, stream.CURSOR * stream.MOST_WARPS, model.eos)
    for product in range(first.shape[1]):
        if thread_id() == 0:
            first[block.id, product] = stream.first_strip(block, kinds, kind_of(model, product), product >> 2)
            cursors[stream.PRODUCT] = product - 1
            cursors[stream.STRIPS_LEFT] = 0
            stream.turn_to_next(block, model, product + 1, cursors, 0)
            left[block.id, product] = cursors[stream.STRIPS_LEFT]
            source[block.id, product] = cursors[stream.NEXT]


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("blocks", [1, 7, 200])
def test_what_a_block_notes_of_the_kinds_of_products_says_the_same_of_each(blocks, layers):
    config = replace(FITS, layers=layers, vocab=1000)
    table = packing.table(config, blocks, 1)
    model = memory.device_model(
        config, Weights.random(config, seed=3), config.context, 0, 1, np.zeros(8, np.int16), table
    )
    first, left, source = (np.zeros((blocks, len(table)), np.int32) for _ in range(3))
    simt.launch(find_strips, blocks, 1, model, first, left, source, target="python", shared=staging.SCRATCH)
    strips, ids = table[:, packing.STRIPS], np.arange(blocks)[:, None]
    np.testing.assert_array_equal(first, (ids - table[:, packing.TURN]) % blocks)
    np.testing.assert_array_equal(left, np.maximum(0, -(-(strips - first) // blocks)))
    there = table[:, packing.AT] + first * table[:, packing.STEPS]
    np.testing.assert_array_equal(source[left > 0], there[left > 0])


# --- steps


@pytest.mark.parametrize("target", FAST)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_from_the_stream_are_those_of_the_reference(target, shape):
    model, most = model_of(shape), stream.MOST_ROWS
    ids = some_ids(model[0], 3 * most)
    steps, seen = StepsInStream(model, target, rows=most, blocks=3), []
    for n in (most, 1, 9, most, 2, 4):
        logits, drawn = steps.step(ids[steps.done : steps.done + n])
        seen.append(logits)
        assert drawn == logits.argmax(axis=1).tolist()
    expected, logits = Reference(*model).logits(ids), np.concatenate(seen)
    if target == "cpu":
        np.testing.assert_allclose(logits, expected, **SMALL_CLOSE)
    # where x is float16, 2**-11 of it is lost in each product, at most
    assert np.linalg.norm(logits - expected) < 4e-3 * np.linalg.norm(expected)


def test_logits_from_the_stream_in_plain_python():
    model = model_of("plain")
    ids = some_ids(model[0], 5)
    steps = StepsInStream(model, "python", rows=3)
    logits = np.concatenate([steps.step(ids[:3])[0], steps.step(ids[3:])[0]])
    np.testing.assert_allclose(logits, Reference(*model).logits(ids), **SMALL_CLOSE)


@pytest.mark.parametrize("target", FAST)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_blocks_nor_on_room(target):
    """Bit for bit; the smallest arena has no room for activations, and for one strip's sums."""
    model = model_of("more fragments than warps")
    ids, seen = some_ids(model[0], 16), []
    for blocks, rows, room in ((1, 16, 0), (2, 1, 4000), (3, 5, 0), (2, 16, 30000 if target == "cpu" else 4000)):
        steps = StepsInStream(model, target, rows=rows, blocks=blocks, room=room)
        seen.append(np.concatenate([steps.step(ids[at : at + rows])[0] for at in range(0, 16, rows)]))
    for other in seen[1:]:
        np.testing.assert_array_equal(seen[0], other)


# --- an engine


def served(model, target, **changes):
    settings = chosen(model[0], target, rows=24, running=16, context=100, tiles=tiles.FEW, **changes)
    settings = replace(settings, shared=max(settings.shared, tiles.arena(model[0].head_dim, target == "cuda")))
    return Bench(model, streaming(settings, model[0]))


@pytest.mark.parametrize("target", FAST)
def test_requests_get_what_the_reference_gives(target):
    """Prompts in chunks of many rows and of few, a batch that decodes, requests that end one after the other."""
    model = model_of("plain")
    draw = np.random.default_rng(1)
    requests = [
        Request(tuple(draw.integers(8, 131, 5 + 3 * n).tolist()), 3 + n % 4, ignore_eos=True) for n in range(12)
    ]
    made = served(model, target)
    answers = answers_together(made, requests)
    assert_greedy(model, requests, answers, close=0.03 if target == "cuda" else 1e-3)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("target", FAST)
def test_a_step_that_is_interrupted_loses_what_it_has_asked_for_and_nothing_else(target):
    model = model_of("plain")
    requests = [Request((8, 9, 10 + n), 6, ignore_eos=True) for n in range(3)]
    expected = answers_together(served(model, target), requests)
    made = served(model, target)
    made.interrupt(1)
    assert answers_together(made, requests) == expected
    assert made.queue.count[state.PAUSES] > 0


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "float32"), ({"hidden": 72}, "bfloat16"), ({"ffn": 100}, "bfloat16"), ({"head_dim": 24}, "bfloat16")],
)
def test_what_cannot_be_packed_is_computed_without_the_stream(changes, dtype):
    config = replace(FITS, **changes)
    weights = Weights.random(config, dtype=dtype)
    settings = streaming(chosen(config), config)
    assert not memory.stream_fits(config, weights, settings)
    made = Bench((config, weights), settings)
    assert made.model.stream_rows == 0
    assert made.model.packed is None
    least = stream.arena(stream.MOST_ROWS, 1, FITS.head_dim, settings.page_size, halves=False)
    small = replace(settings, shared=least - 1)
    assert not memory.stream_fits(FITS, Weights.random(FITS), small)
