"""How long an engine takes to start: from its command to the first token, compiled anew and from the cache."""

import time
from dataclasses import replace

import numpy as np
import pytest

from blink_ref.nic.client import Nic
from blink_ref.nic.engine_process import engine_process
from tests.engine_bench import load

from . import shapes

pytestmark = pytest.mark.timeout(1800)

TIMES = 5
SHAPES = {"1b": shapes.LLAMA_1B, "8b": shapes.LLAMA_8B}
WARM_BAR = {"1b": 6.0}
"""Seconds."""


def seconds_to_first_token(folder, target: str, seed: int) -> float:
    """Of an engine that is started for it."""
    begin = time.perf_counter()
    with engine_process(folder, target) as engine:
        nic = Nic(engine.window)
        nic.submit(np.random.default_rng(seed).integers(0, 512, 16).tolist(), 1, ignore_eos=True)
        while nic.running:
            if any(event.token is not None for event in nic.poll()):
                took = time.perf_counter() - begin
        return took


def figures(folder, target: str, times: int) -> list[float]:
    """Of so many starts after one another."""
    return [seconds_to_first_token(folder, target, seed) for seed in range(times)]


def test_start_on_a_cpu(benchmark, show, tmp_path, monkeypatch):
    """The tiny model. Compiled anew only where figures are wanted."""
    config, weights = load("tiny")
    shapes.write_folder(tmp_path, config, weights)
    times = 1
    if not benchmark.disabled:
        monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path / "cache"))
        times = 1 + TIMES
    seconds = benchmark.pedantic(figures, args=(tmp_path, "cpu", times), rounds=1)
    keep(benchmark, show, "tiny on cpu", seconds)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_start_at_a_shape(benchmark, show, shape, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="it makes the weights: pip install torch")
    config = replace(SHAPES[shape], name=shape)
    weights, flat = shapes.random_weights(config, torch)
    del flat
    torch.cuda.empty_cache()
    shapes.write_folder(tmp_path, config, weights)
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path / "cache"))
    seconds = benchmark.pedantic(figures, args=(tmp_path, "cuda", 1 + TIMES), rounds=1)
    warm = keep(benchmark, show, f"{shape} on cuda", seconds)
    assert warm < WARM_BAR.get(shape, np.inf)


def keep(benchmark, show, title: str, seconds: list[float]) -> float:
    """The first start compiles, if there are several; returns the median of the others."""
    cold, warm = seconds[0], float(np.median(seconds[1:] or seconds))
    benchmark.extra_info.update(cold_s=cold, warm_s=warm, each_s=seconds)
    anew = f"{cold:.1f} s compiled anew, " if len(seconds) > 1 else ""
    show(f"{title}: {anew}{warm:.2f} s from the cache")
    return warm
