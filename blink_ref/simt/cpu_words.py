"""The words on the CPU. A block has one lane, so most of them vanish.

The inner loops are written as LLVM vectors with a fixed number of accumulators, so that a sum is added
in the same order whatever the machine's vector width; LLVM splits the vectors to fit.
"""

import math
import platform
import time
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import templates
from numba.cpython.unsafe.tuple import tuple_setitem
from numba.extending import overload, register_jitable

from . import plain_tiles
from . import vocabulary as words
from .lowering import (
    COMMON,
    DEFAULT,
    F32,
    I32,
    I64,
    VOID,
    element_pointer,
    index_argument,
    is_vector,
    narrow_put_by,
    nearest_bf16,
    register,
)
from .vocabulary import DOTS_PITCH, DOTS_RESULTS, FRAGMENT, FRAGMENT_PITCH, HEADS, HEADS_GAP, PART, exp, f32, widen


def _define(word: Any) -> Any:
    def decorate(define: Any) -> Any:
        register(templates, types.Function, "cpu", word, define)
        return define

    return decorate


for _word, _definition in COMMON.items():
    _define(_word)(_definition)
_define(words.narrow_put)(narrow_put_by(nearest_bf16))


# --- ids and exchanges of a block with one lane

for _word in (words.thread_id, words.lane_id, words.warp_id):
    overload(_word, target="cpu", strict=False)(lambda: lambda: 0)
for _word in (words.block_threads, words.warp_width, words.warps):
    overload(_word, target="cpu", strict=False)(lambda: lambda: 1)
for _word in (words.barrier, words.warp_barrier):
    overload(_word, target="cpu", strict=False)(lambda: lambda: None)
for _word in (words.lane_sum, words.lane_max):
    overload(_word, target="cpu", strict=False)(lambda x: lambda x: x)
overload(words.lane_any, target="cpu", strict=False)(lambda x: lambda x: x != 0)
overload(words.lane_broadcast, target="cpu", strict=False)(lambda x, source: lambda x, source: x)


# --- plain loops, which LLVM vectorises as they stand


overload(words.opaque, target="cpu", strict=False)(lambda x: lambda x: x)


@overload(words.tiles_pay, target="cpu", strict=False)
def _(w):
    return (lambda w: False) if w.dtype == types.float32 else (lambda w: True)


@overload(words.heads_pay, target="cpu", strict=False)
def _(keys):
    return (lambda keys: False) if keys.dtype == types.float32 else (lambda keys: True)


@_define(words.exp)
def _(typing_context, x):
    """Inline, so that loops with it vectorise: 2**n times a polynomial on [-ln 2 / 2, ln 2 / 2].

    The polynomial and the split of ln 2 are those of expf in Cephes (Moshier).
    """

    def codegen(context, builder, signature, args):
        def number(value):
            return ir.Constant(F32, value)

        (x,) = args
        low, high = number(-104.0), number(89.0)  # beyond them the result is 0, or inf
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        rounded = builder.module.declare_intrinsic("llvm.rint", [F32])
        n = builder.call(rounded, [builder.fmul(x, number(1.44269504088896341))])
        r = _multiply_add(builder, n, number(-0.693359375), x)
        r = _multiply_add(builder, n, number(2.12194440e-4), r)
        p = number(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = _multiply_add(builder, p, r, number(c))
        p = builder.fadd(_multiply_add(builder, builder.fmul(r, r), p, r), number(1.0))
        # 2**n in two halves: n may reach 128, and for numbers near 0 go below -126
        n = builder.fptosi(n, I32)
        half = builder.ashr(n, ir.Constant(I32, 1))
        for part in (half, builder.sub(n, half)):
            bits = builder.shl(builder.add(part, ir.Constant(I32, 127)), ir.Constant(I32, 23))
            p = builder.fmul(p, builder.bitcast(bits, F32))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, p)

    return types.float32(types.float32), codegen


@overload(words.packed_floats, target="cpu", strict=False)
def _(n):
    return lambda n: n


def _put_four(x, at, a, b, c, d):
    def put_four(x, at, a, b, c, d):
        x[at] = a
        x[at + 1] = b
        x[at + 2] = c
        x[at + 3] = d

    return put_four


