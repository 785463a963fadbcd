"""An engine in this process, behind a real window: the other side of it is the bench's NIC."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from blink_ref.engine import memory, settings
from blink_ref.engine.host import Engine
from blink_ref.engine.settings import Settings
from blink_ref.model.config import ModelConfig
from blink_ref.model.weights import Weights
from blink_ref.ring.window import Window


def sizes(config: ModelConfig, target: str, **changes) -> Settings:
    """What an engine chooses, with changes. On the CPU it gets one block: the NIC polls on the other core."""
    blocks = 1 if target == "cpu" else 0
    return replace(settings.choose(config, target, blocks), **changes)


@contextmanager
def serving(config: ModelConfig, weights: Weights, chosen: Settings) -> Iterator[Window]:
    """The engine runs as long as the context does; the window is opened from the NIC's side."""
    engine = Engine(config, weights, chosen, Window.create(memory.window_layout(config, chosen)))
    try:
        engine.start()
        yield Window.open(engine.window.path)
    finally:
        engine.stop()
        engine.wait()
        engine.close()
