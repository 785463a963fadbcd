"""Reading events out of a window while somebody writes them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_ref.ring.layout import BEAT_EVENTS, CACHED, EVENT_HOLD, EVENT_PHASE, EVENT_ROWS, EVENT_STEP, Layout
from blink_ref.ring.window import Window
from blink_ref.trace.record import Event, Recorder, pack_event, unpack_events

RING = 16


class Writer:
    """The GPU's side: writes events, and counts them, as scheduler/trace.py."""

    def __init__(self, window):
        self.window, self.n = window, 0

    def write(self, n=1):
        """`n` events that nobody can know of yet."""
        for _ in range(n):
            self.window.gpu["event"][self.n % RING] = pack_event(1000 + self.n, EVENT_STEP, 0, self.n)
            self.n += 1

    def count(self):
        self.window.gpu["heartbeat"][BEAT_EVENTS] = self.n


@pytest.fixture
def sides(tmp_path):
    layout = Layout(slots=4, arena=16, outbox=4, pages=6, events=RING)
    engine = Window.create(layout, directory=tmp_path)
    nic = Window.open(engine.path)
    yield Writer(engine), nic
    nic.close()
    engine.unlink()
    engine.close()


def numbers(recording):
    return [[event.value for event in part.events] for part in recording.parts]


@given(st.integers(0, 2**64 - 1), st.integers(1, 255), st.integers(0, 2**16 - 1), st.integers(0, 2**40 - 1))
def test_an_event_is_read_as_it_was_written(ns, kind, slot, value):
    words = np.array([pack_event(ns, kind, slot, value)], np.uint64)
    assert unpack_events(words) == [Event(ns, kind, slot, value)]


def test_a_value_that_holds_two_numbers_is_taken_apart():
    assert Event(0, EVENT_ROWS, 3, 130 << 20 | 32).pair == (130, 32)
    assert Event(0, EVENT_HOLD, 3, 2 << 20 | 77).pair == (2, 77)
    assert Event(0, EVENT_PHASE, 0, 5 << 32 | 2**32 - 1).pair == (5, 2**32 - 1)


def test_events_are_asked_for_while_a_recorder_is_there_and_no_longer(sides):
    _, nic = sides
    assert nic.nic["trace"][0] == 0
    with Recorder(nic):
        assert nic.nic["trace"][0] == 1
        with Recorder(nic):
            pass
        assert nic.nic["trace"][0] == 1
    assert nic.nic["trace"][0] == 0
    with pytest.raises(KeyboardInterrupt), Recorder(nic):
        raise KeyboardInterrupt
    assert nic.nic["trace"][0] == 0


def test_only_events_since_the_recorder_came_are_taken_and_only_once(sides):
    writer, nic = sides
    writer.write(5)
    writer.count()
    with Recorder(nic) as recorder:
        assert recorder.poll() == 0
        writer.write(3)
        assert recorder.poll() == 0
        writer.count()
        assert recorder.poll() == 3
        assert recorder.poll() == 0
        writer.write(2)
        writer.count()
    assert numbers(recorder.recording) == [[5, 6, 7, 8, 9]]
    assert (recorder.recording.count, recorder.recording.lost) == (5, 0)


def test_what_may_have_been_overwritten_is_lost_and_counted_and_a_new_part_begins(sides):
    writer, nic = sides
    with Recorder(nic) as recorder:
        writer.write(4)
        writer.count()
        recorder.poll()
        writer.write(RING)
        writer.count()
        recorder.poll()
        writer.write(1)
        writer.count()
    half = RING // 2
    assert numbers(recorder.recording) == [[0, 1, 2, 3], [*range(4 + half, 4 + RING), 4 + RING]]
    assert recorder.recording.lost == half


def test_events_overwritten_while_they_were_copied_are_lost(sides, monkeypatch):
    writer, nic = sides
    with Recorder(nic) as recorder:
        writer.write(6)
        writer.count()
        counts = iter([6, 6 + RING // 2 - 2])
        monkeypatch.setattr(recorder, "_written", lambda: next(counts))
        assert recorder.poll() == 2
        monkeypatch.undo()
    assert numbers(recorder.recording) == [[4, 5]]
    assert recorder.recording.lost == 4


def test_a_part_knows_who_had_the_pages(sides):
    writer, nic = sides
    writer.window.gpu["owner"][:3] = [CACHED, 2 << 16 | 1, 3 << 16 | 4]
    with Recorder(nic) as recorder:
        pass
    assert recorder.recording.parts[0].page_slot.tolist() == [-2, 2, 3, -1, -1, -1]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, RING // 2), st.booleans()), max_size=30))
def test_every_event_is_recorded_in_order_or_counted_as_lost(tmp_path_factory, turns):
    engine = Window.create(
        Layout(slots=4, arena=16, outbox=4, pages=6, events=RING), directory=tmp_path_factory.mktemp("w")
    )
    writer = Writer(engine)
    with Recorder(engine) as recorder:
        for n, polled in turns:
            writer.write(n)
            if polled:  # in the middle of a turn: half of the ring may be overwritten and not counted
                recorder.poll()
            writer.count()
    seen = [number for part in numbers(recorder.recording) for number in part]
    assert seen == sorted(set(seen))
    assert len(seen) + recorder.recording.lost == writer.n
    for part in numbers(recorder.recording):
        assert part == list(range(part[0], part[0] + len(part))) if part else True
    engine.unlink()
    engine.close()
