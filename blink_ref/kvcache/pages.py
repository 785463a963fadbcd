"""The paged KV cache: a pool of pages, a stack of free ones, and a page table a slot (Kwon et al., 2023).

A page holds P positions of every layer and kv head. Only the scheduler's block takes and returns
pages, between steps, so the stack needs no lock; within that block one call is made at a time.
"""

from typing import Any, NamedTuple

import numpy as np

from ..simt import device
from ..simt.vocabulary import block_threads, divide, i32, i64, thread_id

FREE = 0
"""Index in :attr:`Cache.count`: how many pages are on the free stack."""


class Cache(NamedTuple):
    """Keys and values in pages, and who owns which page."""

    keys: Any
    """float32, flat [layers, pages, K, P, d]"""
    values: Any
    """the same"""
    table: Any
    """int32 [slots, pages a slot can have]: the slot's pages, in order of position"""
    free: Any
    """int32 [pages]: the free pages, a stack"""
    count: Any
    """int32 [1]: the stack's height"""
    pages: int
    page_size: int


def allocate(
    layers: int, kv_heads: int, head_dim: int, slots: int, context: int, pages: int, page_size: int
) -> Cache:
    """A cache with all pages free. Untouched pages cost no memory: the arrays are zero pages until written."""
    size = layers * pages * kv_heads * page_size * head_dim
    table = np.zeros((slots, -(-context // page_size)), np.int32)
    # the first page taken is page 0: pictures read better
    free = np.arange(pages, dtype=np.int32)[::-1].copy()
    count = np.array([pages], np.int32)
    return Cache(np.zeros(size, np.float32), np.zeros(size, np.float32), table, free, count, pages, page_size)


def pages_spec(positions: int, page_size: int) -> int:
    """Pages that hold `positions` positions."""
    return -(-positions // page_size)


@device
def pages_for(positions, page_size):
    """Pages that hold `positions` positions. One lane."""
    return divide(i64(positions) + i64(page_size) - 1, i64(page_size))[0]


@device
def take_pages(cache, slot, n):
    """Move n pages from the stack to the slot's table. All lanes of one block; a barrier before and after.

    The caller has seen that n are free; it lowers the count itself, after the second barrier.
    """
    top = i64(cache.count[FREE])
    i = i64(thread_id())
    while i < n:
        cache.table[slot, i] = cache.free[top - 1 - i]
        i += block_threads()


@device
def return_pages(cache, slot, n):
    """Move the slot's n pages back to the stack. One lane, no other lane at the stack."""
    top = i64(cache.count[FREE])
    for i in range(n):
        cache.free[top + i] = cache.table[slot, n - 1 - i]
    cache.count[FREE] = i32(top + n)
