"""The `cuda` target: kernels around device functions, their launch, and the memory they work on.

A launched device function becomes one ``@cuda.jit`` kernel that makes its :class:`.vocabulary.Block`
and calls it; numba-cuda lowers device functions, :mod:`.cuda_words` and :mod:`.cuda_loops` the words.
"""

import functools
import time
import weakref
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ..errors import BlinkError
from . import (
    capability,
    cuda_async,  # noqa: F401 - defines words
    cuda_fragments,  # noqa: F401 - defines words
    cuda_heads,  # noqa: F401 - defines words
    cuda_loops,  # noqa: F401 - defines words
    cuda_published,  # noqa: F401 - defines words
    cuda_staged,  # noqa: F401 - defines words
    cuda_tiles,  # noqa: F401 - defines words
)
from . import vocabulary as words
from .cache import Locator, pass_over_what_is_gone
from .cuda_arguments import count_of, maker_of, words_of
from .cuda_words import arena
from .device import DeviceFunction, references
from .numba_cuda import cuda, cuda_types, driver, no_index_from_the_end, typeof, typeof_impl
from .numba_cuda import dispatcher as cuda_dispatcher
from .vocabulary import GRID_WORDS, Block, i64, u32

WARP_WORDS = {words.warp_width, words.lane_sum, words.lane_max, words.lane_broadcast, words.lane_any}
WARP_WORDS |= {
    words.row_dot,
    words.row_dots,
    words.row_dots_of_two,
    words.row_mix,
    words.warp_barrier,
    words.awaited_copy,
    words.awaited_sum,
    words.dots_ask,
    words.dots_forget,
    words.block_dots,
    words.fragment_dots,
    words.heads_weigh,
    words.heads_mix,
    words.tile_attend,
    words.tile_end,
}

SHARED_PER_BLOCK_DEFAULT = 48 * 1024
"""Bytes of dynamic shared memory that a kernel gets without asking."""


def why_unavailable() -> str:
    """Why no kernel can run on this machine; empty if one can."""
    if not cuda.is_available():
        return "no NVIDIA GPU or driver found"
    cc = tuple(cuda.get_current_device().compute_capability)
    if cc < capability.OLDEST:
        oldest = capability.name(capability.OLDEST)
        return f"the GPU has compute capability {capability.name(cc)}; the oldest served is {oldest}"
    return ""


class Limits(NamedTuple):
    """What a kernel may use of the present GPU."""

    name: str
    sms: int
    shared_bytes: int
    """dynamic shared memory a block, at most"""
    free_bytes: int
    """of device memory"""
    streams: bool = False
    """whether bulk copies and tensor cores with bfloat16 are there, and used: from compute capability 9.0 on"""


def limits() -> Limits:
    """The present GPU's limits."""
    device = cuda.get_current_device()
    free, _ = cuda.current_context().get_memory_info()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    shared, streams = device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device.compute_capability >= (9, 0)
    return Limits(name, device.MULTIPROCESSOR_COUNT, shared, free, streams)


def map_host(memory: np.ndarray) -> Callable[[np.ndarray], Any]:
    """Let kernels reach page-aligned host memory where it is; returns what turns a view of it into a device array.

    It is locked there until `memory` is collected, also while the process is stopped. It has to be anonymous,
    or a file of a memory file system: the driver does not lock pages of a disk's files.
    """
    from cuda.bindings import driver as binding

    base, context = memory.ctypes.data, cuda.current_context()
    portable_and_mapped = 3
    (error,) = binding.cuMemHostRegister(base, memory.nbytes, portable_and_mapped)
    if int(error):
        raise BlinkError(
            f"the driver refuses to lock the window's {memory.nbytes} bytes (error {int(error)}); "
            "a window for a GPU has to lie in a memory file system such as /dev/shm, and `ulimit -l` to allow it"
        )
    # before the pages are given back: the driver would hold on to an address that others may get
    weakref.finalize(memory, binding.cuMemHostUnregister, base).atexit = False
    error, there = binding.cuMemHostGetDevicePointer(base, 0)
    if int(error):
        raise BlinkError(f"the window has no address on the GPU (error {int(error)})")

    def view(a: np.ndarray) -> Any:
        pointer = binding.CUdeviceptr(int(there) + a.ctypes.data - base)
        owned = driver.MemoryPointer(context, pointer, a.nbytes, owner=memory)
        return cuda.devicearray.DeviceNDArray(a.shape, a.strides, a.dtype, gpu_data=owned)

    return view


