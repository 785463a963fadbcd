"""``blink-ref trace``: what the scheduler does, as a file for Perfetto and as a picture."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import resolve
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.nic.client import Busy, Nic
from blink_ref.nic.engine_process import engine_process
from blink_ref.nic.parameters import Parameters
from blink_ref.ring.layout import (
    BEAT_STATE,
    EVENT_ADMIT,
    EVENT_FINISH,
    EVENT_PAUSE,
    EVENT_PREEMPT,
    REASONS,
    STOPPED,
)
from blink_ref.ring.window import Window, default_directory

from .perfetto import trace_events
from .picture import picture
from .record import Recorder, Recording
from .scenario import scenario
from .timeline import Timeline, timeline

SHORTEST_PAUSE = 0.0002
"""Seconds between two looks while requests are still to be submitted."""
PAUSE = 0.005
"""Seconds between two looks at an engine that others use: thousands of times less than its ring lasts."""
QUIET, MOST_QUIET = 0.05, 2.0
"""Seconds without an event after which an idle engine has counted all, and how long that is waited for."""


class Prepared(NamedTuple):
    """A request to submit once so many tokens have come."""

    after: int
    prompt: list[int]
    parameters: Parameters


def run(args: argparse.Namespace) -> int:
    """The command. Raises BlinkError."""
    _check_folders(args.out, args.picture)
    if args.attach is not None:
        if args.prompt or args.file:
            raise BlinkError("--attach records the requests of others; leave the prompts out")
        return _write(args, *_attach(args.attach, args.seconds))
    path = resolve(args.model)
    config, tokenizer = ModelConfig.load(path), Tokenizer.load(path)
    requests = _prepare([*args.prompt, *_lines(args.file)], args.max_tokens, config, tokenizer)
    with (
        engine_process(
            path, args.target, args.sms, args.debug, args.scheduler_block, args.batch_invariant, args.kv_dtype
        ) as engine,
        Recorder(engine.window) as recorder,
    ):
        _serve(Nic(engine.window), requests, recorder)
        _settle(recorder)
    ready = engine.ready
    blocks = "1 block" if ready.blocks == 1 else f"{ready.blocks} blocks"
    return _write(args, recorder.recording, f"{config.name} on {ready.target}, {blocks}")


def _prepare(prompts: list[str], most: int | None, config: ModelConfig, tokenizer: Tokenizer) -> list[Prepared]:
    prepared = []
    for request in scenario(prompts, most):
        tokens = tokenizer.encode(request.prompt, allow_special=True)
        parameters = Parameters(request.max_tokens, urgent=request.urgent, ignore_eos=request.ignore_eos)
        parameters.check(tokens, config.context, config.vocab)
        prepared.append(Prepared(request.after, tokens, parameters))
    return prepared


def _serve(nic: Nic, requests: Sequence[Prepared], recorder: Recorder) -> None:
    """Submit the requests, each when it is due, and see them through."""
    todo, came = list(requests), 0
    while todo or nic.running:
        while todo and (came >= todo[0].after or not nic.running):
            try:
                nic.submit_samples(todo[0].prompt, todo[0].parameters, 1)
            except Busy:
                if not nic.running:
                    raise
                break
            todo.pop(0)
        events = nic.poll()
        came += sum(event.token is not None for event in events)
        recorder.poll()
        if not events:
            time.sleep(SHORTEST_PAUSE if todo else nic.pause())


def _settle(recorder: Recorder) -> None:
    """Wait until an engine that has nothing to do has counted its last events."""
    begin = last = time.monotonic()
    while last + QUIET > time.monotonic() < begin + MOST_QUIET:
        if recorder.poll():
            last = time.monotonic()
        time.sleep(PAUSE)


def _attach(name: str, seconds: float) -> tuple[Recording, str]:
    """Record an engine that runs, until the time is over, it stops, or somebody interrupts."""
    window = Window.open(Path(name) if name else _only_window())
    end = time.monotonic() + seconds
    if sys.stderr.isatty():
        print(f"recording for {seconds:g} s; ctrl-C ends it sooner", file=sys.stderr)
    with Recorder(window) as recorder:
        try:
            while time.monotonic() < end and window.alive() and window.gpu["heartbeat"][BEAT_STATE] != STOPPED:
                recorder.poll()
                time.sleep(min(PAUSE, max(end - time.monotonic(), 0)))
        except KeyboardInterrupt:
            pass
    title = f"the engine of process {window.engine_pid}"
    window.close()
    return recorder.recording, title


def _only_window() -> Path:
    """The window of the one engine of this user that runs. Raises BlinkError: there is none, or a choice."""
    found = []
    for path in sorted(default_directory().glob("blink_ref-*.window")):
        try:
            Window.open(path).close()
        except BlinkError:  # another user's, or one whose engine is gone
            continue
        found.append(str(path))
    if len(found) != 1:
        many = f"{len(found)} engines run ({', '.join(found)}); name one" if found else "no engine runs; start one"
        raise BlinkError(f"{many}, for instance with `blink-ref trace --attach WINDOW`")
    return Path(found[0])


def _lines(file: str | None) -> list[str]:
    """The prompts of a file, one a line; none without a file."""
    if file is None:
        return []
    try:
        lines = [line for line in Path(file).read_text().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise BlinkError(f"cannot read prompts from {file}: {error}") from None
    if not lines:
        raise BlinkError(f"there is no prompt in {file}; write one a line")
    return lines


def _check_folders(*paths: str) -> None:
    """Before anything runs: can these files be written?"""
    for path in map(Path, paths):
        if not path.parent.is_dir():
            raise BlinkError(f"there is no folder {path.parent} for {path.name}; make it first")
        if path.is_dir():
            raise BlinkError(f"{path} is a folder; name a file in it")


def _write(args: argparse.Namespace, recording: Recording, title: str) -> int:
    line = timeline(recording)
    if not line.steps:
        raise BlinkError(f"{title} did no step while it was recorded; is there a request that runs?")
    Path(args.out).write_text(json.dumps(trace_events(line, title), separators=(",", ":")))
    Path(args.picture).write_text(picture(line, title))
    said = _summary(line, recording) | {"trace": args.out, "picture": args.picture}
    if args.json:
        print(json.dumps(said))
        return 0
    ends = ", ".join(f"{n} {reason}" for reason, n in said["ends"].items())
    print(f"{title}: {line.requests} requests ({ends}), {len(line.steps)} steps in {said['seconds']:.3g} s")
    print(f"{recording.count} events, {recording.lost} lost")
    print(f"{args.out}: open it at https://ui.perfetto.dev")
    print(f"{args.picture}: the slots over the steps, and the pages; any browser shows it")
    return 0


def _summary(line: Timeline, recording: Recording) -> dict:
    events = [mark.event for mark in line.marks]
    kinds = Counter(event.kind for event in events)
    return {
        "requests": line.requests,
        "steps": len(line.steps),
        "seconds": (line.end - line.begin) / 1e9,
        "ends": Counter(REASONS.get(event.value, "?") for event in events if event.kind == EVENT_FINISH),
        "found_in_cache": sum(event.value for event in events if event.kind == EVENT_ADMIT),
        "preempted": kinds[EVENT_PREEMPT],
        "paused": kinds[EVENT_PAUSE],
        "events": recording.count,
        "lost": recording.lost,
    }
