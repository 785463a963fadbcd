"""Numbers that are published, and awaited, on CUDA: relaxed accesses of the whole GPU, four at a time.

They order nothing else, so no fence is needed: one would wait for all asynchronous copies on their way to the
multiprocessor (docs/performance.md).
"""

from llvmlite import ir
from numba import types

from . import ptx
from . import vocabulary as words
from .cuda_words import access, define, define_by, is_at_least
from .lowering import I32, VOID, asm
from .numba_cuda import cuda
from .vocabulary import GPU, UNPUBLISHED, f32, f32_of_bits, i64, lane_id, lane_sum, relax, u32

_FOUR = types.UniTuple(types.uint32, 4)


def publish_word(a, i, word):
    """:func:`.vocabulary.publish` of 32 bits. A word of the `cuda_` files."""
    raise NotImplementedError("compiled code only")


@define(publish_word)
def _(typing_context, a, i, word):
    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[2], I32)
        taken = builder.icmp_unsigned("==", bits, ir.Constant(I32, UNPUBLISHED))
        bits = builder.select(taken, ir.Constant(I32, UNPUBLISHED - 1), bits)
        text = ptx.store("relaxed", GPU, 32)
        asm(builder, VOID, text, "l,r", [access(context, builder, signature, args), bits])
        return context.get_dummy_value()

    return types.none(a, i, types.float32 if word == types.float32 else types.uint32), codegen


def _four_published(a, i):
    """``a[i:i+4]`` as four words, published or not. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_four_published)
def _(typing_context, a, i):
    def codegen(context, builder, signature, args):
        pointer = access(context, builder, signature, args)
        kind = ir.LiteralStructType([I32] * 4)
        loaded = asm(builder, kind, ptx.load_four(GPU), "=r,=r,=r,=r,l", [pointer])
        return context.make_tuple(builder, _FOUR, [builder.extract_value(loaded, n) for n in range(4)])

    return _FOUR(a, i), codegen


def _one_published(a, i):
    """``a[i]`` as a word, published or not. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_one_published)
def _(typing_context, a, i):
    def codegen(context, builder, signature, args):
        pointer = access(context, builder, signature, args)
        return asm(builder, I32, ptx.load("relaxed", GPU, 32), "=r,l", [pointer])

    return types.uint32(a, i), codegen


def _keep_four(out, k, four):
    """Four words become ``out[k:k+4]``, by one store of 16 bytes. A word of this file only."""
    raise NotImplementedError("compiled code only")


@define(_keep_four)
def _(typing_context, out, k, four):
    def codegen(context, builder, signature, args):
        vector = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
        for lane in range(4):
            word = builder.extract_value(args[2], lane)
            vector = builder.insert_element(vector, word, ir.Constant(I32, lane))
        pointer = access(context, builder, signature, args)
        builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=16)
        return context.get_dummy_value()

    return types.none(out, k, _FOUR), codegen


@cuda.jit(device=True)
def _highest(four):
    """The largest of four words: UNPUBLISHED if one of them is."""
    return max(max(four[0], four[1]), max(four[2], four[3]))


@define(words.unpublish)
def _(typing_context, a, i):
    def codegen(context, builder, signature, args):
        pointer, word = access(context, builder, signature, args), ir.Constant(I32, UNPUBLISHED)
        with builder.if_else(is_at_least(builder, 800)) as (newer, older):
            with newer:  # it is published, and awaited, behind many weights
                asm(builder, VOID, ptx.STORE_TO_STAY, "l,r", [pointer, word])
            with older:
                builder.store(word, builder.bitcast(pointer, I32.as_pointer()))
        return context.get_dummy_value()

    return types.none(a, i), codegen


@define_by(words.publish)
def _(a, i, x):
    def publish(a, i, x):
        publish_word(a, i, f32(x))

    return publish


@define_by(words.awaited)
def _(a, i):
    def awaited(a, i):
        word, spins = _one_published(a, i), i64(0)
        while word == u32(UNPUBLISHED):
            relax(spins)
            spins += 1
            word = _one_published(a, i)
        return f32_of_bits(word)

    return awaited


@cuda.jit(device=True)
def _await_four(a, i):
    four, spins = _four_published(a, i), i64(0)
    highest = _highest(four)
    while highest == u32(UNPUBLISHED):
        relax(spins)
        spins += 1
        four = _four_published(a, i)
        highest = _highest(four)
    return four


