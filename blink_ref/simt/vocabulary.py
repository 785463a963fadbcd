"""The words that device code is written in, with their meaning in plain Python.

A device function calls these by name. Run as Python, the bodies below *are* what happens; compiled
for the `cpu` target, :mod:`.on_cpu` lowers each word to LLVM; compiled for `cuda`, :mod:`.on_cuda`
lowers it to PTX. One warp is 32 lanes on CUDA, 1 on the CPU, and up to 4 in Python, so warp-wide
work is written against :func:`warp_width`, and heavy inner loops are words themselves
(:func:`row_dot`, :func:`dot`, :func:`row_mix`), which one lane can carry out as well as 32.

Scopes of ordered accesses follow the PTX memory model: ``BLOCK`` (lanes of one block), ``GPU``
(all blocks), ``SYSTEM`` (other processes and devices too).
"""

from typing import Any, NamedTuple

import numpy as np

from . import mbarrier
from .on_python import Copy, me

f32, f64 = np.float32, np.float64
i32, i64, u32, u64 = np.int32, np.int64, np.uint32, np.uint64

BLOCK, GPU, SYSTEM = 0, 1, 2

FULL_WARP = 0xFFFFFFFF


class Block(NamedTuple):
    """What a device function knows of the block it runs in; always its first parameter."""

    id: Any
    """this block's number, 0 to blocks - 1"""
    blocks: Any
    """blocks in the grid; all of them run at the same time"""
    shared: Any
    """float32 [n], 16-byte aligned: the block's arena, seen by its own lanes only"""
    grid: Any
    """uint32 [GRID_WORDS]: arrivals at the grid barrier, shared by all blocks, and at that of a team"""
    turn: Any
    """uint32 [2]: the counts at which this block leaves its next grid barriers; block-private"""
    team: Any = 0
    """1 = all blocks but the first, as a grid of their own (see simt/grid.py)"""


GRID_WORDS = 64
"""Words of :attr:`Block.grid`: its two counters lie in different cache lines."""


# --- who am I


def thread_id():
    """This lane's number in its block."""
    return me().thread


def block_threads():
    """Lanes in a block."""
    return me().block.threads


def warp_width():
    """Lanes in this lane's warp: 32 on CUDA, 1 on the CPU, at most 4 in Python."""
    return me().warp.width


def lane_id():
    """This lane's number in its warp."""
    return me().lane


def warp_id():
    """This warp's number in its block."""
    return me().warp.index


def warps():
    """Warps in a block."""
    return len(me().block.warps)


# --- waiting for each other


def barrier():
    """Wait until every lane of the block is here; what each wrote before, all see after.

    All lanes of the block call it, at the same place.
    """
    me().block.barrier.wait()


def warp_barrier():
    """The same among the lanes of one warp."""
    me().warp.barrier.wait()


def relax(spins):
    """Give way inside a spin loop; `spins` counts the turns so far, and the pause grows with it.

    CUDA: nothing at first, then ``nanosleep``. CPU: ``pause``, then ``sched_yield``, then sleeps of
    up to 2 ms, so that an idle engine leaves the machine to others.
    """
    me().block.python_grid.relax(spins)


# --- warp-wide exchange: every lane of the warp calls, every lane gets the result


def lane_sum(x):
    """Sum over the warp's lanes, halving: lane i with lane i + n/2."""
    values = me().warp.exchange(x)
    while len(values) > 1:
        half = (len(values) + 1) // 2
        low, high = values[:half], values[half:]
        values = [a + b for a, b in zip(low, high, strict=False)] + low[len(high) :]
    return values[0]


def lane_max(x):
    """Maximum over the warp's lanes."""
    return max(me().warp.exchange(x))


def lane_broadcast(x, source):
    """The value that lane `source` of the warp holds."""
    return me().warp.exchange(x)[source]


def lane_any(x):
    """Whether `x` is true in any lane of the warp."""
    return any(me().warp.exchange(bool(x)))


# --- ordered memory accesses: one lane, one element of a 1-D integer array


def load_relaxed(a, i, scope=GPU):
    """``a[i]``, read from memory each time and never torn, ordering nothing."""
    return a[i]


def load_relaxed_four(a, i, scope=GPU):
    """``a[i:i+4]`` of 32-bit elements as a tuple, each as by :func:`load_relaxed`; one load on CUDA.

    `a` is 16-byte aligned, and i a multiple of 4.
    """
    return a[i], a[i + 1], a[i + 2], a[i + 3]


