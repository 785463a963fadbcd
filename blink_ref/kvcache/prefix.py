"""Prefix sharing: whole pages are found by the tokens in them and before them.

Keys and values of a position depend on the tokens up to it and on nothing else, so two requests whose
texts begin alike can hold the same pages. A full page is filed under the hash of all tokens up to its end
(vLLM's automatic prefix caching; SGLang's RadixAttention keeps a tree). The hash is a sum over the tokens and
their places, so that pages are hashed side by side, and what is left to do in order are additions.
The hash only finds: a page is shared when its tokens are equal and its parent is the page found before it,
so no collision shows one request another's text.

Of pages with equal text one is filed, and whoever makes a second gives it up for the first. So a page's
parent is filed as long as the page is: a slot that holds a page holds its parents too, and lets go of the
last page first, so the parent is always the newer of the two among the unused.
"""

from ..simt import device
from ..simt.vocabulary import (
    barrier,
    block_threads,
    divide,
    i32,
    i64,
    lane_broadcast,
    lane_id,
    lane_sum,
    opaque,
    thread_id,
    u64,
    warp_id,
    warp_width,
    warps,
)
from .pages import leave_unused

MIX_0 = u64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = u64(0xBF58476D1CE4E5B9), u64(0x94D049BB133111EB)
"""The step and the finalizer of SplitMix64 (Steele et al., 2014)."""
NONE = -1