overload(words.block_put, target="cpu", strict=False)(_put_four)


@register_jitable
def _dot_of_fragments(w, at, steps, r, x, j, pitch, half):
    """Row r of fragments from ``w[at]`` on times a row of x: `pitch` from a fragment's columns to the next one's,
    `half` to those of its second half."""
    y = f32(0.0)
    for s in range(steps):
        for g in range(2):
            of = at + s * FRAGMENT * FRAGMENT + g * 128 + (r >> 3) * 64 + (r & 7) * 8
            row = j + s * pitch + g * half
            for c in range(8):
                y += widen(w[of + c]) * x[row + c]
    return y


@overload(words.fragment_dots, target="cpu", strict=False)
def _(out, k, w, at, steps, x, j, rows, more):
    def fragment_dots(out, k, w, at, steps, x, j, rows, more):
        for t in range(rows):
            for r in range(FRAGMENT):
                y = _dot_of_fragments(w, at, steps, r, x, j + t * FRAGMENT, rows * FRAGMENT, 8)
                place = k + t * FRAGMENT_PITCH + r
                out[place] = out[place] + y if more else y

    return fragment_dots


@overload(words.dots_ask, target="cpu", strict=False)
def _(out, k, w, x, tile, begins):
    return lambda out, k, w, x, tile, begins: None


@overload(words.dots_forget, target="cpu", strict=False)
def _(out, k, w, tile):
    return lambda out, k, w, tile: None


@overload(words.block_dots, target="cpu", strict=False)
def _(out, k, w, x, tile):
    def block_dots(out, k, w, x, tile):
        at, steps, strips, j, across, rows, _, first, n = tile
        for t in range(rows):
            row = j + (2 * first * across + t) * 8
            for r in range(FRAGMENT * strips):
                stored = at + ((r >> 4) * steps + first) * (FRAGMENT * FRAGMENT)
                dotted = _dot_of_fragments(w, stored, n, r & 15, x, row, 16 * across, 8 * across)
                out[k + DOTS_RESULTS + t * DOTS_PITCH + r] = dotted

    return block_dots


@overload(words.sum_of_fours, target="cpu", strict=False)
def _(a, i, step, n):
    def sum_of_fours(a, i, step, n):
        s0, s1, s2, s3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        for m in range(n):
            s0 += a[i + m * step]
            s1 += a[i + m * step + 1]
            s2 += a[i + m * step + 2]
            s3 += a[i + m * step + 3]
        return s0, s1, s2, s3

    return sum_of_fours


@overload(words.mix_of_fours, target="cpu", strict=False)
def _(weights, w, a, i, step, n):
    def mix_of_fours(weights, w, a, i, step, n):
        s0, s1, s2, s3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        for m in range(n):
            weight, at = weights[w + m], i + m * step
            s0 += weight * a[at]
            s1 += weight * a[at + 1]
            s2 += weight * a[at + 2]
            s3 += weight * a[at + 3]
        return s0, s1, s2, s3

    return mix_of_fours


@overload(words.heads_weigh, target="cpu", strict=False)
def _(arena, k, keys, j, heads, d, n):
    def heads_weigh(arena, k, keys, j, heads, d, n):
        scale = f32(1.0) / f32(math.sqrt(f32(d)))
        for h in range(heads):
            highest, total, weights = f32(-np.inf), f32(0.0), k + 2 * HEADS + h * (d + HEADS_GAP)
            for p in range(n):
                score = f32(0.0)
                for c in range(d):
                    score += arena[j + h * d + c] * widen(keys[p * d + c])
                arena[weights + p] = score * scale
                highest = max(highest, score * scale)
            for p in range(n):
                weight = exp(arena[weights + p] - highest)
                arena[weights + p] = weight
                total += weight
            arena[k + 2 * h] = highest
            arena[k + 2 * h + 1] = total
        return 0

    return heads_weigh


