"""Products of a few rows on CUDA: fragments of weights in the arena with rows of x, on `mma.sync`.

Both are float16. A fragment of weights lies in the arena as four matrices of 8 x 8, which one instruction loads.
Of x, in the arena or in global memory, a lane takes four columns of a row with 8 bytes: of its 16 columns 2q,
2q + 1, 2q + 8 and 2q + 9, which is why :func:`.vocabulary.fragment_put` leaves these side by side.
"""

from . import vocabulary as words
from .cuda_loops import _four, _keep_rolled, _store_four, store_two_words, two_words
from .cuda_published import publish_word
from .cuda_tensor import has_tensor_cores, load_matrices, multiply_f16, narrow_two, shared_address
from .cuda_words import define_by
from .numba_cuda import cuda
from .vocabulary import FRAGMENT, FRAGMENT_PITCH, f32, i32, i64, lane_id, publish, u32, widen

SCALE, BACK = f32(1 / 16), f32(16.0)
"""Activations are kept scaled: the largest float16 is 65,504, and there are models with larger ones. What becomes
too small for all of its bits thereby, below 2**-10, still has an error of 2**-21 at most."""


@cuda.jit(device=True)
def _before(out, at, real):
    """A lane's four sums so far, of rows 2c and 2c + 1 of x, if they are real."""
    if real:
        a, b, c, d = out[at], out[at + FRAGMENT_PITCH], out[at + 8], out[at + FRAGMENT_PITCH + 8]
        return a * SCALE, b * SCALE, c * SCALE, d * SCALE
    return f32(0.0), f32(0.0), f32(0.0), f32(0.0)


@cuda.jit(device=True)
def _put(out, at, c, one, two):
    """A lane's four sums, if the one row, or the two, are real."""
    if one:
        out[at] = c[0] * BACK
        out[at + 8] = c[2] * BACK
    if two:
        out[at + FRAGMENT_PITCH] = c[1] * BACK
        out[at + FRAGMENT_PITCH + 8] = c[3] * BACK


@cuda.jit(device=True)
def _plus(c, odd):
    return c[0] + odd[0], c[1] + odd[1], c[2] + odd[2], c[3] + odd[3]


@cuda.jit(device=True)
def _fragments(out, k, w, at, steps, x, j, rows, more):
    """:func:`.vocabulary.fragment_dots` on tensor cores."""
    row, quad, n = i32(lane_id() >> 2), i32(lane_id() & 3), i32(rows)
    stored = u32(shared_address(w, at) + u32(lane_id()) * u32(16))
    # behind the last row, the last one once more: what becomes of it is not kept
    x0 = j + i64(i32(min(row, i32(n - 1)) * 8 + 2 * quad))
    to_second = i64(i32((min(i32(row + 8), i32(n - 1)) - min(row, i32(n - 1))) * 8))
    step = i64(i32(n * 8))
    to = k + i64(i32(2 * quad * FRAGMENT_PITCH + row))
    zero = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    c, d = zero, zero
    if more:
        c = _before(out, to, i32(2 * quad) < n)
        d = _before(out, to + 8 * FRAGMENT_PITCH, i32(2 * quad + 8) < n)
    left = i32(steps)
    while left > 0:
        left = _keep_rolled(left)
        if left >= 4:
            b0, b1 = two_words(x, x0), two_words(x, x0 + step)
            b2, b3 = two_words(x, x0 + 2 * step), two_words(x, x0 + 3 * step)
            a0, a1 = load_matrices(stored), load_matrices(u32(stored + u32(512)))
            a2, a3 = load_matrices(u32(stored + u32(1024))), load_matrices(u32(stored + u32(1536)))
            c, odd = multiply_f16(c, a0, b0[0], b0[1]), multiply_f16(zero, a1, b1[0], b1[1])
            c, odd = multiply_f16(c, a2, b2[0], b2[1]), multiply_f16(odd, a3, b3[0], b3[1])
            c = _plus(c, odd)  # here, so that it is the same where a call ends here
            if n > 8:
                x1 = x0 + to_second
                b0, b1 = two_words(x, x1), two_words(x, x1 + step)
                b2, b3 = two_words(x, x1 + 2 * step), two_words(x, x1 + 3 * step)
                d, odd = multiply_f16(d, a0, b0[0], b0[1]), multiply_f16(zero, a1, b1[0], b1[1])
                d, odd = multiply_f16(d, a2, b2[0], b2[1]), multiply_f16(odd, a3, b3[0], b3[1])
                d = _plus(d, odd)
            left = i32(left - 4)
            x0 += 4 * step
            stored = u32(stored + u32(2048))
        else:
            b0, a0 = two_words(x, x0), load_matrices(stored)
            c = multiply_f16(c, a0, b0[0], b0[1])
            if n > 8:
                b0 = two_words(x, x0 + to_second)
                d = multiply_f16(d, a0, b0[0], b0[1])
            left = i32(left - 1)
            x0 += step
            stored = u32(stored + u32(512))
    _put(out, to, c, i32(2 * quad) < n, i32(2 * quad + 1) < n)
    if n > 8:
        to += 8 * FRAGMENT_PITCH
        _put(out, to, d, i32(2 * quad + 8) < n, i32(2 * quad + 9) < n)


