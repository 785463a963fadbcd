"""Places what the kernel works on: the window stays in host memory, all else goes to the GPU."""

import mmap
from typing import Any

import numpy as np

from ..ring.device import Window as DeviceWindow
from ..ring.window import Window
from ..simt import on_cuda

IN_HOST_MEMORY = ("stop", "doorbell", "cancel", "consumed", "request", "arena", "heartbeat", "state", "outbox")


def place(args: tuple[Any, ...], window: Window) -> tuple[Any, ...]:
    """The kernel's arguments with device arrays for NumPy arrays; the first is the window."""
    view, *others = args
    mapped_file = window.nic.base
    assert isinstance(mapped_file, mmap.mmap)
    whole = np.frombuffer(mapped_file, np.uint8)
    at = on_cuda.map_host(whole)
    fields = {name: at(getattr(view, name)) for name in IN_HOST_MEMORY}
    own = {name: on_cuda.to_device(getattr(view, name)) for name in ("written", "room")}
    mapped: DeviceWindow = view._replace(**fields, **own)
    return mapped, *(on_cuda.to_device(other) for other in others)
