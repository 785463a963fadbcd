"""What the tests of whole processes share: engines to run them with, and looking after what they leave."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from blink_ref.errors import BlinkError
from blink_ref.ring.window import Window

COMMAND = [sys.executable, "-m", "blink_ref"]
FAKE = shlex.join([sys.executable, str(Path(__file__).with_name("fake_engine.py"))])


class Served(NamedTuple):
    """A server that runs, what it said of itself, and a client of it."""

    process: subprocess.Popen
    said: dict
    http: httpx.Client


@dataclass(frozen=True)
class Bench:
    """A folder for windows, and the engine that commands run with."""

    windows: Path
    engine: dict[str, str] = field(default_factory=dict)

    def start(self, *args: str, **options) -> subprocess.Popen:
        """Run ``blink-ref`` with ``args``; its streams are pipes unless ``options`` say otherwise."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Tests may run in the background, where a shell has set SIGINT to be ignored.
        options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes, **options}
        environment = {**os.environ, **self.engine, "BLINK_REF_WINDOW_DIR": str(self.windows)}
        return subprocess.Popen([*COMMAND, *args], env=environment, **options)

    def run(self, *args: str, stdin: bytes = b"", code: int = 0) -> tuple[str, str]:
        """Run to the end, which is to be with ``code``; returns what it printed on both streams."""
        process = self.start(*args, stdin=subprocess.PIPE)
        out, err = process.communicate(stdin, timeout=120)
        assert process.returncode == code, err.decode()
        return out.decode(), err.decode()

    @contextmanager
    def serve(self, *args: str) -> Iterator["Served"]:
        """``blink-ref serve`` of the tiny model on a free port; left by SIGTERM, unless it has ended."""
        process = self.start("serve", "--model", "tiny", "--port", "0", "--json", *args)
        try:
            said = json.loads(process.stdout.readline())
            with httpx.Client(base_url=said["url"], timeout=60) as http:
                yield Served(process, said, http)
        finally:
            process.terminate()
            process.communicate(timeout=20)

    def fake(self, **script) -> "Bench":
        """The same with a fake engine that follows ``script``."""
        return Bench(self.windows, {"BLINK_REF_ENGINE": FAKE, "FAKE_ENGINE": json.dumps(script)})

    def engine_pid(self) -> int:
        """Process id of the one engine that serves here."""
        for _ in range(1000):
            for path in self.windows.iterdir():
                try:
                    return Window.open(path).engine_pid
                except BlinkError:  # not ready yet
                    pass
            time.sleep(0.05)
        pytest.fail("no engine serves")

    def left(self) -> list[Path]:
        """Windows that still lie there."""
        return list(self.windows.iterdir())


# The tests that kill processes run with both. Ten milliseconds a token leave time to kill in mid-stream.
ENGINES = {"fake": {"BLINK_REF_ENGINE": FAKE, "FAKE_ENGINE": '{"delay": 0.01}'}, "real": {}}


def wait_until_gone(pid: int, seconds: float = 10) -> None:
    """Wait for the end of a process that is not ours to wait for."""
    stat, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + seconds
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > deadline:
            pytest.fail(f"process {pid} is still there")
        time.sleep(0.02)


def wait_until_running(http, n: int, seconds: float = 5) -> None:
    """Return when the server says that n requests run; the engine's heartbeat is a step behind its records."""
    deadline = time.monotonic() + seconds
    while (running := http.get("/health").json()["running"]) != n:
        assert time.monotonic() < deadline, f"{running} requests run, not {n}"
        time.sleep(0.02)
