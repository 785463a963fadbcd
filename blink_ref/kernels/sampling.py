"""Sampling by the Gumbel-max trick: the largest of logit / temperature + Gumbel noise is a draw from softmax.

(Gumbel, 1954; Maddison et al., 2014.) It needs no softmax and no sum over the vocabulary, only a maximum,
which any number of warps can take in any order. The noise of (seed, position, token) comes from the
counter-based generator Philox4x32-10 (Salmon et al., 2011), so a draw does not depend on the batch.
Temperature 0 is greedy; ties go to the smaller id.
"""

import math

import numpy as np

from ..simt import device
from ..simt.vocabulary import f32, u64

MULTIPLIER_0, MULTIPLIER_1 = u64(0xD2511F53), u64(0xCD9E8D57)
WEYL_0, WEYL_1 = u64(0x9E3779B9), u64(0xBB67AE85)
LOW, WORD = u64(0xFFFFFFFF), u64(32)

NEVER = f32(-np.inf)
"""The logit of a token that is not drawn."""

SHARPEST = f32(3e38)
"""Where 1 / temperature ends, short of infinity."""


def spec(logits: np.ndarray, temperature: float, seed: int, position: int) -> int:
    """The token drawn from logits [vocab] for the answer's token at `position`; NaN is never drawn."""
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    if temperature == 0:
        return int(np.argmax(logits))
    counters = np.zeros((len(logits), 4), np.uint64)
    counters[:, 0], counters[:, 1] = np.arange(len(logits)), position
    return int(np.argmax(logits * sharpness_spec(temperature) + gumbel_spec(philox_spec(counters, seed)[:, 0])))


def sharpness_spec(temperature: float) -> np.float32:
    """1 / temperature, at most SHARPEST: what logits are multiplied by."""
    with np.errstate(divide="ignore", over="ignore"):
        return min(np.float32(1) / np.float32(temperature), SHARPEST)


def gumbel_spec(words: np.ndarray) -> np.ndarray:
    """Gumbel noise, float32, of random 32-bit words held in uint64: -log(-log(u)) of a uniform u.

    u is the middle of one of 2**23 equal parts of (0, 1). All of them are exact in float32, and none is
    0 or 1, so both logarithms are finite; of 2**24 parts the last middle would round to 1, and the noise be inf.
    """
    uniform = ((words >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    return -np.log(-np.log(uniform))


def philox_spec(counters: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-10: counters [n, 4] of 32-bit words -> [n, 4] random 32-bit words, both held in uint64."""
    c = [counters[:, i].astype(np.uint64) for i in range(4)]
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        low = [c[0] * MULTIPLIER_0, c[2] * MULTIPLIER_1]
        c = [
            low[1] >> WORD ^ c[1] ^ u64(key[0]),
            low[1] & LOW,
            low[0] >> WORD ^ c[3] ^ u64(key[1]),
            low[0] & LOW,
        ]
        key = [(key[0] + int(WEYL_0)) & 0xFFFFFFFF, (key[1] + int(WEYL_1)) & 0xFFFFFFFF]
    return np.stack(c, 1)


@device
def philox(seed, counter_0, counter_1):
    """The first word of Philox4x32-10 for the counter (counter_0, counter_1, 0, 0); all uint64. One lane."""
    key_0, key_1 = seed & LOW, seed >> WORD
    c0, c1, c2, c3 = counter_0, counter_1, u64(0), u64(0)
    for _ in range(10):
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> WORD) ^ c1 ^ key_0, p1 & LOW, (p0 >> WORD) ^ c3 ^ key_1, p0 & LOW
        key_0, key_1 = (key_0 + WEYL_0) & LOW, (key_1 + WEYL_1) & LOW
    return c0


@device
def gumbel(word):
    """Gumbel noise of a random 32-bit word held in uint64; see :func:`gumbel_spec`. One lane."""
    uniform = (f32(word >> u64(9)) + f32(0.5)) * f32(2.0**-23)
    return -f32(math.log(-f32(math.log(uniform))))


@device
def sharpness(temperature):
    """See :func:`sharpness_spec`. A division by the temperature itself would not do: where it is the same for
    many logits, compilers may make it this product, or not. One lane.
    """
    return min(f32(1.0) / temperature, SHARPEST)


@device
def score(logit, temperature, seed, position, token):
    """What the token's logit counts for in the draw: itself when greedy, else scaled, with noise. One lane.

    The same bits wherever it is called: a comparison stands between product and sum, so that no compiler
    makes one rounding of the two here and not there.
    """
    if temperature == f32(0.0):
        return logit
    scaled = logit * sharpness(temperature)
    scaled = scaled if scaled > NEVER else NEVER  # NaN too
    return scaled + gumbel(philox(seed, u64(token), u64(position)))


def cost(rows: int, vocab: int) -> tuple[int, int]:
    """(bytes, FLOPs): fused with the logits, it moves nothing; ten rounds of six operations a token."""
    return 0, 60 * rows * vocab
