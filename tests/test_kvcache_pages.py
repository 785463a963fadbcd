"""The page pool: no page is lost, none is owned twice, whatever the order of taking and returning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blink_ref.kvcache import pages
from blink_ref.simt import device, launch
from blink_ref.simt.vocabulary import barrier, i32, thread_id


@device
def take(block, cache, slot, n):
    """Take pages as the scheduler does: the count is lowered behind the second barrier."""
    barrier()
    pages.take_pages(cache, slot, n)
    barrier()
    if thread_id() == 0:
        cache.count[pages.FREE] -= i32(n)


@device
def give_back(block, cache, slot, n):
    if thread_id() == 0:
        pages.return_pages(cache, slot, n)


class Pool(RuleBasedStateMachine):
    """Slots take and return pages in any order; beside the device code runs a set of free pages."""

    target, lanes, slots, each, all_pages = "cpu", 1, 4, 5, 11

    def __init__(self):
        super().__init__()
        self.cache = pages.allocate(
            layers=1,
            kv_heads=1,
            head_dim=8,
            slots=self.slots,
            context=self.each * 16,
            pages=self.all_pages,
            page_size=16,
        )
        self.free = set(range(self.all_pages))
        self.owned = {}

    def run(self, fn, slot, n):
        launch(fn, 1, self.lanes, self.cache, slot, n, target=self.target)

    @precondition(lambda self: self.free and len(self.owned) < self.slots)
    @rule(data=st.data())
    def take(self, data):
        slot = data.draw(st.sampled_from(sorted(set(range(self.slots)) - set(self.owned))))
        n = data.draw(st.integers(1, min(self.each, len(self.free))))
        self.run(take, slot, n)
        got = self.cache.table[slot, :n].tolist()
        assert set(got) <= self.free
        assert len(set(got)) == n
        self.free -= set(got)
        self.owned[slot] = got

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data):
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        held = self.owned.pop(slot)
        self.run(give_back, slot, len(held))
        self.free |= set(held)

    @invariant()
    def the_stack_holds_the_free_pages_once_each(self):
        height = int(self.cache.count[pages.FREE])
        stack = self.cache.free[:height].tolist()
        assert len(stack) == len(self.free)
        assert set(stack) == self.free

    @invariant()
    def a_slot_keeps_its_pages_until_it_returns_them(self):
        for slot, held in self.owned.items():
            assert self.cache.table[slot, : len(held)].tolist() == held


class PoolInPython(Pool):
    target, lanes = "python", 3


class PoolOnCuda(Pool):
    target, lanes = "cuda", 64


TestPoolOnTheCpu = Pool.TestCase
TestPoolOnTheCpu.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolInPython = PoolInPython.TestCase
TestPoolInPython.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestPoolOnCuda = pytest.mark.cuda(PoolOnCuda.TestCase)
TestPoolOnCuda.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


def test_the_first_pages_taken_are_the_first_of_the_pool(target, lanes):
    cache = pages.allocate(1, 1, 8, slots=2, context=100, pages=9, page_size=16)
    launch(take, 1, lanes, cache, 1, 4, target=target)
    assert cache.table.tolist() == [[0] * 7, [0, 1, 2, 3, 0, 0, 0]]
    assert cache.count[pages.FREE] == 5


def test_pages_returned_are_taken_again_in_the_order_they_had(target, lanes):
    cache = pages.allocate(1, 1, 8, slots=2, context=100, pages=9, page_size=16)
    launch(take, 1, lanes, cache, 0, 4, target=target)
    launch(give_back, 1, lanes, cache, 0, 4, target=target)
    launch(take, 1, lanes, cache, 1, 6, target=target)
    assert cache.table[1].tolist() == [0, 1, 2, 3, 4, 5, 0]


def test_a_new_cache_has_all_pages_free_and_a_table_for_the_whole_context():
    cache = pages.allocate(layers=2, kv_heads=3, head_dim=8, slots=5, context=33, pages=7, page_size=16)
    assert cache.keys.shape == cache.values.shape == (2 * 7 * 3 * 16 * 8,)
    assert cache.keys.dtype == cache.values.dtype == np.float32
    assert not np.shares_memory(cache.keys, cache.values)
    assert cache.table.shape == (5, 3)
    assert sorted(cache.free.tolist()) == list(range(7))
    assert cache.count.tolist() == [7]


@device
def count_pages(block, positions, page_size, out):
    if thread_id() == 0:
        for i in range(positions.shape[0]):
            out[i] = pages.pages_for(positions[i], page_size)


@pytest.mark.parametrize("page_size", [1, 16, 17, 256])
def test_positions_need_as_many_pages_as_hold_them(target, lanes, page_size):
    p = page_size
    positions = np.array([0, 1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 257, 10**6])
    out = np.full(len(positions), -1)
    launch(count_pages, 1, lanes, positions, page_size, out, target=target)
    assert out.tolist() == [pages.pages_spec(int(n), page_size) for n in positions]


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_the_pages_for_positions_hold_them_and_one_fewer_would_not(positions, page_size):
    n = pages.pages_spec(positions, page_size)
    assert n * page_size >= positions
    assert n == 0 or (n - 1) * page_size < positions
    assert pages.pages_for(positions, page_size) == n
