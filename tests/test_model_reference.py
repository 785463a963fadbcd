"""The NumPy reference: held to transformers on SmolLM2, and to itself on small models."""

import json
from pathlib import Path

import numpy as np
import pytest

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.model.reference import Reference, attend, swiglu
from blink_ref.model.store import resolve
from blink_ref.model.weights import Weights

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "smollm2_golden.json").read_text())["items"]
MORE = json.loads((DATA / "smollm2_more.json").read_text())["items"]
# Both sides compute in float32. Logits of some 20 after 30 layers differ by about 1e-4; the bar of
# the project for any path is 2e-2.
LOGIT_BAR = 2e-3
SMALL = ModelConfig(
    name="small",
    vocab=61,
    hidden=32,
    ffn=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    context=24,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=True,
    bos_id=None,
    eos_ids=(),
    dtype="float32",
)


@pytest.fixture(scope="session")
def smollm2():
    path = resolve("smollm2")
    config = ModelConfig.load(path)
    return Reference(config, Weights.load(path, config))


@pytest.fixture
def small():
    return Reference(SMALL, Weights.random(SMALL, dtype="float32", scale=0.3))


@pytest.mark.parametrize("item", GOLDEN, ids=lambda item: item["prompt"][:20])
def test_greedy_tokens_of_smollm2_are_the_golden_ones(smollm2, item):
    assert smollm2.generate(item["prompt_ids"], 32) == item["output_ids"]


@pytest.mark.parametrize("item", MORE, ids=lambda item: item["name"])
def test_teacher_forced_argmax_of_smollm2_follows_transformers(smollm2, item):
    logits = smollm2.logits(item["prompt_ids"] + item["output_ids"])
    after_prompt = logits[len(item["prompt_ids"]) - 1 : -1]
    assert after_prompt.argmax(axis=-1).tolist() == item["output_ids"]
    second, first = np.sort(after_prompt, axis=-1)[:, -2:].T
    np.testing.assert_allclose(first - second, item["top1_minus_top2"], atol=2 * LOGIT_BAR)


@pytest.mark.parametrize("number", range(len(GOLDEN)))
def test_logits_of_smollm2_are_those_of_transformers_in_float32(smollm2, number):
    kept = np.load(DATA / "smollm2_logits.npz")
    ids = GOLDEN[number]["prompt_ids"] + GOLDEN[number]["output_ids"]
    logits = smollm2.logits(ids)
    top = np.take_along_axis(logits, kept[f"ids{number}"].astype(np.int64), axis=-1)
    np.testing.assert_allclose(top, kept[f"logits{number}"], rtol=0, atol=LOGIT_BAR)
    # What transformers did not keep is smaller than what it kept.
    rest = logits.copy()
    np.put_along_axis(rest, kept[f"ids{number}"].astype(np.int64), -np.inf, axis=-1)
    assert (rest.max(axis=-1) <= kept[f"logits{number}"].min(axis=-1) + LOGIT_BAR).all()


def test_the_cache_changes_no_token(small):
    ids = [5, 1, 40]
    out = small.generate(ids, 12)
    logits = small.logits(ids + out)
    assert logits[len(ids) - 1 : -1].argmax(axis=-1).tolist() == out


def test_a_later_token_changes_no_earlier_logits(small):
    np.testing.assert_array_equal(small.logits([3, 4, 5])[:2], small.logits([3, 4, 60])[:2])


def test_ties_go_to_the_smaller_id(small):
    small.embed[:] = small.embed[0]
    assert small.generate([7], 3) == [0, 0, 0]


def test_generation_ends_with_the_end_of_text_token_unless_ignored():
    weights = Weights.random(SMALL, dtype="float32", scale=0.3)
    free = Reference(SMALL, weights).generate([5], 8)
    config = ModelConfig(**(vars(SMALL) | {"eos_ids": (free[3],)}))
    end = free.index(free[3]) + 1
    assert Reference(config, weights).generate([5], 8) == free[:end]
    assert Reference(config, weights).generate([5], 8, ignore_eos=True) == free


def test_attention_of_grouped_heads_is_softmax_over_the_past():
    draw = np.random.default_rng(0)
    query, keys, values = (draw.standard_normal(shape) for shape in ((3, 4, 8), (5, 2, 8), (5, 2, 8)))
    out = attend(query, keys, values).reshape(3, 4, 8)
    for row in range(3):
        for head in range(4):
            seen = slice(0, 3 + row)
            score = keys[seen, head // 2] @ query[row, head] / np.sqrt(8)
            weight = np.exp(score) / np.exp(score).sum()
            np.testing.assert_allclose(out[row, head], weight @ values[seen, head // 2], rtol=1e-6)


def test_swiglu_of_a_very_negative_gate_is_zero_and_no_warning():
    one = np.ones((1, 1), np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert swiglu(np.float32([[-1000.0]]), one, one, one) == 0


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([], "prompt is empty"),
        ([61], "token 61 is outside the vocabulary of 61"),
        ([-1], "token -1 is outside"),
        ([0] * 25, "25 positions exceed the context of 24"),
    ],
)
def test_impossible_prompts_are_refused(small, ids, complaint):
    with pytest.raises(BlinkError, match=complaint):
        small.logits(ids)


def test_generation_past_the_context_is_refused(small):
    assert len(small.generate([0] * 20, 5)) == 5
    with pytest.raises(BlinkError, match="25 positions exceed the context of 24"):
        small.generate([0] * 20, 6)
