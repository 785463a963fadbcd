"""The `python` target: every lane of every block is a Python thread, all alive at once.

Nothing is compiled, so breakpoints work and a reader can step through the persistent kernel. Lane 0
of block 0 runs on the thread that launched, so that ``python -m pdb`` sees it without more ado.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from . import mbarrier

WARP_WIDTH = 4


class Abandoned(Exception):
    """Raised in the other lanes when one lane of the grid has failed."""


class Divergence(Exception):
    """A lane ended while others of its block still wait for it at a barrier."""


class Rendezvous:
    """A barrier for n threads: the last to come opens the gate of each that waits.

    ``threading.Barrier`` would do, at three times the cost: a warp meets thousands of times a token.
    """

    def __init__(self, n):
        self.n, self.lock, self.gates, self.broken, self.gone = n, threading.Lock(), [], False, 0

    def wait(self):
        """Wait for the other n - 1; raises Abandoned if one of them failed, Divergence if one has ended."""
        with self.lock:
            if self.broken:
                raise Abandoned
            if self.gone:
                raise Divergence(
                    "a lane waits at a barrier that another lane of its block has passed by and ended"
                )
            if len(self.gates) == self.n - 1:
                gates, self.gates, mine = self.gates, [], None
            else:
                mine = threading.Lock()
                mine.acquire()
                self.gates.append(mine)
        if mine is None:
            for gate in gates:
                gate.release()
        else:
            mine.acquire()
        if self.broken:
            raise Abandoned

    def leave(self):
        """A lane has ended and will not come again; says whether others wait for it in vain."""
        with self.lock:
            self.gone += 1
            return bool(self.gates)

    def abort(self):
        """Let all who wait, and all who come, go with an exception."""
        with self.lock:
            self.broken = True
            for gate in self.gates:
                gate.release()
            self.gates = []


class Warp:
    """Up to `WARP_WIDTH` lanes of one block."""

    def __init__(self, index, width):
        self.index, self.width = index, width
        self.barrier = Rendezvous(width)
        # Two sets of boxes used in turn: a lane can only reach exchange n + 2 after all have passed
        # the barrier of n + 1, hence after all have read the boxes of n. One wait does for both.
        self._boxes = [[None] * width, [None] * width]
        self._round = [0] * width

    def exchange(self, x):
        """Every lane gives a value and gets the list of all of them, in lane order."""
        lane = me().lane
        boxes = self._boxes[self._round[lane] & 1]
        self._round[lane] += 1
        boxes[lane] = x
        self.barrier.wait()
        return list(boxes)


class Copy(NamedTuple):
    """The arguments of a ``copy_async``."""

    target: Any
    at: int
    source: Any
    first: int
    n: int
    bar: Any
    i: int

    def check(self) -> None:
        """Raises ValueError where addresses or size are not multiples of 16 bytes, IndexError beyond an end."""
        if self.target.dtype != self.source.dtype:
            raise ValueError(f"copy_async from {self.source.dtype} to {self.target.dtype}; take an arena_view")
        for name, array, at in (("target", self.target, self.at), ("source", self.source, self.first)):
            if not 0 <= at <= at + self.n <= len(array):
                raise IndexError(f"copy_async's {name} is [{at}:{at + self.n}], of an array of {len(array)}")
            if (array.ctypes.data + at * array.itemsize) % 16:
                raise ValueError(f"copy_async's {name} begins at element {at}, no multiple of 16 bytes")
        if self.size % 16:
            raise ValueError(f"copy_async of {self.n} elements: {self.size} bytes, no multiple of 16")

    @property
    def size(self) -> int:
        """In bytes."""
        return int(self.n) * self.source.dtype.itemsize

    def make(self) -> None:
        """Carry it out."""
        self.target[self.at : self.at + self.n] = self.source[self.first : self.first + self.n]
        self.bar[self.i] = mbarrier.after(int(self.bar[self.i]), 0, -self.size)


class PythonBlock:
    """One block of the Python grid."""

    def __init__(self, threads, python_grid):
        self.threads, self.python_grid = threads, python_grid
        self.barrier = Rendezvous(threads)
        widths = [min(WARP_WIDTH, threads - first) for first in range(0, threads, WARP_WIDTH)]
        self.warps = [Warp(index, width) for index, width in enumerate(widths)]

    def start_copy(self, copy):
        """The copy will be made while a lane waits."""
        copy.check()
        self.python_grid.copies.append(copy)

    def acquire_fence(self, scope):
        """Nothing: what is written is visible."""

    def async_fence(self):
        """Nothing: copies see what lanes see."""


class PythonGrid:
    """All blocks of a launch, and the first exception that any lane raised."""

    def __init__(self, blocks, lanes):
        self.lock = threading.Lock()
        self.failure = None
        self.copies: deque[Copy] = deque()
        """asynchronous copies that have been started, and not made"""
        self.blocks = [PythonBlock(lanes, self) for _ in range(blocks)]

    def fail(self, exception):
        with self.lock:
            self.failure = self.failure or exception
        for block in self.blocks:
            for each in (block.barrier, *(warp.barrier for warp in block.warps)):
                each.abort()

    def relax(self, spins):
        """Let others run in a lane's spin loop, a copy too; raises Abandoned once another lane has failed."""
        if self.failure is not None:
            raise Abandoned
        if self.copies:
            with self.lock, contextlib.suppress(IndexError):  # another lane may have been first
                self.copies.popleft().make()
        time.sleep(0 if spins < 100 else 0.0005)

    def clock_ns(self):
        """The time, in nanoseconds."""
        return time.perf_counter_ns()


