"""An idle scheduler rehearses a request, and nobody notices."""

import numpy as np
import pytest
from engine_bench import SMALL, TARGETS, Bench, Request, answers_alone, chosen, small

from blink_ref.kvcache.pages import FREE as FREE_PAGES
from blink_ref.kvcache.pages import UNUSED
from blink_ref.ring.layout import CACHED, DONE, FREE, REHEARSED_PAGES
from blink_ref.scheduler import rehearsal
from blink_ref.scheduler.rehearsal import MANY, REHEARSAL, pretend
from blink_ref.scheduler.state import ENDING, EVICTED, GO, IDLE
from blink_ref.simt import device, swap
from blink_ref.simt.vocabulary import barrier, thread_id, u32

targets = pytest.mark.parametrize("target", TARGETS)
without_cuda = pytest.mark.parametrize("target", TARGETS[:2])  # a kernel of its own takes minutes to compile
own_block = pytest.mark.parametrize("own_block", [False, True])
LONG_ENOUGH = REHEARSAL + 1
PAGE_SIZE, SLOTS = 4, 16
LAST = SLOTS - 1


def bench(target="cpu", own_block=False, **changes):
    sizes = {"blocks": 2, "page_size": PAGE_SIZE, "slots": SLOTS, "rehearsals": True, "scheduler_block": own_block}
    return Bench(small(), chosen(SMALL, target, **{**sizes, **changes}))


def rehearsed(made):
    """Whether a prompt of the rehearsal's length has been looked up for the last slot."""
    return (
        made.slots.hashed[LAST] == REHEARSED_PAGES
        and made.slots.prompt_len[LAST] == REHEARSED_PAGES * PAGE_SIZE + 1
    )


def all_that_counts(made):
    """Everything but what a slot holds beside a request, and how often the scheduler has looked."""
    heartbeat = made.window.gpu["heartbeat"][1:].tolist()
    shown = {name: made.window.gpu[name].tolist() for name in ("state", "position", "owner", "outbox")}
    slots = {name: getattr(made.slots, name).tolist() for name in ("taken", "state", "pages", "flight")}
    lists = made.running(), made.waiting(), made.free_pages(), made.unused_pages()
    return heartbeat, shown, slots, made.queue.count[1:24].tolist(), lists, made.cache.table.tolist()


@targets
@own_block
def test_a_rehearsal_leaves_all_as_it_was(target, own_block):
    found = []
    for rehearsals in (False, True):
        made = bench(target, own_block, rehearsals=rehearsals)
        made.desk.ring(LAST, range(11), 3, ignore_eos=True)
        made.run(patience=LONG_ENOUGH)
        assert made.queue.count[GO] == IDLE
        assert rehearsed(made) == rehearsals
        made.cache.table[LAST] = 0
        found.append(all_that_counts(made))
        made.desk.read()
        made.check()
    assert found[0] == found[1]
    assert made.window.gpu["state"][LAST] == DONE, "as its last request has left it"


@targets
@own_block
def test_requests_before_and_after_get_what_they_get_alone(target, own_block):
    alone = answers_alone(Bench(small(), chosen(SMALL, target)))
    made = bench(target, own_block)
    for round_ in range(3):
        asked = {slot: Request((1 + round_, 2, slot, *range(9)), 4, 0.7, slot) for slot in (0, LAST)}
        for slot, request in asked.items():
            request.ring(made.desk, slot)
        made.run(patience=LONG_ENOUGH)
        made.desk.read()
        assert {slot: made.desk.answers[slot] for slot in asked} == {slot: alone(r) for slot, r in asked.items()}
        assert rehearsed(made)
        made.check()


@device
def pretend_and_ring(window, slots, sampling, cache, context):
    last = slots.state.shape[0] - 1
    if thread_id() == 0:
        slots.prompt_len[last] = 0
    barrier()
    kept_pretend(window, slots, sampling, cache, context)
    if thread_id() == 0:
        window.doorbell[last] = u32(2)
    barrier()


kept_pretend = device(pretend.python)


