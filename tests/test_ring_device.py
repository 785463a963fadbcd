"""The GPU's side of the ring, on every target: records, room, and whose slot is whose."""

import numpy as np
import pytest
from engine_bench import LANES, TARGETS, Memory
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref import simt
from blink_ref.engine.memory import device_window
from blink_ref.ring.device import (
    beat,
    outbox_room,
    urgent_rung,
    worker_of,
    write_record,
)
from blink_ref.ring.layout import END, LINE, TOKEN, Layout, Record, pack_record, unpack_record
from blink_ref.simt import device
from blink_ref.simt.vocabulary import i64

LAYOUT = Layout(slots=16, workers=4, arena=8, outbox=8)
targets = pytest.mark.parametrize("target", TARGETS)


@device
def write(block, window, worker, slot, kind, value, last):
    write_record(window, worker, slot, kind, value, last)


@device
def beat_once(block, window, place, value):
    beat(window, place, value)


@device
def rooms(block, window, wanted, out):
    for worker in range(window.workers):
        out[worker] = outbox_room(window, i64(worker), wanted)


@device
def urgent_counts(block, window, out):
    out[0] = i64(urgent_rung(window))


@device
def owners(block, window, out):
    for slot in range(out.shape[0]):
        out[slot] = worker_of(window, slot)


def window_of(layout=LAYOUT):
    memory = Memory(layout)
    return memory, device_window(memory.nic, memory.gpu, layout)


@targets
@settings(max_examples=60, deadline=None)
@given(
    index=st.integers(0, 2**22) | st.integers(2**18 * 8 - 20, 2**18 * 8 + 20) | st.integers(2**40, 2**41),
    slot=st.integers(0, 2**16 - 1),
    kind=st.sampled_from([TOKEN, END]),
    value=st.integers(0, 2**24 - 1),
    worker=st.integers(0, LAYOUT.workers - 1),
)
def test_a_record_written_on_the_device_is_the_one_that_the_nic_unpacks(target, index, slot, kind, value, worker):
    memory, view = window_of()
    view.written[worker] = index
    simt.launch(write, 1, 1, view, worker, slot, kind, value, kind == END, target=target)
    at = worker * LAYOUT.outbox + index % LAYOUT.outbox
    word = int(memory.gpu["outbox"][at])
    assert word == pack_record(index, LAYOUT.outbox, slot, kind, value)
    assert unpack_record(word, index, LAYOUT.outbox) == Record(slot, kind, value)
    assert np.count_nonzero(memory.gpu["outbox"]) == 1
    assert view.written.tolist() == [index + 1 if n == worker else 0 for n in range(LAYOUT.workers)]


@targets
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**34), st.integers(0, LAYOUT.outbox), st.integers(0, 6)),
        min_size=LAYOUT.workers,
        max_size=LAYOUT.workers,
    )
)
def test_room_is_what_reader_and_reservations_have_left_also_past_32_bits(target, counts):
    memory, view = window_of()
    for worker, (consumed, unread, reserved) in enumerate(counts):
        memory.nic["consumed"][worker * LINE // 4] = consumed & 0xFFFFFFFF
        view.written[worker] = consumed + unread
        view.read[worker] = (consumed - max(0, LAYOUT.outbox - unread)) & 0xFFFFFFFF  # as last looked: full
        view.reserved[worker] = reserved
    out = np.full(LAYOUT.workers, -1, np.int64)
    simt.launch(rooms, 1, 1, view, 1, out, target=target)
    assert out.tolist() == [LAYOUT.outbox - unread - reserved for _, unread, reserved in counts]


@targets
def test_what_is_read_is_looked_up_only_when_the_room_known_of_does_not_do(target):
    memory, view = window_of()
    view.written[:] = 5
    memory.nic["consumed"][:: LINE // 4] = 5
    out = np.full(LAYOUT.workers, -1, np.int64)
    simt.launch(rooms, 1, 1, view, LAYOUT.outbox - 5, out, target=target)
    assert out.tolist() == [LAYOUT.outbox - 5] * LAYOUT.workers
    simt.launch(rooms, 1, 1, view, LAYOUT.outbox - 4, out, target=target)
    assert out.tolist() == [LAYOUT.outbox] * LAYOUT.workers


@targets
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=LAYOUT.workers, max_size=LAYOUT.workers))
def test_urgent_requests_are_counted_over_all_workers_modulo_32_bits(target, counts):
    memory, view = window_of()
    memory.nic["urgent"][:: LINE // 4] = counts
    out = np.full(1, -1, np.int64)
    simt.launch(urgent_counts, 1, 1, view, out, target=target)
    assert out.tolist() == [sum(counts) % 2**32]


@targets
def test_a_consumed_count_that_is_garbage_leaves_no_room(target):
    memory, view = window_of()
    memory.nic["consumed"][:] = 5  # a reader that claims to have read what was never written
    out = np.zeros(LAYOUT.workers, np.int64)
    simt.launch(rooms, 1, 1, view, LAYOUT.outbox + 1, out, target=target)
    assert (out < 0).all()


@targets
@pytest.mark.parametrize(("slots", "workers"), [(16, 4), (16, 1), (4096, 4096)])
def test_workers_own_equal_runs_of_slots(target, slots, workers):
    _, view = window_of(Layout(slots=slots, workers=workers, arena=1, outbox=2))
    out = np.full(slots, -1, np.int64)
    simt.launch(owners, 1, LANES[target], view, out, target=target)
    np.testing.assert_array_equal(out, np.arange(slots) // (slots // workers))


@targets
def test_a_beat_changes_its_own_word_only(target):
    memory, view = window_of()
    simt.launch(beat_once, 1, 1, view, 3, 2**31, target=target)
    assert memory.gpu["heartbeat"].tolist() == [0, 0, 0, 2**31, *[0] * 12]
