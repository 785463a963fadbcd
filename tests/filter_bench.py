"""What tests of the sampling phase share: samples of any request, drawn on the device and by the specification."""

from dataclasses import dataclass, field, replace

import numpy as np
from engine_bench import SMALL
from kernel_bench import poison_arena

from blink_ref.engine import memory
from blink_ref.kernels import filters, logits, penalties
from blink_ref.kernels.tensors import MOST_LOGPROBS, Model
from blink_ref.scheduler import state
from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import f32

EOS = (3, 1)


@dataclass
class Ask:
    """What a request asks for, and what it has so far. Parameters that are off are 0."""

    temperature: float = 1.0
    seed: int = 1
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    repetition: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    logprobs: int = 0
    stops: list[int] = field(default_factory=list)
    biases: list[tuple[int, float]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=lambda: [0])
    answer: list[int] = field(default_factory=list)

    def adjusted(self, x: np.ndarray) -> np.ndarray:
        """Its adjusted logits, by the specification."""
        banned = [*EOS, *self.stops] if len(self.answer) < self.min_tokens else []
        numbers = self.repetition, self.presence, self.frequency
        return penalties.spec(x, self.prompt, self.answer, banned, self.biases, *numbers)

    def kept(self, x: np.ndarray) -> np.ndarray:
        """Which tokens may be drawn, by the specification."""
        return filters.kept_spec(self.adjusted(x), self.temperature, self.top_k, self.top_p, self.min_p)

    def drawn(self, x: np.ndarray, position: int) -> int:
        """The token, by the specification."""
        given = self.temperature, self.seed, position, self.top_k, self.top_p, self.min_p
        return filters.spec(self.adjusted(x), *given)


def random_ask(draw: np.random.Generator, vocab: int, on: dict[str, bool] | None = None) -> Ask:
    """A random request; `on` says which parameters it has: by default each with probability 1/2."""

    def has(name: str) -> bool:
        return draw.random() < 0.5 if on is None else on.get(name, False)

    def uniform(name: str, low: float, high: float) -> float:
        return float(draw.uniform(low, high)) if has(name) else 0.0

    def tokens(most: int) -> list[int]:
        return draw.integers(0, vocab, draw.integers(0, most)).tolist()

    return Ask(
        temperature=0.0 if has("greedy") else float(draw.choice([0.3, 1, 1.7])),
        seed=int(draw.integers(0, 2**64, dtype=np.uint64)),
        top_k=int(draw.integers(1, vocab + 5)) if has("top_k") else 0,
        top_p=uniform("top_p", 0, 1),
        min_p=10 ** -float(draw.uniform(0, 3)) if has("min_p") else 0.0,
        repetition=uniform("repetition", 0.7, 1.5),
        presence=uniform("presence", -1, 1),
        frequency=uniform("frequency", -1, 1),
        min_tokens=int(draw.integers(1, 12)) if has("min_tokens") else 0,
        logprobs=int(draw.integers(0, 22)),
        stops=tokens(5),
        biases=[(token, float(draw.uniform(-3, 3))) for token in tokens(9)] if has("biases") else [],
        prompt=[0, *tokens(8)],
        answer=tokens(9),
    )


class Samples:
    """Samples of a step: sample s has the logits ``x[s]`` and is of the request ``asks[of[s]]``.

    The scratch is poisoned, and of the outputs there is one row more, which must stay as it is.
    """

    def __init__(self, x: np.ndarray, asks: list[Ask], of: np.ndarray | None = None, first: int = 0) -> None:
        self.x, self.asks = np.atleast_2d(x).astype(np.float32), asks
        n, vocab = self.x.shape
        self.of = np.arange(n) % len(asks) if of is None else of
        self.plan, self.sampling = state.allocate_plan(n, n), state.allocate_sampling(len(asks))
        context = max(len(ask.prompt) + len(ask.answer) for ask in asks)
        self.slots, _ = state.allocate(len(asks), 1, context)
        for slot, ask in enumerate(asks):
            self._fill(slot, ask)
        self.plan.sample_slot[:] = self.of
        self.plan.temperature[:] = self.sampling.temperature[self.of]
        self.plan.seed[:] = self.sampling.seed[self.of]
        self.plan.draw[:] = first + np.arange(n)
        self.plan.best[:] = logits.LOWEST
        none, rows = np.zeros(0, np.float32), n + 1
        self.model = Model(
            none, np.zeros((1, 7), np.int64), none, np.zeros((1, 1), np.float32), np.array(EOS, np.int32),
            0, 0, 1, 8, 8, 1, 1, 8, vocab, f32(1e-5), 0, np.zeros(8, np.uint16), np.zeros((1, 4), np.int64), 0,
        )  # fmt: skip
        unused = memory.activations(replace(SMALL, hidden=16, ffn=16, vocab=1), 1, 1)
        self.act = unused._replace(
            logits=np.append(self.x.reshape(-1), np.full(vocab, np.nan, np.float32)),
            adjusted=np.full(rows * vocab, np.nan, np.float32),
            counts=np.zeros(rows * vocab, np.int32),
            chosen_logprob=np.full(rows * (1 + MOST_LOGPROBS), np.nan, np.float32),
            likely=np.full(rows * MOST_LOGPROBS, -1, np.int32),
        )

    def _fill(self, slot: int, ask: Ask) -> None:
        s, tokens = self.sampling, ask.prompt + ask.answer
        s.filtered[slot] = 1
        for name in ("temperature", "seed", "top_k", "top_p", "min_p", "repetition", "presence", "frequency"):
            getattr(s, name)[slot] = getattr(ask, name)
        s.min_tokens[slot], s.logprobs[slot] = ask.min_tokens, ask.logprobs
        s.stops[slot], s.biases[slot] = len(ask.stops), len(ask.biases)
        s.stop[slot, : len(ask.stops)] = ask.stops
        for i, (token, bias) in enumerate(ask.biases):
            s.bias_token[slot, i], s.bias[slot, i] = token, bias
        self.slots.token[slot, : len(tokens)] = tokens
        self.slots.known[slot], self.slots.prompt_len[slot] = len(tokens), len(ask.prompt)

    def draw(self, target: str, lanes: int, blocks: int = 2, shared: int = 195) -> list[int]:
        """The tokens drawn on the device; nothing is changed that is not to be."""
        n, vocab = self.x.shape
        plan, act = self.plan, self.act
        launch(
            poisoned_draw, blocks, lanes, plan, n, self.slots, self.sampling, self.model, act,
            target=target, shared=shared,
        )  # fmt: skip
        assert not act.counts.any()
        assert np.isnan(act.adjusted[n * vocab :]).all()
        assert np.isnan(act.chosen_logprob[n * (1 + MOST_LOGPROBS) :]).all()
        assert (act.likely[n * MOST_LOGPROBS :] == -1).all()
        assert (act.logits[: n * vocab].view(np.int32) == self.x.reshape(-1).view(np.int32)).all()
        tokens = 0x7FFFFFFF - (plan.best[:n] & 0x7FFFFFFF)
        assert (tokens >= 0).all()
        assert (tokens < vocab).all()
        return tokens.tolist()


@device
def poisoned_draw(block, plan, samples, slots, sampling, model, act):
    poison_arena(block)
    filters.draw_filtered(block, plan, samples, slots, sampling, model, act)
