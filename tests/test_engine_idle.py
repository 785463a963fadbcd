"""An idle engine leaves the machine to others, and is there at once when it is wanted."""

import os
import statistics
import time
from pathlib import Path

import pytest
from engine_bench import TINY, Request
from engine_child import Child, Client

SILENCE = 1.0
"""Seconds after which an engine must be cheap."""
WATCHED = 3.0
MOST_CPU = 0.05
"""of one core"""
LATER = 0.005
"""Seconds that the first token may come later than from a busy engine."""
REQUEST = Request((16, 44, 291, 7), 8, 0.0, 0, True)


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    options = "--model", str(TINY), "--target", "cpu"
    with Child(tmp_path_factory.mktemp("windows"), *options) as child:
        child.open()
        yield child


def cpu_seconds(pid):
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_token(client):
    """Seconds from a request to its first token; leaves when it has ended."""
    begin = time.monotonic()
    handle = client.submit(REQUEST)
    while not client.poll():
        time.sleep(0.0001)
    latency = time.monotonic() - begin
    client.finish(handle)
    return latency


def test_an_idle_engine_uses_less_than_a_twentieth_of_a_core(child):
    first_token(Client(child.open()))
    time.sleep(SILENCE)
    before = cpu_seconds(child.process.pid)
    time.sleep(WATCHED)
    used = (cpu_seconds(child.process.pid) - before) / WATCHED
    print(f"{used:.1%} of a core")
    assert used < MOST_CPU


def test_an_idle_engine_answers_within_five_milliseconds_of_a_busy_one(child):
    client = Client(child.open())
    busy = statistics.median(first_token(client) for _ in range(15))
    idle = []
    for _ in range(5):
        time.sleep(1.2 * SILENCE)
        idle.append(first_token(client))
    print(f"busy {1e3 * busy:.1f} ms, idle {1e3 * statistics.median(idle):.1f} ms")
    assert statistics.median(idle) < busy + LATER