@cuda.jit(device=True)
def _one_by_one(out, k, w, at, steps, x, j, rows, more):
    """:func:`.vocabulary.fragment_dots` without tensor cores: a lane takes a result at a time."""
    e = i64(lane_id())
    while e < FRAGMENT * rows:
        t, r = e >> 4, e & 15
        y, to = f32(0.0), k + t * FRAGMENT_PITCH + r
        if more:
            y = out[to]
        for s in range(steps):
            for column in range(FRAGMENT):
                of = at + s * FRAGMENT * FRAGMENT + (column >> 3) * 128 + (r >> 3) * 64 + (r & 7) * 8
                of += column & 7
                y += widen(w[of]) * x[j + (s * rows + t) * FRAGMENT + column]
        out[to] = y
        e += 32


@define_by(words.fragment_dots)
def _(out, k, w, at, steps, x, j, rows, more):
    def fragment_dots(out, k, w, at, steps, x, j, rows, more):
        if has_tensor_cores():
            _fragments(out, k, w, at, steps, x, j, rows, more)
        else:
            _one_by_one(out, k, w, at, steps, x, j, rows, more)

    return fragment_dots


@define_by(words.packed_floats)
def _(n):
    def packed_floats(n):
        if has_tensor_cores():
            return i64(n) >> 1
        return i64(n)

    return packed_floats


@define_by(words.fragment_put)
def _(x, at, a, b, c, d):
    def fragment_put(x, at, a, b, c, d):
        if has_tensor_cores():
            to = (at & ~i64(7)) + 2 * (at & 3) + ((at >> 2) & 1)
            publish_word(x, to, narrow_two(a * SCALE, b * SCALE))
            publish_word(x, to + 2, narrow_two(c * SCALE, d * SCALE))
        else:
            publish(x, at, a)
            publish(x, at + 1, b)
            publish(x, at + 2, c)
            publish(x, at + 3, d)

    return fragment_put


@define_by(words.block_put)
def _(x, at, a, b, c, d):
    def block_put(x, at, a, b, c, d):
        if has_tensor_cores():
            store_two_words(x, at, narrow_two(a * SCALE, b * SCALE), narrow_two(c * SCALE, d * SCALE))
        else:
            _store_four(x, at, (a, b, c, d))

    return block_put


@define_by(words.sum_of_fours)
def _(a, i, step, n):
    def sum_of_fours(a, i, step, n):
        s = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        m = i64(0)
        while m + 3 < n:  # four loads in flight
            m = _keep_rolled(m)
            y0, y1, y2, y3 = _four(a, i), _four(a, i + step), _four(a, i + 2 * step), _four(a, i + 3 * step)
            s = (s[0] + y0[0], s[1] + y0[1], s[2] + y0[2], s[3] + y0[3])
            s = (s[0] + y1[0], s[1] + y1[1], s[2] + y1[2], s[3] + y1[3])
            s = (s[0] + y2[0], s[1] + y2[1], s[2] + y2[2], s[3] + y2[3])
            s = (s[0] + y3[0], s[1] + y3[1], s[2] + y3[2], s[3] + y3[3])
            i += 4 * step
            m += 4
        while m < n:
            y = _four(a, i)
            s = (s[0] + y[0], s[1] + y[1], s[2] + y[2], s[3] + y[3])
            i += step
            m += 1
        return s

    return sum_of_fours
