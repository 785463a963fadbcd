"""Starting and ending the engine's process."""

import json
import os
import time

import pytest
from processes import FAKE, wait_until_gone

from blink_ref.errors import BlinkError
from blink_ref.model.store import TINY
from blink_ref.nic import engine_process as module
from blink_ref.nic.engine_process import engine_process


@pytest.fixture
def windows(tmp_path, monkeypatch):
    """The folder of the windows; the engine is a fake one."""
    monkeypatch.setenv("BLINK_REF_WINDOW_DIR", str(tmp_path))
    monkeypatch.setenv("BLINK_REF_ENGINE", FAKE)
    monkeypatch.delenv("FAKE_ENGINE", raising=False)
    return tmp_path


def test_it_serves_inside_the_context_and_is_gone_after_it(windows):
    with engine_process(TINY, "python", sms=3) as engine:
        assert engine.window.alive()
        assert engine.window.engine_pid == engine.ready.pid
        assert (engine.ready.target, engine.ready.blocks, engine.ready.context) == ("python", 3, 1024)
    wait_until_gone(engine.ready.pid, 0)
    assert list(windows.iterdir()) == []


def test_it_is_gone_after_an_error_too(windows):
    with pytest.raises(ZeroDivisionError), engine_process(TINY, "auto") as engine:
        raise ZeroDivisionError
    wait_until_gone(engine.ready.pid, 0)
    assert list(windows.iterdir()) == []


def test_an_engine_that_ignores_every_request_to_end_is_killed(windows, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"stubborn": True}))
    monkeypatch.setattr(module, "STOP_PATIENCE", 0.2)
    monkeypatch.setattr(module, "TERMINATE_PATIENCE", 0.2)
    started = time.monotonic()
    with engine_process(TINY, "auto") as engine:
        pass
    assert time.monotonic() - started < 5
    wait_until_gone(engine.ready.pid, 0)
    assert list(windows.iterdir()) == [], "what it could not remove itself is removed"


def test_an_impatient_user_gets_it_killed_at_once(windows, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"stubborn": True}))

    def interrupted(process, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt), engine_process(TINY, "auto") as engine:
        pass
    wait_until_gone(engine.ready.pid, 0)
    assert list(windows.iterdir()) == []


def test_a_ready_line_of_another_version_is_refused(windows, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"noise": "hello "}))
    with pytest.raises(BlinkError, match=r"the engine said b'hello .* and not that it serves"):
        engine_process(TINY, "auto").__enter__()
    assert list(windows.iterdir()) == []


def test_nothing_is_shown_while_it_starts_quickly_or_without_a_terminal(windows, monkeypatch, capfd):
    monkeypatch.setattr(module, "SHOW_AFTER", 0)
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"startup": 1}))
    with engine_process(TINY, "auto"):
        pass
    assert capfd.readouterr() == ("", "")


def test_the_engine_is_not_in_the_terminals_foreground(windows):
    with engine_process(TINY, "auto") as engine:
        assert os.getsid(engine.ready.pid) != os.getsid(0)