@without_cuda
def test_who_rings_for_the_same_slot_meanwhile_is_seen_afterwards(target):
    made = bench(target)
    made.desk.ring(LAST, range(5), 2, ignore_eos=True)
    made.run()
    made.desk.read()
    first = made.desk.answers[LAST]
    made.desk.ring(LAST, range(5), 2, ignore_eos=True)
    made.window.nic["doorbell"][LAST] = 1  # not yet: it rings again while the scheduler rehearses
    with swap(rehearsal.pretend, pretend_and_ring):
        made.run(1, patience=LONG_ENOUGH + 1)
    assert made.steps == 3
    made.run()
    made.desk.read()
    assert made.desk.answers[LAST] == first
    assert made.slots.taken[LAST] == 2


@targets
@pytest.mark.parametrize("field", ["temperature", "prompt_len", "stops", "leader", "min_tokens", "time_ms"])
@pytest.mark.parametrize("record", [LAST, SLOTS], ids=["its own", "nobody's"])
def test_what_is_in_a_record_does_not_matter(target, field, record):
    made = bench(target)
    made.window.nic["request"][record][field] = np.nan if field == "temperature" else 2**32 - 1
    made.window.nic["doorbell"][LAST] = made.window.nic["cancel"][LAST] = made.slots.taken[LAST] = 7
    made.run(patience=LONG_ENOUGH)
    assert rehearsed(made)
    assert made.slots.state[LAST] == FREE
    assert not made.slots.ending.any()
    assert not made.window.gpu["outbox"].any()
    made.check()


@pytest.mark.parametrize(
    ("hindrance", "changes"),
    [
        ("none", {}),
        ("traced", {}),
        ("few pages", {"pages": REHEARSED_PAGES}),
        ("not wanted", {"rehearsals": False}),
    ],
)
def test_there_is_none_where_it_would_be_noticed(hindrance, changes):
    made = bench(**changes)
    made.window.nic["trace"][0] = hindrance == "traced"
    made.run(patience=LONG_ENOUGH)
    assert rehearsed(made) == (hindrance == "none")
    made.check()


@targets
def test_one_that_has_to_be_refused_ends_without_a_word(target):
    made = bench(target, page_size=1, pages=REHEARSED_PAGES + 1)
    made.run(patience=LONG_ENOUGH)
    assert made.slots.prompt_len[LAST] == REHEARSED_PAGES + 1
    assert made.slots.state[LAST] == FREE
    assert not made.queue.count[ENDING]
    assert not made.window.gpu["outbox"].any()
    made.check()


@pytest.mark.parametrize("pages", [MANY - 1, MANY])
def test_of_many_pages_those_unused_for_longest_give_way_once(pages):
    made = bench(pages=pages)
    made.cache.count[FREE_PAGES] = made.cache.count[UNUSED] = 0
    for page in range(pages):  # all are cached, and nobody holds one
        made.cache.filed[page] = 1
        made.cache.hash[page] = page
        made.window.gpu["owner"][page] = CACHED
        made.cache.following[page] = made.cache.bucket[page]
        made.cache.bucket[page] = page + 1
        older = made.cache.older[pages]
        made.cache.newer[older] = page
        made.cache.older[page] = older
        made.cache.newer[page] = pages
        made.cache.older[pages] = page
        made.cache.count[UNUSED] += 1
    made.check()
    for _ in range(2):
        made.slots.hashed[LAST] = 0
        made.run(patience=LONG_ENOUGH)
        assert rehearsed(made) == (pages == MANY)
        made.check()
        taken = REHEARSED_PAGES + 1 if pages == MANY else 0
        assert made.unused_pages() == list(range(taken, pages))
        assert len(made.free_pages()) == taken
        assert made.queue.count[EVICTED] == taken


def test_there_is_one_in_each_silence():
    made = bench()
    for _ in range(2):
        made.slots.hashed[LAST] = 0
        made.run(patience=100)
        assert rehearsed(made)
        made.desk.ring(0, [1, 2], 1)
        made.run()
        made.desk.read()
    assert made.queue.count[GO] == IDLE
