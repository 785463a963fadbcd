"""Several samples of one prompt, urgent requests, log probabilities, and ends by time, against a fake GPU."""

import threading
import time

import pytest
from fake_engine import scores
from nic_bench import LAYOUT, Pair, pair_in

from blink_ref.errors import BlinkError
from blink_ref.nic import client
from blink_ref.nic.client import Busy, Nic
from blink_ref.nic.parameters import Parameters
from blink_ref.ring.layout import BEAT_FOUND, LENGTH, LINE, STOP, TIME, Layout


@pytest.fixture
def pair(tmp_path):
    with pair_in(tmp_path) as pair:
        yield pair


def test_samples_have_seeds_of_their_own_and_one_prompt(pair):
    handles = pair.nic.submit_samples([5, 6, 7], Parameters(3, seed=2**64 - 1, stop_ids=[9]), 3)
    records = [pair.request(handle) for handle in handles]
    assert [int(record["seed"]) for record in records] == [2**64 - 1, 0, 1]
    assert {int(record["prompt_at"]) for record in records} == {handles[0].piece.at}
    assert pair.nic._arena.take(LAYOUT.arena - 4) == 4, "three tokens and a stop token were taken, once"


def test_all_but_the_first_sample_name_the_first_and_its_generation(pair):
    pair.drain({pair.nic.submit([5], 1): [] for _ in range(3)})
    first, *others = pair.nic.submit_samples([5, 6, 7], Parameters(3), 3)
    assert pair.request(first)["leader"] == 0
    for other in others:
        assert pair.request(other)["leader"] == 1 + first.slot
        assert pair.request(other)["leader_generation"] == first.generation == 2
    pair.gpu.step()
    assert pair.window.gpu["heartbeat"][BEAT_FOUND] == 6
    pair.drain({handle: [] for handle in (first, *others)})
    assert pair.request(pair.nic.submit([5], 1))["leader"] == 0, "also in a slot that had one"


def test_the_prompt_stays_until_the_last_sample_has_ended(pair):
    first, second = pair.nic.submit_samples([5] * 90, Parameters(10), 2)
    pair.gpu.step()
    pair.nic.cancel(first)
    pair.gpu.step()
    pair.nic.poll()
    assert pair.nic.running == 1
    other = pair.nic.submit([6] * 90, 1)
    assert other.piece.at == 90
    pair.drain({second: [], other: []})
    assert pair.nic.submit([7] * 90, 2).piece.at == 0


def test_fewer_free_slots_than_samples_is_busy_and_takes_none(pair):
    handles = {pair.nic.submit([5], 2): [] for _ in range(6)}
    before = pair.peer.nic.tobytes()
    with pytest.raises(Busy, match="3 samples need as many request slots, and 2 are free; try again later"):
        pair.nic.submit_samples([5], Parameters(2), 3)
    assert pair.peer.nic.tobytes() == before
    assert pair.nic.running == 6
    handles |= {handle: [] for handle in pair.nic.submit_samples([5], Parameters(2), 2)}
    pair.drain(handles)


@pytest.mark.parametrize("n", [0, -1, 9])
def test_samples_that_can_never_run_at_once_are_refused(pair, n):
    with pytest.raises(BlinkError, match=f"n is {n}; it must be between 1 and 8, the number of request slots"):
        pair.nic.submit_samples([5], Parameters(2), n)


def test_stop_tokens_and_biases_that_the_arena_can_never_hold_are_refused(tmp_path):
    with (
        pair_in(tmp_path, Layout(slots=8, arena=20, outbox=16, context=100, vocab=300)) as pair,
        pytest.raises(BlinkError, match="takes 21 words of the 20 of the arena; shorten it"),
    ):
        pair.nic.submit([5] * 10, 1, stop_ids=[1], logit_bias=dict.fromkeys(range(5), 1.0))


def test_an_urgent_request_is_counted_after_its_doorbell_has_rung(pair, monkeypatch):
    rung = []

    def publish(words, at, value):
        rung.append((words is pair.peer.nic["doorbell"] or len(words) > 1, value))
        words[at] = value

    monkeypatch.setattr(client, "_publish", publish)
    pair.nic.submit([5], 1, urgent=True)
    assert rung == [(True, 1), (False, 1)], "the doorbell, then the count"
    pair.nic.submit([5], 1)
    assert rung[2:] == [(True, 1)]
    pair.nic.submit_samples([5], Parameters(1, urgent=True), 3)
    assert pair.window.nic["urgent"][0] == 4