class Lane:
    """One thread's place in the grid."""

    def __init__(self, block, thread):
        self.block, self.thread = block, thread
        self.warp = block.warps[thread // WARP_WIDTH]
        self.lane = thread % WARP_WIDTH


class _Here(threading.local):
    """The lane a thread is; outside a launch, the only lane of a grid of its own."""

    def __init__(self):
        self.lane = Lane(PythonGrid(1, 1).blocks[0], 0)


_here = _Here()


def me() -> Lane:
    """The lane that is running."""
    return _here.lane


def become(lane) -> None:
    """The calling thread is to be `lane`."""
    _here.lane = lane


def _run_lane(lane, fn, block, args):
    become(lane)
    grid = lane.block.python_grid
    try:
        with np.errstate(all="ignore"):  # device arithmetic overflows to inf without a word, as on a GPU
            fn(block, *args)
        if lane.block.barrier.leave() or lane.warp.barrier.leave():
            raise Divergence(f"lane {lane.thread} ended while others of its block wait for it at a barrier")
    except Abandoned:
        pass  # the lane that failed says why
    except BaseException as exception:  # handed to the launcher, which raises it
        grid.fail(exception)


class Running:
    """A launched grid, all of it on threads of its own."""

    def __init__(self, fn, blocks, args):
        self._failure = None
        self._thread = threading.Thread(target=self._run, args=(fn, blocks, args), daemon=True)
        self._thread.start()

    def _run(self, fn, blocks, args):
        try:
            launch(fn, blocks, args)
        except BaseException as failure:  # raised again by wait
            self._failure = failure

    def wait(self):
        """Return when every lane has; raises what the first failing lane raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def launch(fn, blocks, args):
    """Run plain Python `fn(block, *args)` on every lane of `blocks`, a list of (Block, lanes).

    Raises what the first failing lane raised.
    """
    grid = PythonGrid(len(blocks), blocks[0][1])
    lanes = [
        (Lane(python_block, thread), block)
        for python_block, (block, lanes) in zip(grid.blocks, blocks, strict=True)
        for thread in range(lanes)
    ]
    trace = sys.gettrace()
    if trace is not None:  # a debugger is at work: let it see every lane
        threading.settrace(trace)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # spinning lanes hand over soon
    here, (own, first) = _here.lane, lanes[0]
    try:
        others = [
            threading.Thread(target=_run_lane, args=(lane, fn, block, args), daemon=True)
            for lane, block in lanes[1:]
        ]
        for thread in others:
            thread.start()
        _run_lane(own, fn, first, args)
        for thread in others:
            thread.join()
    finally:
        become(here)
        sys.setswitchinterval(interval)
        if trace is not None:
            threading.settrace(None)  # type: ignore[arg-type]
    if grid.failure is not None:
        raise grid.failure
