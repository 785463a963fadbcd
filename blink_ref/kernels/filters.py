"""Drawing from some of the tokens only: min-p, top-k and top-p, exactly, over the whole vocabulary.

Each of the three keeps the tokens whose logit reaches a bar, so none needs a sort. min-p's bar is a formula.
Top-k's is found by bisection: float32 numbers are in the order of their bits, read as integers, so at most 32
halvings end at one number, and mostly half as many at one token. Top-p's is never found: what matters is
whether the token drawn reaches it. Where it does not, neither does any token as unlikely, and the draw is
repeated from the likelier ones with the same noise. That is rejection, as in FlashInfer's sorting-free
sampling; but since the noise stays, it ends with the very token that the tokens above the bar would have given.
Tokens exactly as likely as the last one kept are kept too.

The order is vLLM's: min-p (Nguyen et al., 2024) first, then top-k, then top-p (Holtzman et al., 2020), whose
share is of what the others left. Probabilities are at the request's temperature, after penalties and biases.
They are summed as integers, so that no result depends on how many lanes share out the sum.
"""

import math

import numpy as np

from ..simt import device
from ..simt.vocabulary import block_threads, f32, i64, rank, rank_index, thread_id
from .agree import NOTHING, block_max, block_sum
from .logprobs import mass, mass_spec, put_logprobs
from .penalties import adjust
from .sampling import NEVER, gumbel_spec, philox_spec, score, sharpness, sharpness_spec

MOST_NOISE = f32(17.0)
"""More than :func:`.sampling.gumbel` ever gives, which is 16.7."""

KEY_OF_NEVER = -0x7F800000
"""The :func:`order` of -inf."""


