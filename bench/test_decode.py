"""Decode on a GPU at the shapes of Llama 3, as the NIC sees it, with transformers beside it in the same run.

``make bench-cuda`` runs it and keeps the figures, with the card's name, in ``bench/results``. On a CPU the same is
done with the tiny model, without a peer, and nothing is asked of the figure.
"""

import gc
from dataclasses import asdict, replace

import numpy as np
import pytest

from blink_ref.engine import memory, settings
from blink_ref.engine.host import read_bandwidth
from blink_ref.engine.persistent import serve
from blink_ref.model.weights import Weights
from blink_ref.nic.client import Nic
from blink_ref.nic.sight import look
from blink_ref.ring.layout import PHASES
from blink_ref.ring.window import Window
from blink_ref.simt import start
from tests.engine_bench import load

from . import shapes
from .decoding import Case, prompts_of, seconds_a_step, sizes_for
from .serving import serving

pytestmark = pytest.mark.timeout(1200)

CASES = [
    Case(shapes.LLAMA_1B, 1, 256, bar=0.80),
    Case(shapes.LLAMA_1B, 8, 512, bar=0.65),
    Case(shapes.LLAMA_1B, 32, 512, bar=0.60),
    Case(shapes.LLAMA_8B, 1, 1024, bar=0.88),
    Case(shapes.LLAMA_8B, 64, 1024, bar=0.60),
]
ATTENTION = replace(shapes.LLAMA_8B, name="8b-attention", layers=4, ffn=512, vocab=4096, context=16384)
"""Little beside the attention."""
ROWS, TIMES, CONTEXT = 512, 20, 256
DATASHEET = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H100 PCIe": 2.0e12}
"""Bytes a second of the memory, of NVIDIA's datasheets."""


@pytest.fixture(scope="module")
def peer():
    """PyTorch and transformers."""
    torch = pytest.importorskip("torch", reason="the peer is PyTorch with CUDA: pip install torch transformers")
    transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install transformers")
    return torch, transformers


_made: dict = {}


def random_model(config, torch):
    """Weights on the host, and the same on the GPU; of one shape at a time."""
    if config.name not in _made:
        _made.clear()
        gc.collect()
        torch.cuda.empty_cache()
        _made[config.name] = shapes.random_weights(config, torch)
    return _made[config.name]


def graph_ms(model, prompts: list[list[int]], torch, transformers) -> float:
    """Milliseconds of one decode step of transformers in bfloat16, replayed as a CUDA graph; median of 20."""
    batch, context = len(prompts), len(prompts[0])
    cache = transformers.StaticCache(config=model.config, max_cache_len=2 * context)
    with torch.inference_mode():
        ids = torch.tensor(prompts, device="cuda")
        for first in range(0, context, CONTEXT):
            piece = ids[:, first : first + CONTEXT]
            at = torch.arange(first, first + piece.shape[1], device="cuda")
            model(piece, past_key_values=cache, cache_position=at, use_cache=True, logits_to_keep=1)
        token = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
        position = torch.tensor([context], device="cuda")
        positions = position.expand(batch, 1)

        def step():
            model(token, past_key_values=cache, position_ids=positions, cache_position=position, use_cache=True)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        times = []
        for _ in range(21):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return float(np.median(times[1:]))


def figures_of(case: Case, weights, target: str, rows: int, times: int) -> tuple[list[float], dict]:
    """Milliseconds of a step, so many times, and the engine's settings."""
    chosen = sizes_for(case, target, rows)
    with serving(case.config, weights, chosen) as window:
        prompts = prompts_of(case)
        seconds_a_step(window, case, prompts, rows)  # compiles; the next finds the prompts cached
        return [seconds_a_step(window, case, prompts, rows) * 1e3 for _ in range(times)], asdict(chosen)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_at_a_shape(benchmark, show, case, peer):
    from blink_ref.simt import on_cuda

    torch, transformers = peer
    weights, flat = random_model(case.config, torch)
    figures, chosen = benchmark.pedantic(figures_of, args=(case, weights, "cuda", ROWS, TIMES), rounds=1)
    ours, bandwidth, card = float(np.median(figures)), on_cuda.copy_bandwidth(), torch.cuda.get_device_name()
    model = shapes.transformers_model(case.config, weights, flat, torch, transformers, torch.bfloat16)
    theirs = graph_ms(model, prompts_of(case), torch, transformers)
    least = case.bytes() / bandwidth * 1e3
    fractions = {"of_copy": least / ours, "bar": case.bar}
    if card in DATASHEET:
        fractions["of_datasheet"] = case.bytes() / DATASHEET[card] * 1e3 / ours
    benchmark.extra_info.update(
        card=card,
        ms_a_step=ours,
        ms_each=figures,
        bytes=case.bytes(),
        copy_gb_per_s=bandwidth / 1e9,
        bytes_at_copy_bandwidth_ms=least,
        fractions=fractions,
        transformers_graph_ms=theirs,
        times_transformers=theirs / ours,
        settings=chosen,
    )
    show(f"{case.name}: {ours:.3f} ms a step, transformers {theirs:.3f}; {fractions}")
    assert ours < theirs


