"""The engine's process: what it says, what it obeys, and that nothing of it is left behind."""

import functools
import os
import random
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from engine_bench import TINY, Bench, Request, answers_alone, chosen, mixed_requests, tiny
from engine_child import Child, Client, wait_until

from blink_ref.ring.layout import CANCEL, LENGTH, SERVING, SHUTDOWN, STOP, STOPPED, Layout
from blink_ref.ring.window import Window
from blink_ref.simt.launch import why_no_cuda

OPTIONS = ("--model", str(TINY), "--target", "cpu", "--sms", "1")
FAST = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
REQUEST = Request((16, 44, 291), 24, 0.8, 5, True)
LONG = Request((16, 44, 291), 1000, 0.0, 0, True)


def options_for(target):
    """Those with which an answer is the same in any company, and as :func:`alone` says."""
    exact = "--batch-invariant", "--kv-dtype", "float32"
    return OPTIONS if target == "cpu" else ("--model", str(TINY), "--target", target, *exact)


@functools.cache
def alone(target):
    return answers_alone(Bench(tiny(), chosen(tiny()[0], target)))


@pytest.fixture
def child(tmp_path):
    with Child(tmp_path, *OPTIONS) as child:
        yield child


@pytest.fixture(scope="module", params=FAST)
def serving(request, tmp_path_factory):
    """An engine that serves all tests that do not end it, and its target."""
    with Child(tmp_path_factory.mktemp("windows"), *options_for(request.param)) as child:
        child.open()
        yield child, request.param


def left(folder):
    """What an engine has left of its window."""
    return list(folder.iterdir())


def test_the_ready_line_says_what_a_nic_needs(child):
    ready = child.says()
    window = child.open(ready)
    config, weights = tiny()
    assert ready["pid"] == child.process.pid == window.engine_pid
    assert (ready["target"], ready["blocks"], ready["context"]) == ("cpu", 1, config.context)
    assert ready["bytes_per_token"] == 2 * config.parameters
    assert 1e8 < ready["bandwidth"] < 1e13
    assert window.layout.context == config.context
    assert window.layout.vocab == config.vocab
    assert weights.flat.itemsize == 2


def test_requests_through_the_process_get_the_answers_of_the_kernel(serving):
    child, target = serving
    requests = [REQUEST, *(Request((n, 7), 30, 0.5, n, n % 2 == 0) for n in range(12))]
    client = Client(child.open())
    handles = [client.submit(request) for request in requests]
    for handle, request in zip(handles, requests, strict=True):
        assert client.finish(handle) == alone(target)(request).tokens


def test_seconds_of_random_arrivals_and_cancels_disturb_no_answer(serving):
    """The kernel scans, admits and publishes while this process writes; slots are used over and over."""
    child, target = serving
    draw, known = random.Random(1), mixed_requests(tiny()[0], 32, longest=60, max_tokens=40)
    client, asked, cancelled = Client(child.open()), {}, set()
    deadline = time.monotonic() + 3
    while client.nic.running or time.monotonic() < deadline:
        if time.monotonic() < deadline and client.nic.running < draw.randrange(64):
            request = draw.choice(known)
            asked[client.submit(request)] = request
        if client.nic.running and draw.random() < 0.05:
            victim = draw.choice([handle for handle in asked if handle not in client.reasons])
            client.nic.cancel(victim)
            cancelled.add(victim)
        client.poll()
    assert len(asked) > 100
    for handle, request in asked.items():
        tokens, expected = client.tokens[handle], alone(target)(request)
        if client.reasons[handle] == CANCEL:
            assert handle in cancelled
            assert tokens == expected.tokens[: len(tokens)]
        else:
            assert (tokens, client.reasons[handle]) == expected
    assert {CANCEL, LENGTH, STOP} == set(client.reasons.values())


def test_the_python_target_serves_through_its_process_too(tmp_path):
    with Child(tmp_path, "--model", str(TINY), "--target", "python") as child:
        ready = child.says()
        assert (ready["target"], ready["blocks"]) == ("python", 2)
        client = Client(child.open(ready))
        request = Request((16,), 1)
        in_process = answers_alone(Bench(tiny(), chosen(tiny()[0])))
        assert client.finish(client.submit(request)) == in_process(request).tokens
        child.process.stdin.close()
        assert child.ends() == 0
        assert not left(tmp_path)


def test_the_heart_beats_while_it_serves_and_while_it_idles(serving):
    beats = serving[0].open().gpu["heartbeat"]
    wait_until(lambda: beats[2] == SERVING)
    steps = int(beats[1])
    for _ in range(3):
        before = int(beats[0])
        wait_until(lambda before=before: beats[0] > before, 2)
    assert beats[1] == steps, "and no step runs without a request"


def close_input(child, window):
    child.process.stdin.close()


def terminate(child, window):
    child.process.terminate()


def set_stop_word(child, window):
    window.nic["stop"][0] = 1


STOPS = [
    *product(["cpu"], [close_input, terminate, set_stop_word], [False, True]),
    pytest.param("cuda", terminate, True, marks=pytest.mark.cuda),
]


@pytest.mark.parametrize(("target", "order", "busy"), STOPS)
def test_each_order_to_stop_ends_it_in_order_and_its_requests_with_shutdown(tmp_path, target, order, busy):
    with Child(tmp_path, *options_for(target)) as child:
        window = child.open()
        client = Client(window)
        handles = [client.submit(LONG) for _ in range(3 * busy)]
        wait_until(lambda: not busy or client.poll())
        order(child, window)
        assert child.ends() == 0
        assert not left(tmp_path)
        assert window.gpu["heartbeat"][2] == STOPPED
        for handle in handles:
            tokens = client.finish(handle)
            assert client.reasons[handle] == SHUTDOWN
            assert tokens == alone(target)(LONG).tokens[: len(tokens)]


