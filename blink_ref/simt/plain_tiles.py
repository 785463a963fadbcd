"""Attention in tiles without tensor cores, a query a lane: these words are the same on the CPU and on CUDA."""

from collections.abc import Callable
from typing import Any

from . import vocabulary as words
from .vocabulary import (
    LOWEST,
    TILE_GAP,
    TILE_POSITIONS,
    block_threads,
    divide,
    dot,
    exp,
    f32,
    i64,
    thread_id,
    widen,
)


def put(arena, k, t, n, i, x, j, scale):
    at = k + t * (n + TILE_GAP) + i
    for m in range(16):
        arena[at + m] = x[j + m] * scale


def ask(arena, waiting, n, i, x, j):
    pass


def take(arena, k, t, n, i, x, j, waiting):
    at, half = k + t * (n + TILE_GAP) + i, i64(n) >> 1
    for m in range(8):
        arena[at + m] = widen(x[j + i + m])
        arena[at + half + m] = widen(x[j + i + half + m])


def begin(arena, k, queries, d):
    t = i64(thread_id())
    while t < queries:
        row = k + t * (d + TILE_GAP)
        for i in range(d):
            arena[row + i] = f32(0.0)
        arena[row + d] = LOWEST
        arena[row + d + 1] = f32(0.0)
        t += block_threads()
    return i64(0)


def attend(arena, held, k, q, queries, keys, across, sees, group, d):
    """A position at a time, with the maximum so far: sums shrink as often as it grows."""
    pitch, t = i64(d) + TILE_GAP, i64(thread_id())
    most = TILE_POSITIONS if d <= 64 else TILE_POSITIONS >> 1 if d <= 128 else TILE_POSITIONS >> 2
    values = keys + most * pitch
    while t < queries:
        row, seen = k + t * pitch, min(i64(across), sees + divide(t, i64(group))[0])
        highest, total = arena[row + d], arena[row + d + 1]
        for p in range(seen):
            score = dot(arena, q + t * pitch, arena, keys + p * pitch, d)
            if score > highest:
                shrink = exp(highest - score)
                total *= shrink
                for i in range(d):
                    arena[row + i] *= shrink
                highest = score
            weight, value = exp(score - highest), values + p * pitch
            total += weight
            for i in range(d):
                arena[row + i] += weight * arena[value + i]
        arena[row + d] = highest
        arena[row + d + 1] = total
        t += block_threads()
    return held


def end(arena, held, k, room, queries, d):
    t = i64(thread_id())
    while t < queries:
        row = k + t * (d + TILE_GAP)
        for i in range(d):
            arena[row + i] /= arena[row + d + 1]
        t += block_threads()


WORDS: dict[Callable[..., Any], Callable[..., Any]] = {
    words.tile_put: put,
    words.tile_ask: ask,
    words.tile_take: take,
    words.tile_begin: begin,
    words.tile_attend: attend,
    words.tile_end: end,
}
"""What each of these words does."""
