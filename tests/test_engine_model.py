"""The engine's arithmetic: held to transformers' tokens and logits on SmolLM2, and to the NumPy reference."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_bench import SMALL, TARGETS, Bench, Request, answers_together, chosen, load, small, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.config import cache_dir
from blink_ref.engine.forward import forward
from blink_ref.kernels import sampling
from blink_ref.kernels.logits import LOWEST
from blink_ref.kernels.stream import set_up
from blink_ref.kvcache.pages import pages_spec
from blink_ref.model.config import ModelConfig
from blink_ref.model.reference import Reference
from blink_ref.model.weights import Weights
from blink_ref.ring.layout import LENGTH, STOP
from blink_ref.scheduler import state
from blink_ref.simt import device
from blink_ref.simt.vocabulary import barrier, rank_index

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "smollm2_golden.json").read_text())["items"]
MORE = json.loads((DATA / "smollm2_more.json").read_text())["items"]
FAST = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LOGIT_BAR = 2e-2
"""The project's bar for any path against transformers in float32."""
CLOSE = 2e-3
"""For float32 paths that add up in different orders. A rounding is 6e-8 of logits of some 20, so this is what
a thousand roundings that all err the same way would do; 5e-5 is seen."""
SMALL_CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""The same for two layers and logits of some 5; 7e-6 is seen."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "plain": {},
    "untied": {"tied": False},
    "head_dim 96": {"heads": 2, "kv_heads": 1, "head_dim": 96},
    "heads wider than hidden": {"heads": 8, "kv_heads": 8, "head_dim": 16},
    "one kv head": {"kv_heads": 1},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "context": 96},
    "large ffn": {"ffn": 1000},
    "a vocabulary of one": {"vocab": 1},
}


@device
def one_step(block, window, slots, queue, plans, now, sampling, cache, model, act):
    set_up(block, model)
    barrier()
    forward(block, window, slots, queue, plans, now, sampling, cache, model, act)


class Steps:
    """``forward`` called by hand on one sequence; every row wants a sample."""

    def __init__(self, model, target="cpu", blocks=2, rows=64, page_size=16, kv_dtype="float32"):
        config, context = model[0], min(model[0].context, 1024)
        count = pages_spec(context, page_size) + 3
        sizes = {"slots": 1, "rows": rows, "running": rows, "context": context, "kv_dtype": kv_dtype}
        self.settings = chosen(config, target, blocks=blocks, pages=count, page_size=page_size, **sizes)
        self.bench = Bench(model, self.settings)
        self.bench.cache.table[:] = np.random.default_rng(0).permutation(count)[:-3]
        self.done = 0

    def step(self, ids, temperature=0.0, seed=0):
        """Compute the next positions; returns their logits [T, V] and the tokens drawn after each."""
        n, plan, act = len(ids), self.bench.plan, self.bench.act
        plan.count[state.ROWS] = plan.count[state.SAMPLES] = n
        plan.count[state.CHUNKS] = 1
        plan.chunk_row[0], plan.chunk_rows[0] = 0, n
        plan.slot[:n] = 0
        plan.token[:n] = ids
        plan.position[:n] = np.arange(self.done, self.done + n)
        plan.sample_row[:n] = np.arange(n)
        plan.draw[:n] = plan.position[:n] + 1
        plan.temperature[:n], plan.seed[:n], plan.best[:n] = temperature, seed, LOWEST
        for buffer in act:
            if isinstance(buffer, np.ndarray):
                buffer.fill(np.nan if buffer.dtype == np.float32 else 0)
        s, made = self.settings, self.bench
        now = int(made.queue.count[state.NOW])
        needed = made.view, made.slots, made.queue, made.plans, now, made.sampling, made.cache, made.model, act
        simt.launch(one_step, s.blocks, s.lanes, *needed, target=s.target, shared=s.shared)
        self.done += n
        vocab = self.bench.config.vocab
        logits = act.logits[: n * vocab].reshape(n, vocab).copy()
        return logits, [rank_index(key) for key in plan.best[:n].tolist()]


def logits_of(model, ids, chunk=32, **how):
    """Teacher-forced logits [T, V], `chunk` positions a step."""
    steps = Steps(model, rows=chunk, **how)
    return np.concatenate([steps.step(ids[at : at + chunk])[0] for at in range(0, len(ids), chunk)])


def some_ids(config, n, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab, n).tolist()


def variant(name, dtype="bfloat16"):
    config = ModelConfig(**(vars(SMALL) | {"eos_ids": (0,)} | VARIANTS[name]))
    return config, Weights.random(config, seed=2, dtype=dtype, scale=0.2)


# --- SmolLM2, against transformers


def smollm2(target):
    if target == "cuda" and not (cache_dir() / "models" / "smollm2").exists():
        pytest.skip("machines with a GPU may have no network; run `blink-ref model pull smollm2` before")
    return load("smollm2")


@pytest.fixture(scope="module", params=FAST)
def smollm2_bench(request):
    """Room for all the goldens at once."""
    model = smollm2(request.param)
    return Bench(model, chosen(model[0], request.param, context=1024, pages=256, blocks=0))


def expect(bench, items):
    requests = [Request(tuple(item["prompt_ids"]), len(item["output_ids"])) for item in items]
    for item, answer in zip(items, answers_together(bench, requests), strict=True):
        end = STOP if item["output_ids"][-1] in bench.config.eos_ids else LENGTH
        assert answer == (item["output_ids"], end), item["prompt"][:40]


