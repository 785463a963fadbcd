"""The host's part: load, allocate, launch, and leave. After :meth:`Engine.start` no code here runs for a token."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..model.config import ModelConfig
from ..model.weights import Weights
from ..ring.window import Window
from ..simt import Running, start
from . import memory, settings
from .persistent import serve


class Engine:
    """A model, a window, and the persistent kernel that serves the one through the other."""

    def __init__(self, config: ModelConfig, weights: Weights, chosen: settings.Settings, window: Window) -> None:
        self.config, self.weights, self.settings, self.window = config, weights, chosen, window
        self._running: Running | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        target: str,
        sms: int = 0,
        scheduler_block: bool | None = None,
        batch_invariant: bool = False,
        kv_dtype: str | None = None,
    ) -> "Engine":
        """Load the model in folder `path` for a target that this machine has; creates the window.

        The rest as in :func:`.settings.choose`.
        """
        config = ModelConfig.load(path)
        weights = Weights.load(path, config)
        chosen = settings.choose(
            config,
            target,
            sms,
            scheduler_block=scheduler_block,
            batch_invariant=batch_invariant,
            kv_dtype=kv_dtype,
        )
        return cls(config, weights, chosen, Window.create(memory.window_layout(config, chosen)))

    def start(self, max_steps: int = 0, patience: int = 0) -> None:
        """Allocate, compile if need be, launch; returns when the kernel runs. Bounds: see persistent.serve."""
        s, w = self.settings, self.window
        view = memory.device_window(w.nic, w.gpu, w.layout)
        args: tuple[Any, ...] = memory.arguments(self.config, self.weights, s, view, pack=s.target != "cuda")
        if s.target == "cuda":
            from . import cuda_memory

            args = cuda_memory.place(args, w)
        args += (max_steps, patience)
        self._running = start(serve, s.blocks, s.lanes, *args, target=s.target, shared=s.shared)

    @property
    def started(self) -> bool:
        """Whether the kernel has been launched."""
        return self._running is not None

    def stop(self) -> None:
        """Ask the kernel to leave. It ends its requests, then returns; safe to call from a signal handler."""
        self.window.nic["stop"][0] = 1

    def wait(self) -> None:
        """Return when the kernel has."""
        if self._running is not None:
            self._running.wait()

    def close(self) -> None:
        """Remove the window. The kernel has ended."""
        self.window.unlink()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights a decode step must read: all but the embedding, unless it is the output matrix too."""
        embedding = 0 if self.config.tied else self.config.vocab * self.config.hidden
        return (self.config.parameters - embedding) * self.weights.flat.itemsize

    def bandwidth(self) -> float:
        """Bytes per second that the target's memory delivers, measured now, in a fraction of a second."""
        if self.settings.target == "cuda":
            from ..simt import on_cuda

            return on_cuda.copy_bandwidth()
        return read_bandwidth(self.weights.flat, self.settings.blocks)


def read_bandwidth(array: np.ndarray, threads: int) -> float:
    """Bytes per second at which `threads` threads read an array with plain vector sums; the best of three."""
    whole = array.view(np.uint8)[: array.nbytes // (8 * threads) * 8 * threads].view(np.uint64)
    return whole.nbytes / seconds_side_by_side(np.add.reduce, [(part,) for part in np.split(whole, threads)])


def seconds_side_by_side(work: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> float:
    """Until all threads have done `work`, one with each of the arguments; the best of three."""
    best, calls = float("inf"), list(arguments)
    for _ in range(3):
        threads = [threading.Thread(target=work, args=call) for call in calls]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - begin)
    return best
