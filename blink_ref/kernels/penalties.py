"""Logits after what a request says of single tokens: bans, biases, and penalties for tokens it has seen.

In vLLM's order: end tokens banned while the answer is short; biases; the repetition penalty (CTRL: Keskar
et al., 2019) for tokens of prompt and answer; frequency and presence penalties (OpenAI's) for the answer's.
"""

from collections.abc import Sequence

import numpy as np

from ..simt import device
from ..simt.vocabulary import (
    atomic_add,
    atomic_cas,
    atomic_max,
    barrier,
    block_threads,
    divide,
    f32,
    i32,
    i64,
    load_relaxed,
    thread_id,
)
from .sampling import NEVER

IN_PROMPT = 1 << 30
"""Beside the number of times that the answer has a token: the prompt has it too."""


def spec(
    logits: np.ndarray,
    prompt: Sequence[int],
    answer: Sequence[int],
    banned: Sequence[int] = (),
    biases: Sequence[tuple[int, float]] = (),
    repetition: float = 0,
    presence: float = 0,
    frequency: float = 0,
) -> np.ndarray:
    """logits [vocab] -> the adjusted ones, float32; NaN becomes -inf, and a penalty of 0 is off."""
    x = np.where(np.isnan(logits), NEVER, logits)
    x[list(banned)] = NEVER
    for token, bias in biases:
        x[token] += np.float32(bias)
    if repetition:
        seen = np.unique([*prompt, *answer])
        x[seen] = np.where(x[seen] > 0, x[seen] / np.float32(repetition), x[seen] * np.float32(repetition))
    tokens, times = np.unique(np.array(answer, int), return_counts=True)
    x[tokens] -= np.float32(frequency) * times.astype(np.float32) + np.float32(presence)
    return x


@device
def adjust(block, s, slot, slots, sampling, model, act):
    """``act.adjusted[s]`` of ``act.logits[s]``, for the request in `slot`. All lanes of one block.

    ``act.counts[s]`` is zero before and after. A barrier stands at its end.
    """
    vocab = i64(model.vocab)
    at = i64(s) * vocab
    logits, adjusted = act.logits[at : at + vocab], act.adjusted[at : at + vocab]
    token = i64(thread_id())
    while token < vocab:
        x = logits[token]
        adjusted[token] = x if x == x else NEVER
        token += block_threads()
    # From here to the barrier each lane looks through the lists for the tokens that it has just written. So
    # biases of one token are added by one lane, in the list's order.
    if slots.known[slot] - slots.prompt_len[slot] < sampling.min_tokens[slot]:
        for i in range(model.eos.shape[0]):
            if is_mine(model.eos[i], vocab):
                adjusted[model.eos[i]] = NEVER
        for i in range(sampling.stops[slot]):
            if is_mine(sampling.stop[slot, i], vocab):
                adjusted[sampling.stop[slot, i]] = NEVER
    for i in range(sampling.biases[slot]):
        if is_mine(sampling.bias_token[slot, i], vocab):
            adjusted[sampling.bias_token[slot, i]] += sampling.bias[slot, i]
    barrier()
    penalise(at, slot, slots, sampling, adjusted, act.counts)


@device
def is_mine(token, vocab):
    """Whether `token` is one that this lane looks after when the lanes of a block share out the vocabulary."""
    token = i64(token)
    return token >= 0 and token < vocab and divide(token, i64(block_threads()))[1] == thread_id()


@device
def penalise(at, slot, slots, sampling, adjusted, counts):
    """Apply the three penalties to `adjusted` [vocab]; ``counts[at:at+vocab]`` is zero before and after.

    All lanes of one block, behind a barrier; it ends with one. The lanes share out the tokens known, count
    them, and whoever takes a token's count away applies its penalties.
    """
    repetition, prompt, known = sampling.repetition[slot], i64(slots.prompt_len[slot]), i64(slots.known[slot])
    presence, frequency = sampling.presence[slot], sampling.frequency[slot]
    if repetition != f32(0.0):
        i = i64(thread_id())
        while i < prompt:
            atomic_max(counts, at + slots.token[slot, i], i32(IN_PROMPT))
            i += block_threads()
        barrier()
    if repetition != f32(0.0) or presence != f32(0.0) or frequency != f32(0.0):
        i = prompt + thread_id()
        while i < known:
            atomic_add(counts, at + slots.token[slot, i], i32(1))
            i += block_threads()
        barrier()
        i = i64(thread_id())
        while i < known:
            token = i64(slots.token[slot, i])
            n = load_relaxed(counts, at + token)
            if n != 0 and atomic_cas(counts, at + token, n, i32(0)) == n:
                adjusted[token] = penalised(adjusted[token], n, repetition, presence, frequency)
            i += block_threads()
        barrier()


@device
def penalised(x, n, repetition, presence, frequency):
    """One lane: the logit of a token that occurs, n being its count. Repetition 0 is off."""
    if repetition != f32(0.0):
        x = x / repetition if x > f32(0.0) else x * repetition
    times = i64(n) & i64(IN_PROMPT - 1)
    if times > 0:
        x -= frequency * f32(times) + presence
    return x


def cost(samples: int, vocab: int, known: int) -> tuple[int, int]:
    """(bytes, FLOPs): logits read and written once; each known token and its count three times."""
    return samples * (8 * vocab + 24 * known), 4 * samples * known
