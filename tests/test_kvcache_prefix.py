"""Prefix sharing: what a cache finds of a text is what the spec says, and the tokens decide, not the hash."""

import numpy as np
import pytest
from engine_bench import LANES, SMALL, TARGETS, Bench, chosen, small
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.kvcache.pages import pages_for, pages_spec
from blink_ref.kvcache.prefix import chain_spec, found_pages, look_up, shared_spec
from blink_ref.scheduler.residence import release_pages, share_page, take_pages
from blink_ref.scheduler.retire import file_pages
from blink_ref.simt import device
from blink_ref.simt.vocabulary import barrier, i32, i64, thread_id

targets = pytest.mark.parametrize("target", TARGETS)


@device
def live(block, window, slots, queue, cache, slot, stays, out):
    """A request's whole life as the cache sees it: look up, share, take, file, and let go unless it stays."""
    known = i64(slots.known[slot])
    look_up(slots, cache, slot, known)
    if thread_id() == 0:
        found, size = found_pages(cache, slot, known), i64(cache.page_size)
        out[0] = found * size
        for _ in range(found):
            share_page(window, slots, queue, cache, slot)
        held, needed = i64(slots.pages[slot]), pages_for(known, size)
        if held < needed:
            take_pages(window, slots, queue, cache, slot, held, needed - held)
        slots.done[slot] = slots.known[slot] - i32(1)
        file_pages(window, slots, queue, cache, slot, found * size, i64(slots.done[slot]))
        if not stays:
            release_pages(window, slots, queue, cache, slot)
    barrier()


class Texts:
    """Texts pass through a cache, each in a slot of its own."""

    def __init__(self, target, page_size, pages, context=24):
        sizes = {"context": context, "pages": pages, "page_size": page_size, "slots": 16}
        self.made, self.target = Bench(small(), chosen(SMALL, **sizes)), target

    def pass_through(self, slot, text, stays=False):
        """How many positions of it were found; `text` has one token more than is computed, the last one."""
        slots, out = self.made.slots, np.full(1, -1, np.int64)
        slots.token[slot, : len(text)] = text
        slots.known[slot], slots.hashed[slot] = len(text), 0
        made = self.made
        rest = made.view, slots, made.queue, made.cache, slot, stays, out
        simt.launch(live, 1, LANES[self.target], *rest, target=self.target)
        return int(out[0])


texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=8)


@targets
@settings(max_examples=40, deadline=None)
@given(texts, st.sampled_from([1, 2, 3, 4, 16]), st.booleans())
def test_a_cache_with_room_finds_of_a_text_what_the_spec_says(target, texts, page_size, stays):
    """The last token of each text has no position in the cache, so it is no part of what has been seen."""
    cache = Texts(target, page_size, pages=8 * pages_spec(20, page_size))
    for slot, text in enumerate(texts):
        expected = shared_spec([before[:-1] for before in texts[:slot]], text, page_size)
        assert cache.pass_through(slot, text, stays) == expected


@targets
@settings(max_examples=40, deadline=None)
@given(texts, st.sampled_from([1, 2, 3, 4]), st.integers(0, 6))
def test_a_full_cache_forgets_the_oldest_and_finds_nothing_that_was_not_there(target, texts, page_size, spare):
    cache = Texts(target, page_size, pages=pages_spec(20, page_size) + spare)
    for slot, text in enumerate(texts):
        found = cache.pass_through(slot, text)
        assert found <= shared_spec([before[:-1] for before in texts[:slot]], text, page_size)
        assert found >= shared_spec([before[:-1] for before in texts[slot - 1 : slot]], text, page_size)
        made = cache.made
        assert len(made.free_pages()) + len(made.unused_pages()) == made.cache.pages
        for page in made.unused_pages():
            parent = int(made.cache.parent[page]) - 1
            assert parent < 0 or made.cache.filed[parent], "a page outlives no page before it"


@targets
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.sampled_from([1, 3, 4, 16]))
def test_hashes_are_a_chain_over_the_pages_as_the_spec_says(target, text, page_size):
    cache = Texts(target, page_size, pages=24)
    cache.pass_through(0, text)
    whole = len(text) // page_size
    assert cache.made.cache.chain[0, :whole].tolist() == chain_spec(text, page_size)


def test_hashes_of_different_texts_differ():
    """Of 3,000 texts of one page; a chance collision has a probability of 3000**2 / 2**65."""
    draw = np.random.default_rng(4)
    texts = {tuple(draw.integers(0, 50000, 16).tolist()) for _ in range(3000)}
    assert len({chain_spec(list(text), 16)[0] for text in texts}) == len(texts)


@targets
def test_the_same_page_behind_another_beginning_is_not_found(target):
    cache = Texts(target, page_size=2, pages=30)
    cache.pass_through(0, [1, 1, 5, 5, 9])
    assert cache.pass_through(1, [2, 2, 5, 5, 9]) == 0
    assert cache.pass_through(2, [1, 1, 5, 5, 9]) == 4


def test_the_spec_never_shares_the_last_position():
    """Its logits are wanted, so it is computed, though it is cached."""
    assert shared_spec([[1, 2, 3, 4]], [1, 2, 3, 4], 2) == 2
    assert shared_spec([[1, 2, 3, 4]], [1, 2, 3, 4], 1) == 3
    assert shared_spec([[1, 2, 3, 4]], [1, 2, 3, 4, 5], 2) == 4
    assert shared_spec([[1, 2, 3, 4]], [1, 2, 3], 2) == 2
    assert shared_spec([], [1, 2, 3], 2) == 0
