"""The engine as a child process: started, waited for, and ended, so that none is ever left behind.

The engine's standard input is a pipe whose other end this process holds and never writes to. However
this process ends, the pipe ends with it, and the engine takes that as the order to stop.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from blink_ref.errors import BlinkError
from blink_ref.ring.window import Window, default_directory, reap

ENGINE = "BLINK_REF_ENGINE"
"""The environment variable that names another engine command: a wrapper (a profiler), or a test's double."""
SHOW_AFTER = 2.0
STOP_PATIENCE = 5.0
TERMINATE_PATIENCE = 3.0


@dataclass(frozen=True)
class Ready:
    """What the engine says once its kernel serves."""

    window: str
    """path of the window"""
    target: str
    """``cuda``, ``cpu`` or ``python``"""
    pid: int
    bytes_per_token: int
    """bytes that one token of one request must read from memory: weights, mostly"""
    bandwidth: float
    """bytes per second that the device's memory can deliver"""
    blocks: int
    context: int
    """most tokens of prompt and answer together"""


class Engine(NamedTuple):
    """A serving engine: what it said, and its window, opened from the NIC's side."""

    ready: Ready
    window: Window


@contextmanager
def engine_process(
    model: Path,
    target: str,
    sms: int = 0,
    debug: bool = False,
    scheduler_block: bool | None = None,
    batch_invariant: bool = False,
    kv_dtype: str | None = None,
) -> Iterator[Engine]:
    """A child process that serves the model in the directory ``model``; left, it is gone.

    ``target`` is one of ``auto``, ``cuda``, ``cpu``, ``python``; ``sms`` the number of blocks, 0 = the
    engine's choice; with ``debug`` the engine shows its tracebacks; with ``scheduler_block`` block 0 only
    schedules (None = the engine's choice); with ``batch_invariant`` a request's tokens never depend on what is
    computed beside it; ``kv_dtype`` is what keys and values are stored as, ``float32`` or ``bfloat16`` (None = the
    engine's choice). Waits until the engine serves, with a note on the terminal if that takes long.

    Raises BlinkError: the engine cannot be started, or does not come to serve.
    """
    options = ["--debug"] * debug + ["--batch-invariant"] * batch_invariant
    if scheduler_block is not None:
        options.append("--scheduler-block" if scheduler_block else "--no-scheduler-block")
    if kv_dtype is not None:
        options += ["--kv-dtype", kv_dtype]
    process = _spawn(["--model", str(model), "--target", target, "--sms", str(sms), *options])
    window = None
    try:
        ready = _parse(_first_line(process))
        window = Window.open(Path(ready.window))
        yield Engine(ready, window)
    finally:
        _end(process, window)


def _spawn(options: list[str]) -> subprocess.Popen:
    command = shlex.split(os.environ.get(ENGINE, "")) or [sys.executable, "-m", "blink_ref.engine"]
    command += options
    try:
        # A session of its own: ctrl-C on the terminal reaches only this process, which then ends the
        # engine in order.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise BlinkError(f"cannot start the engine {command[0]} ({error.strerror}); look at {ENGINE}") from None


def _end(process: subprocess.Popen, window: Window | None) -> None:
    """Ask by the stop word, then by SIGTERM, then end by SIGKILL; then clear away what a killed engine left.

    An interrupt (ctrl-C) during the waits goes to the SIGKILL at once.
    """
    try:
        if window is not None:
            window.nic["stop"][0] = 1
            _wait(process, STOP_PATIENCE)
        if process.poll() is None:
            process.terminate()
            _wait(process, TERMINATE_PATIENCE)
    finally:
        with process:  # closes the pipes, and waits
            process.kill()
        if window is not None:
            window.close()
        reap(default_directory())


def _wait(process: subprocess.Popen, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _first_line(process: subprocess.Popen) -> bytes:
    """The first line that the engine prints, and a note on the terminal as long as it takes."""
    assert process.stdout is not None
    pipe, line = process.stdout.fileno(), b""
    started = time.monotonic()
    with _Note() as note:
        while not line.endswith(b"\n"):
            if select.select([pipe], [], [], 0.5)[0]:
                piece = os.read(pipe, 65536)
                if not piece:
                    raise BlinkError(_obituary(process))
                line += piece
            elif time.monotonic() - started > SHOW_AFTER:
                note.show(f"starting the engine: {time.monotonic() - started:.0f} s (longest at first use)")
    return line


def _obituary(process: subprocess.Popen) -> str:
    _wait(process, TERMINATE_PATIENCE)
    code = process.returncode
    if code is None:
        how = "closed its standard output"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    return f"the engine (process {process.pid}) {how} before it served; its own messages are above"


class _Note:
    """One changing line on standard error, if that is a terminal; wiped at the end."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            self._shown = True
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "_Note":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _parse(line: bytes) -> Ready:
    try:
        said = json.loads(line)
        if "error" in said:
            raise BlinkError(said["error"])
        return Ready(**{field.name: said[field.name] for field in fields(Ready)})
    except (ValueError, KeyError, TypeError):
        raise BlinkError(
            f"the engine said {line[:200]!r} and not that it serves; is it of this version?"
        ) from None
