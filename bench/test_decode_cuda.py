"""Decode on a GPU at Llama-3.2-1B's shape, as the NIC sees it, with transformers beside it in the same run.

``make bench-cuda`` runs it and keeps the figures, with the card's name, in ``bench/results``.
"""

import time
from dataclasses import asdict

import numpy as np
import pytest

from blink_ref.engine import memory, settings
from blink_ref.engine.host import Engine
from blink_ref.engine.persistent import serve
from blink_ref.nic.client import Nic
from blink_ref.ring.window import Window
from blink_ref.simt import start

from . import shapes

pytestmark = pytest.mark.cuda

torch = pytest.importorskip("torch", reason="the peer is PyTorch with CUDA: pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install transformers")

CONTEXT, TOKENS = 256, 256


@pytest.fixture(scope="module")
def model():
    weights, flat = shapes.random_weights(shapes.LLAMA_1B, torch)
    return shapes.LLAMA_1B, weights, flat


def stream(nic: Nic, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The tokens of one greedy request, and when each arrived (seconds)."""
    nic.submit(prompt, tokens, ignore_eos=True)
    ids, times = [], []
    while nic.running:
        for event in nic.poll():
            if event.token is not None:
                ids.append(event.token)
                times.append(time.perf_counter())
    return ids, times


def graph_ms(model, prompt: list[int]) -> float:
    """Milliseconds of one decode step of transformers in bfloat16, replayed as a CUDA graph; median of 20."""
    model = model.to(torch.bfloat16)
    cache = transformers.StaticCache(config=model.config, max_cache_len=2 * CONTEXT)
    with torch.inference_mode():
        model(torch.tensor([prompt], device="cuda"), past_key_values=cache, use_cache=True)
        token = torch.zeros((1, 1), dtype=torch.long, device="cuda")
        position = torch.tensor([CONTEXT], device="cuda")

        def step():
            model(
                token, past_key_values=cache, position_ids=position[None], cache_position=position, use_cache=True
            )

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


def test_decode_of_one_request_at_a_1b_shape(benchmark, model):
    config, weights, flat = model
    chosen = settings.choose(config, "cuda")
    engine = Engine(config, weights, chosen, Window.create(memory.window_layout(config, chosen)))
    prompt = np.random.default_rng(0).integers(0, config.vocab, CONTEXT).tolist()
    bandwidth = engine.bandwidth()
    engine.start()
    try:
        nic = Nic(Window.open(engine.window.path))
        stream(nic, prompt, 16)

        def ms_per_token() -> float:
            _, times = stream(nic, prompt, TOKENS + 1)
            return (times[-1] - times[0]) / TOKENS * 1e3

        figures = [benchmark.pedantic(ms_per_token, rounds=1)] + [ms_per_token() for _ in range(4)]
    finally:
        engine.stop()
        engine.wait()
        engine.close()
    peer = graph_ms(shapes.transformers_model(config, weights, flat, torch, transformers), prompt)
    ours = float(np.median(figures))
    floor = engine.bytes_per_token / bandwidth * 1e3
    benchmark.extra_info.update(
        card=torch.cuda.get_device_name(),
        ms_per_token=ours,
        ms_each=figures,
        transformers_graph_ms=peer,
        times_transformers=peer / ours,
        copy_gb_per_s=bandwidth / 1e9,
        weights_at_copy_bandwidth_ms=floor,
        fraction_of_copy=floor / ours,
        settings=asdict(chosen),
    )
    assert ours < peer


def test_logits_of_a_1b_shape_agree_with_transformers_in_float32(model):
    from blink_ref.engine import cuda_memory  # numba-cuda may be missing where these are skipped

    config, weights, flat = model
    chosen = settings.choose(config, "cuda")
    window = Window.create(memory.window_layout(config, chosen))
    view = memory.device_window(window.nic, window.gpu, window.layout)
    args = cuda_memory.place(memory.arguments(config, weights, chosen, view), window)
    *_, act, _ = args
    prompt = np.random.default_rng(0).integers(0, config.vocab, CONTEXT).tolist()
    nic = Nic(Window.open(window.path))
    nic.submit(prompt, 1, ignore_eos=True)
    start(serve, chosen.blocks, chosen.lanes, *args, 0, 3, target="cuda", shared=chosen.shared).wait()
    window.unlink()
    ours = act.logits.copy_to_host()[: config.vocab]
    peer = shapes.transformers_model(config, weights, flat, torch, transformers)
    with torch.no_grad():
        theirs = peer(torch.tensor([prompt], device="cuda")).logits[0, -1].cpu().numpy()
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    print(f"relative error of the logits {error:.1e}")
    assert error < 1e-2
