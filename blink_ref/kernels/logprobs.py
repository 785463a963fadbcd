"""Log probabilities of the token drawn and of the likeliest: the log-softmax of the raw logits.

Raw: at temperature 1, before penalties, biases and filters, as vLLM gives them. The sum of a softmax is taken
of integers, so that it is the same however many lanes share it out.
"""

import math

import numpy as np

from ..simt import device
from ..simt.vocabulary import block_threads, exp, f32, i64, rank, rank_index, thread_id
from .agree import NOTHING, block_max, block_sum
from .sampling import NEVER, sharpness, sharpness_spec
from .tensors import MOST_LOGPROBS

WHOLE = 2.0**40
"""The mass of the likeliest token; that of one with a q-th of its probability is a q-th of this, rounded down.
The masses of 2**21 tokens add up within an int64; what rounding takes from 2**17 is 2**-23 of the likeliest's."""


def spec(logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """logits [vocab] -> their log probabilities [vocab], float64, and the ids of the n likeliest [n]."""
    x = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum()), np.argsort(-x, kind="stable")[:n]


def mass_spec(x: np.ndarray, top: np.float32, temperature: float) -> np.ndarray:
    """The probabilities of logits x, relative to that of the logit `top`, in units of 1 / WHOLE; int64."""
    with np.errstate(invalid="ignore", over="ignore"):
        relative = np.where(x == top, np.float32(1), np.exp((x - top) * sharpness_spec(temperature)))
    return (relative * np.float32(WHOLE)).astype(np.int64)


@device
def mass(x, top, temperature):
    """See :func:`mass_spec`; 0 of NaN. One lane."""
    relative = exp((x - top) * sharpness(temperature))
    if x == top:
        relative = f32(1.0)  # also of inf, and where all is -inf
    return i64(relative * f32(WHOLE)) if relative == relative else i64(0)


@device
def put_logprobs(block, s, drawn, n, model, act):
    """Into ``act.chosen_logprob[s]`` and ``act.likely[s]``: of the token drawn, and of the n likeliest.

    All lanes of one block. Each of the likeliest is a pass over the logits, for the best below the last one.
    What is left of n where the vocabulary is smaller is token 0 at -inf.
    """
    vocab = i64(model.vocab)
    at, out = i64(s) * vocab, i64(s) * (1 + MOST_LOGPROBS)
    logits = act.logits[at : at + vocab]
    best = best_below(block, logits, vocab, i64(2**62))
    top = logits[rank_index(best)]
    part = i64(0)
    token = i64(thread_id())
    while token < vocab:
        part += mass(logits[token], top, f32(1.0))
        token += block_threads()
    whole = max(i64(1), block_sum(block, part))  # nothing has a mass where all is NaN
    total = f32(math.log(f32(whole) * f32(1.0 / WHOLE)))
    if thread_id() == 0:
        act.chosen_logprob[out] = logprob(logits[drawn], top, total)
    for i in range(n):
        if thread_id() == 0:
            none = best == NOTHING
            token = i64(0) if none else rank_index(best)
            act.likely[i64(s) * MOST_LOGPROBS + i] = token
            act.chosen_logprob[out + 1 + i] = NEVER if none else logprob(logits[token], top, total)
        if i + 1 < n:
            best = best_below(block, logits, vocab, best)


@device
def best_below(block, logits, vocab, last):
    """The greatest rank key of a token that is below `last`. All lanes of one block call it and get it."""
    best = NOTHING
    token = i64(thread_id())
    while token < vocab:
        key = rank(logits[token], token)
        key = key if key < last else NOTHING  # not a branch: LLVM makes vectors of this loop
        best = max(best, key)
        token += block_threads()
    return block_max(block, best)


@device
def logprob(x, top, total):
    """The log probability of logit x, where `top` is the highest, and `total` the log of all masses. One lane."""
    if x == top:
        return -total
    return x - top - total if x == x else NEVER


def cost(samples: int, vocab: int, n: int) -> tuple[int, int]:
    """(bytes, FLOPs) for the n likeliest: a pass for the sum, with an exponential, and one for each of them."""
    return 4 * samples * vocab * (1 + max(1, n)), 4 * samples * vocab
