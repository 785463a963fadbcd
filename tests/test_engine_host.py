"""The host's part, in this process: load, start, stop, and what it says of the machine."""

from dataclasses import replace

import numpy as np
import pytest
from engine_bench import SMALL, TINY, chosen

from blink_ref.engine import memory
from blink_ref.engine.host import Engine, read_bandwidth
from blink_ref.model.weights import Weights
from blink_ref.ring.layout import SERVING, STOPPED
from blink_ref.ring.window import DIRECTORY, Window


@pytest.fixture
def windows(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_an_engine_is_loaded_started_bounded_and_closed(windows, target):
    engine = Engine.load(TINY, target, 1)
    assert list(windows.iterdir()) == [engine.window.path]
    engine.start(patience=3)
    engine.wait()
    assert engine.window.gpu["heartbeat"][2] == SERVING
    engine.close()
    assert not list(windows.iterdir())


@pytest.mark.parametrize("target", ["cpu", "python", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_stop_ends_the_kernel_whenever_it_comes(windows, target):
    model = SMALL, Weights.random(SMALL)
    made = chosen(SMALL, target)
    engine = Engine(*model, made, Window.create(memory.window_layout(SMALL, made)))
    engine.wait()  # not started: nothing to wait for
    engine.start()
    engine.stop()
    engine.wait()
    assert engine.window.gpu["heartbeat"][2] == STOPPED
    engine.close()
    engine.close()


def test_a_decode_step_reads_every_weight_but_an_untied_embedding(windows):
    made = chosen(SMALL)
    for tied in (True, False):
        config = replace(SMALL, tied=tied)
        weights = Weights.random(config)
        window = Window.create(memory.window_layout(config, made))
        embedding = config.vocab * config.hidden
        read = config.parameters - (0 if tied else embedding)
        assert Engine(config, weights, made, window).bytes_per_token == 2 * read
        window.unlink()
        window.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_read_bandwidth_is_measured_on_arrays_of_any_length(threads):
    assert 1e6 < read_bandwidth(np.ones(100_003, np.uint16), threads) < 1e13
