"""An engine whose KV cache holds bfloat16, and whose attention of single rows is cut in chunks."""

from dataclasses import replace

import numpy as np
import pytest
from engine_bench import Bench, Request, answers_together, assert_greedy, chosen
from engine_bench import interruptible as interruptible
from test_engine_model import some_ids
from test_engine_tiles import in_tiles
from test_kernels_stream import FITS, StepsInStream, streaming

from blink_ref.engine.memory import chunks_fit
from blink_ref.kernels import flash_items, stream
from blink_ref.kernels.work_list import CHUNK
from blink_ref.model.reference import Reference
from blink_ref.model.weights import Weights
from blink_ref.scheduler import state

FAST = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
BF16 = "bfloat16"
SHAPES = {
    "heads of 32": {},
    "heads of 64": {"hidden": 128, "heads": 4, "kv_heads": 1, "head_dim": 64},
    "heads of 96": {"heads": 2, "kv_heads": 1, "head_dim": 96},
    "two units": {"heads": 9, "kv_heads": 1, "head_dim": 32, "hidden": 288},
}


def model_of(shape):
    config = replace(FITS, **SHAPES[shape])
    return config, Weights.random(config, seed=3, scale=0.1)


@pytest.mark.parametrize("target", FAST)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_few_rows_over_several_chunks_are_nearly_those_of_the_reference(target, shape):
    """What is missing is what bfloat16 keys and values lack: 2**-9 of themselves."""
    model, n = model_of(shape), CHUNK + 40
    ids = some_ids(model[0], n)
    steps = StepsInStream(model, target, rows=stream.MOST_ROWS, blocks=3, room=20000, kv_dtype=BF16)
    assert steps.bench.act.most_chunks > 1
    assert model[0].kv_heads * stream.MOST_ROWS > 2 * 3  # the stream stops
    logits = np.concatenate([steps.step(ids[at : at + 16])[0] for at in range(0, n, 16)])
    expected = Reference(*model).logits(ids)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 1e-5 < error < 1e-2


def test_logits_in_plain_python():
    model, n = model_of("heads of 32"), 5
    ids = some_ids(model[0], n)
    steps = StepsInStream(model, "python", rows=3, room=20000, kv_dtype=BF16)
    assert steps.bench.act.most_chunks > 1
    logits = np.concatenate([steps.step(ids[:3])[0], steps.step(ids[3:])[0]])
    expected = Reference(*model).logits(ids)
    assert np.linalg.norm(logits - expected) < 1e-2 * np.linalg.norm(expected)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("target", FAST)
def test_what_attends_in_place_of_the_stages_gives_the_same_and_may_be_interrupted(target):
    """On one block the stream stops at the attention; on many it does not."""
    model = model_of("heads of 32")
    requests = [Request((8, 9, 10 + n), 6, ignore_eos=True) for n in range(3)]
    answers, pauses = [], []
    for blocks, interrupted in ((1, False), (3, False), (1, True), (3, True)):
        settings = chosen(model[0], target, blocks=blocks, rows=16, running=4, context=100, kv_dtype=BF16)
        made = Bench(model, streaming(settings, model[0], rows=16, room=20000))
        assert made.act.most_chunks > 0
        if interrupted:
            made.interrupt(1)
        answers.append(answers_together(made, requests))
        pauses.append(int(made.queue.count[state.PAUSES]))
    assert all(answer == answers[0] for answer in answers)
    assert pauses[:2] == [0, 0]
    assert min(pauses[2:]) > 0


@pytest.mark.parametrize("target", FAST)
def test_requests_that_decode_in_tiles_get_what_the_reference_gives(target):
    """Prompts in tiles, single rows in chunks, in one step."""
    model = model_of("heads of 64")
    draw = np.random.default_rng(1)
    requests = [
        Request(tuple(draw.integers(8, 131, length).tolist()), 3 + n % 4, ignore_eos=True)
        for n, length in enumerate([270, 5, 33, 16, 250, 17, 64, 300, 9, 70, 12, 100])
    ]
    settings = in_tiles(model[0], target, rows=48, running=16, context=400, kv_dtype=BF16)
    settings = replace(settings, shared=max(settings.shared, flash_items.arena(64, 8)), pages=400)
    made = Bench(model, settings)
    assert made.act.most_chunks > 1
    assert_greedy(model, requests, answers_together(made, requests), close=0.05)


def test_what_chunks_do_not_serve_is_attended_to_otherwise():
    heads = flash_items.heads_of_unit(FITS)
    settings = replace(chosen(FITS, "cpu", kv_dtype=BF16), shared=flash_items.arena(32, heads))
    assert chunks_fit(FITS, settings)
    assert not chunks_fit(FITS, replace(settings, kv_dtype="float32"))
    assert not chunks_fit(FITS, replace(settings, page_size=24))
    assert not chunks_fit(FITS, replace(settings, shared=flash_items.arena(32, heads) - 1))
    assert not chunks_fit(replace(FITS, head_dim=48), settings)
    assert not chunks_fit(FITS, replace(streaming(settings, FITS, room=0), stream_rows=4, shared=settings.shared))
