"""A Nic and a fake GPU on one window, stepped by hand."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_engine import FakeGpu, Script

from blink_ref.nic.client import Nic
from blink_ref.ring.layout import LENGTH, STOP, Layout
from blink_ref.ring.window import Window

LAYOUT = Layout(slots=8, arena=256, outbox=16, context=100, vocab=300)
EOS = 2


class Pair:
    """A window with a fake GPU on one side and a Nic on the other."""

    def __init__(self, directory, layout=LAYOUT, **script):
        self.window = Window.create(layout, directory=directory)
        self.peer = Window.open(self.window.path)
        self.gpu = FakeGpu(self.window, Script(**script), (EOS,))
        self.nic = Nic(self.peer)

    def drain(self, answers, steps=10_000):
        """Step both sides until nothing runs; tokens and reasons go to ``answers`` by handle."""
        for _ in range(steps):
            self.gpu.step()
            for handle, token, reason, _ in self.nic.poll():
                answers[handle].append(reason if token is None else token)
            if not self.nic.running:
                return
        pytest.fail("requests are still running")

    def request(self, handle):
        """The record that a request's slot holds."""
        return self.window.nic["request"][handle.slot]

    def events(self, steps=1000):
        """Step both sides until nothing runs; all that came."""
        came = []
        for _ in range(steps):
            self.gpu.step()
            came += self.nic.poll()
            if not self.nic.running:
                return came
        return pytest.fail("requests are still running")


@contextmanager
def pair_in(directory, layout=LAYOUT, **script) -> Iterator[Pair]:
    """A pair whose window is gone at the end."""
    made = Pair(directory, layout, **script)
    yield made
    made.window.unlink()
    made.window.close()


def echo(prompt, max_tokens):
    """What the fake GPU says, and then the reason."""
    said = [prompt[n % len(prompt)] for n in range(max_tokens)]
    if EOS in said:
        return [*said[: said.index(EOS) + 1], STOP]
    return [*said, LENGTH]
