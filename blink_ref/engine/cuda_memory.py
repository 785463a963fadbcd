"""Places what the kernel works on: the window stays in host memory, all else goes to the GPU."""

import mmap
from typing import Any

import numpy as np

from ..kernels.packing import pack, too_large
from ..kernels.tensors import Model
from ..ring.device import Window as DeviceWindow
from ..ring.window import Window
from ..simt import on_cuda
from .settings import CUDA_LANES

IN_GPU_MEMORY = ("written", "read", "room", "dealt", "reserved")
"""Arrays of the kernel's view of the window that are not in the window."""


def place(args: tuple[Any, ...], window: Window) -> tuple[Any, ...]:
    """The kernel's arguments with device arrays for NumPy arrays; the first is the window."""
    view, *others = args
    mapped_file = window.nic.base
    assert isinstance(mapped_file, mmap.mmap)
    whole = np.frombuffer(mapped_file, np.uint8)
    at = on_cuda.map_host(whole)
    arrays = {name: value for name, value in view._asdict().items() if isinstance(value, np.ndarray)}
    own = {name: on_cuda.to_device(arrays.pop(name)) for name in IN_GPU_MEMORY}
    fields = {name: at(value) for name, value in arrays.items()}
    mapped: DeviceWindow = view._replace(**fields, **own)
    return mapped, *(place_model(each) if isinstance(each, Model) else on_cuda.to_device(each) for each in others)


def place_model(model: Model) -> Model:
    """The model on the GPU; its weights are packed there. Raises BlinkError where they cannot be."""
    placed: Model = on_cuda.to_device(model._replace(packed=None))
    placed = placed._replace(packed=on_cuda.empty(model.packed))
    if placed.tiles or placed.stream_rows:
        large = on_cuda.to_device(np.zeros(1, np.uint32))
        on_cuda.start(pack, on_cuda.limits().sms, CUDA_LANES, (placed, large), 0).wait()
        if large.copy_to_host()[0]:
            raise too_large()
    return placed
