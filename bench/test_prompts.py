"""How long a prompt takes: from a doorbell to its first token, by its length, on an idle engine.

And what the last of its steps spends its time on, by the phases that the engine shows.
"""

import time

import numpy as np
import pytest

from blink_ref.ring.layout import HISTORY, PHASES, STEP_NS, STEP_NUMBER, STEP_PHASES, STEP_WORDS
from blink_ref.ring.window import Window
from tests.engine_bench import Desk

from . import shapes
from .serving import serving, sizes
from .test_scheduler import ask, drain

PROMPTS = {"cpu": (16, 64, 256), "cuda": (8, 16, 64, 128, 512, 2048)}
TIMES = 5
LONG = 2048
SHORT, OFTEN, SHORT_BAR_MS = 128, 300, 6.0
"""Tokens of a prompt, how often it is asked, and on a GPU milliseconds at most, for a 1B shape."""


def last_step(window: Window) -> dict[str, float]:
    """Milliseconds of the last step, and of each of its phases."""
    records = window.gpu["history"].reshape(HISTORY, STEP_WORDS).astype(np.int64)
    last = records[records[:, STEP_NUMBER].argmax()]
    return {"step": last[STEP_NS] / 1e6} | {name: last[STEP_PHASES + n] / 1e6 for n, name in enumerate(PHASES)}


def test_time_to_the_first_token_by_the_prompt(benchmark, show, target, model):
    """No two prompts are alike, so that none is found in the cache."""
    config, weights = model
    longest = max(PROMPTS[target])
    chosen = sizes(config, target, rows=512, slots=64, context=longest + 1)
    times = 1 if benchmark.disabled else TIMES

    def prompts(desk: Desk) -> dict[int, dict]:
        seen = {}
        for length in PROMPTS[target]:
            took = []
            for slot in range(times):
                begin = time.perf_counter()
                ask(desk, slot, config, length, 1)
                drain(desk)
                took.append((time.perf_counter() - begin) * 1e3)
            seen[length] = {"ms": float(np.median(took)), "last_step_ms": last_step(desk.window)}
        return seen

    with serving(config, weights, chosen) as window:
        desk = Desk(window)
        ask(desk, 0, config, 8, 1)
        drain(desk)
        seen = benchmark.pedantic(prompts, args=(desk,), rounds=1)
    benchmark.extra_info.update(target=target, rows=chosen.rows, by_prompt=seen)
    lines = [f"{target}: ms to the first token, and of the last step"]
    for length, of in seen.items():
        phases = "  ".join(f"{name} {ms:.2f}" for name, ms in of["last_step_ms"].items())
        lines.append(f"  {length:5} tokens {of['ms']:8.2f}: {phases}")
    show(*lines)
    assert all(of["last_step_ms"]["step"] <= of["ms"] for of in seen.values())


def test_time_to_the_first_token_of_a_short_prompt(benchmark, show, target, model):
    """128 tokens, not cached, on an idle engine: from before the NIC's writes to the token in the outbox."""
    config, weights = model
    times = 3 if benchmark.disabled else OFTEN
    chosen = sizes(config, target, rows=512, slots=64, context=256)

    def first_tokens(desk: Desk) -> list[float]:
        took = []
        for n in range(times):
            begin = time.perf_counter()
            ask(desk, n % 64, config, SHORT, 1)
            drain(desk)
            took.append(time.perf_counter() - begin)
        return took

    with serving(config, weights, chosen) as window:
        desk = Desk(window)
        ask(desk, 0, config, SHORT, 1)
        drain(desk)
        seconds = benchmark.pedantic(first_tokens, args=(desk,), rounds=1)
    ms = {f"p{q}": float(np.percentile(seconds, q)) * 1e3 for q in (50, 90, 99)}
    benchmark.extra_info.update(target=target, ms=ms, bar_ms=SHORT_BAR_MS)
    show(f"{target}: {SHORT} tokens to the first: " + "  ".join(f"{q} {took:.2f} ms" for q, took in ms.items()))
    if target == "cuda" and not benchmark.disabled:
        assert ms["p99"] < SHORT_BAR_MS


@pytest.mark.cuda
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("config", "bar"), [(shapes.LLAMA_1B, 1.0), (shapes.LLAMA_8B, 0.5)], ids=["1b", "8b"])
def test_a_long_prompt_beside_transformers(benchmark, show, config, bar):
    """2,048 tokens to the first token, and transformers' forward pass in bfloat16. `bar`: of its tokens/s."""
    torch = pytest.importorskip("torch", reason="the peer is PyTorch with CUDA: pip install torch transformers")
    transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install transformers")
    weights, flat = shapes.random_weights(config, torch)
    chosen = sizes(config, "cuda", rows=512, slots=64, context=LONG + 1)

    def ours() -> list[float]:
        took = []
        for slot in range(1 + TIMES):
            begin = time.perf_counter()
            ask(desk, slot, config, LONG, 1)
            drain(desk)
            took.append(time.perf_counter() - begin)
        return took[1:]

    with serving(config, weights, chosen) as window:
        desk = Desk(window)
        seconds = benchmark.pedantic(ours, rounds=1)
    peer = shapes.transformers_model(config, weights, flat, torch, transformers, torch.bfloat16)
    ids = torch.randint(0, config.vocab, (1, LONG), device="cuda")
    theirs = []
    with torch.inference_mode():
        for _ in range(2 + TIMES):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            peer(ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            theirs.append(time.perf_counter() - begin)
    mine, other = float(np.median(seconds)), float(np.median(theirs[2:]))
    card = torch.cuda.get_device_name()
    benchmark.extra_info.update(card=card, ms=mine * 1e3, transformers_ms=other * 1e3, times=other / mine, bar=bar)
    show(f"{config.name}, {LONG} tokens: {mine * 1e3:.1f} ms, transformers {other * 1e3:.1f} (bar {bar})")
    assert other / mine > bar