def load_acquire(a, i, scope=GPU):
    """``a[i]``; what its writer wrote before releasing it is visible after."""
    return a[i]


def acquire_fence(scope=GPU):
    """What writers wrote before releasing what this lane has read by relaxed loads is visible from now on.

    As if those loads had been :func:`load_acquire`; one fence does for many.
    """
    me().block.acquire_fence(scope)


def store_relaxed(a, i, value, scope=GPU):
    """``a[i] = value``, never torn, and ordering nothing."""
    a[i] = value


def store_release(a, i, value, scope=GPU):
    """``a[i] = value``, visible only after everything this lane wrote or saw before."""
    a[i] = value


def atomic_add(a, i, value, scope=GPU):
    """``a[i] += value`` as one step, acquire and release; returns the old value."""
    bits = 8 * a.dtype.itemsize
    with me().block.python_grid.lock:
        old = a[i]
        total = (int(old) + int(value)) % (1 << bits)
        a[i] = total - (1 << bits) if a.dtype.kind == "i" and total >> (bits - 1) else total
    return old


def atomic_max(a, i, value, scope=GPU):
    """``a[i] = max(a[i], value)`` as one step, acquire and release; returns the old value."""
    with me().block.python_grid.lock:
        old = a[i]
        a[i] = max(old, value)
    return old


def atomic_cas(a, i, expected, value, scope=GPU):
    """If ``a[i] == expected``, set it to `value`; one step; returns the old value."""
    with me().block.python_grid.lock:
        old = a[i]
        if old == expected:
            a[i] = value
    return old


# --- asynchronous copies: from global memory into the arena, counted on an mbarrier


