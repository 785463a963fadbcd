"""Attention over the paged KV cache, with grouped-query heads.

Two phases: :func:`project` makes a row's queries, keys and values, and writes keys and values into the
row's page (PagedAttention: Kwon et al., 2023); :func:`attend` reads the pages back for each (row,
head), a page a warp at a time with a running maximum (FlashAttention: Dao et al., 2022), and combines
the warps in order. Prefill rows and decode rows are the same to both: a row sees the positions up to
its own.
"""

import math

import numpy as np

from ..simt import device, first_of_share, grid_warp, grid_warps
from ..simt.vocabulary import (
    barrier,
    block_copy,
    block_threads,
    divide,
    dot,
    exp,
    f32,
    fragment_put,
    i32,
    i64,
    lane_id,
    lane_max,
    lane_sum,
    narrow_put,
    opaque,
    row_dots_of_two,
    row_mix,
    thread_id,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
)
from . import handed
from .packing import row_at
from .rmsnorm import rmsnorm
from .rope import rotate
from .staging import SCRATCH, result_at, rows_at_once, staged_at
from .tensors import K, Q, V

NOTHING = f32(-np.inf)
"""The maximum over no scores."""


def spec(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One row's heads q [H, d] over its positions' keys and values [n, K, d] -> [H, d], float32."""
    groups = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat(groups, 1), values.repeat(groups, 1)
    scores = np.einsum("hd,nhd->hn", q, keys) / np.sqrt(np.float32(q.shape[1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), values)


@device
def page_start(cache, model, layer, page, kv_head):
    """Where (layer, page, kv head)'s [P, d] block of keys, or of values, begins."""
    block_of_page = (i64(layer) * i64(cache.pages) + i64(page)) * i64(model.kv_heads) + i64(kv_head)
    return block_of_page * i64(cache.page_size) * i64(model.head_dim)


@device
def project(block, plan, rows, layer, model, cache, x, q):
    """Queries of norm(x), rotated, into `q`; keys, rotated, and values into the rows' pages.

    A warp makes elements i and i + d/2 of a head, which rotate together. All blocks call it. It
    begins and ends without a grid barrier.
    """
    width, d = opaque(i64(model.hidden)), opaque(i64(model.head_dim))
    heads, kv_heads = opaque(i64(model.heads)), opaque(i64(model.kv_heads))
    weights, half = model.weights, d >> 1
    pairs = (heads + 2 * kv_heads) * half
    tile = rows_at_once(block, width)
    warp, all_warps = grid_warp(block), grid_warps(block)
    first, end = first_of_share(pairs, warp, all_warps), first_of_share(pairs, warp + 1, all_warps)
    t0 = i64(0)
    while t0 < rows:
        n = min(tile, rows - t0)
        for t in range(n):
            rmsnorm(block, x, (t0 + t) * width, model.norm, 2 * layer * width, width, model.eps, t)
        barrier()
        for pair in range(first, end):
            head, i = divide(pair, half)
            at = head_start(model, layer, head) + i * width
            b_at, shared = at + half * width, block.shared
            row_dots_of_two(weights, at, b_at, shared, staged_at(), n, width, shared, result_at(0), result_at(1))
            if lane_id() == 0:
                for t in range(n):
                    a, b = block.shared[result_at(0) + t], block.shared[result_at(1) + t]
                    put_pair(plan, t0 + t, layer, head, i, a, b, model, cache, q)
        t0 += tile


@device
def head_start(model, layer, head):
    """Where a head's rows begin in the weights; query heads count first, then key heads, then value heads."""
    rows, kv_heads = i64(model.head_dim) * i64(model.hidden), i64(model.kv_heads)
    within = head - i64(model.heads)
    if within < 0:
        return model.matrix[layer, Q] + head * rows
    if within < kv_heads:
        return model.matrix[layer, K] + within * rows
    return model.matrix[layer, V] + (within - kv_heads) * rows


@device
def put_pair(plan, row, layer, head, i, a, b, model, cache, q):
    """One lane: rotate elements i and i + d/2 of a head where they are of a query or a key, and store them."""
    d, heads, kv_heads = i64(model.head_dim), i64(model.heads), i64(model.kv_heads)
    half, position = d >> 1, i64(plan.position[row])
    if head < heads + kv_heads:
        a, b = rotate(a, b, model.rope[position, i], model.rope[position, half + i])
    page, inside = i64(0), i64(0)
    if head >= heads:
        n_page, inside = divide(position, i64(cache.page_size))
        page = i64(cache.table[plan.slot[row], n_page])
    store_pair(page, inside, row, layer, head, i, a, b, model, cache, q)


@device
def store_pair(page, inside, row, layer, head, i, a, b, model, cache, q):
    """One lane: a rotated pair of a row of queries, or of a key or value, to its place in a page."""
    if head < i64(model.heads):
        at = (row * i64(model.heads) + head) * i64(model.head_dim) + i
        q[at] = a
        q[at + (i64(model.head_dim) >> 1)] = b
    else:
        keep_pair(page, inside, layer, head, i, a, b, model, cache)


@device
def keep_pair(page, inside, layer, head, i, a, b, model, cache):
    """One lane: a pair of a rotated key or of a value to its place in a page; rounded, if that holds bfloat16."""
    d, heads, kv_heads = i64(model.head_dim), i64(model.heads), i64(model.kv_heads)
    half = d >> 1
    if head < heads + kv_heads:
        at = page_start(cache, model, layer, page, head - heads) + inside * d + i
        narrow_put(cache.keys, at, a)
        narrow_put(cache.keys, at + half, b)
    else:
        at = page_start(cache, model, layer, page, head - heads - kv_heads) + inside * d + i
        narrow_put(cache.values, at, a)
        narrow_put(cache.values, at + half, b)


@device
def attend(block, plan, rows, layer, model, cache, act, streamed):
    """``act.attended[t, h]`` = softmax(q k / sqrt(d)) v over positions up to the row's own, for each (row, head).

    Blocks share out the (row, head) items. All blocks call it, after a grid barrier behind
    :func:`project`; it ends without one. The arena holds the scratch, the query, and for each warp
    a page's scores and the head's sum so far; then the warps' maxima and totals. `streamed`: the layer is computed
    from the stream, and queries and results lie in ``act.handed`` (see handed.py).
    """
    d, heads = opaque(i64(model.head_dim)), opaque(i64(model.heads))
    group, _ = divide(heads, i64(model.kv_heads))
    shared, size = block.shared, i64(cache.page_size)
    query = i64(SCRATCH)
    sums = query + d
    scores = maxima_at(d) + 2 * warps() + ((-2 * i64(warps())) & 3)
    item = i64(block.id)
    while item < rows * heads:
        head, row = divide(item, rows)  # rows of one head follow each other: what they read is still in the cache
        kv_head, _ = divide(head, group)
        slot, length = plan.slot[row], i64(plan.position[row]) + 1
        end = divide(length + size - 1, size)[0]
        n_page, page = i64(warp_id()), i32(0)
        if n_page < end:
            page = i32(cache.table[slot, n_page])  # on its way while the query is copied
        barrier()  # the item before is finished with the arena
        if streamed:
            at = handed.of_layer(act, layer) + handed.projected_at(rows, model)
            block_copy(shared, query, act.handed, at + row * handed.projected_width(model) + head * d, d)
        else:
            block_copy(shared, query, act.q, (row * heads + head) * d, d)
        i = i64(thread_id())
        while i < d * warps():
            shared[sums + i] = f32(0.0)
            i += block_threads()
        barrier()
        maximum, total = NOTHING, f32(0.0)
        while n_page < end:
            at = page_start(cache, model, layer, page, kv_head)
            n = min(size, length - n_page * size)
            maximum, total = attend_page(
                shared,
                query,
                scores + size * warp_id(),
                sums + d * warp_id(),
                d,
                n,
                cache.keys,
                cache.values,
                at,
                maximum,
                total,
            )
            n_page += warps()
            if n_page < end:
                page = i32(cache.table[slot, n_page])
        maxima = maxima_at(d)  # made anew, since the loop has no register for it
        totals = maxima + warps()
        if lane_id() == 0:
            shared[maxima + warp_id()] = maximum
            shared[totals + warp_id()] = total
        barrier()
        if warp_id() == 0:
            parts = min(end, i64(warps()))
            combine(shared, sums, maxima, totals, parts, d, act, row, rows, head, heads, layer, streamed)
        item += block.blocks


@device
def maxima_at(d):
    """Where the warps' maxima begin in the arena of :func:`attend`, and behind them their totals."""
    return i64(SCRATCH) + d + d * warps()


@device
def attend_page(shared, query, scores, sums, d, n, keys, values, at, maximum, total):
    """One warp takes n positions of a page into its running softmax: returns the new maximum and total.

    ``shared[sums:sums+d]`` is the sum of values weighted by exp(score - maximum), rescaled as the
    maximum grows.
    """
    scale = f32(1.0) / f32(math.sqrt(f32(d)))
    highest = NOTHING
    j = i64(lane_id())
    while j < n:
        score = dot(shared, query, keys, at + j * d, d) * scale
        shared[scores + j] = score
        highest = max(highest, score)
        j += warp_width()
    highest = max(maximum, lane_max(highest))
    shrink = exp(maximum - highest)
    part = f32(0.0)
    j = i64(lane_id())
    while j < n:
        weight = exp(shared[scores + j] - highest)
        shared[scores + j] = weight
        part += weight
        j += warp_width()
    i = i64(lane_id())
    while i < d:
        shared[sums + i] *= shrink
        i += warp_width()
    warp_barrier()
    row_mix(shared, scores, n, values, at, d, shared, sums)
    warp_barrier()
    return highest, total * shrink + lane_sum(part)


@device
def combine(shared, sums, maxima, totals, parts, d, act, row, rows, head, heads, layer, streamed):
    """One warp: bring the sums of `parts` warps to one maximum, add them in order, divide by the total."""
    highest, total = NOTHING, f32(0.0)
    w = i64(lane_id())
    while w < parts:
        highest = max(highest, shared[maxima + w])
        w += warp_width()
    highest, w = lane_max(highest), i64(lane_id())
    while w < parts:
        weight = exp(shared[maxima + w] - highest)
        total += shared[totals + w] * weight
        shared[maxima + w] = weight
        w += warp_width()
    total = f32(1.0) / lane_sum(total)
    warp_barrier()
    i = 4 * i64(lane_id())
    while i < d:
        a, b, c, e, w = f32(0.0), f32(0.0), f32(0.0), f32(0.0), i64(0)
        while w < parts:
            weight, at = shared[maxima + w], sums + w * d + i
            a += shared[at] * weight
            b += shared[at + 1] * weight
            c += shared[at + 2] * weight
            e += shared[at + 3] * weight
            w += 1
        column = head * d + i
        if streamed:
            at = handed.of_layer(act, layer) + row_at(rows, row, column)
            fragment_put(act.handed, at, a * total, b * total, c * total, e * total)
        else:
            at = row * heads * d + column
            act.attended[at] = a * total
            act.attended[at + 1] = b * total
            act.attended[at + 2] = c * total
            act.attended[at + 3] = e * total
        i += 4 * warp_width()


def arena(head_dim: int, page_size: int, warps_in_block: int) -> int:
    """Floats of arena that :func:`attend` needs."""
    return SCRATCH + head_dim + warps_in_block * (head_dim + page_size + 2) + 4


def cost(
    rows: int, positions: int, heads: int, kv_heads: int, head_dim: int, requests: int = 0, kv_bytes: int = 4
) -> tuple[int, int]:
    """(bytes, FLOPs) of :func:`attend` for rows that each see `positions`: keys and values once.

    Rows of the same of so many requests (0: each row is one) share what they read. `kv_bytes`: of a number of the
    cache.
    """
    read = 2 * kv_bytes * (requests or rows) * positions * kv_heads * head_dim
    return read, 4 * rows * positions * heads * head_dim