@overload(words.heads_mix, target="cpu", strict=False)
def _(arena, k, values, weights, heads, d, n):
    none = (f32(0.0),) * PART

    def heads_mix(arena, k, values, weights, heads, d, n):
        own = none  # device code allocates no arrays
        for h in range(heads):
            sums = k + 2 * HEADS + h * (d + HEADS_GAP)
            for p in range(n):
                own = tuple_setitem(own, p, arena[sums + p])
            for i in range(d):
                arena[sums + i] = f32(0.0)
            for p in range(n):
                for i in range(d):
                    arena[sums + i] += own[p] * widen(values[p * d + i])

    return heads_mix


for _word, _plain in plain_tiles.WORDS.items():
    overload(_word, target="cpu", strict=False)(lambda *args, plain=_plain: plain)


@overload(words.block_copy, target="cpu", strict=False)
def _(out, k, a, i, n):
    def block_copy(out, k, a, i, n):
        for c in range(n):
            out[k + c] = a[i + c]

    return block_copy


@overload(words.block_scale, target="cpu", strict=False)
def _(out, k, a, i, scale, gain, g, n):
    def block_scale(out, k, a, i, scale, gain, g, n):
        for c in range(n):
            out[k + c] = a[i + c] * scale * gain[g + c]

    return block_scale


# --- ordered accesses


def _pointer(context, builder, signature, args):
    index = index_argument(context, builder, signature, args, 1)
    return element_pointer(context, builder, signature.args[0], args[0], index)


