"""The paged KV cache: a pool of pages, and a page table a slot (Kwon et al., 2023).

A page holds P positions of every layer and kv head. It is in one of four places:

- *held*: in the page tables of as many slots as its reference count says;
- *cached*: held by nobody, but found by its tokens (see :mod:`.prefix`); the one unused for longest is
  taken when there is no free one;
- *free*: on the stack;
- *in limbo*: given back while a step has yet to write to it; it is free when that step has ended.

Only the scheduler's block moves pages, one lane at a time, so nothing here needs a lock.
"""

from typing import Any, NamedTuple

import numpy as np

from ..simt import device
from ..simt.vocabulary import divide, i32, i64

FREE, LIMBO, UNUSED = range(3)
"""Places in :attr:`Cache.count`: pages on the free stack, in limbo, and cached but held by nobody."""

BUCKETS = 4
"""For each page, at least: most have no page or one, so that a look for what is not there ends at once."""

NOWHERE = -1
"""In the list of cached pages: the page is not in it."""


class Cache(NamedTuple):
    """Keys and values in pages, who holds which, and what is in them."""

    keys: Any
    """float32, or uint16 that are the bits of bfloat16; flat [layers, pages, K, P, d]"""
    values: Any
    """the same"""
    table: Any
    """int32 [slots, pages a slot can have]: the slot's pages, in order of position"""
    chain: Any
    """uint64 [slots, pages a slot can have]: hash of all tokens up to the end of the page"""
    references: Any
    """int32 [pages]: slots that hold the page"""
    free: Any
    """int32 [pages]: the free pages, a stack"""
    limbo: Any
    """int32 [pages]: pages that a step will still write to"""
    count: Any
    """int32 [3]: see the places above"""
    newer: Any
    """int32 [pages + 1]: in the ring of cached pages that nobody holds, the one put in after; place `pages`
    begins and ends it, so that ``newer[pages]`` is the oldest"""
    older: Any
    """int32 [pages + 1]: the one put in before, or NOWHERE"""
    bucket: Any
    """int32 [a power of two]: 1 + the first page whose hash falls into the bucket, 0 = none"""
    following: Any
    """int32 [pages]: 1 + the next page in the same bucket, 0 = none"""
    hash: Any
    """uint64 [pages]: of a page that can be found: its :attr:`chain`"""
    parent: Any
    """int32 [pages]: 1 + the page before it in the text, 0 = it begins one"""
    filed: Any
    """int32 [pages]: 1 = the page is in its bucket"""
    token: Any
    """int32 [pages, P]: the tokens of a page that can be found"""
    pages: int
    page_size: int
    sharing: int
    """1 = pages are found by their tokens, 0 = none is ever shared"""


def allocate(
    layers: int,
    kv_heads: int,
    head_dim: int,
    slots: int,
    context: int,
    pages: int,
    page_size: int,
    sharing: bool = True,
    dtype: Any = np.float32,
) -> Cache:
    """A cache with all pages free; `dtype` is that of keys and values, float32 or uint16 (bfloat16 bits).

    Untouched pages cost no memory: the arrays are zero pages until written.
    """

    def i32s(*shape):
        return np.zeros(shape, np.int32)

    size = layers * pages * kv_heads * page_size * head_dim
    most = pages_spec(context, page_size)
    newer, older = i32s(pages + 1), np.full(pages + 1, NOWHERE, np.int32)
    newer[pages] = older[pages] = pages
    return Cache(
        keys=np.zeros(size, dtype),
        values=np.zeros(size, dtype),
        table=i32s(slots, most),
        chain=np.zeros((slots, most), np.uint64),
        references=i32s(pages),
        # the first page taken is page 0: pictures read better
        free=np.arange(pages, dtype=np.int32)[::-1].copy(),
        limbo=i32s(pages),
        count=np.array([pages, 0, 0], np.int32),
        newer=newer,
        older=older,
        bucket=i32s(BUCKETS << max(4, (pages - 1).bit_length())),
        following=i32s(pages),
        hash=np.zeros(pages, np.uint64),
        parent=i32s(pages),
        filed=i32s(pages),
        token=i32s(pages, page_size),
        pages=pages,
        page_size=page_size,
        sharing=int(sharing),
    )


def pages_spec(positions: int, page_size: int) -> int:
    """Pages that hold `positions` positions."""
    return -(-positions // page_size)


@device
def pages_for(positions, page_size):
    """Pages that hold `positions` positions. One lane."""
    return divide(i64(positions) + i64(page_size) - 1, i64(page_size))[0]


@device
def spare_pages(cache):
    """Pages that can be taken now. One lane."""
    return i64(cache.count[FREE]) + i64(cache.count[UNUSED])


@device
def free_page(cache, place):
    """The page at a place of the free stack has the caller for its first holder. One lane.

    :func:`leave_stack` takes those that were used off the stack, at the end.
    """
    page = i64(cache.free[place])
    cache.references[page] = i32(1)
    return page


@device
def leave_stack(cache, n):
    """Take n pages off the free stack. One lane."""
    cache.count[FREE] -= i32(n)


@device
def hold(cache, page):
    """One holder more, of a page that is held or cached. One lane."""
    if cache.older[page] != NOWHERE:
        leave_unused(cache, page)
    cache.references[page] += i32(1)


@device
def let_go(cache, page, in_use):
    """One holder less. `in_use` > 0: the holder has rows in a step that is paused, or may be. One lane.

    Those rows are nobody's any more, but they will be computed. What they read does not matter; what they
    write must not be anybody else's. They write to pages that are not filed, since those are not full.
    """
    cache.references[page] -= i32(1)
    if cache.references[page] == 0:
        if in_use > 0 and cache.filed[page] == 0:
            cache.limbo[cache.count[LIMBO]] = i32(page)
            cache.count[LIMBO] += i32(1)
        else:
            put_back(cache, page)


@device
def empty_limbo(cache):
    """The step has ended: the pages that it wrote to are free. One lane."""
    for n in range(cache.count[LIMBO]):
        put_back(cache, i64(cache.limbo[n]))
    cache.count[LIMBO] = i32(0)


@device
def put_back(cache, page):
    """A page that nobody holds or reads becomes the newest of the cached, or free. One lane."""
    if cache.filed[page] == 1:
        newest = i64(cache.older[cache.pages])
        cache.newer[newest] = i32(page)
        cache.older[page] = i32(newest)
        cache.newer[page] = i32(cache.pages)
        cache.older[cache.pages] = i32(page)
        cache.count[UNUSED] += i32(1)
    else:
        cache.free[cache.count[FREE]] = i32(page)
        cache.count[FREE] += i32(1)


@device
def leave_unused(cache, page):
    """Take a page out of the ring of cached pages that nobody holds. One lane."""
    older, newer = i64(cache.older[page]), i64(cache.newer[page])
    cache.newer[older] = i32(newer)
    cache.older[newer] = i32(older)
    cache.older[page] = i32(NOWHERE)
    cache.count[UNUSED] -= i32(1)