def copy_bandwidth(size: int = 1 << 31) -> float:
    """Bytes per second of a device-to-device copy, read and written both counted; median of 20.

    Of `size` bytes, or as many as there is room for twice: with less than 2 GiB, starting the copy counts.
    """
    from cuda.bindings import driver as binding

    size = min(size, limits().free_bytes // 4) & -256
    a, b = cuda.device_array(size, np.uint8), cuda.device_array(size, np.uint8)
    there, here = (binding.CUdeviceptr(int(array.device_ctypes_pointer.value)) for array in (b, a))
    times = []
    for _ in range(21):
        begin, end = cuda.event(), cuda.event()
        begin.record()
        binding.cuMemcpyDtoDAsync(there, here, size, 0)
        end.record()
        end.synchronize()
        times.append(cuda.event_elapsed_time(begin, end) / 1e3)
    return 2 * size / float(np.median(times[1:]))


def dispatcher(fn: FunctionType) -> Any:
    """Numba's dispatcher for a device function."""
    return cuda_dispatcher.CUDADispatcher(fn, {"device": True, "debug": False, "opt": True})


@typeof_impl.register(DeviceFunction)
def _(fn, context):
    return cuda_types.Dispatcher(fn.cuda)


# --- kernels


@functools.cache
def kernel(fn: DeviceFunction, lanes: int, given: Any) -> Any:
    """The ``@cuda.jit`` kernel that runs `fn`, for blocks of up to `lanes` threads.

    It is given a tuple of words (:mod:`.cuda_arguments`); of what type they are is `given`: the grid's array, and
    the arguments of `fn` behind its block.
    """
    body, made = fn.cuda, maker_of(given)

    @cuda.jit(launch_bounds=(lanes, 1))
    def run(words):
        grid, args = made(words)
        shared = arena()
        turn = cuda.shared.array(2, u32)
        if cuda.threadIdx.x == 0:
            turn[0] = turn[1] = u32(0)
        cuda.syncthreads()
        body(Block(i64(cuda.blockIdx.x), i64(cuda.gridDim.x), shared, grid, turn, i64(0)), *args)

    if fn.kept_on_disk:
        run._cache = _KernelCache(fn.python, lanes, given)
    return run


class _KernelLocator(Locator):
    TARGET = "cuda"


class _KernelCacheImplementation(cuda_dispatcher.CUDACacheImpl):
    _locator_classes = [_KernelLocator]  # noqa: RUF012 - numba's name and form


class _KernelCache(cuda_dispatcher.CUDACache):
    """Compiled kernels on disk, keyed by the closure of the device function they run, and the launch bound."""

    _impl_class = _KernelCacheImplementation

    def __init__(self, fn: FunctionType, lanes: int, given: Any) -> None:
        super().__init__(fn)
        pass_over_what_is_gone(self)
        self._lanes, self._given = lanes, given

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._lanes, self._given


class Running:
    """A launched kernel."""

    def __init__(self, done: Any, keep: Any) -> None:
        self._done, self._keep = done, keep

    def wait(self) -> None:
        """Return when the kernel has ended. It looks twenty times a second: CUDA's own wait spins."""
        while not self._done.query():
            time.sleep(0.05)


def start(fn: DeviceFunction, blocks: int, lanes: int, args: tuple[Any, ...], shared: int) -> Running:
    """Launch `fn` on device arrays and return at once; `shared` is the arena in float32 a block.

    The launch is cooperative: it fails, instead of hanging, if the blocks cannot all be resident.
    """
    if lanes % 32 and lanes != 1:
        raise BlinkError(f"a CUDA block has whole warps of 32 lanes, or a single lane, not {lanes} lanes")
    if lanes == 1 and (work := warp_work(fn)):
        raise BlinkError(f"{fn} needs whole warps, for {', '.join(work)}; launch it with 32 lanes")
    grid = cuda.to_device(np.zeros(GRID_WORDS, np.uint32))
    given = typeof((grid, args))
    run, words = kernel(fn, lanes, given), words_of((grid, args))
    with no_index_from_the_end():
        compiled = run.compile((types.UniTuple(types.int64, count_of(given)),))
    compiled.cooperative = True
    _allow_shared(compiled, shared * 4)
    stream, done = cuda.stream(), cuda.event(timing=False)
    cuda.synchronize()  # what was copied for the kernel is there
    run[blocks, lanes, stream, shared * 4](words)
    done.record(stream)
    return Running(done, (grid, args, stream))


def warp_work(fn: DeviceFunction) -> list[str]:
    """The words that `fn` may come to use, and that a warp's 32 lanes carry out together."""
    named = {v for each in fn.closure() for v in references(each.python).values() if isinstance(v, FunctionType)}
    return sorted(word.__name__ for word in named & WARP_WORDS)


def launch(fn: DeviceFunction, blocks: int, lanes: int, args: tuple[Any, ...], shared: int) -> None:
    """Launch `fn` on copies of NumPy arrays, wait, and copy the arrays back."""
    there = [to_device(a) for a in args]
    start(fn, blocks, lanes, tuple(there), shared)
    cuda.synchronize()
    for mine, theirs in zip(args, there, strict=True):
        _copy_back(mine, theirs)


def to_device(value: Any) -> Any:
    """A copy of an array, or of a named tuple of arrays, on the GPU; anything else as it is."""
    if isinstance(value, np.ndarray):
        return cuda.to_device(value)
    if isinstance(value, tuple):
        return type(value)(*map(to_device, value))
    return value


def empty(like: np.ndarray) -> Any:
    """Memory on the GPU for an array that is filled there."""
    return cuda.device_array(like.shape, like.dtype)


def _copy_back(mine: Any, theirs: Any) -> None:
    if isinstance(mine, np.ndarray):
        if mine.flags.writeable:
            theirs.copy_to_host(mine)
    elif isinstance(mine, tuple):
        for a, b in zip(mine, theirs, strict=True):
            _copy_back(a, b)


def _allow_shared(compiled: Any, size: int) -> None:
    """Let a kernel use more dynamic shared memory than the default, up to the device's limit."""
    if size <= SHARED_PER_BLOCK_DEFAULT:
        return
    from cuda.bindings import driver as binding

    attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = compiled._codelibrary.get_cufunc().handle
    (error,) = binding.cuKernelSetAttribute(attribute, size, handle, cuda.get_current_device().id)
    if int(error):
        limit = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        raise BlinkError(f"a block wants {size} bytes of shared memory; this GPU gives at most {limit}")


def compile_to_ptx(fn: DeviceFunction, argument_types: tuple[Any, ...], lanes: int, cc: tuple[int, int]) -> str:
    """PTX of `fn`'s kernel for compute capability `cc`; needs no GPU."""
    given = types.BaseTuple.from_types(
        (types.Array(types.uint32, 1, "C"), types.BaseTuple.from_types(argument_types))
    )
    current = cuda_dispatcher.get_current_device
    # numba-cuda asks the present GPU which capability to compile a callee for
    cuda_dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        kernel.cache_clear()
        _forget(fn)
        with no_index_from_the_end():
            code, _ = cuda.compile_ptx(
                kernel(fn, lanes, given).py_func,
                (types.UniTuple(types.int64, count_of(given)),),
                cc=(*cc, "a") if capability.architecture(cc).endswith("a") else cc,
                launch_bounds=(lanes, 1),
            )
    finally:
        cuda_dispatcher.get_current_device = current
        kernel.cache_clear()
        _forget(fn)
    return code


def _forget(fn: DeviceFunction) -> None:
    """Drop compiled forms of `fn` and of what it calls: they are for one compute capability."""
    for each in fn.closure():
        each.__dict__.pop("cuda", None)