def _define_load(word: Any, ordering: str) -> None:
    @_define(word)
    def _(typing_context, a, i, scope=None):
        def codegen(context, builder, signature, args):
            pointer = _pointer(context, builder, signature, args)
            return builder.load_atomic(pointer, ordering, a.dtype.bitwidth // 8)

        return a.dtype(a, i, scope or DEFAULT), codegen


_define_load(words.load_relaxed, "monotonic")
_define_load(words.load_acquire, "acquire")


@_define(words.acquire_fence)
def _(typing_context, scope=None):
    def codegen(context, builder, signature, args):
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.none(scope or DEFAULT), codegen


@_define(words.load_relaxed_four)
def _(typing_context, a, i, scope=None):
    returns = types.UniTuple(a.dtype, 4)

    def codegen(context, builder, signature, args):
        first = _pointer(context, builder, signature, args)
        places = [builder.gep(first, [ir.Constant(I64, n)]) for n in range(4)]
        loaded = [builder.load_atomic(place, "monotonic", a.dtype.bitwidth // 8) for place in places]
        return context.make_tuple(builder, returns, loaded)

    return returns(a, i, scope or DEFAULT), codegen


def _define_store(word: Any, ordering: str) -> None:
    @_define(word)
    def _(typing_context, a, i, value, scope=None):
        def codegen(context, builder, signature, args):
            pointer = _pointer(context, builder, signature, args)
            builder.store_atomic(args[2], pointer, ordering, a.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.none(a, i, a.dtype, scope or DEFAULT), codegen


_define_store(words.store_relaxed, "monotonic")
_define_store(words.store_release, "release")


def _define_rmw(word: Any, operation: str) -> None:
    @_define(word)
    def _(typing_context, a, i, value, scope=None):
        name = "u" + operation if operation == "max" and not a.dtype.signed else operation

        def codegen(context, builder, signature, args):
            return builder.atomic_rmw(name, _pointer(context, builder, signature, args), args[2], "acq_rel")

        return a.dtype(a, i, a.dtype, scope or DEFAULT), codegen


_define_rmw(words.atomic_add, "add")
_define_rmw(words.atomic_max, "max")


@_define(words.atomic_cas)
def _(typing_context, a, i, expected, value, scope=None):
    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature, args)
        pair = builder.cmpxchg(pointer, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return a.dtype(a, i, a.dtype, a.dtype, scope or DEFAULT), codegen


# --- waiting and time

YIELDS_FROM, SLEEPS_FROM, LONGEST_SLEEP_US = 64, 2000, 2000


@_define(words.relax)
def _(typing_context, spins):
    on_x86 = platform.machine() in ("x86_64", "AMD64", "i686")

    def codegen(context, builder, signature, args):
        n = args[0]
        with builder.if_else(builder.icmp_signed("<", n, ir.Constant(I64, YIELDS_FROM))) as (short, longer):
            with short:
                name, given = ("llvm.x86.sse2.pause", []) if on_x86 else ("llvm.aarch64.hint", [I32(1)])
                kind = ir.FunctionType(VOID, [g.type for g in given])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
            with (
                longer,
                builder.if_else(builder.icmp_signed("<", n, ir.Constant(I64, SLEEPS_FROM))) as (y, s),
            ):
                with y:
                    give_way = ir.FunctionType(I32, [])
                    builder.call(cgutils.get_or_insert_function(builder.module, give_way, "sched_yield"), [])
                with s:
                    # 20 us, and one more each turn: the longest sleep is reached after about a second
                    wanted = builder.sub(n, ir.Constant(I64, SLEEPS_FROM - 20))
                    most = ir.Constant(I64, LONGEST_SLEEP_US)
                    us = builder.select(builder.icmp_signed("<", wanted, most), wanted, most)
                    sleep = ir.FunctionType(I32, [I32])
                    usleep = cgutils.get_or_insert_function(builder.module, sleep, "usleep")
                    builder.call(usleep, [builder.trunc(us, I32)])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@_define(words.clock_ns)
def _(typing_context):
    def codegen(context, builder, signature, args):
        pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        kind = ir.FunctionType(I32, [I32, pair.type])
        now = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(now, [ir.Constant(I32, time.CLOCK_MONOTONIC), pair])
        both = builder.load(pair)
        seconds, ns = builder.extract_value(both, 0), builder.extract_value(both, 1)
        return builder.add(builder.mul(seconds, ir.Constant(I64, 10**9)), ns)

    return types.int64(), codegen


# --- asynchronous copies: made at once, so that a block's one lane never has to wait

overload(words.mbarrier_init, target="cpu", strict=False)(lambda bar, i, count: lambda bar, i, count: None)
overload(words.mbarrier_arrive, target="cpu", strict=False)(lambda bar, i: lambda bar, i: None)
overload(words.mbarrier_expect_bytes, target="cpu", strict=False)(lambda bar, i, size: lambda bar, i, size: None)
overload(words.mbarrier_wait, target="cpu", strict=False)(lambda bar, i, parity: lambda bar, i, parity: None)
overload(words.async_fence, target="cpu", strict=False)(lambda: lambda: None)


@_define(words.copy_async)
def _(typing_context, target, at, source, first, n, bar, i):
    if not (is_vector(target) and is_vector(source) and target.dtype == source.dtype):
        return None

    def codegen(context, builder, signature, args):
        places = {m: index_argument(context, builder, signature, args, m) for m in (1, 3, 4)}
        to = element_pointer(context, builder, target, args[0], places[1])
        of = element_pointer(context, builder, source, args[2], places[3])
        cgutils.raw_memcpy(builder, to, of, places[4], source.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(target, at, source, first, n, bar, i), codegen


# --- inner loops


def _load_floats(builder, pointer, offset, lanes, dtype):
    """`lanes` stored elements from pointer[offset] on, as a float32 vector."""
    stored = {types.uint16: ir.IntType(16), types.int16: ir.HalfType(), types.float32: F32}[dtype]
    at = builder.bitcast(builder.gep(pointer, [offset]), ir.VectorType(stored, lanes).as_pointer())
    loaded = builder.load(at, align=dtype.bitwidth // 8)
    if dtype == types.float32:
        return loaded
    if dtype == types.int16:
        return builder.fpext(loaded, ir.VectorType(F32, lanes))
    wide = builder.zext(loaded, ir.VectorType(I32, lanes))
    shift = ir.Constant(wide.type, [16] * lanes)
    return builder.bitcast(builder.shl(wide, shift), ir.VectorType(F32, lanes))


def _multiply_add(builder, a, b, c):
    kind = ir.FunctionType(a.type, [a.type] * 3)
    name = f"llvm.fmuladd.v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "llvm.fmuladd.f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def _strip(builder, start, n, step, body):
    """``for k in range(start, n - step + 1, step): body(k)``; returns the first k left over."""
    k = cgutils.alloca_once_value(builder, start)
    test, loop, done = (builder.append_basic_block(f"strip.{name}") for name in ("test", "loop", "done"))
    width = ir.Constant(I64, step)
    builder.branch(test)
    builder.position_at_end(test)
    now = builder.load(k)
    builder.cbranch(builder.icmp_signed("<=", builder.add(now, width), n), loop, done)
    builder.position_at_end(loop)
    body(now)
    builder.store(builder.add(now, width), k)
    builder.branch(test)
    builder.position_at_end(done)
    return builder.load(k)


def _halves(builder, vector):
    """The lower and the upper half of a vector."""
    n = vector.type.count // 2
    undefined = ir.Constant(vector.type, ir.Undefined)
    low, high = (
        builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(I32, n), list(part)))
        for part in (range(n), range(n, 2 * n))
    )
    return low, high


WIDE, CHAINS = 16, 2
"""A sum runs in CHAINS vectors of WIDE floats, added up at the end: enough to cover an addition's latency."""


def _rows_together():
    """How many rows' sums fit into the vector registers beside a weight's."""
    return 4 if llvm.get_host_cpu_features().get("avx512f") else 2


def _dots(builder, lefts, dtype, rights, n):
    """Dot products of each stored row in `lefts` with each float32 row in `rights`, a list for each left one."""
    vector, narrow = ir.VectorType(F32, WIDE), ir.VectorType(F32, WIDE // 2)

    def zeros(kind):
        zero = ir.Constant(kind, [0.0] * kind.count)
        return [[cgutils.alloca_once_value(builder, zero) for _ in rights] for _ in lefts]

    chains, rests = [zeros(vector) for _ in range(CHAINS)], zeros(narrow)

    def accumulate(k, totals, lanes):
        ys = [_load_floats(builder, right, k, lanes, types.float32) for right in rights]
        for left, row in zip(lefts, totals, strict=True):
            x = _load_floats(builder, left, k, lanes, dtype)
            for y, total in zip(ys, row, strict=True):
                builder.store(_multiply_add(builder, x, y, builder.load(total)), total)

    def stride(k):
        for chain in range(CHAINS):
            accumulate(builder.add(k, ir.Constant(I64, chain * WIDE)), chains[chain], WIDE)

    k = _strip(builder, ir.Constant(I64, 0), n, WIDE * CHAINS, stride)
    k = _strip(builder, k, n, WIDE, lambda k: accumulate(k, chains[0], WIDE))
    _strip(builder, k, n, WIDE // 2, lambda k: accumulate(k, rests, WIDE // 2))
    return [
        [_add_up(builder, [chain[a][b] for chain in chains], rests[a][b]) for b in range(len(rights))]
        for a in range(len(lefts))
    ]


def _add_up(builder, chains, rest):
    """The sum of all lanes of a row's vectors: chains first, then halves onto halves."""
    total = builder.load(chains[0])
    for chain in chains[1:]:
        total = builder.fadd(total, builder.load(chain))
    low, high = _halves(builder, total)
    total = builder.fadd(builder.fadd(low, high), builder.load(rest))
    while total.type.count > 2:
        total = builder.fadd(*_halves(builder, total))
    return builder.fadd(*(builder.extract_element(total, ir.Constant(I32, lane)) for lane in (0, 1)))


def _dot_of(stored: int) -> Any:
    """The definition of a dot product whose argument number `stored` is the one that need not hold float32."""
    other = 2 - stored

    def _dot(typing_context, a, i, b, j, n):
        kinds = a, i, b
        if not (is_vector(a) and is_vector(b) and kinds[other].dtype == types.float32):
            return None

        def codegen(context, builder, signature, args):
            at = {k: index_argument(context, builder, signature, args, k) for k in (1, 3, 4)}
            left, right = (
                element_pointer(context, builder, kinds[k], args[k], at[k + 1]) for k in (stored, other)
            )
            return _dots(builder, [left], kinds[stored].dtype, [right], at[4])[0][0]

        return types.float32(a, i, b, j, n), codegen

    return _dot


_define(words.row_dot)(_dot_of(0))
_define(words.dot)(_dot_of(2))


def _tiles(builder, lefts, dtype, right, count, n, targets):
    """Dot products of each of `lefts` with `count` rows from `right` on, stored from each of `targets` on."""

    def some(rows_now):
        def body(t):
            first = builder.gep(right, [builder.mul(t, n)])
            rights = [builder.gep(first, [builder.mul(ir.Constant(I64, r), n)]) for r in range(rows_now)]
            for target, values in zip(targets, _dots(builder, lefts, dtype, rights, n), strict=True):
                for r, value in enumerate(values):
                    builder.store(value, builder.gep(target, [builder.add(t, ir.Constant(I64, r))]))

        return body

    together = _rows_together()
    t = _strip(builder, ir.Constant(I64, 0), count, together, some(together))
    _strip(builder, t, count, 1, some(1))


@_define(words.row_dots)
def _(typing_context, w, i, x, j, rows, n, out, k):
    if not (is_vector(w) and is_vector(x) and x.dtype == types.float32):
        return None

    def codegen(context, builder, signature, args):
        at = {m: index_argument(context, builder, signature, args, m) for m in (1, 3, 4, 5, 7)}
        left = element_pointer(context, builder, w, args[0], at[1])
        right = element_pointer(context, builder, x, args[2], at[3])
        target = element_pointer(context, builder, out, args[6], at[7])
        _tiles(builder, [left], w.dtype, right, at[4], at[5], [target])
        return context.get_dummy_value()

    return types.none(w, i, x, j, rows, n, out, k), codegen


@_define(words.row_dots_of_two)
def _(typing_context, w, i, i2, x, j, rows, n, out, k, k2):
    if not (is_vector(w) and is_vector(x) and x.dtype == types.float32):
        return None

    def codegen(context, builder, signature, args):
        at = {m: index_argument(context, builder, signature, args, m) for m in (1, 2, 4, 5, 6, 8, 9)}
        lefts = [element_pointer(context, builder, w, args[0], at[m]) for m in (1, 2)]
        right = element_pointer(context, builder, x, args[3], at[4])
        targets = [element_pointer(context, builder, out, args[7], at[m]) for m in (8, 9)]
        _tiles(builder, lefts, w.dtype, right, at[5], at[6], targets)
        return context.get_dummy_value()

    return types.none(w, i, i2, x, j, rows, n, out, k, k2), codegen


@_define(words.row_mix)
def _(typing_context, weight, i, n, rows, j, width, out, k):
    def codegen(context, builder, signature, args):
        at = {m: index_argument(context, builder, signature, args, m) for m in (1, 2, 4, 5, 7)}
        count, columns = at[2], at[5]
        weights = element_pointer(context, builder, weight, args[0], at[1])
        values = element_pointer(context, builder, rows, args[3], at[4])
        target = element_pointer(context, builder, out, args[6], at[7])

        def some(vectors, lanes):
            """A body for `vectors` vectors of columns: their sums stay in registers while the rows go by."""

            def body(first):
                starts = [builder.add(first, ir.Constant(I64, v * lanes)) for v in range(vectors)]
                sums = [
                    cgutils.alloca_once_value(builder, _load_floats(builder, target, c, lanes, types.float32))
                    for c in starts
                ]

                def row(p):
                    share = _spread(builder, builder.load(builder.gep(weights, [p])), lanes)
                    begin = builder.mul(p, columns)
                    for c, total in zip(starts, sums, strict=True):
                        x = _load_floats(builder, values, builder.add(begin, c), lanes, rows.dtype)
                        builder.store(_multiply_add(builder, x, share, builder.load(total)), total)

                _strip(builder, ir.Constant(I64, 0), count, 1, row)
                for c, total in zip(starts, sums, strict=True):
                    place = builder.bitcast(builder.gep(target, [c]), ir.VectorType(F32, lanes).as_pointer())
                    builder.store(builder.load(total), place, align=4)

            return body

        c = _strip(builder, ir.Constant(I64, 0), columns, 4 * WIDE, some(4, WIDE))
        c = _strip(builder, c, columns, WIDE, some(1, WIDE))
        _strip(builder, c, columns, WIDE // 2, some(1, WIDE // 2))
        return context.get_dummy_value()

    return types.none(weight, i, n, rows, j, width, out, k), codegen


def _spread(builder, number, lanes):
    """A vector with the number in every lane."""
    undefined = ir.Constant(ir.VectorType(F32, lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))