def shared_spec(texts: list[list[int]], text: list[int], page_size: int) -> int:
    """Positions of `text` that a cache holds which has seen `texts`: whole pages, and never the last position,
    whose logits are wanted."""

    def alike(other: list[int]) -> int:
        differ = (n for n, (a, b) in enumerate(zip(other, text, strict=False)) if a != b)
        return next(differ, min(len(other), len(text)))

    longest = max((alike(other) // page_size for other in texts), default=0)
    return min(longest, (len(text) - 1) // page_size) * page_size


def chain_spec(tokens: list[int], page_size: int) -> list[int]:
    """The hash of each whole page of `tokens`: of all tokens up to its end, a sum over them and their places."""
    mask = 2**64 - 1

    def mixed(h: int) -> int:
        h = (h ^ h >> 30) * int(MIX_1) & mask
        h = (h ^ h >> 27) * int(MIX_2) & mask
        return h ^ h >> 31

    terms = [mixed(token + (place + 1) * int(MIX_0) & mask) for place, token in enumerate(tokens)]
    return [sum(terms[: n + page_size]) & mask for n in range(0, len(tokens) - page_size + 1, page_size)]


@device
def page_hash(token, slot, first, n, lane, lanes):
    """What ``token[slot, first:first+n]`` adds to the hash of the text. One lane's share, of `lanes`."""
    h = u64(0)
    i = i64(lane)
    while i < n:
        h += mixed(u64(token[slot, first + i]) + u64(first + i + 1) * MIX_0)
        i += lanes
    return h


@device
def mixed(h):
    """64 bits that each depend on all bits of h. One lane."""
    h = (h ^ (h >> u64(30))) * MIX_1
    h = (h ^ (h >> u64(27))) * MIX_2
    return h ^ (h >> u64(31))


@device
def look_up(slots, cache, slot, known):
    """Write into the slot's page table, for each page but the last position's, a cached page or NONE.

    All lanes of one block, after a barrier; ends with one. `known` are the slot's tokens. Only tokens are compared
    here, by all lanes at once; :func:`found_pages` sees which follow each other.
    """
    size, hashed = i64(cache.page_size), i64(slots.hashed[slot])
    whole, most = divide(known, size)[0], divide(known - 1, size)[0]
    i = hashed + warp_id()
    while i < whole:
        h = lane_sum(i64(page_hash(slots.token, slot, i * size, size, lane_id(), warp_width())))
        if lane_id() == 0:
            cache.chain[slot, i] = u64(h)
        i += warps()
    barrier()
    if warp_id() == 0:
        link_chain(cache, slot, hashed, whole)
        if lane_id() == 0:
            slots.hashed[slot] = i32(max(hashed, whole))
    barrier()
    i = i64(thread_id())
    while i < most:
        cache.table[slot, i] = i32(find(slots, cache, slot, i, i64(NONE)))
        i += block_threads()
    barrier()


@device
def link_chain(cache, slot, first, whole):
    """Add to what each page from `first` on adds to the hash what those before it add. All lanes of one warp."""
    before = u64(0)
    if first > 0:
        before = cache.chain[slot, first - 1]
    while first < whole:
        own = u64(0)
        if first + lane_id() < whole:
            own = cache.chain[slot, first + lane_id()]
        upto = before
        for lane in range(min(i64(warp_width()), whole - first)):
            part = u64(lane_broadcast(i64(own), lane))
            before += part
            if lane <= lane_id():
                upto += part
        if first + lane_id() < whole:
            cache.chain[slot, first + lane_id()] = upto
        first += warp_width()


@device
def find(slots, cache, slot, i, parent):
    """The filed page with the text of the slot's page number i, or NONE. One lane.

    `parent` is 1 + the page before, 0 for the first; NONE = whatever it is.
    """
    wanted = cache.chain[slot, i]
    page = i64(cache.bucket[bucket_of(cache, wanted)]) - 1
    while page != NONE:
        following = i64(cache.following[page]) - 1
        right = cache.hash[page] == wanted and (parent == NONE or cache.parent[page] == parent)
        if right and same_tokens(slots, cache, slot, i, page):
            break
        page = following
    return page


@device
def same_tokens(slots, cache, slot, i, page):
    """Whether a page holds the tokens of the slot's page number i. One lane."""
    size = i64(cache.page_size)
    n = i64(0)
    while n < size and cache.token[page, n] == slots.token[slot, i * size + n]:
        n += 1
    return n == size


@device
def found_pages(cache, slot, known):
    """How many of the pages that :func:`look_up` wrote follow each other from the first on. One lane."""
    most = divide(known - 1, i64(cache.page_size))[0]
    n, before = i64(0), i64(0)
    while n < most and cache.sharing == 1:
        page = i64(cache.table[slot, n])
        if page == NONE or cache.parent[page] != before:
            break
        before = page + 1
        n += 1
    return n


@device
def file_page(slots, cache, slot, i, parent):
    """The slot's page number i is full: file it, unless a page with the same text is. One lane.

    `parent` is 1 + the filed page before it, 0 for the first. Returns the page that is filed.
    """
    page, size = i64(cache.table[slot, i]), opaque(i64(cache.page_size))
    if i >= slots.hashed[slot]:
        h = page_hash(slots.token, slot, i * size, size, 0, 1)
        if i > 0:
            h += cache.chain[slot, i - 1]
        cache.chain[slot, i] = h
        slots.hashed[slot] = i32(i + 1)
    other = find(slots, cache, slot, i, parent)
    if other != NONE:
        return other
    for n in range(size):
        cache.token[page, n] = slots.token[slot, i * size + n]
    cache.hash[page] = cache.chain[slot, i]
    cache.parent[page] = i32(parent)
    at = bucket_of(cache, cache.hash[page])
    cache.following[page] = cache.bucket[at]
    cache.bucket[at] = i32(page + 1)
    cache.filed[page] = i32(1)
    return page


@device
def evict_oldest(cache):
    """Take the cached page unused for longest out of its bucket; the caller is its first holder. One lane."""
    page = i64(cache.newer[cache.pages])
    leave_unused(cache, page)
    at = bucket_of(cache, cache.hash[page])
    if cache.bucket[at] == page + 1:
        cache.bucket[at] = cache.following[page]
    else:
        other = i64(cache.bucket[at]) - 1
        while cache.following[other] != page + 1:
            other = i64(cache.following[other]) - 1
        cache.following[other] = cache.following[page]
    cache.filed[page] = i32(0)
    cache.references[page] = i32(1)
    return page


@device
def bucket_of(cache, h):
    """The bucket of a hash. One lane."""
    return i64(h & u64(cache.bucket.shape[0] - 1))
