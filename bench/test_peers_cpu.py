"""This project beside llama.cpp and transformers on the CPU: SmolLM2, the same work, in turns in one run.

``make bench`` runs it where the peers are installed, and prints the medians. The engines take turns, so that a
busy machine is busy for all of them; the read bandwidth is measured in the same turns. Each turn has new prompts,
so that no engine finds one in its cache.
"""

import statistics
from contextlib import ExitStack

import numpy as np
import pytest

from blink_ref.engine.host import read_bandwidth
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import resolve
from blink_ref.model.weights import Weights

from . import peers

INSTALL = "install the peers: pip install 'blink-ref[peers]'"
pytest.importorskip("xllamacpp", reason=INSTALL)
pytest.importorskip("torch", reason=INSTALL)
pytest.importorskip("transformers", reason=INSTALL)

pytestmark = pytest.mark.timeout(1200)

ROUNDS = 3
PROMPT, TOKENS, BATCH = 64, 64, 8
VOCAB = 49152

draw = np.random.default_rng(0)


def new_prompts(batch: int, prompt: int) -> peers.Prompts:
    """Prompts of token ids that have not been seen before."""
    return draw.integers(3, VOCAB, (batch, prompt)).tolist()


class Field:
    """The engines with their model loaded, on one number of threads."""

    def __init__(self, threads: int, stack: ExitStack) -> None:
        model = resolve("smollm2")
        self.threads = threads
        self.weights = Weights.load(model, ModelConfig.load(model)).flat
        self.ours = stack.enter_context(peers.blink_ref(model, threads))
        self.llama = peers.LlamaCpp(model, threads, parallel=1)
        self.llama_of_a_batch = peers.LlamaCpp(model, threads, parallel=BATCH)
        self.transformers = peers.Transformers(model, threads)

    def bandwidth(self) -> float:
        """Bytes a second, now."""
        return read_bandwidth(self.weights, self.threads)


@pytest.fixture(scope="module", params=[1, 2], ids="{}-threads".format)
def field(request):
    with ExitStack() as stack:
        yield Field(request.param, stack)


class Turns:
    """Lets the engines answer in turns, and keeps and prints the medians of what is asked of a run."""

    def __init__(self, benchmark, field: Field, show) -> None:
        self.benchmark, self.field, self.show = benchmark, field, show

    def __call__(self, llama: peers.LlamaCpp, batch: int, prompt: int, tokens: int, **figures) -> None:
        """`batch` prompts of `prompt` tokens; `figures` are functions of a :class:`peers.Run`, by name."""
        seen = {name: {} for name in figures}
        bandwidths = []

        def turn(peer, prompts):
            run = peer.run(prompts, tokens)
            for name, figure in figures.items():
                seen[name].setdefault(peer.name, []).append(figure(run))

        def others():
            prompts = new_prompts(batch, prompt)
            bandwidths.append(self.field.bandwidth())
            turn(llama, prompts)
            turn(self.field.transformers, prompts)
            return (self.field.ours, prompts), {}

        self.benchmark.pedantic(turn, setup=others, rounds=ROUNDS)
        bandwidth = statistics.median(bandwidths)
        self.benchmark.extra_info.update(threads=self.field.threads, bytes_per_s=bandwidth, each=seen)
        lines = [f"{self.benchmark.name}, read bandwidth {bandwidth / 1e9:.1f} GB/s"]
        for name, by_peer in seen.items():
            for peer, values in by_peer.items():
                median = statistics.median(values)
                self.benchmark.extra_info.setdefault(name, {})[peer] = median
                lines.append(f"  {name:28} {peer:13} {median:7.1f}  ({min(values):.1f} to {max(values):.1f})")
        self.show(*lines)


@pytest.fixture
def in_turns(benchmark, field, show):
    return Turns(benchmark, field, show)


def test_decode_of_one_request(in_turns, field):
    in_turns(field.llama, 1, PROMPT, TOKENS, tokens_per_s=lambda run: run.decode)
    info = in_turns.benchmark.extra_info
    ours = info["tokens_per_s"]["blink_ref"]
    info["times_llama_cpp"] = ours / info["tokens_per_s"]["llama.cpp"]
    info["fraction_of_bandwidth"] = ours * field.weights.nbytes / info["bytes_per_s"]


def test_a_batch_of_eight(in_turns, field):
    in_turns(
        field.llama_of_a_batch,
        BATCH,
        PROMPT,
        TOKENS,
        tokens_per_s=lambda run: BATCH * TOKENS / run.wall,
        tokens_per_s_in_decode=lambda run: run.decode,
    )


@pytest.mark.parametrize("prompt", [64, 256])
def test_prefill(in_turns, field, prompt):
    in_turns(field.llama, 1, prompt, 1, tokens_per_s=lambda run: prompt / run.first)


def test_the_engines_answer_with_the_same_tokens(field):
    (prompt,) = new_prompts(1, PROMPT)
    (ours,) = field.ours.run([prompt], TOKENS).answers
    (theirs,) = field.transformers.run([prompt], TOKENS).answers
    assert ours == theirs == field.llama.ids(prompt, TOKENS)
