"""The window's file: creation, liveness, clearing away."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from blink_ref.errors import BlinkError
from blink_ref.ring import window as window_module
from blink_ref.ring.layout import LINE, PAGE, VERSION, Layout
from blink_ref.ring.window import Window, default_directory, reap

SMALL = Layout(slots=64, workers=2, arena=256, outbox=16, context=100, vocab=300)

HOLD = """
import sys, time
from pathlib import Path
from blink_ref.ring.layout import Layout
from blink_ref.ring.window import Window
window = Window.create(Layout(slots=64), directory=Path(sys.argv[1]))
print(window.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def window(tmp_path):
    window = Window.create(SMALL, directory=tmp_path)
    yield window
    window.unlink()
    window.close()


@pytest.fixture
def holder(tmp_path):
    """A process that holds a window in ``tmp_path``; the window's path comes with it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    path = tmp_path / process.stdout.readline().strip()
    yield process, path
    process.kill()
    process.communicate()


def test_both_sides_see_the_same_memory_and_sizes(window):
    peer = Window.open(window.path)
    assert peer.layout == SMALL
    assert peer.engine_pid == os.getpid()
    peer.nic["doorbell"][5] = 7
    peer.nic["request"][5]["temperature"] = 0.5
    window.gpu["heartbeat"][1] = 2**40
    assert window.nic["doorbell"][5] == 7
    assert window.nic["request"][5]["temperature"] == 0.5
    assert peer.gpu["heartbeat"][1] == 2**40
    peer.close()


def test_a_new_window_is_zero_but_for_its_header(window):
    assert not window.nic.tobytes()[LINE:].strip(b"\0")
    assert not window.gpu.tobytes().strip(b"\0")


def test_the_halves_are_page_aligned(window):
    nic, gpu = window.nic.ctypes.data, window.gpu.ctypes.data
    assert nic % PAGE == 0
    assert gpu == nic + SMALL.nic_half.itemsize
    assert SMALL.nic_half.itemsize % PAGE == 0


def test_the_nic_cannot_write_the_half_of_the_gpu(window):
    peer = Window.open(window.path)
    for name in peer.gpu.dtype.names:
        with pytest.raises(ValueError, match="read-only"):
            peer.gpu[name][0] = 1
    peer.close()


def test_only_its_user_can_read_the_file(window):
    assert window.path.stat().st_mode & 0o777 == 0o600
    assert window.path.stat().st_size == SMALL.size


def test_the_default_window_fits_the_shared_memory_of_a_container():
    assert Layout(vocab=49152, context=8192).size < 32e6


def test_the_peer_learns_that_the_engine_let_go(tmp_path):
    window = Window.create(SMALL, directory=tmp_path)
    peer = Window.open(window.path)
    assert peer.alive()
    assert peer.alive(), "asking must not take the lock away"
    window.unlink()
    window.close()
    assert not peer.alive()
    peer.close()


def test_the_peer_learns_that_the_engine_was_killed(holder):
    process, path = holder
    peer = Window.open(path)
    assert peer.alive()
    assert peer.engine_pid == process.pid
    process.kill()
    process.wait()
    assert not peer.alive()
    with pytest.raises(BlinkError, match="is gone; start an engine again"):
        Window.open(path)
    peer.close()


def test_children_of_the_engine_do_not_inherit_its_lock(tmp_path):
    window = Window.create(SMALL, directory=tmp_path)
    peer = Window.open(window.path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        window.close()
        assert not peer.alive()
        child.kill()
    peer.close()


def test_the_next_start_removes_the_window_of_a_killed_engine_and_no_other(holder, tmp_path):
    process, dead = holder
    living = Window.create(SMALL, directory=tmp_path)
    assert dead.exists(), "its engine still lives"
    process.kill()
    process.wait()
    stranger = tmp_path / "blink_ref-someone.window"
    stranger.touch()
    third = Window.create(SMALL, directory=tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, third.path, stranger])
    for window in (living, third):
        window.unlink()
        window.close()


def test_two_engines_have_windows_of_their_own(tmp_path):
    first, second = (Window.create(SMALL, directory=tmp_path) for _ in range(2))
    first.nic["doorbell"][:] = 1
    assert not second.nic["doorbell"].any()
    first.unlink()
    first.close()
    assert Window.open(second.path).alive()
    second.unlink()
    second.close()


def test_creating_and_reaping_do_not_race(tmp_path):
    stop = threading.Event()

    def keep_reaping():
        while not stop.is_set():
            reap(tmp_path)

    reapers = [threading.Thread(target=keep_reaping) for _ in range(2)]
    for reaper in reapers:
        reaper.start()
    deadline = time.monotonic() + 1
    try:
        while time.monotonic() < deadline:
            window = Window.create(SMALL, directory=tmp_path)
            assert Window.open(window.path).alive()
            window.unlink()
            window.close()
    finally:
        stop.set()
        for reaper in reapers:
            reaper.join()


def test_reaping_leaves_what_another_user_planted(tmp_path, monkeypatch):
    prefix = f"blink_ref-{os.getuid()}-"
    os.mkfifo(tmp_path / f"{prefix}pipe.window")
    (tmp_path / f"{prefix}link.window").symlink_to("/etc/passwd")
    assert reap(tmp_path) == []
    (tmp_path / "blink_ref-12345-theirs.window").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # a file of uid 12345 by name, not by owner
    assert reap(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_another_version_is_refused(window):
    window.nic["header"]["version"] = 99
    with pytest.raises(BlinkError, match=f"layout version 99, this program speaks {VERSION}; run engine and NIC"):
        Window.open(window.path)


@pytest.mark.parametrize("content", [b"", b"hello", bytes(10000)])
def test_a_file_that_is_no_window_is_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(BlinkError, match="is not a window"):
        Window.open(path)


def test_a_truncated_window_is_refused(window):
    os.truncate(window.path, SMALL.size - PAGE)
    with pytest.raises(BlinkError, match=f"has {SMALL.size - PAGE} bytes, its header says {SMALL.size}"):
        Window.open(window.path)


def test_a_missing_window_and_another_users_window_are_refused(window, tmp_path, monkeypatch):
    with pytest.raises(BlinkError, match="No such file"):
        Window.open(tmp_path / "none")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(BlinkError, match="not a file of user 12345"):
        Window.open(window.path)


def test_the_folder_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("BLINK_REF_WINDOW_DIR", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("BLINK_REF_WINDOW_DIR")
    monkeypatch.setattr(window_module, "SHARED_MEMORY", tmp_path / "none")
    assert default_directory().is_dir(), "without /dev/shm, the folder for temporary files"


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(BlinkError, match=r"none \(No such file or directory\); set BLINK_REF_WINDOW_DIR"):
        Window.create(SMALL, directory=tmp_path / "none")


def test_no_room_is_an_error_at_the_start_and_leaves_nothing(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs of 1 MB needs root; run the test as root")
    try:
        with pytest.raises(BlinkError, match=r"no room for a window of \d+\.\d MB in .* \(1\.0 MB are free\)"):
            Window.create(Layout(), directory=tmp_path)
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_view_outlives_its_window(tmp_path):
    window = Window.create(SMALL, directory=tmp_path)
    doorbell = window.nic["doorbell"]
    window.unlink()
    window.close()
    doorbell[:] = 3
    assert np.all(doorbell == 3)