def test_ctrl_c_is_for_its_parent(serving):
    child, _ = serving
    child.process.send_signal(signal.SIGINT)
    client = Client(child.open())
    assert len(client.finish(client.submit(REQUEST))) == REQUEST.max_tokens
    assert child.process.poll() is None


def test_a_killed_engine_leaves_a_window_that_the_next_start_removes(child, tmp_path):
    window = child.open()
    client = Client(window)
    client.submit(LONG)
    wait_until(client.poll)
    child.process.kill()
    child.process.wait()
    assert left(tmp_path) == [window.path]
    assert not window.alive()
    with Child(tmp_path, *OPTIONS) as second:
        successor = second.open()
        assert left(tmp_path) == [successor.path]


def test_the_end_of_whoever_started_it_ends_it_too(tmp_path):
    """Also by SIGKILL: then the pipe that is its standard input ends."""
    program = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "blink_ref.engine", *sys.argv[1:]], stdin=subprocess.PIPE).wait()
"""
    with Child(tmp_path, *OPTIONS, program=("-c", program)) as parent:
        ready = parent.says()
        window = parent.open(ready)
        parent.process.kill()
        wait_until(lambda: not window.alive())
        wait_until(lambda: not left(tmp_path))


def test_it_ends_at_once_when_its_parent_ends_while_it_still_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path / "cache"))
    windows = tmp_path / "windows"
    windows.mkdir()
    with Child(windows, *OPTIONS) as child:
        wait_until(lambda: left(windows))
        time.sleep(0.2)
        child.process.stdin.close()
        assert child.ends(3) == 1
        assert not left(windows)


def test_two_engines_serve_side_by_side(tmp_path):
    with Child(tmp_path, *OPTIONS) as first, Child(tmp_path, *OPTIONS) as second:
        clients = [Client(child.open()) for child in (first, second)]
        handles = [client.submit(REQUEST) for client in clients]
        answers = [client.finish(handle) for client, handle in zip(clients, handles, strict=True)]
        assert answers[0] == answers[1]
        first.process.terminate()
        assert first.ends() == 0
        assert len(clients[1].finish(clients[1].submit(REQUEST))) == REQUEST.max_tokens


# --- what cannot be served


def copy_of_tiny(folder, **changes):
    for file in TINY.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).write_bytes(changes.get(file.name, file.read_bytes()))
    return folder


def refused(windows, *options, code=1):
    """What an engine says that does not come to serve: one line, and nothing stays."""
    with Child(windows, *options) as child:
        said = child.says()
        assert child.ends() == code
        assert child.process.stdout.read() == child.process.stderr.read() == ""
    assert not windows.exists() or not left(windows)
    return said["error"]


@pytest.fixture
def windows(tmp_path):
    folder = tmp_path / "windows"
    folder.mkdir()
    return folder


def test_a_missing_folder_is_said_in_one_line(windows, tmp_path):
    error = refused(windows, "--model", str(tmp_path / "none"), "--target", "cpu")
    assert "config.json is missing; a model is a directory in Hugging Face layout" in error


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b'{"model_type": "gpt2"}', "architecture 'gpt2' is not served"),
        ("model.safetensors", b"", "model.safetensors"),
        ("model.safetensors", (TINY / "model.safetensors").read_bytes()[:100000], "model.safetensors"),
    ],
    ids=["broken config", "other architecture", "empty weights", "truncated weights"],
)
def test_a_damaged_model_is_said_in_one_line(windows, tmp_path, file, content, complaint):
    model = tmp_path / "model"
    model.mkdir()
    copy_of_tiny(model, **{file: content})
    assert complaint in refused(windows, "--model", str(model), "--target", "cpu")


def test_an_unknown_target_is_said_in_one_line(windows):
    error = refused(windows, "--model", str(TINY), "--target", "tpu")
    assert "target 'tpu' is not known; choose one of" in error


@pytest.mark.skipif(not why_no_cuda(), reason="there is a GPU")
def test_a_missing_gpu_is_said_in_one_line(windows):
    assert "target 'cuda' is not available" in refused(windows, "--model", str(TINY), "--target", "cuda")


def test_a_missing_folder_for_windows_is_said_in_one_line(tmp_path):
    error = refused(tmp_path / "none", *OPTIONS)
    assert "cannot create a window in" in error
    assert "BLINK_REF_WINDOW_DIR" in error


def test_no_room_for_the_window_is_said_in_one_line(windows):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(windows)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs of 1 MB needs root; run the test as root")
    try:
        assert "no room for a window of" in refused(windows, *OPTIONS)
    finally:
        subprocess.run(["umount", str(windows)], check=True)


def test_debug_shows_the_traceback_too(windows, tmp_path):
    with Child(windows, "--model", str(tmp_path), "--target", "cpu", "--debug") as child:
        assert "config.json is missing" in child.says()["error"]
        assert child.ends() == 1
        assert "Traceback" in child.process.stderr.read()


def test_a_dead_window_of_another_layout_does_not_hinder_a_start(tmp_path, child):
    child.open()
    program = """
import os, sys
from pathlib import Path
from blink_ref.ring.layout import Layout
from blink_ref.ring.window import Window
Window.create(Layout(slots=2), directory=Path(sys.argv[1]))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    assert len(left(tmp_path)) == 2
    third = Window.create(Layout(slots=2), os.getpid(), Path(tmp_path))
    assert len(left(tmp_path)) == 2, "the dead one is gone, and the one in use is not"
    third.unlink()
    third.close()
