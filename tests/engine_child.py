"""The engine as a child process, for tests: what it says, its window, and its orderly or violent end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_bench import Request

from blink_ref.nic.client import Handle, Nic
from blink_ref.ring.window import DIRECTORY, Window

ENGINE = ("-m", "blink_ref.engine")


class Child:
    """``python -m blink_ref.engine`` (or another `program` that keeps its contract) on a folder of its own."""

    def __init__(self, windows: Path, *options: str, program: tuple[str, ...] = ENGINE) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = os.environ | {DIRECTORY: str(windows)}
        command = [sys.executable, *program, *options]
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self._window: Window | None = None

    def says(self) -> dict[str, Any]:
        """The next line of its standard output."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def open(self, ready: dict[str, Any] | None = None) -> Window:
        """The window that its ready line names, from the NIC's side."""
        self._window = self._window or Window.open(Path((ready or self.says())["window"]))
        return self._window

    def ends(self, seconds: float = 20) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(seconds)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()
        if self._window is not None:
            self._window.close()


def wait_until(condition: Callable[[], Any], seconds: float = 10) -> None:
    """Return as soon as `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Client:
    """A Nic that keeps what comes, by request."""

    def __init__(self, window: Window) -> None:
        self.nic = Nic(window)
        self.tokens: dict[Handle, list[int]] = {}
        self.reasons: dict[Handle, int] = {}

    def submit(self, request: Request) -> Handle:
        """Put a request without filters into the ring."""
        prompt, *parameters = request[:5]
        handle = self.nic.submit(prompt, *parameters)
        self.tokens[handle] = []
        return handle

    def poll(self) -> int:
        """Take what has come; returns how many tokens that were."""
        count = 0
        for handle, token, reason, _ in self.nic.poll():
            if token is None:
                self.reasons[handle] = reason
            else:
                self.tokens[handle].append(token)
                count += 1
        return count

    def finish(self, handle: Handle, seconds: float = 30) -> list[int]:
        """The answer to a request, when it is whole."""

        def ended() -> bool:
            if handle not in self.reasons:  # once all has come, to poll a stopped engine is an error
                self.poll()
            return handle in self.reasons

        wait_until(ended, seconds)
        return self.tokens[handle]
