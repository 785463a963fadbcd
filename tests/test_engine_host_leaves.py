"""The host leaves: tokens keep coming while the engine's Python stands still, or its whole process does."""

import select
import signal
import time
from itertools import pairwise

import pytest
from engine_bench import TINY, Request
from engine_child import Child, Client

SECONDS = 5
LONGEST_GAP = 0.5
"""Seconds without a token that a busy machine may cause; a stop of the engine would cause one of 5."""

HOLD = f"""
import ctypes, json, signal, sys, threading, time
from blink_ref.engine.__main__ import main

def tick():
    last = time.monotonic()
    while True:
        time.sleep(0.01)
        now = time.monotonic()
        if now - last > 1:
            print(json.dumps({{"held": now - last}}), flush=True)
        last = now

def hold(*_):
    threading.Thread(target=tick, daemon=True).start()
    time.sleep(0.1)
    ctypes.PyDLL(None).usleep({SECONDS}_000_000)  # a PyDLL keeps the GIL

signal.signal(signal.SIGUSR1, hold)
sys.exit(main(sys.argv[1:]))
"""
"""The engine, and a signal that makes it hold the GIL; a thread of its own shows that no Python ran."""


class Load:
    """A NIC that keeps four long requests in flight and writes down when tokens came."""

    def __init__(self, window):
        self.client = Client(window)
        self.asked = 0
        self.times = []

    def until(self, ended):
        while not ended():
            while self.client.nic.running < 4:
                self.asked += 1
                self.client.submit(Request((self.asked % 1000, 7), 200, 0.8, self.asked, True))
            if count := self.client.poll():
                self.times += [time.monotonic()] * count
            time.sleep(0.001)

    def during(self, begin, end):
        """Tokens a second, and the longest time without one."""
        times = [begin, *(t for t in self.times if begin <= t < end), end]
        return (len(times) - 2) / (end - begin), max(b - a for a, b in pairwise(times))


def seconds_later(seconds):
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() >= deadline


def expect_the_same_rate(load, begin, held, end):
    before, _ = load.during(begin, held)
    rate, gap = load.during(held, end)
    print(f"{before:.0f} tokens/s before, {rate:.0f} while the host stood still, longest gap {1e3 * gap:.0f} ms")
    assert before > 0
    # half: other programs run here too
    assert rate > before / 2
    assert gap < LONGEST_GAP


def test_tokens_keep_coming_while_the_engine_holds_the_gil(tmp_path):
    options = "--model", str(TINY), "--target", "cpu", "--sms", "1"
    with Child(tmp_path, *options, program=("-c", HOLD)) as child:
        load = Load(child.open())
        load.until(seconds_later(0.5))
        begin = time.monotonic()
        load.until(seconds_later(2))
        child.process.send_signal(signal.SIGUSR1)
        held = time.monotonic() + 0.1
        load.until(lambda: select.select([child.process.stdout], [], [], 0)[0])
        end = held + SECONDS
        assert child.says()["held"] > 0.95 * SECONDS, "no Python ran in between"
        expect_the_same_rate(load, begin, held, end)
        child.process.stdin.close()
        assert child.ends() == 0


@pytest.mark.cuda
def test_tokens_keep_coming_while_the_engine_process_is_stopped(tmp_path):
    with Child(tmp_path, "--model", str(TINY), "--target", "cuda") as child:
        load = Load(child.open())
        load.until(seconds_later(0.5))
        begin = time.monotonic()
        load.until(seconds_later(2))
        child.process.send_signal(signal.SIGSTOP)
        held = time.monotonic()
        try:
            load.until(seconds_later(SECONDS))
            end = time.monotonic()
        finally:
            child.process.send_signal(signal.SIGCONT)
        expect_the_same_rate(load, begin, held, end)
        child.process.stdin.close()
        assert child.ends() == 0