def test_greedy_tokens_of_smollm2_are_the_golden_ones_all_in_one_batch(smollm2_bench):
    expect(smollm2_bench, [*GOLDEN, *MORE])


@pytest.mark.parametrize("item", [GOLDEN[0], MORE[-1]], ids=["golden", "chat"])
def test_greedy_tokens_of_smollm2_are_the_golden_ones_alone(smollm2_bench, item):
    expect(smollm2_bench, [item])


@pytest.mark.parametrize("number", range(len(GOLDEN)))
@pytest.mark.parametrize("target", FAST)
def test_logits_of_smollm2_are_those_of_transformers_in_float32(target, number):
    kept = np.load(DATA / "smollm2_logits.npz")
    ids = GOLDEN[number]["prompt_ids"] + GOLDEN[number]["output_ids"]
    logits = logits_of(smollm2(target), ids, target=target, blocks=0)
    top = np.take_along_axis(logits, kept[f"ids{number}"].astype(np.int64), axis=-1)
    gap = np.abs(top - kept[f"logits{number}"]).max()
    print(f"largest difference {gap:.1e}")
    assert gap < LOGIT_BAR
    assert gap < CLOSE
    rest = logits.copy()
    np.put_along_axis(rest, kept[f"ids{number}"].astype(np.int64), -np.inf, axis=-1)
    assert (rest.max(axis=-1) <= kept[f"logits{number}"].min(axis=-1) + CLOSE).all()


# --- other models, against the NumPy reference


@pytest.mark.parametrize("target", FAST)
def test_logits_of_the_tiny_model_are_those_of_the_reference(target):
    ids = some_ids(tiny()[0], 150)
    expected = Reference(*tiny()).logits(ids)
    np.testing.assert_allclose(logits_of(tiny(), ids, target=target), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("target", TARGETS)
def test_logits_of_every_kind_of_model_are_those_of_the_reference(target, name):
    model = variant(name)
    ids = some_ids(model[0], 4 if target == "python" else 40)
    expected = Reference(*model).logits(ids)
    np.testing.assert_allclose(logits_of(model, ids, target=target, chunk=16), expected, **SMALL_CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("target", TARGETS)
def test_logits_of_other_weight_types_are_those_of_the_reference(target, dtype):
    model = variant("plain", dtype)
    ids = some_ids(model[0], 4 if target == "python" else 40)
    expected = Reference(*model).logits(ids)
    np.testing.assert_allclose(logits_of(model, ids, target=target, chunk=16), expected, **SMALL_CLOSE)


# --- one path: how it is computed changes nothing


@pytest.mark.parametrize("target", TARGETS)
def test_logits_over_keys_and_values_in_bfloat16_are_near_those_of_the_reference(target):
    """Each is off by 2**-8 of itself at most; of the logits, which are sums of many, 4e-3 and 1e-3 are seen."""
    model = small() if target == "python" else tiny()
    ids = some_ids(model[0], 6 if target == "python" else 150)
    expected = Reference(*model).logits(ids)
    logits = logits_of(model, ids, target=target, kv_dtype="bfloat16")
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 1e-5 < error < 1e-2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 3))
def test_logits_are_bitwise_the_same_in_whatever_chunks_and_blocks(chunks, blocks):
    ids = some_ids(SMALL, 40)
    whole = logits_of(small(), ids, chunk=40, blocks=1)
    steps, pieces, at = Steps(small(), blocks=blocks), [], 0
    for n in [*chunks, *[1] * 40]:
        if ids[at : at + n]:
            pieces.append(steps.step(ids[at : at + n])[0])
            at += n
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_logits_of_the_tiny_model_are_bitwise_the_same_with_any_number_of_blocks(blocks):
    ids = some_ids(tiny()[0], 90)
    np.testing.assert_array_equal(logits_of(tiny(), ids, blocks=blocks), logits_of(tiny(), ids, blocks=1))


@pytest.mark.parametrize("page_size", [1, 7, 32, 64, 256])
def test_the_size_of_a_page_changes_logits_by_rounding_only(page_size):
    ids = some_ids(tiny()[0], 257)
    expected = logits_of(tiny(), ids)
    found = logits_of(tiny(), ids, page_size=page_size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_row_reads_no_later_position_and_no_foreign_page():
    """What the step before left behind, and what its own step writes later, are NaN or other numbers."""
    ids, other = some_ids(SMALL, 30), some_ids(SMALL, 30, seed=1)
    first = logits_of(small(), ids, chunk=30)
    second = logits_of(small(), ids[:15] + other[15:], chunk=30)
    np.testing.assert_array_equal(first[:15], second[:15])
    assert np.isfinite(first).all()


# --- the draw


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 3.0), st.integers(0, 2**64 - 1))
def test_the_token_drawn_is_the_one_of_the_spec(temperature, seed):
    steps = Steps(small())
    logits, drawn = steps.step(some_ids(SMALL, 12), temperature, seed)
    assert drawn == [sampling.spec(row, temperature, seed, n + 1) for n, row in enumerate(logits)]


def test_greedy_ties_go_to_the_smaller_id():
    config, weights = small()
    same = replace(weights, flat=weights.flat.copy())
    start = same.embed
    for token in range(1, config.vocab):
        same.flat[start + token * config.hidden : start + (token + 1) * config.hidden] = same.flat[
            start : start + config.hidden
        ]
    _, drawn = Steps((config, same), blocks=3).step([4, 5, 6])
    assert drawn == [0, 0, 0]
