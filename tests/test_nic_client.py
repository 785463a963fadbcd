"""The NIC's side of the ring against a fake GPU."""

import multiprocessing
import threading
import time

import pytest
from fake_engine import FakeGpu, Script
from hypothesis import given, settings
from hypothesis import strategies as st
from nic_bench import EOS, LAYOUT, Pair, echo, pair_in

from blink_ref.errors import BlinkError
from blink_ref.nic import client
from blink_ref.nic.client import Busy, EngineGone, Nic, next_generation
from blink_ref.ring.layout import CANCEL, LENGTH, SHUTDOWN, STOP, Layout
from blink_ref.ring.window import Window


def poll_for_ever(nic, events):
    while True:
        events += nic.poll()
        time.sleep(nic.pause())


@pytest.fixture
def pair(tmp_path):
    with pair_in(tmp_path) as pair:
        yield pair


def test_the_tokens_of_a_request_come_in_order_and_its_end_last(pair):
    handle = pair.nic.submit([5, 6, 7], 5)
    answers = {handle: []}
    pair.drain(answers)
    assert answers[handle] == [5, 6, 7, 5, 6, LENGTH]


def test_an_end_of_text_token_is_delivered_and_ends_the_request_unless_ignored(pair):
    stops, goes_on = pair.nic.submit([5, EOS, 7], 4), pair.nic.submit([5, EOS, 7], 4, ignore_eos=True)
    answers = {stops: [], goes_on: []}
    pair.drain(answers)
    assert answers[stops] == [5, EOS, STOP]
    assert answers[goes_on] == [5, EOS, 7, 5, LENGTH]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 60)), max_size=40),
    st.randoms(use_true_random=False),
)
def test_any_mix_of_requests_gets_each_its_own_tokens(tmp_path_factory, requests, random):
    """Slots, arena and outbox are all too small for the whole, so all are used over and over."""
    pair = Pair(tmp_path_factory.mktemp("window"))
    waiting, expected, got = list(requests), {}, {}
    while waiting or pair.nic.running:
        if waiting and random.random() < 0.5:
            prompt, max_tokens = waiting[-1]
            try:
                handle = pair.nic.submit(prompt, max_tokens)
            except Busy:
                assert pair.nic.running
            else:
                waiting.pop()
                expected[handle], got[handle] = echo(prompt, max_tokens), []
        if random.random() < 0.8:
            pair.gpu.step()
        if random.random() < 0.5:
            for handle, token, reason, _ in pair.nic.poll():
                got[handle].append(reason if token is None else token)
    assert got == expected
    pair.window.unlink()
    pair.window.close()


def test_the_outbox_wraps_many_times_and_past_32_bits(tmp_path):
    pair = Pair(tmp_path)
    pair.peer.nic["consumed"][0] = pair.gpu.index = 2**32 - 40  # as after four billion records
    pair.nic = Nic(pair.peer)
    for _ in range(20):
        handles = {pair.nic.submit([3, 4, n], 30): [] for n in range(5, 9)}
        pair.drain(handles)
        assert [answer[:3] for answer in handles.values()] == [[3, 4, n] for n in range(5, 9)]
        assert all(len(answer) == 31 for answer in handles.values())
    pair.window.unlink()
    pair.window.close()


def test_a_full_outbox_loses_nothing_while_the_nic_sleeps(pair):
    handles = {pair.nic.submit([5, 6, 7, 8, n], 50): [] for n in range(10, 14)}
    for _ in range(100):
        pair.gpu.step()
    assert pair.gpu.index == LAYOUT.outbox, "the GPU waits for the NIC"
    pair.drain(handles)
    for n, answer in zip(range(10, 14), handles.values(), strict=True):
        assert answer == echo([5, 6, 7, 8, n], 50)


def test_a_cancelled_request_ends_and_its_slot_serves_again(pair):
    handle = pair.nic.submit([5, 6], 90)
    other = pair.nic.submit([7], 3)
    answers = {handle: [], other: []}
    pair.gpu.step()
    pair.nic.cancel(handle)
    pair.drain(answers)
    assert answers[handle][-1] == CANCEL
    assert len(answers[handle]) < 5
    assert answers[other] == [7, 7, 7, LENGTH]
    again = pair.nic.submit([8], 2)
    assert again.slot in (handle.slot, other.slot)
    assert pair.nic.running == 1


def test_cancelling_too_late_does_not_hit_the_next_request_in_the_slot(pair):
    first = pair.nic.submit([5], 1)
    pair.drain({first: []})
    second = pair.nic.submit([6], 3)
    assert second.slot == first.slot
    pair.nic.cancel(first)
    answers = {second: []}
    pair.drain(answers)
    assert answers[second] == [6, 6, 6, LENGTH]


def test_generations_wrap_around_without_zero_and_without_old_cancel_words(pair):
    assert next_generation(0) == 1
    assert next_generation(0xFFFFFFFF) == 1
    slot = pair.nic.submit([5], 1).slot
    pair.drain({h: [] for h in pair.nic._running.values()})
    for side in (pair.peer.nic["doorbell"], pair.gpu.taken):
        side[slot] = 0xFFFFFFFE
    pair.peer.nic["cancel"][slot] = 1  # from four billion requests ago
    for generation in (0xFFFFFFFF, 1, 2):
        handle = pair.nic.submit([5], 2)
        assert (handle.slot, handle.generation) == (slot, generation)
        answers = {handle: []}
        pair.drain(answers)
        assert answers[handle] == [5, 5, LENGTH]


def test_all_slots_taken_is_busy_until_a_request_ends(pair):
    handles = {pair.nic.submit([5], 2): [] for _ in range(LAYOUT.slots)}
    assert len({handle.slot for handle in handles}) == LAYOUT.slots
    with pytest.raises(Busy, match="all 8 request slots are taken; try again"):
        pair.nic.submit([5], 2)
    pair.drain(handles)
    pair.nic.submit([5], 2)