def test_urgent_requests_of_two_workers_are_counted_apart_and_past_32_bits(tmp_path):
    with pair_in(tmp_path, Layout(slots=8, workers=2, arena=64, outbox=16, context=100, vocab=300)) as pair:
        words = pair.peer.nic["urgent"]
        words[LINE // 4] = 2**32 - 1
        Nic(pair.peer, worker=1).submit([6], 1, urgent=True)
        assert not words.any()
        pair.nic.submit([5], 1, urgent=True)
        assert words.nonzero()[0].tolist() == [0]


def test_an_engine_that_looks_all_the_time_never_sees_a_count_before_its_doorbell(tmp_path):
    """The fake GPU asserts it, in a thread of its own."""
    with pair_in(tmp_path) as pair:
        stop, failed = threading.Event(), []

        def look():
            try:
                while not stop.is_set():
                    pair.gpu.step()
            except AssertionError as error:
                failed.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            if pair.nic.running < LAYOUT.slots:
                pair.nic.submit([5], 1, urgent=True)
            pair.nic.poll()
        stop.set()
        thread.join()
    assert not failed


def test_log_probabilities_come_with_the_tokens_that_asked_for_them(pair):
    scored, bare = pair.nic.submit([5, 6], 3, logprobs=4), pair.nic.submit([7], 2, logprobs=0)
    plain = pair.nic.submit([8], 2)
    by_handle = {scored: [], bare: [], plain: []}
    for event in pair.events():
        by_handle[event.handle].append(event)
    for handle, n in ((scored, 4), (bare, 0)):
        *tokens, end = by_handle[handle]
        assert [tuple(event.logprobs) for event in tokens] == [scores(event.token, n) for event in tokens]
        assert end.logprobs is None
    assert len(by_handle[scored][0].logprobs.likeliest) == 4
    assert {event.logprobs for event in by_handle[plain]} == {None}


def test_log_probabilities_are_right_when_the_outbox_is_full_and_wraps(tmp_path):
    with pair_in(tmp_path) as pair:
        pair.peer.nic["consumed"][0] = pair.gpu.index = 2**32 - 40
        pair.nic = Nic(pair.peer)
        for n in range(3):
            pair.nic.submit([5 + n, 9, 11 + n], 30, logprobs=n)
        seen = 0
        while pair.nic.running:
            for _ in range(20):
                pair.gpu.step()
            for event in pair.nic.poll():
                if event.token is not None:
                    assert tuple(event.logprobs) == scores(event.token, event.handle.logprobs)
                    seen += 1
        assert seen == 90


def test_a_row_is_read_before_its_record_counts_as_consumed(tmp_path):
    with pair_in(tmp_path) as pair:
        order = []
        read = pair.nic._read_row
        pair.nic._read_row = lambda n: order.append(int(pair.peer.nic["consumed"][0])) or read(n)
        pair.nic.submit([5], 3, logprobs=1)
        for _ in range(4):
            pair.gpu.step()
        assert len(pair.nic.poll()) == 4
        assert order == [0, 0, 0]
        assert pair.peer.nic["consumed"][0] == 4


def test_a_stop_token_ends_the_answer_as_its_last_but_not_before_min_tokens(pair):
    first = pair.nic.submit([5, 6, 7], 9, stop_ids=[7, 100])
    later = pair.nic.submit([5, 6, 7], 9, stop_ids=[6], min_tokens=3)
    answers = {first: [], later: []}
    pair.drain(answers)
    assert answers[first] == [5, 6, 7, STOP]
    assert answers[later] == [5, 6, 7, 5, 6, STOP]


def test_a_request_whose_time_is_over_ends_with_what_came(pair):
    handle, other = pair.nic.submit([5, 6], 90, time_ms=30), pair.nic.submit([7], 2, time_ms=60_000)
    answers = {handle: [], other: []}
    pair.gpu.step()
    time.sleep(0.05)
    pair.drain(answers)
    assert answers[handle] == [5, TIME]
    assert answers[other] == [7, 7, LENGTH]


def test_any_mix_of_samples_and_single_requests_gives_all_slots_and_the_arena_back(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("window"))
    for round_ in range(200):
        n = round_ % 5 + 1
        try:
            pair.nic.submit_samples([5] * (round_ % 40 + 1), Parameters(round_ % 7 + 1, stop_ids=[9] * (n % 3)), n)
        except Busy:
            pair.gpu.step()
        pair.gpu.step()
        pair.nic.poll()
    pair.events()
    assert sorted(pair.nic._free) == list(range(LAYOUT.slots))
    assert pair.nic._arena.take(LAYOUT.arena) == 0
    pair.window.unlink()
    pair.window.close()