def test_decode_of_the_tiny_model_on_a_cpu(benchmark, show):
    config, weights = load("tiny")
    case = Case(config, 3, 40, bar=0, tokens=200)
    (ms,), _ = benchmark.pedantic(figures_of, args=(case, weights, "cpu", 32, 1), rounds=1)
    benchmark.extra_info.update(ms_a_step=ms, bytes=case.bytes())
    show(f"{case.name}: {ms:.3f} ms a step")
    assert ms > 0


def attend_seconds(case: Case, weights, target: str, rows: int) -> float:
    """Of the attention of all layers in a step in which all get a token, the barrier behind it included.

    As the engine itself tells: the median of the last steps.
    """
    chosen = sizes_for(case, target, rows)
    with serving(case.config, weights, chosen) as window:
        seconds_a_step(window, case, prompts_of(case), rows)
        steps = [step for step in look(window).steps if step.decode == case.batch and not step.prefill]
    return float(np.median([step.phases[PHASES.index("attend")] for step in steps])) / 1e9


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_attention_alone(benchmark, show, target):
    """Of a few layers: 8 heads of keys and values, of 128 numbers."""
    if target == "cuda":
        from blink_ref.simt import on_cuda

        config, batch, context, rows, bandwidth = ATTENTION, 16, 8192, ROWS, on_cuda.copy_bandwidth()
    else:
        config, batch, context, rows = replace(ATTENTION, hidden=64, ffn=64, heads=8, layers=1), 2, 64, 32
        bandwidth = read_bandwidth(np.ones(1 << 25, np.float32), 1)
    case = Case(config, batch, context, bar=0.75, tokens=64)
    weights = Weights.random(config, dtype="bfloat16")
    seconds = benchmark.pedantic(attend_seconds, args=(case, weights, target, rows), rounds=1)
    fraction = case.cache_bytes() / bandwidth / seconds
    benchmark.extra_info.update(seconds=seconds, bytes=case.cache_bytes(), of_copy=fraction, bar=case.bar)
    show(f"attention, {case.name}: {seconds * 1e3:.3f} ms, {fraction:.2f} of the bandwidth (on a GPU: {case.bar})")
    assert seconds > 0


@pytest.mark.cuda
def test_logits_of_a_1b_shape_agree_with_transformers_in_float32(peer):
    from blink_ref.engine import cuda_memory  # numba-cuda may be missing where these are skipped

    torch, transformers = peer
    config = shapes.LLAMA_1B
    weights, flat = random_model(config, torch)
    chosen = settings.choose(config, "cuda")
    window = Window.create(memory.window_layout(config, chosen))
    view = memory.device_window(window.nic, window.gpu, window.layout)
    args = cuda_memory.place(memory.arguments(config, weights, chosen, view, pack=False), window)
    *_, act, _ = args
    prompt = np.random.default_rng(0).integers(0, config.vocab, CONTEXT).tolist()
    nic = Nic(Window.open(window.path))
    nic.submit(prompt, 1, ignore_eos=True)
    start(serve, chosen.blocks, chosen.lanes, *args, 0, 3, target="cuda", shared=chosen.shared).wait()
    window.unlink()
    ours = act.logits.copy_to_host()[: config.vocab]
    peer = shapes.transformers_model(config, weights, flat, torch, transformers, torch.float32)
    with torch.no_grad():
        theirs = peer(torch.tensor([prompt], device="cuda")).logits[0, -1].cpu().numpy()
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    print(f"relative error of the logits {error:.1e}")
    assert error < 1e-2
