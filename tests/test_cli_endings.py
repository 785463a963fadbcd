"""How ``blink-ref generate`` ends when it does not end by itself: signals, kills, pipes, terminals."""

import fcntl
import os
import re
import signal
import termios
import time

import pytest
from processes import ENGINES, Bench, wait_until_gone

PROMPT = "It is a truth — 😀"
LONG = ["generate", "--model", "tiny", "--max-tokens", "1000", "--ignore-eos", PROMPT]


@pytest.fixture(params=ENGINES)
def bench(request, tmp_path):
    return Bench(tmp_path, ENGINES[request.param])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_in_mid_stream_ends_everything_in_order(bench, number, code):
    process = bench.start(*LONG)
    assert process.stdout.read(5)
    engine = bench.engine_pid()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert err == b""
    wait_until_gone(engine, 0)
    assert bench.left() == []


def test_an_interrupt_while_the_engine_starts_ends_everything(tmp_path):
    bench = Bench(tmp_path).fake(startup=30)
    process = bench.start(*LONG)
    time.sleep(1)
    (engine,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, b"")
    wait_until_gone(engine, 0)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(child) for child in listed.read().split()]


def test_an_engine_killed_in_mid_stream_is_one_line_and_leaves_nothing(bench):
    process = bench.start(*LONG)
    assert process.stdout.read(5)
    engine = bench.engine_pid()
    os.kill(engine, signal.SIGKILL)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert err.decode().splitlines() == [
        f"blink-ref: error: the engine (process {engine}) died; look above for its last words and start it again"
    ]
    assert bench.left() == []


def test_a_nic_killed_in_mid_stream_leaves_no_engine_and_the_next_start_clears_up(bench):
    process = bench.start(*LONG)
    assert process.stdout.read(5)
    engine = bench.engine_pid()
    process.kill()
    process.communicate()
    wait_until_gone(engine)
    bench.run("generate", "--model", "tiny", "--max-tokens", "1", "x")
    assert bench.left() == []


def test_nic_and_engine_killed_together_leave_nothing_after_the_next_start(bench):
    process = bench.start(*LONG)
    assert process.stdout.read(5)
    engine = bench.engine_pid()
    os.kill(engine, signal.SIGKILL)
    process.kill()
    process.communicate()
    wait_until_gone(engine)
    assert len(bench.left()) == 1
    bench.run("generate", "--model", "tiny", "--max-tokens", "1", "x")
    assert bench.left() == []


def test_a_reader_that_has_enough_ends_the_command_without_a_word(bench):
    process = bench.start(*LONG)
    assert process.stdout.read(5)
    engine = bench.engine_pid()
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr.read() == b""
    wait_until_gone(engine, 0)
    process.stderr.close()


def test_ctrl_c_on_a_terminal_leaves_it_as_it_was(tmp_path):
    bench = Bench(tmp_path).fake(startup=3, delay=0.01)
    master, terminal = os.openpty()
    before = termios.tcgetattr(terminal)

    def own_the_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = bench.start(*LONG, preexec_fn=own_the_terminal, **streams)
    shown = b""
    while PROMPT.encode() not in shown:
        shown += os.read(master, 1000)
    assert re.search(rb"\rstarting the engine: \d s.*\r\x1b\[K", shown), "a note, wiped when the engine serves"
    engine = bench.engine_pid()
    os.write(master, b"\x03")
    assert process.wait(10) == 130
    wait_until_gone(engine, 0)
    assert termios.tcgetattr(terminal) == before
    assert b"Traceback" not in os.read(master, 10000)
    os.close(master)
    os.close(terminal)