def kept_spec(adjusted: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which of the tokens with these adjusted logits [vocab] may be drawn, bool; parameters that are 0 are off."""
    kept, top, t = adjusted > NEVER, adjusted.max(), np.float32(temperature)
    if not kept.any():
        return kept
    if min_p:
        kept &= adjusted >= top + t * np.log(min(np.float32(min_p), np.float32(1)))
    if top_k:
        kept &= adjusted >= np.sort(adjusted[kept])[-top_k:][0]
    if 0 < top_p < 1:
        mass = mass_spec(np.where(kept, adjusted, NEVER), top, temperature)
        goal = min(max(1, int(np.float32(mass.sum()) * np.float32(top_p))), mass.sum())
        order = np.argsort(-adjusted)
        kept &= adjusted >= adjusted[order][np.argmax(mass[order].cumsum() >= goal)]
    return kept


def spec(
    adjusted: np.ndarray, temperature: float, seed: int, position: int, top_k: int, top_p: float, min_p: float
) -> int:
    """The token drawn for the answer's token at `position`, 0 if none may be drawn."""
    kept = kept_spec(adjusted, temperature, top_k, top_p, min_p)
    if temperature == 0:
        return int(np.argmax(adjusted))
    counters = np.zeros((len(adjusted), 4), np.uint64)
    counters[:, 0], counters[:, 1] = np.arange(len(adjusted)), position
    scores = adjusted * sharpness_spec(temperature) + gumbel_spec(philox_spec(counters, seed)[:, 0])
    return int(np.argmax(np.where(kept, scores, NEVER)))


@device
def draw_filtered(block, plan, samples, slots, sampling, model, act):
    """Draw the samples whose slots have filters: ``plan.best[s]``, and log probabilities where wanted.

    Blocks share out the samples. All blocks call it, after a grid barrier behind
    :func:`.logits.logits_and_draw`; it ends without one.
    """
    turn = i64(0)
    for s in range(samples):
        slot = i64(plan.sample_slot[s])
        if sampling.filtered[slot] != 0:
            if turn == block.id:
                adjust(block, s, slot, slots, sampling, model, act)
                best = draw_kept(block, plan, s, slot, sampling, model, act)
                if thread_id() == 0:
                    plan.best[s] = best
                if sampling.logprobs[slot] > 0:
                    put_logprobs(block, s, rank_index(best), sampling.logprobs[slot] - 1, model, act)
            turn += 1
            if turn == block.blocks:
                turn = i64(0)


@device
def draw_kept(block, plan, s, slot, sampling, model, act):
    """The rank key of the token drawn from ``act.adjusted[s]``. All lanes of one block call it and get it.

    Tokens that min-p leaves out become -inf there; each lane reads only what it writes itself.
    """
    vocab = i64(model.vocab)
    at = i64(s) * vocab
    adjusted = act.adjusted[at : at + vocab]
    bits = adjusted.view(np.int32)
    temperature, top_p = plan.temperature[s], sampling.top_p[slot]
    best = NOTHING
    token = i64(thread_id())
    while token < vocab:
        best = max(best, rank(adjusted[token], token))
        token += block_threads()
    best = block_max(block, best)
    likeliest = rank_index(best)
    top, end = adjusted[likeliest], order(bits[likeliest]) + 1
    if temperature == f32(0.0) or top == NEVER:
        return best
    leave_out(adjusted, vocab, top, temperature, sampling.min_p[slot])
    bar = bar_of_top_k(block, bits, vocab, end, i64(sampling.top_k[slot]))
    has_share = top_p > f32(0.0) and top_p < f32(1.0)
    goal = i64(0)
    if has_share:
        total = mass_of(block, adjusted, bits, vocab, bar, end, top, temperature)
        goal = min(max(i64(1), i64(f32(total) * top_p)), total)
    kept = False
    while not kept:
        best = draw_from(block, plan, s, adjusted, bits, vocab, bar, likeliest)
        bar = order(bits[rank_index(best)]) + 1
        kept = True
        if has_share:
            kept = mass_of(block, adjusted, bits, vocab, bar, end, top, temperature) < goal
    return best


@device
def leave_out(adjusted, vocab, top, temperature, min_p):
    """Min-p: -inf for tokens with a probability below `min_p` times that of the logit `top`. All lanes."""
    if min_p > f32(0.0):
        least = top + temperature * f32(math.log(min(min_p, f32(1.0))))
        token = i64(thread_id())
        while token < vocab:
            if adjusted[token] < least:
                adjusted[token] = NEVER
            token += block_threads()


@device
def bar_of_top_k(block, bits, vocab, end, top_k):
    """The highest :func:`order` that `top_k` tokens reach, or that of all tokens above -inf where they are fewer.

    None is at `end` or above. All lanes of one block call it and get it.
    """
    bar, above = i64(KEY_OF_NEVER + 1), i64(0)
    if top_k > 0:
        inside = count_between(block, bits, vocab, bar, end)  # from `bar` to below `end`; those above are `above`
        while inside + above > top_k and inside > 1 and end - bar > 1:
            middle = bar + ((end - bar) >> 1)
            n = count_between(block, bits, vocab, middle, end)
            if above + n >= top_k:
                bar, inside = middle, n
            else:
                end, inside, above = middle, inside - n, above + n
    return bar


@device
def draw_from(block, plan, s, adjusted, bits, vocab, bar, likeliest):
    """The rank key of the best score of tokens whose :func:`order` is `bar` or higher, as the likeliest's is.

    All lanes of one block call it and get it. Noise is made only where it can win: a sum rounds no lower if
    its parts grow, so a score is at most that with more noise than there is.
    """
    temperature, seed, position = plan.temperature[s], plan.seed[s], plan.draw[s]
    good = score(adjusted[likeliest], temperature, seed, position, likeliest)
    best, sharp = rank(good, likeliest), sharpness(temperature)
    token = i64(thread_id())
    while token < vocab:
        if order(bits[token]) >= bar and adjusted[token] * sharp + MOST_NOISE >= good:
            best = max(best, rank(score(adjusted[token], temperature, seed, position, token), token))
        token += block_threads()
    return block_max(block, best)


@device
def count_between(block, bits, vocab, first, end):
    """How many tokens have an :func:`order` from `first` to below `end`. All lanes of one block."""
    n = i64(0)
    token = i64(thread_id())
    while token < vocab:
        key = order(bits[token])
        n += i64(first <= key and key < end)
        token += block_threads()
    return block_sum(block, n)


@device
def mass_of(block, adjusted, bits, vocab, first, end, top, temperature):
    """The sum of their masses."""
    total = i64(0)
    token = i64(thread_id())
    while token < vocab:
        key = order(bits[token])
        if first <= key and key < end:
            total += mass(adjusted[token], top, temperature)
        token += block_threads()
    return block_sum(block, total)


@device
def order(bits):
    """A float32's bits, given as int32, as int64 in the order of the numbers; -0 equals 0. One lane."""
    bits = i64(bits)
    return bits if bits >= 0 else i64(-(2**31)) - bits


def cost(samples: int, vocab: int, halvings: int, draws: int) -> tuple[int, int]:
    """(bytes, FLOPs) of samples whose top-k takes that many halvings, and whose top-p that many draws.

    The logits are read for the likeliest, min-p, top-p's share, once a halving, and twice a draw, which makes
    sixty operations of noise and ten of mass for each token that is still in.
    """
    return 4 * samples * vocab * (3 + halvings + 2 * draws), 70 * samples * vocab * draws
