"""``launch``: run one device function alone, on any target."""

import importlib.util
import os
import sys
from typing import Any, Protocol

import numpy as np

from ..errors import BlinkError
from . import on_python
from .device import DeviceFunction
from .vocabulary import GRID_WORDS, Block

TARGETS = ("cuda", "cpu", "python")


def choose_target(wanted: str = "auto") -> str:
    """The target to run on: `wanted`, or for ``auto`` CUDA where there is a GPU, else the CPU.

    ``NUMBA_ENABLE_CUDASIM=1`` selects `python`, which does what numba's CUDA simulator cannot: it runs
    all blocks of a grid at the same time. Raises BlinkError for a target that this machine lacks.
    """
    if wanted not in ("auto", *TARGETS):
        raise BlinkError(f"target '{wanted}' is not known; choose one of auto, {', '.join(TARGETS)}")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" and wanted in ("auto", "cuda"):
        print("NUMBA_ENABLE_CUDASIM=1: running on the 'python' target in the simulator's place", file=sys.stderr)
        return "python"
    if wanted in ("cpu", "python"):
        return wanted
    reason = why_no_cuda()
    if wanted == "cuda" and reason:
        raise BlinkError(f"target 'cuda' is not available: {reason}; use --target cpu")
    return "cpu" if reason else "cuda"


def why_no_cuda() -> str:
    """Why CUDA cannot be used here; empty if it can."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed (pip install 'blink-ref[cuda13]')"
    from . import on_cuda

    return on_cuda.why_unavailable()


def make_blocks(count: int, shared: int) -> list[Block]:
    """Blocks of a grid on the CPU, each with an arena of `shared` floats, 64-byte aligned."""
    grid = np.zeros(GRID_WORDS, np.uint32)
    return [Block(i, count, aligned(shared, np.float32), grid, np.zeros(2, np.uint32)) for i in range(count)]


def aligned(n: int, dtype: Any) -> np.ndarray:
    """An uninitialised 1-D array of n elements that starts at a multiple of 64 bytes."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(n * size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n * size].view(dtype)


def launch(
    fn: DeviceFunction,
    blocks: int,
    lanes: int,
    *args: Any,
    target: str = "auto",
    shared: int = 4096,
    check: bool = False,
    seed: int = 0,
) -> None:
    """Run ``fn(block, *args)`` on every lane of a grid and wait for its end.

    `blocks` blocks of `lanes` lanes run at the same time; `shared` is the size of a block's arena in
    float32. `args` are numbers, NumPy arrays (changed in place; on CUDA copied there and back) and
    named tuples of them. On the CPU a block has one lane, whatever `lanes` says. Raises BlinkError if
    the target is not there, and on the `python` target whatever the device function raised.

    With `check`, which is for the `python` target, every access to memory is checked, and lanes take
    turns as `seed` has it; raises the first :class:`.checker.Finding`.
    """
    target = choose_target(target)
    if check:
        if target != "python":
            raise BlinkError(f"check=True runs device code as Python, not on '{target}'; add target=\"python\"")
        from . import checker

        checker.check(fn, blocks, lanes, *args, seed=seed, shared=shared)
        return
    if target == "python":
        on_python.launch(fn.python, [(block, lanes) for block in make_blocks(blocks, shared)], args)
    elif target == "cpu":
        start(fn, blocks, lanes, *args, target=target, shared=shared).wait()
    else:
        from . import on_cuda

        on_cuda.launch(fn, blocks, lanes, args, shared)


class Running(Protocol):
    """A grid that has been started."""

    def wait(self) -> None:
        """Return when all of it has ended."""


def start(fn: DeviceFunction, blocks: int, lanes: int, *args: Any, target: str, shared: int) -> Running:
    """As :func:`launch`, but returns at once; on CUDA the arrays in `args` are already on the device."""
    if target == "cuda":
        from . import on_cuda

        return on_cuda.start(fn, blocks, lanes, args, shared)
    made = make_blocks(blocks, shared)
    if target == "python":
        return on_python.Running(fn.python, [(block, lanes) for block in made], args)
    from . import on_cpu

    return on_cpu.Running(fn, made, args)
