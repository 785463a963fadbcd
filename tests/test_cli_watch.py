"""``blink-ref generate --watch`` on a terminal of 80 by 24, on a small one, and on none."""

import fcntl
import os
import select
import signal
import struct
import termios

import pytest
from processes import Bench

WATCH = ["generate", "--model", "tiny", "--ignore-eos", "--watch"]
ANSWER = "It is a truth universally acknowledged"
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal with a command on it."""

    def __init__(self, bench, *args, rows=24, term="xterm-256color"):
        self.master, self.end = os.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
        self.before = termios.tcgetattr(self.end)
        self.shown = b""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.end)
        bench.engine["TERM"] = term
        self.process = bench.start(*args, preexec_fn=self._own, **streams)

    def _own(self):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def read_until(self, text):
        """Read on until a text has been shown."""
        while text not in self.shown:
            assert select.select([self.master], [], [], 30)[0], self.shown
            self.shown += os.read(self.master, 65536)

    def read_to_the_end(self):
        """The exit code, when all has been read."""
        while self.process.poll() is None or select.select([self.master], [], [], 0.1)[0]:
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 65536)
        return self.process.returncode

    def left_as_it_was(self):
        """Modes as before, and the cursor to be seen."""
        return termios.tcgetattr(self.end) == self.before and self.shown.rfind(SHOW) >= self.shown.rfind(HIDE)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.end)


@pytest.fixture
def terminal(tmp_path):
    made = []

    def start(*args, **options):
        made.append(Terminal(Bench(tmp_path).fake(delay=0.02), *args, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_the_view_is_drawn_and_at_the_end_the_whole_answer_stands_below_it(terminal):
    screen = terminal(*WATCH, "--max-tokens", "60", ANSWER)
    assert screen.read_to_the_end() == 0
    assert screen.shown.count("╭─".encode()) > 1
    last = screen.shown.rpartition("╰".encode())[2].decode()
    assert ANSWER in last.replace("\r\n", "\n")
    assert "first token after" in last.splitlines()[-1]
    assert screen.left_as_it_was()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_what_has_come_and_the_terminal_as_it_was(terminal, number, code):
    screen = terminal(*WATCH, "--max-tokens", "900", ANSWER)
    screen.read_until(b"universally")
    screen.process.send_signal(number)
    assert screen.read_to_the_end() == code
    assert b"It is a truth universally" in screen.shown.rpartition("╰".encode())[2]
    assert b"Traceback" not in screen.shown
    assert screen.left_as_it_was()


def test_an_engine_killed_in_mid_stream_leaves_the_terminal_as_it_was(terminal, tmp_path):
    screen = terminal(*WATCH, "--max-tokens", "900", ANSWER)
    screen.read_until(b"universally")
    os.kill(Bench(tmp_path).engine_pid(), signal.SIGKILL)
    assert screen.read_to_the_end() == 1
    assert b"blink-ref: error: the engine" in screen.shown
    assert screen.left_as_it_was()


@pytest.mark.parametrize("options", [{"rows": 16}, {"term": "dumb"}], ids=["16 rows", "dumb"])
def test_a_terminal_that_cannot_hold_the_view_gets_plain_lines(terminal, options):
    screen = terminal(*WATCH, "--max-tokens", "20", ANSWER, **options)
    assert screen.read_to_the_end() == 0
    assert "╭".encode() not in screen.shown
    assert HIDE not in screen.shown


def test_without_a_terminal_the_output_is_the_same_with_and_without_it(tmp_path):
    bench = Bench(tmp_path).fake()
    plain, _ = bench.run("generate", "--model", "tiny", "--max-tokens", "20", ANSWER)
    assert bench.run("generate", "--model", "tiny", "--max-tokens", "20", "--watch", ANSWER)[0] == plain
