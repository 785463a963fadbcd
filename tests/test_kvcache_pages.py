"""The page pool: each page is in one place, whatever the order of taking, sharing and letting go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blink_ref.kvcache import pages
from blink_ref.kvcache.prefix import evict_oldest
from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import i64, thread_id

POP, EVICT, HOLD, LET_GO, LET_GO_IN_USE, EMPTY_LIMBO = range(6)


@device
def move(block, cache, what, page, out):
    """One of the pool's moves. One lane."""
    if what == POP:
        out[0] = pages.free_page(cache, i64(cache.count[pages.FREE]) - 1)
        pages.leave_stack(cache, 1)
    elif what == EVICT:
        out[0] = evict_oldest(cache)
    elif what == HOLD:
        pages.hold(cache, page)
    elif what == EMPTY_LIMBO:
        pages.empty_limbo(cache)
    else:
        pages.let_go(cache, page, i64(what == LET_GO_IN_USE))
    out[1] = pages.spare_pages(cache)


class Pool(RuleBasedStateMachine):
    """Pages are taken, filed, shared and let go of in any order; beside the device code runs a model of it.

    Of a page its first holder files it, when it is full, and only filed pages are held again.
    """

    target, pages = "cpu", 7

    def __init__(self):
        super().__init__()
        self.cache = pages.allocate(
            layers=1, kv_heads=1, head_dim=8, slots=1, context=16, pages=self.pages, page_size=16
        )
        self.free = list(range(self.pages))[::-1]
        self.unused: list[int] = []
        self.limbo: list[int] = []
        self.holders = [0] * self.pages
        self.filed: set[int] = set()

    def move(self, what, page=0):
        out = np.full(2, -1, np.int64)
        launch(move, 1, 1, self.cache, what, page, out, target=self.target)
        return int(out[0]), int(out[1])

    def held(self):
        return [page for page in range(self.pages) if self.holders[page]]

    @precondition(lambda self: self.free or self.unused)
    @rule()
    def take(self):
        if self.free:
            page, _ = self.move(POP)
            assert page == self.free.pop()
        else:
            page, _ = self.move(EVICT)
            assert page == self.unused.pop(0), "the page unused for longest goes"
            self.filed.discard(page)
        self.holders[page] = 1

    @precondition(lambda self: set(self.held()) - self.filed)
    @rule(data=st.data())
    def file(self, data):
        """As prefix.file_page does; the hash is any."""
        page = data.draw(st.sampled_from(sorted(set(self.held()) - self.filed)))
        cache = self.cache
        cache.hash[page] = data.draw(st.integers(0, 3))
        cache.following[page] = cache.bucket[cache.hash[page]]
        cache.bucket[cache.hash[page]] = page + 1
        cache.filed[page] = 1
        self.filed.add(page)

    @precondition(lambda self: self.filed)
    @rule(data=st.data())
    def hold(self, data):
        page = data.draw(st.sampled_from(sorted(self.filed)))
        self.move(HOLD, page)
        self.holders[page] += 1
        if page in self.unused:
            self.unused.remove(page)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), in_use=st.booleans())
    def let_go(self, data, in_use):
        page = data.draw(st.sampled_from(self.held()))
        self.move(LET_GO_IN_USE if in_use else LET_GO, page)
        self.holders[page] -= 1
        if self.holders[page]:
            return
        if page in self.filed:
            self.unused.append(page)
        else:
            (self.limbo if in_use else self.free).append(page)

    @rule()
    def end_a_step(self):
        self.move(EMPTY_LIMBO)
        self.free += self.limbo
        self.limbo = []

    @invariant()
    def every_page_is_where_the_model_has_it(self):
        cache, ring = self.cache, []
        page = int(cache.newer[cache.pages])
        while page != cache.pages:
            ring.append(page)
            page = int(cache.newer[page])
            assert len(ring) <= self.pages
        backwards, page = [], int(cache.older[cache.pages])
        while page != cache.pages:
            backwards.append(page)
            page = int(cache.older[page])
        assert ring == backwards[::-1] == self.unused
        assert cache.count.tolist() == [len(self.free), len(self.limbo), len(self.unused)]
        assert cache.free[: len(self.free)].tolist() == self.free
        assert cache.limbo[: len(self.limbo)].tolist() == self.limbo
        assert cache.references.tolist() == self.holders
        assert set(np.flatnonzero(cache.filed)) == self.filed
        in_buckets = []
        for head in cache.bucket.tolist():
            while head:
                in_buckets.append(head - 1)
                head = int(cache.following[head - 1])
        assert sorted(in_buckets) == sorted(self.filed)


class PoolInPython(Pool):
    target = "python"


class PoolOnCuda(Pool):
    target = "cuda"


TestPoolOnTheCpu = Pool.TestCase
TestPoolOnTheCpu.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolInPython = PoolInPython.TestCase
TestPoolInPython.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestPoolOnCuda = pytest.mark.cuda(PoolOnCuda.TestCase)
TestPoolOnCuda.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


def test_the_first_pages_taken_are_the_first_of_the_pool_and_the_last_let_go_is_taken_next(target):
    cache = pages.allocate(1, 1, 8, slots=2, context=100, pages=9, page_size=16)
    out = np.zeros(2, np.int64)
    seen = []
    for what, page in ((POP, 0), (POP, 0), (POP, 0), (LET_GO, 1), (POP, 0)):
        launch(move, 1, 1, cache, what, page, out, target=target)
        seen.append(out.tolist())
    assert seen == [[0, 8], [1, 7], [2, 6], [2, 7], [1, 6]]


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_new_cache_has_all_pages_free_and_a_table_for_the_whole_context(dtype):
    cache = pages.allocate(
        layers=2, kv_heads=3, head_dim=8, slots=5, context=33, pages=7, page_size=16, dtype=dtype
    )
    assert cache.keys.shape == cache.values.shape == (2 * 7 * 3 * 16 * 8,)
    assert cache.keys.dtype == cache.values.dtype == dtype
    assert not np.shares_memory(cache.keys, cache.values)
    assert cache.table.shape == cache.chain.shape == (5, 3)
    assert sorted(cache.free.tolist()) == list(range(7))
    assert cache.count.tolist() == [7, 0, 0]
    assert cache.sharing == 1


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 1000])
def test_a_cache_has_a_bucket_for_each_page_and_a_power_of_two_of_them(count):
    buckets = len(pages.allocate(1, 1, 8, slots=1, context=16, pages=count, page_size=16).bucket)
    assert buckets >= count
    assert buckets & (buckets - 1) == 0


@device
def count_pages(block, positions, page_size, out):
    if thread_id() == 0:
        for i in range(positions.shape[0]):
            out[i] = pages.pages_for(positions[i], page_size)


@pytest.mark.parametrize("page_size", [1, 16, 17, 256])
def test_positions_need_as_many_pages_as_hold_them(target, lanes, page_size):
    p = page_size
    positions = np.array([0, 1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 257, 10**6, 2**31 - 300])
    out = np.full(len(positions), -1)
    launch(count_pages, 1, lanes, positions, page_size, out, target=target)
    assert out.tolist() == [pages.pages_spec(int(n), page_size) for n in positions]


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_the_pages_for_positions_hold_them_and_one_fewer_would_not(positions, page_size):
    n = pages.pages_spec(positions, page_size)
    assert n * page_size >= positions
    assert n == 0 or (n - 1) * page_size < positions
    assert pages.pages_for(positions, page_size) == n
