"""What `make sanitize-cuda` runs under NVIDIA's compute-sanitizer: the kernel that serves, for so many steps.

Prompts in tiles, rows from the stream, their attention in chunks, a sample with filters. `--target cpu` runs the
same without a GPU, which shows that this file works.
"""

import sys
from dataclasses import replace

import numpy as np

from blink_ref.engine import memory, settings
from blink_ref.engine.persistent import serve
from blink_ref.model.weights import Weights
from blink_ref.nic.client import Nic
from blink_ref.ring.window import Window
from blink_ref.simt import start
from tests.engine_bench import SMALL

MODEL = replace(SMALL, vocab=2048, hidden=256, ffn=512, layers=3, head_dim=64, context=1024)
PROMPTS, TOKENS, MAX_STEPS, PATIENCE = (300, 3, 40, 130), 12, 200, 3
FILTERED = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition": 1.2, "logprobs": 3, "seed": 3}


def main(target: str) -> int:
    """0 if all tokens came."""
    chosen = replace(
        settings.choose(MODEL, target), rows=128, slots=16, running=8, reserved=1, context=512, pages=300
    )
    window = Window.create(memory.window_layout(MODEL, chosen))
    view = memory.device_window(window.nic, window.gpu, window.layout)
    args = memory.arguments(MODEL, Weights.random(MODEL), chosen, view)
    if target == "cuda":
        from blink_ref.engine import cuda_memory  # numba-cuda may be missing

        args = cuda_memory.place(args, window)
    nic, draw = Nic(Window.open(window.path)), np.random.default_rng(0)
    for n, length in enumerate(PROMPTS):
        filters = FILTERED if n == 1 else {}
        nic.submit(draw.integers(0, MODEL.vocab, length).tolist(), TOKENS, ignore_eos=True, **filters)
    bounds = MAX_STEPS, PATIENCE
    start(serve, chosen.blocks, chosen.lanes, *args, *bounds, target=target, shared=chosen.shared).wait()
    tokens = 0
    while events := nic.poll():
        tokens += sum(event.token is not None for event in events)
    window.unlink()
    print(f"{tokens} tokens of {len(PROMPTS) * TOKENS}, on {chosen.blocks} blocks")
    return int(tokens != len(PROMPTS) * TOKENS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2] if sys.argv[1:2] == ["--target"] else "cuda"))
