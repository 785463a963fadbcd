"""The engines that are compared on a CPU, each made to do the same work: prompts of token ids in, greedy ids out.

llama.cpp reports its own times, without its server's; transformers is timed around its forward passes; this
project is timed as its NIC sees it.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from blink_ref.nic.client import Nic
from blink_ref.nic.engine_process import engine_process

from .gguf_export import bf16_gguf

Prompts = list[list[int]]


class Run(NamedTuple):
    """What one engine did with some prompts."""

    answers: list[list[int]]
    first: float
    """seconds from the beginning to the first token of the first prompt"""
    decode: float
    """tokens a second after each request's first, summed over the requests; 0 for answers of one token"""
    wall: float
    """seconds from the beginning to the last token"""


class Peer(Protocol):
    """An engine that has loaded the model."""

    name: str

    def run(self, prompts: Prompts, tokens: int) -> Run:
        """Answer all prompts at once with `tokens` greedy tokens each, whatever they are."""


class BlinkRef:
    """This project: the engine is a child process, and this process its NIC."""

    name = "blink_ref"

    def __init__(self, nic: Nic) -> None:
        self._nic = nic

    def run(self, prompts: Prompts, tokens: int) -> Run:
        """See :class:`Peer`."""
        nic, begin = self._nic, time.perf_counter()
        handles = [nic.submit(prompt, tokens, ignore_eos=True) for prompt in prompts]
        answers = {handle: [] for handle in handles}
        times = {handle: [] for handle in handles}
        while nic.running:
            events = nic.poll()
            now = time.perf_counter()
            for handle, token, *_ in events:
                if token is not None:
                    answers[handle].append(token)
                    times[handle].append(now)
            if not events:
                time.sleep(nic.pause())
        spans = [seen[-1] - seen[0] for seen in times.values()]
        ends = [seen[-1] for seen in times.values()]
        decode = sum((tokens - 1) / span for span in spans if span)
        return Run(list(answers.values()), times[handles[0]][0] - begin, decode, max(ends) - begin)


@contextmanager
def blink_ref(model: Path, threads: int) -> Iterator[BlinkRef]:
    """This project's engine with `threads` blocks."""
    with engine_process(model, "cpu", threads) as engine:
        yield BlinkRef(Nic(engine.window))


class LlamaCpp:
    """llama.cpp by the ``xllamacpp`` wheel, on the same weights as a BF16 GGUF file."""

    name = "llama.cpp"

    def __init__(self, model: Path, threads: int, parallel: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(bf16_gguf(model))
        params.n_parallel = parallel
        params.n_ctx = 512 * parallel
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = 0
        self._server = xllamacpp.Server(params)
        self._pool = ThreadPoolExecutor(parallel)

    def run(self, prompts: Prompts, tokens: int) -> Run:
        """See :class:`Peer`; the ids of an answer are not part of its reply, see :meth:`ids`."""
        begin = time.perf_counter()
        replies = list(self._pool.map(lambda prompt: self._complete(prompt, tokens), prompts))
        wall = time.perf_counter() - begin
        timings = [reply["timings"] for reply in replies]
        decode = sum((tokens - 1) / t["predicted_ms"] * 1e3 for t in timings) if tokens > 1 else 0.0
        return Run([], timings[0]["prompt_ms"] / 1e3, decode, wall)

    def ids(self, prompt: list[int], tokens: int) -> list[int]:
        """The ids of an answer; asking for them costs time."""
        reply = self._complete(prompt, tokens, logprobs=1)
        return [token["id"] for token in reply["choices"][0]["logprobs"]["content"]]

    def _complete(self, prompt: list[int], tokens: int, **options: object) -> dict:
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        return self._server.handle_completions(request | {"cache_prompt": False} | options)


class Transformers:
    """Hugging Face transformers in float32, its forward passes called one by one."""

    name = "transformers"

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def run(self, prompts: Prompts, tokens: int) -> Run:
        """See :class:`Peer`; the prompts are of one length."""
        begin = time.perf_counter()
        answers, times, cache = [], [], None
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            for _ in range(tokens):
                out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                answers.append(ids[:, 0].tolist())
                times.append(time.perf_counter())
        span = times[-1] - times[0]
        decode = len(prompts) * (tokens - 1) / span if span else 0.0
        return Run([list(ids) for ids in zip(*answers, strict=True)], times[0] - begin, decode, times[-1] - begin)
