"""Steps of the persistent kernel on the CPU: decode and prefill, launched in bounded pieces by hand.

No two prompts are alike, so that none is found in the cache.
"""

import itertools

import numpy as np
import pytest

from blink_ref.roofline import ceilings, costs
from tests.engine_bench import Bench, chosen, load

from .pages_read import bytes_read
from .report import report

PROMPT, STEPS, ROUNDS = 64, 8, 10

models = pytest.mark.parametrize("model", ["tiny", "smollm2"])
threads = pytest.mark.parametrize("threads", [1, 2])


def engine(model: str, threads: int) -> Bench:
    """An engine with room for a few hundred positions of eight requests."""
    config, weights = load(model)
    return Bench((config, weights), chosen(config, blocks=threads, context=512, pages=320))


seeds = itertools.count()


def ring(bench: Bench, slots: int, prompt: int, tokens: int) -> None:
    """Ask for `tokens` tokens in each of the first slots, after a new prompt of `prompt` tokens."""
    draw = np.random.default_rng(next(seeds))
    for slot in range(slots):
        bench.desk.ring(slot, draw.integers(3, bench.config.vocab, prompt).tolist(), tokens, ignore_eos=True)


@models
@pytest.mark.parametrize("batch", [1, 8])
@threads
def test_decode_step(benchmark, model, batch, threads):
    bench = engine(model, threads)
    ring(bench, batch, PROMPT, 512 - PROMPT)
    while min(len(answer.tokens) for answer in bench.desk.answers.values()) < 1:
        bench.run(steps=1)
        bench.desk.read()

    def work():
        bench.run(steps=STEPS)
        bench.desk.read()

    before = sum(len(answer.tokens) for answer in bench.desk.answers.values())
    read = bytes_read(bench.model.weights, lambda: bench.run(steps=1))
    bench.desk.read()
    tokens = sum(len(answer.tokens) for answer in bench.desk.answers.values()) - before
    benchmark.pedantic(work, rounds=ROUNDS, warmup_rounds=1)
    cost = costs.step(
        bench.config, batch, batch, PROMPT + STEPS * (ROUNDS + 2) // 2, kv_bytes=bench.settings.kv_bytes
    )
    most = ceilings.measure(bench.model.weights, threads)
    report(benchmark, cost, most, STEPS, batch=batch, weight_bytes_read=read)
    assert tokens == batch
    if read is not None:
        assert read + bench.model.norm.nbytes >= 2 * bench.config.parameters


@models
@pytest.mark.parametrize("prompt", [64, 256])
@threads
def test_prefill(benchmark, model, prompt, threads):
    bench = engine(model, threads)

    def work():
        bench.run()
        bench.desk.read()

    def setup():
        assert not bench.desk.busy()
        ring(bench, 1, prompt, 1)

    benchmark.pedantic(work, setup=setup, rounds=5, warmup_rounds=1)
    cost = costs.prefill(bench.config, prompt, bench.settings.rows, bench.settings.kv_bytes)
    most = ceilings.measure(bench.model.weights, threads)
    report(benchmark, cost, most, prompt=prompt, rows_in_a_step=bench.settings.rows)
    if benchmark.stats is not None:
        benchmark.extra_info["tokens_per_s"] = prompt / benchmark.stats["median"]