def test_a_full_arena_is_busy_and_leaves_the_slot_free(pair):
    handles = {pair.nic.submit([5] * 90, 1): [] for _ in range(2)}
    with pytest.raises(Busy, match="prompt of 90 tokens does not fit"):
        pair.nic.submit([5] * 90, 1)
    handles[pair.nic.submit([5] * 76, 1)] = []
    pair.drain(handles)
    assert pair.nic.submit([5] * 90, 1)


def test_two_workers_keep_to_their_own_slots_arenas_and_outboxes(tmp_path):
    pair = Pair(tmp_path, Layout(slots=8, workers=2, arena=64, outbox=16, context=100, vocab=300))
    second = Nic(pair.peer, worker=1)
    first = {pair.nic.submit([5], 1).slot for _ in range(4)}
    assert first == {0, 1, 2, 3}
    assert {second.submit([6], 1).slot for _ in range(4)} == {4, 5, 6, 7}
    arena = pair.peer.nic["arena"]
    assert arena[:4].tolist() == [5] * 4
    assert arena[64:68].tolist() == [6] * 4
    pair.gpu.step()  # the fake GPU answers into the outbox of worker 0 only
    assert second.poll() == []
    pair.window.unlink()
    pair.window.close()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([], 5), "the prompt is empty"),
        (([1, 300], 5), "token id 300 in the prompt is outside the vocabulary of 300"),
        (([-1], 5), "token id -1"),
        (([10**30], 5), "token id 10"),
        (([1], 0), "max_tokens is 0; it must be a whole number from 1 to"),
        (([1], -3), "max_tokens is -3"),
        (([1] * 60, 41), "prompt of 60 tokens and max_tokens 41 exceed the context of 100"),
        (([1], 10**30), "max_tokens is 10+; it must be"),
        (([1], 2**32 - 1), "exceed the context"),
        (([1], 5, -0.1), "temperature is -0.1; it must be between 0"),
        (([1], 5, float("nan")), "temperature is nan"),
        (([1], 5, float("inf")), "temperature is inf"),
        (([1], 5, 0.0, -1), "seed is -1"),
        (([1], 5, 0.0, 2**64), "seed is 18446744073709551616"),
    ],
)
def test_an_impossible_request_is_refused_and_takes_no_slot(pair, arguments, complaint):
    with pytest.raises(BlinkError, match=complaint):
        pair.nic.submit(*arguments)
    assert pair.nic.running == 0
    assert not pair.window.nic["doorbell"].any()


def test_a_prompt_and_answer_that_just_fill_the_context_are_served(pair):
    handle = pair.nic.submit([1] * 60, 40)
    pair.drain({handle: []})


def test_a_stopped_engine_ends_its_requests_and_then_is_gone(pair, monkeypatch):
    monkeypatch.setattr(client, "CHECK_EVERY", 0)
    handle = pair.nic.submit([5], 50)
    stop = threading.Event()
    server = threading.Thread(target=pair.gpu.serve, args=(stop,))
    server.start()
    while not pair.nic.poll():
        time.sleep(0.001)
    pair.peer.nic["stop"][0] = 1
    server.join()
    events = []
    with pytest.raises(EngineGone, match="has stopped; start it again"):
        poll_for_ever(pair.nic, events)
    assert events[-1] == (handle, None, SHUTDOWN, None)
    with pytest.raises(EngineGone):
        pair.nic.check()


def _serve_until_killed(directory, path):
    window = Window.create(LAYOUT, directory=directory)
    path.put(window.path)
    FakeGpu(window, Script(delay=0.01)).serve(threading.Event())


def test_a_killed_engine_is_noticed_within_a_second(tmp_path):
    context = multiprocessing.get_context("spawn")
    path = context.Queue()
    engine = context.Process(target=_serve_until_killed, args=(tmp_path, path))
    engine.start()
    nic = Nic(Window.open(path.get()))
    nic.submit([5], 90)
    while not nic.poll():
        time.sleep(0.001)
    engine.kill()
    engine.join()
    killed = time.monotonic()
    with pytest.raises(EngineGone, match=f"the engine \\(process {engine.pid}\\) died"):
        poll_for_ever(nic, [])
    assert time.monotonic() - killed < 1


def test_pauses_grow_with_the_silence_and_start_short_with_a_request(pair, monkeypatch):
    now = time.monotonic()
    pair.nic.submit([5], 5)
    assert pair.nic.pause() == client.SHORTEST_PAUSE
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    assert pair.nic.pause() == client.LONGEST_PAUSE


def test_it_sleeps_for_most_of_a_usual_wait_and_one_long_wait_changes_nothing(pair, monkeypatch):
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pair.nic.submit([5], 5)
    monkeypatch.setattr(pair.nic, "_take", lambda: ["an event"])

    def pause_after(wait: float) -> float:
        clock[0] += wait
        pair.nic.poll()
        return pair.nic.pause()

    assert pause_after(0.001) == client.SHORTEST_PAUSE, "one wait says nothing"
    assert pause_after(0.001) == pytest.approx(0.75 * 0.001)
    assert pause_after(0.5) == pytest.approx(0.75 * 0.001)
    assert pause_after(0.5) == client.LONGEST_PAUSE
    assert pause_after(0.001) == pytest.approx(0.75 * 0.001)
    clock[0] += 0.0008
    assert pair.nic.pause() == client.SHORTEST_PAUSE, "the next is due"
    pair.nic._running.clear()
    pair.nic.submit([5], 5)
    assert pair.nic.pause() == client.SHORTEST_PAUSE, "of another request nothing is known"
