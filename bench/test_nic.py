"""The NIC's part of a token's way: text to doorbell, doorbell to record, record to text."""

import time
from pathlib import Path

import pytest

from blink_ref.engine.memory import window_layout
from blink_ref.engine.persistent import serve
from blink_ref.model.store import resolve
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.nic.client import Nic
from blink_ref.nic.detokenize import Detokenizer
from blink_ref.roofline import ceilings, costs
from blink_ref.simt import start
from tests.engine_bench import Bench, Memory, chosen, load

from .report import report

TEXT = (Path(__file__).parents[1] / "LICENSE").read_text("utf-8")
CHARACTERS = 1000
STREAMS, EACH = 64, 32

models = pytest.mark.parametrize("model", ["tiny", "smollm2"])


@pytest.fixture(scope="module")
def serving():
    """The tiny model's kernel, running on one block, and its window."""
    model = load("tiny")
    bench = Bench(model, chosen(model[0], blocks=1))
    s, no_bounds = bench.settings, (0, 0)
    running = start(serve, s.blocks, s.lanes, *bench.args, *no_bounds, target="cpu", shared=s.shared)
    yield bench
    bench.window.nic["stop"][0] = 1
    running.wait()


@pytest.mark.parametrize("silence", [0.0, 0.2])
def test_ring_round_trip(benchmark, serving, silence):
    """From the doorbell to the first record, seconds after the last request; the model's step is in it."""
    nic = Nic(serving.window)

    def setup():
        while nic.running:
            nic.poll()
        time.sleep(silence)

    def work():
        nic.submit([1], 1, ignore_eos=True)
        while not nic.poll():
            pass

    benchmark.pedantic(work, setup=setup, rounds=30, warmup_rounds=1)
    setup()
    cost = costs.step(serving.config, 1, 1, 1)
    report(benchmark, cost, ceilings.measure(serving.model.weights, 1), silence=silence)


@models
def test_text_to_doorbell(benchmark, model):
    """A prompt of a thousand characters becomes ids, and its doorbell rings."""
    config, _ = load(model)
    window = Memory(window_layout(config, chosen(config)))
    tokenizer = Tokenizer.load(resolve(model))
    ids = tokenizer.encode(TEXT[:CHARACTERS])

    def work(nic):
        nic.submit(tokenizer.encode(TEXT[:CHARACTERS]), 1)

    benchmark.pedantic(work, setup=lambda: ((Nic(window),), {}), rounds=200, warmup_rounds=5)
    benchmark.extra_info.update(tokens=len(ids), window_bytes=4 * len(ids) + window.nic["request"].itemsize + 4)
    begin = time.perf_counter()
    for _ in range(100):
        tokenizer.encode(TEXT[:CHARACTERS])
    encode = (time.perf_counter() - begin) / 100
    if benchmark.stats is not None:
        benchmark.extra_info["fraction_in_tokenizer"] = encode / benchmark.stats["median"]


@models
def test_detokenization_of_many_streams(benchmark, model):
    """Tokens of 64 answers, taken in turns; the ceiling is the tokenizer that gets each answer at once."""
    tokenizer = Tokenizer.load(resolve(model))
    ids = tokenizer.encode(TEXT)
    answers = [ids[i * EACH : (i + 1) * EACH] for i in range(STREAMS)]

    def work(streams):
        for i in range(EACH):
            for stream, answer in zip(streams, answers, strict=True):
                stream.add(answer[i])

    def streams():
        return ([Detokenizer(tokenizer) for _ in answers],), {}

    benchmark.pedantic(work, setup=streams, rounds=10, warmup_rounds=1)
    begin = time.perf_counter()
    for answer in answers:
        tokenizer.decode(answer)
    at_once = time.perf_counter() - begin
    benchmark.extra_info.update(streams=STREAMS, at_once_tokens_per_s=STREAMS * EACH / at_once)
    if benchmark.stats is not None:
        seconds = benchmark.stats["median"]
        benchmark.extra_info.update(tokens_per_s=STREAMS * EACH / seconds, fraction=at_once / seconds)