@cuda.jit(device=True)
def _as_floats(four):
    return f32_of_bits(four[0]), f32_of_bits(four[1]), f32_of_bits(four[2]), f32_of_bits(four[3])


@define_by(words.awaited_four)
def _(a, i):
    def awaited_four(a, i):
        return _as_floats(_await_four(a, i))

    return awaited_four


@cuda.jit(device=True)
def _await_eight(a, i, j):
    """Four words each from ``a[i]`` and from ``a[j]`` on, with both loads on their way at once."""
    one, two, spins = _four_published(a, i), _four_published(a, j), i64(0)
    highest = max(_highest(one), _highest(two))
    while highest == u32(UNPUBLISHED):
        relax(spins)
        spins += 1
        one, two = _four_published(a, i), _four_published(a, j)
        highest = max(_highest(one), _highest(two))
    return one, two


@cuda.jit(device=True)
def _await_sixteen(a, i, j, k, m):
    """Likewise of four places."""
    one, two, three, four = (
        _four_published(a, i),
        _four_published(a, j),
        _four_published(a, k),
        _four_published(a, m),
    )
    highest, spins = max(max(_highest(one), _highest(two)), max(_highest(three), _highest(four))), i64(0)
    while highest == u32(UNPUBLISHED):
        relax(spins)
        spins += 1
        one, two = _four_published(a, i), _four_published(a, j)
        three, four = _four_published(a, k), _four_published(a, m)
        highest = max(max(_highest(one), _highest(two)), max(_highest(three), _highest(four)))
    return one, two, three, four


@define_by(words.awaited_copy)
def _(out, k, a, i, n):
    def awaited_copy(out, k, a, i, n):
        c, last = i64(lane_id() * 4), i64(n) - 4
        if n <= 128:
            if c < n:
                _keep_four(out, k + c, _await_four(a, i + c))
        elif n <= 256:
            d = min(c + 128, last)  # behind the end, the last four once more
            one, two = _await_eight(a, i + c, i + d)
            _keep_four(out, k + c, one)
            _keep_four(out, k + d, two)
        else:
            while c < n:
                d, e, f = min(c + 128, last), min(c + 256, last), min(c + 384, last)
                one, two, three, four = _await_sixteen(a, i + c, i + d, i + e, i + f)
                _keep_four(out, k + c, one)
                _keep_four(out, k + d, two)
                _keep_four(out, k + e, three)
                _keep_four(out, k + f, four)
                c += 512

    return awaited_copy


@define_by(words.awaited_sum)
def _(a, i, n):
    def awaited_sum(a, i, n):
        c, last, total = i64(lane_id() * 4), i64(n) - 4, f32(0.0)
        while c < n:
            d, e, f = min(c + 128, last), min(c + 256, last), min(c + 384, last)
            one, two, three, four = _await_sixteen(a, i + c, i + d, i + e, i + f)
            total += _sum(one)
            total += _sum(two) if c + 128 < n else f32(0.0)
            total += _sum(three) if c + 256 < n else f32(0.0)
            total += _sum(four) if c + 384 < n else f32(0.0)
            c += 512
        return lane_sum(total)

    return awaited_sum


@define_by(words.awaited_mix)
def _(weights, w, a, i, step, n):
    def awaited_mix(weights, w, a, i, step, n):
        s, left = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), i64(n)
        while left > 0:
            second = i + (step if left > 1 else i64(0))  # behind the last, the last once more, with no weight
            third = second + (step if left > 2 else i64(0))
            one, two, three, four = _await_sixteen(a, i, second, third, third + (step if left > 3 else i64(0)))
            s = _plus(s, weights[w], one)
            s = _plus(s, weights[w + 1] if left > 1 else f32(0.0), two)
            s = _plus(s, weights[w + 2] if left > 2 else f32(0.0), three)
            s = _plus(s, weights[w + 3] if left > 3 else f32(0.0), four)
            w, i, left = w + 4, i + 4 * step, left - 4
        return s

    return awaited_mix


@cuda.jit(device=True)
def _plus(s, weight, four):
    a, b, c, d = _as_floats(four)
    return s[0] + weight * a, s[1] + weight * b, s[2] + weight * c, s[3] + weight * d


@cuda.jit(device=True)
def _sum(four):
    a, b, c, d = _as_floats(four)
    return (a + b) + (c + d)