def arena_view(arena, at, n, like):
    """n elements of the type of the array `like`, in the memory of float32 ``arena[at:]``; no copy is made.

    n elements fill whole float32. On CUDA, words that read 16-bit weights (:func:`row_dot`) read them from global
    memory only, not from here.
    """
    return arena[at : at + n * like.dtype.itemsize // 4].view(like.dtype)


def mbarriers(arena, at, n):
    """n mbarriers (int64), in the memory of float32 ``arena[at : at + 2 * n]``; `at` is even.

    An mbarrier counts arrivals of lanes, and bytes of copies. When both are complete, a *phase* of it is, and the
    next begins, which takes as many arrivals; phases have parity 0 and 1 by turns, the first one 0. All accesses
    are by the words below.
    """
    if at % 2:
        raise ValueError(f"mbarriers begin at float {at} of the arena; it has to be even, for 8-byte alignment")
    return arena[at : at + 2 * n].view(np.int64)


def mbarrier_init(bar, i, count):
    """Begin phase 0 of ``bar[i]``, whose phases take `count` arrivals, 1 to 32767.

    One lane calls it; a barrier() stands between it and the other words on ``bar[i]``.
    """
    if not 1 <= count <= mbarrier.ARRIVALS:
        raise ValueError(f"an mbarrier's phase takes 1 to {mbarrier.ARRIVALS} arrivals, not {count}")
    bar[i] = mbarrier.fresh(count)
    async_fence()


def mbarrier_arrive(bar, i):
    """One arrival at ``bar[i]``; what this lane did before comes before what follows a wait for the phase."""
    with me().block.python_grid.lock:
        bar[i] = mbarrier.arrived(int(bar[i]), 0)


def mbarrier_expect_bytes(bar, i, size):
    """One arrival, after adding `size` bytes (under 2**20) to those that the phase takes.

    One lane calls it, before the copies that bring the bytes.
    """
    if not 0 <= size < 1 << 20:
        raise ValueError(f"a phase of an mbarrier takes up to {(1 << 20) - 1} bytes, not {size}")
    with me().block.python_grid.lock:
        bar[i] = mbarrier.arrived(int(bar[i]), size)


def mbarrier_wait(bar, i, parity):
    """Wait for the end of the phase of that parity (until one of the other runs), as :func:`relax` gives way.

    Each lane that goes on to read what was copied, or to write where lanes have read, calls it, or meets at a
    barrier one that did. What came before the arrivals, and the copies of the phase, come before what follows.
    """
    spins = 0
    while mbarrier.parity(int(bar[i])) == parity:
        relax(spins)
        spins += 1


def copy_async(target, at, source, first, n, bar, i):
    """Start ``target[at:at+n] = source[first:first+n]``; its bytes count on ``bar[i]`` when it is done.

    One lane calls it. `target` lies in the arena, `source` in global memory; both are of one type, and both
    places, and the size, are multiples of 16 bytes. Until a wait for the phase is over, the source is read and the
    target written at any time. What lanes did there before has to come before the call; what they wrote there, by
    way of an :func:`async_fence`.

    CUDA from compute capability 9.0 on: ``cp.async.bulk``; int16 numbers are packed weights, which L2 is to keep
    for less time than anything else. Older: the calling lane copies, there and then; so does the CPU, where a
    block's one lane never has to wait.
    """
    me().block.start_copy(Copy(target, at, source, first, n, bar, i))


def async_fence():
    """What this lane wrote or saw before comes before copies started after it, here or behind a barrier."""
    me().block.async_fence()


# --- numbers that are published one by one, by lanes of any block: whoever awaits them needs no barrier


UNPUBLISHED = 0xFFFFFFFF
"""The bits that stand in a float32's place until it is published: a NaN that no arithmetic makes."""


def unpublish(a, i):
    """``a[i]``, a float32, is yet to be published. One lane; an ordinary write.

    A barrier with whoever publishes or awaits it, or used it before, stands before and behind.
    """
    a[i] = np.uint32(UNPUBLISHED).view(np.float32)


def publish(a, i, x):
    """``a[i] = x``, a float32, for :func:`awaited`. One lane.

    It is seen whole, and by itself: nothing else that the lane has written comes before it. (Where x is the NaN
    that means UNPUBLISHED, another one is published.)
    """
    scope = GPU  # noqa: F841 - the checker looks at it
    a[i] = _publishable(x)


def _publishable(x):
    x = np.float32(x)
    return x if x.view(np.uint32) != UNPUBLISHED else np.uint32(UNPUBLISHED - 1).view(np.float32)


def awaited(a, i):
    """``a[i]``, a float32, as soon as it is published, as :func:`relax` gives way. One lane.

    By it alone, nothing else that the publisher has written is known to be there.
    """
    scope, spins = GPU, 0  # noqa: F841 - the checker looks at it
    while (x := a[i]).view(np.uint32) == UNPUBLISHED:
        relax(spins)
        spins += 1
    return x


def awaited_four(a, i):
    """``a[i:i+4]`` as a tuple, each as by :func:`awaited`; one load on CUDA. i is a multiple of 4. One lane."""
    return awaited(a, i), awaited(a, i + 1), awaited(a, i + 2), awaited(a, i + 3)


def awaited_copy(out, k, a, i, n):
    """``out[k:k+n] = a[i:i+n]``, each as soon as it is published, by the lanes of a warp.

    All call it with the same arguments. n, i and k are multiples of 4, both arrays 16-byte aligned. On CUDA a lane
    waits for up to 16 numbers at once.
    """
    for c in range(me().lane, n, me().warp.width):
        out[k + c] = awaited(a, i + c)


def awaited_sum(a, i, n):
    """The sum of ``a[i:i+n]``, each as soon as it is published, by a warp, all lanes of which get it.

    n and i are multiples of 4. The order of the additions depends on n alone.
    """
    total = np.float32(0)
    for c in range(me().lane, n, me().warp.width):
        total += awaited(a, i + c)
    return lane_sum(total)


# --- numbers


def bf16(bits):
    """float32 with the value of a bfloat16 given as uint16 bits."""
    return np.uint32(int(bits) << 16).view(np.float32)


def f32_of_bits(bits):
    """float32 given as uint32 bits."""
    return np.uint32(bits).view(np.float32)


def fp16(bits):
    """float32 with the value of an IEEE half given as int16 bits (signed, to tell it from bf16)."""
    return np.float32(np.int16(bits).view(np.float16))


def widen(x):
    """float32 of a stored weight: uint16 is bfloat16 bits, int16 is half bits, float32 is itself."""
    if isinstance(x, np.uint16):
        return bf16(x)
    return fp16(x) if isinstance(x, np.int16) else np.float32(x)


def narrow_put(a, i, x):
    """``a[i] = x`` of a float32; where `a` holds uint16, the bits of the bfloat16 nearest to x, ties to even.

    Where it holds int16, those of the nearest float16. What is beyond the largest becomes infinite, and NaN some
    NaN. One lane.
    """
    if a.dtype == np.int16:
        with np.errstate(over="ignore"):
            a[i] = np.float16(x).view(np.int16)
    else:
        a[i] = x if a.dtype == np.float32 else _nearest_bf16(np.float32(x))


def _nearest_bf16(x):
    """The bits of the bfloat16 nearest to a float32, ties to even."""
    bits = int(x.view(np.uint32))
    if np.isnan(x):
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def tiles_pay(w):
    """Whether :func:`block_dots` is of use for such stored weights: 16 bits each, and tensor cores for them.

    Known when a kernel is compiled, so that what depends on it is left out.
    """
    return w.dtype != np.float32


def heads_pay(keys):
    """Whether :func:`heads_weigh` is of use for such stored keys: 16 bits each.

    Known when a kernel is compiled, as :func:`tiles_pay`.
    """
    return keys.dtype != np.float32


def rank(value, index):
    """Pack (float32 value, index < 2**31) into an int64 that orders by value, ties to the smaller index.

    NaN of either sign orders below every number, so a poisoned logit is never chosen. -0 equals 0.
    """
    value, bits = np.float32(value), 0
    if not np.isnan(value):
        bits = 0 if value == 0 else int(value.view(np.uint32))
        bits = bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000
    return np.int64((bits << 31) - (1 << 62) + (0x7FFFFFFF - int(index)))


def rank_index(key):
    """The index inside a :func:`rank` key."""
    return 0x7FFFFFFF - (int(key) & 0x7FFFFFFF)


def exp(x):
    """e**x in float32; 0 for -inf, inf where it overflows."""
    return np.exp(np.float32(x))


def divide(a, b):
    """``a // b`` and ``a % b`` of int64 numbers from 0 to 2**31 - 1 (b from 1), by a 32-bit division.

    A 64-bit one is a call of some hundred instructions on a GPU.
    """
    return a // b, a % b


def opaque(x):
    """x itself (int64), but a compiler may not know it, nor compute what follows from it any earlier.

    In a loop over layers, GPU compilers would hoist the index arithmetic of every phase to the kernel's
    start and keep it in registers throughout; this keeps it in its phase.
    """
    return x


def clock_ns():
    """Nanoseconds of a clock that all blocks share; its zero is arbitrary."""
    return me().block.python_grid.clock_ns()


# --- heavy inner loops


def dot(a, i, b, j, n):
    """One lane's own dot product of float32 ``a[i:i+n]`` and ``b[j:j+n]``, both 16-byte aligned.

    b holds float32, or bfloat16 as uint16 bits, and may be written while the kernel runs. n, i and j are multiples
    of 8. Each lane may pass different offsets.
    """
    return _stored_dot(b[j : j + n], a[i : i + n])


def row_dot(w, i, x, j, n):
    """The warp's dot product of stored weights ``w[i:i+n]`` (see :func:`widen`) and float32 ``x[j:j+n]``.

    All lanes call with the same arguments and all get the sum. n, i and j are multiples of 8, w and
    x 16-byte aligned. The order of the additions depends on n alone, so a result is the same in
    whatever batch it is computed.
    """
    lane, width = me().lane, me().warp.width
    return lane_sum(_stored_dot(w[i + lane : i + n : width], x[j + lane : j + n : width]))


def row_dots(w, i, x, j, rows, n, out, k):
    """``out[k+t]`` = :func:`row_dot` of ``w[i:i+n]`` with ``x[j+t*n : j+(t+1)*n]``, for t < `rows`, by one warp.

    A weight is loaded once for several rows; each result is bit for bit that of :func:`row_dot`. Lane 0
    writes the results, and only lane 0 may read them without a barrier.
    """
    for t in range(rows):
        y = row_dot(w, i, x, j + t * n, n)
        if me().lane == 0:
            out[k + t] = y


def row_dots_of_two(w, i, i2, x, j, rows, n, out, k, k2):
    """:func:`row_dots` of the stored row at i into ``out[k:]``, and of the one at i2 into ``out[k2:]``.

    A CPU loads the rows of x, which outnumber the weights, once for both.
    """
    row_dots(w, i, x, j, rows, n, out, k)
    row_dots(w, i2, x, j, rows, n, out, k2)


FRAGMENT = 16
"""Stored rows, and columns, that a tensor core multiplies at once: a *fragment* of weights is 16 x 16."""
FRAGMENT_PITCH = 20
"""Floats from one row of the results of :func:`fragment_dots` to the next."""


def packed_floats(n):
    """Floats of room that n activations take as :func:`fragment_put` and :func:`block_put` leave them.

    n is a multiple of 4. On CUDA with tensor cores half as many: they are float16 there, which lacks 2**-11 of a
    number at most, or 2**-21 where that is more; what is larger than a million becomes a million.
    """
    return n


def fragment_put(x, at, a, b, c, d):
    """Four neighbouring columns of a row of x, at ``x[at]``, for :func:`fragment_dots`. One lane.

    They take ``packed_floats(4)`` floats, and 16 columns begin at a multiple of ``packed_floats(16)``. Which of
    them is where within their room, only that word knows. Each float is published (see :func:`publish`).
    """
    scope = GPU  # noqa: F841 - the checker looks at it
    x[at], x[at + 1], x[at + 2], x[at + 3] = map(_publishable, (a, b, c, d))


def fragment_dots(out, k, w, at, steps, x, j, rows, more):
    """``out[k + t * FRAGMENT_PITCH + r]`` = products of 16 stored rows r with `rows` rows t of x. By one warp.

    Of 16 columns for each of `steps` fragments, which begin at ``w[at]`` in the order of kernels/packing.py; of
    those, row t of x begins at ``x[j + packed_floats((step * rows + t) * 16)]``, as :func:`fragment_put` writes
    it. With `more` the products are added to what is there. `out` is the arena, w a view of float16 in it, x lies
    there too, or in global memory; `rows` is at most 16, `at` a multiple of 8, j of 4.

    Which lane writes which result is not said: a barrier stands before anybody else reads them. The order of the
    additions does not depend on `rows`, nor on whether a call does what several would, of four steps each, but for
    the last. CUDA, from compute capability 9.0 on: tensor cores.
    """
    lane, width = me().lane, me().warp.width
    stored = _stored_rows(w, at, steps)
    for t in range(lane, rows, width):
        row, to = _packed_row(x, j + t * FRAGMENT, steps, rows * FRAGMENT, FRAGMENT), k + t * FRAGMENT_PITCH
        y = stored @ row
        out[to : to + FRAGMENT] = out[to : to + FRAGMENT] + y if more else y


def _stored_rows(w, at, steps):
    """float32 [16, n] of fragments in the order of kernels/packing.py."""
    stored = _floats(w[at : at + steps * FRAGMENT * FRAGMENT]).reshape(steps, 2, 2, 8, 8)
    return stored.transpose(2, 3, 0, 1, 4).reshape(FRAGMENT, steps * FRAGMENT)


def _packed_row(x, j, n, pitch, width):
    """A row of x: n times `width` columns, `pitch` floats apart; the first at ``x[j]``."""
    row = np.zeros(n * width, np.float32)
    for piece in range(n):
        row[piece * width : (piece + 1) * width] = x[j + piece * pitch : j + piece * pitch + width]
    return row


DOTS_STRIPS, DOTS_ROWS, DOTS_PITCH = 8, 128, 132
"""Most strips of 16 stored rows, and most rows of x, in :func:`block_dots`; floats from one row of its results to
the next."""
DOTS_COLUMNS = 8
"""Columns of a row of x that lie together there."""
DOTS_RESULTS = 36864 + 64
"""Where the results begin in the floats of the arena that are the word's own: behind those in which, on CUDA, both
factors come, in stages."""
DOTS_FLOATS = DOTS_RESULTS + DOTS_ROWS * DOTS_PITCH
"""Those floats."""


class Tile(NamedTuple):
    """What a :func:`block_dots` multiplies, all int64."""

    at: Any
    """where the first strip begins in w: a multiple of 8; the others follow"""
    steps: Any
    """fragments of a strip"""
    strips: Any
    """strips: 1 to DOTS_STRIPS"""
    j: Any
    """where column 0 of the first row begins in x: a multiple of 4"""
    across: Any
    """rows of x in all"""
    rows: Any
    """of them, in the tile: 1 to DOTS_ROWS"""
    most: Any
    """most rows of the tiles that follow each other: 64 or DOTS_ROWS"""
    first: Any
    """the first fragment of each strip that is multiplied"""
    n: Any
    """how many are: at least 1"""


def block_put(x, at, a, b, c, d):
    """Four neighbouring columns of a row of x, at ``x[at]``, for :func:`block_dots`. One lane.

    They take ``packed_floats(4)`` floats, and `at` is a multiple of that.
    """
    x[at], x[at + 1], x[at + 2], x[at + 3] = a, b, c, d


def dots_ask(out, k, w, x, tile, begins):
    """Begin to copy what the next :func:`block_dots` multiplies, which has the same arguments.

    All lanes of the block call it; a barrier stands between it and the one before. If a run of tiles `begins`
    with this one, x may yet have to be written: only stored rows are asked for. Until the results of the tile
    before have been read, DOTS_RESULTS floats from k on are the word's own, from then on all DOTS_FLOATS.
    """
    mine = k + me().thread
    if not begins and out[mine] != np.inf:
        raise AssertionError("dots_ask goes on where no tile has been made")
    out[mine] = -np.inf


def dots_forget(out, k, w, tile):
    """What :func:`dots_ask` has asked for, where a run begins, is not needed. By all lanes, behind a barrier.

    Another barrier is to follow before the arena is used.
    """
    if out[k + me().thread] != -np.inf:
        raise AssertionError("dots_forget without dots_ask")


def block_dots(out, k, w, x, tile):
    """``out[k + DOTS_RESULTS + t * DOTS_PITCH + r]`` = products of stored rows r of strips with rows t of x.

    Of fragments `first` to ``first + n - 1`` of each strip, in the order of kernels/packing.py. Columns 8c to
    8c + 7 of row t of x begin at ``x[j + packed_floats((c * across + t) * 8)]``, as :func:`block_put` writes them.
    By all lanes of the block, of 16 warps on CUDA, which have called :func:`dots_ask` for this tile. `out` is the
    arena; k is a multiple of 16.

    A barrier stands before the call, and one before anybody reads the results. The order of the additions depends
    on everything: a row's result may differ with the rows beside it, by float32's rounding. CUDA, from compute
    capability 9.0 on: tensor cores (see cuda_tiles.py).
    """
    mine = k + me().thread
    if out[mine] != -np.inf:
        raise AssertionError("block_dots without dots_ask")
    out[mine] = np.inf
    at, steps, strips, j, across, rows, _, first, n = tile
    eights, begin = DOTS_COLUMNS * across, j + first * 2 * DOTS_COLUMNS * across
    for t in range(me().thread, rows, me().block.threads):
        row = _packed_row(x, begin + t * DOTS_COLUMNS, 2 * n, eights, DOTS_COLUMNS)
        for strip in range(strips):
            stored = _stored_rows(w, at + (strip * steps + first) * FRAGMENT * FRAGMENT, n)
            to = k + DOTS_RESULTS + t * DOTS_PITCH + FRAGMENT * strip
            out[to : to + FRAGMENT] = stored @ row


def sum_of_fours(a, i, step, n):
    """Four sums over m < n: of ``a[i + m * step]``, and of the three numbers behind each, in order. One lane.

    i and `step` are multiples of 4, n is at least 1.
    """
    sums = [np.float32(0)] * 4
    for m in range(n):
        sums = [sums[c] + a[i + m * step + c] for c in range(4)]
    return tuple(sums)


TILE_GAP = 4
"""Floats between the rows of a tile in the arena, which keep columns apart in its banks."""


HEADS = 8
"""Most heads of queries that :func:`heads_weigh` takes."""
PART = 32
"""Most positions."""
HEADS_GAP = 4
"""Floats between the sums of two heads, which keep lanes apart in the arena's banks."""


def heads_weigh(arena, k, keys, j, heads, d, n):
    """The weights that up to HEADS queries give to n positions, PART at most. By one warp, and for it.

    The queries, of d float32 each, lie one behind the other at ``arena[j]``, the positions' keys, of d bfloat16
    each (as uint16 bits), in `keys`, a view of the arena. Of query h, ``arena[k + 2 * h]`` becomes the highest
    score, a dot product over sqrt(d), and ``arena[k + 2 * h + 1]`` the total of its weights, each
    exp(score - highest). The weights themselves are for :func:`heads_mix`, which takes what this returns: there
    they are, or they lie where the sums go. d is a multiple of 32, j and k are multiples of 4. Which lane reads or
    writes what is not said. CUDA: tensor cores (see cuda_heads.py).
    """
    rows = _floats(keys[: n * d]).reshape(n, d)
    for h in range(me().lane, heads, me().warp.width):
        scores = rows @ arena[j + h * d : j + h * d + d] / np.sqrt(np.float32(d))
        weights, sums = np.exp(scores - scores.max()), k + 2 * HEADS + h * (d + HEADS_GAP)
        arena[k + 2 * h], arena[k + 2 * h + 1], arena[sums : sums + n] = scores.max(), weights.sum(), weights
    return 0


def heads_mix(arena, k, values, weights, heads, d, n):
    """Each query's sum of the values of those positions, weighted: d float32, from ``arena[k + 2 * HEADS]`` on.

    Those of two queries are HEADS_GAP floats apart. `weights` is what :func:`heads_weigh` has returned for this k;
    `values`, as its keys, have room for PART positions, and what lies behind the n-th may be lost. By one warp.
    """
    rows = _floats(values[: n * d]).reshape(n, d)
    for h in range(me().lane, heads, me().warp.width):
        sums = k + 2 * HEADS + h * (d + HEADS_GAP)
        arena[sums : sums + d] = np.array(arena[sums : sums + n]) @ rows


def mix_of_fours(weights, w, a, i, step, n):
    """A tuple: the sums over m < n of ``weights[w + m]`` times each of the four float32 at ``a[i + m * step]``.

    In order, by one lane; i and `step` are multiples of 4.
    """
    fours = np.stack([a[i + m * step : i + m * step + 4] for m in range(n)])
    return tuple((weights[w : w + n, None] * fours).sum(0, dtype=np.float32))


def awaited_mix(weights, w, a, i, step, n):
    """:func:`mix_of_fours` of numbers that are published, each as soon as it is (see :func:`awaited_four`)."""
    fours = np.array([awaited_four(a, i + m * step) for m in range(n)])
    return tuple((weights[w : w + n, None] * fours).sum(0, dtype=np.float32))


TILE_POSITIONS = 128
"""Positions in a tile of keys, or of values, of up to 64 columns; half of them up to 128, a quarter up to 256."""


def tile_put(arena, k, t, n, i, x, j, scale):
    """Numbers i to i + 15 of row t of the tile at k, of n columns, are ``x[j:j+16]`` (float32) * scale. One lane.

    Rows are ``packed_floats(n) + TILE_GAP`` floats apart. Only :func:`tile_attend` reads such a tile: tensor cores
    take it as float16, which lacks 2**-11 of a number at most, or 2**-25; what is beyond 65,504 becomes 65,504.
    k is a multiple of 4, n of 32, i and j of 16.
    """
    at = k + t * (n + TILE_GAP) + i
    arena[at : at + 16] = x[j : j + 16] * scale


TILE_LANES = 512
"""Lanes of a block that asks for tiles, on CUDA."""


def tile_ask(arena, waiting, n, i, x, j):
    """Begin to bring numbers i to i + 7, and as many from i + n / 2 on, of the n at ``x[j]``. One lane.

    They are float32, or bfloat16 as uint16 bits, and the kernel may have written them. They come to a place of the
    lane's, from ``arena[waiting]`` on: of 16 floats for each of TILE_LANES lanes, or of 8 if they are bfloat16.
    A lane has one there at a time, until :func:`tile_take`. i and j are multiples of 8, n of 32, `waiting` of 4.
    CUDA: asynchronously. Elsewhere it does nothing, and that word does all.
    """


def tile_take(arena, k, t, n, i, x, j, waiting):
    """What the lane has asked for by :func:`tile_ask` becomes part of row t of a tile: see :func:`tile_put`."""
    for first in (i, i + n // 2):
        at = k + t * (n + TILE_GAP) + first
        arena[at : at + 8] = _floats(x[j + first : j + first + 8])


LOWEST = f32(-1e30)
"""The maximum over no scores: a number, so that one less itself is 0."""


def tile_begin(arena, k, queries, d):
    """Of so many queries nothing is known: no sums, no totals, and LOWEST for maxima. All lanes of the block.

    What :func:`tile_attend` is to be given. Tensor cores keep all that in registers; elsewhere the sums are rows
    of d float32 at k, ``d + TILE_GAP`` floats apart, with the maximum and the total behind them.
    """
    for t in range(me().thread, queries, me().block.threads):
        row = k + t * (d + TILE_GAP)
        arena[row : row + d], arena[row + d], arena[row + d + 1] = 0, LOWEST, 0
    return 0


def tile_attend(arena, held, k, q, queries, keys, across, sees, group, d):
    """Queries of the tile at `q` attend to `across` positions, whose keys are the tile at `keys`, of d columns.

    That has room for TILE_POSITIONS if d is at most 64, for half of them if it is at most 128, for a quarter if it
    is at most 256; behind it lies the tile of their values. By all lanes of the block, of 16 warps on CUDA.

    Query t sees the first ``sees + t // group`` of the positions: its maximum grows to that of its dot products
    with the keys; its sums and its total shrink accordingly, and get the values, each weighted by
    exp(dot product - maximum), and the weights. On CUDA the maximum may be somewhat smaller, and changes less
    often. `held` is what :func:`tile_begin` has returned, or the call before, and so is what this returns. There
    are up to 128 queries, or 64 if d is above 128. Of the tiles of positions all rows up to the next multiple of
    32 are numbers.

    A barrier stands before the call, and one before anybody writes the tiles. What a query gets depends on the
    calls alone, not on other queries; where it sees nothing of a call, the call may be left out. CUDA: tensor
    cores, for which also the weights are float16 (FlashAttention-2: Dao, 2023).
    """
    most = TILE_POSITIONS if d <= 64 else TILE_POSITIONS >> 1 if d <= 128 else TILE_POSITIONS >> 2
    values = keys + most * (d + TILE_GAP)
    for t in range(me().thread, queries, me().block.threads):
        row, seen = k + t * (d + TILE_GAP), min(across, sees + t // group)
        if seen > 0:
            of_keys, of_values = (_rows(arena, at, seen, d) for at in (keys, values))
            scores = of_keys @ arena[q + t * (d + TILE_GAP) : q + t * (d + TILE_GAP) + d]
            highest = max(arena[row + d], scores.max())
            shrink, weights = exp(arena[row + d] - highest), exp(scores - highest)
            arena[row : row + d] = arena[row : row + d] * shrink + weights @ of_values
            arena[row + d + 1] = arena[row + d + 1] * shrink + weights.sum()
            arena[row + d] = highest
    return held


def tile_end(arena, held, k, room, queries, d):
    """The sums of each query, over its total, are its row of d float32 at k, ``d + TILE_GAP`` floats apart.

    All lanes of the block, as :func:`tile_attend`; k is what :func:`tile_begin` was given. From `room` on there is
    place for 16 * (d + 8) floats for each 16 queries. A barrier stands before the call, and one before anybody
    reads the rows; there may be one within.
    """
    for t in range(me().thread, queries, me().block.threads):
        row = k + t * (d + TILE_GAP)
        arena[row : row + d] = arena[row : row + d] / arena[row + d + 1]


def _rows(arena, at, n, d):
    """The first n rows of a tile."""
    return np.stack([arena[row : row + d] for row in range(at, at + n * (d + TILE_GAP), d + TILE_GAP)])


def _stored_dot(part, x):
    """The dot product of stored numbers (see :func:`widen`) and float32."""
    return np.dot(_floats(part), x)


def _floats(part):
    """Stored numbers, each as by :func:`widen`."""
    if part.dtype == np.uint16:
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.view(np.float16).astype(np.float32) if part.dtype == np.int16 else part


def block_copy(out, k, a, i, n):
    """``out[k:k+n] = a[i:i+n]``, float32, by all lanes of the block; no barrier. All multiples of 4."""
    thread, threads = me().thread, me().block.threads
    out[k + thread : k + n : threads] = a[i + thread : i + n : threads]


def block_scale(out, k, a, i, scale, gain, g, n):
    """``out[k:k+n] = a[i:i+n] * scale * gain[g:g+n]``, as :func:`block_copy`."""
    thread, threads = me().thread, me().block.threads
    scaled = a[i + thread : i + n : threads] * scale
    out[k + thread : k + n : threads] = scaled * gain[g + thread : g + n : threads]


def row_mix(weight, i, n, rows, j, width, out, k):
    """``out[k:k+width] += sum over p < n of weight[i+p] * rows[j+p*width : j+(p+1)*width]``, by one warp.

    float32, but for `rows`, which may hold bfloat16 as uint16 bits; those may be written while the kernel runs.
    `width` is a multiple of 8, j of 8, k of 4. The order of the additions depends on n and `width` alone.
    """
    lane, lanes = me().lane, me().warp.width
    mixed = weight[i : i + n] @ _floats(rows[j : j + n * width]).reshape(n, width)[:, lane::lanes]
    out[k + lane : k + width : lanes] += mixed
