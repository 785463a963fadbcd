"""The `cuda` target: the only file that imports numba.cuda.

A launched device function becomes one ``@cuda.jit`` kernel that makes its :class:`.vocabulary.Block`
and calls it; device functions are lowered by numba-cuda, the words by the definitions below.
"""

import functools
import math
import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cuda, types
from numba.cuda import cudaimpl
from numba.cuda import dispatcher as cuda_dispatcher
from numba.cuda import types as cuda_types
from numba.cuda.cudadrv import driver as cuda_driver
from numba.cuda.extending import overload
from numba.cuda.typing import templates
from numba.cuda.typing.typeof import typeof, typeof_impl

from ..errors import BlinkError
from . import capability, ptx
from . import vocabulary as words
from .cache import Locator
from .device import DeviceFunction
from .lowering import (
    COMMON,
    DEFAULT,
    F32,
    I16,
    I32,
    I64,
    VOID,
    asm,
    element_pointer,
    index_argument,
    is_vector,
    register,
)
from .vocabulary import FULL_WARP, Block, block_threads, f32, i64, lane_id, lane_sum, opaque, thread_id, u32

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


def limits() -> Limits:
    """The present GPU's limits."""
    device = cuda.get_current_device()
    free, _ = cuda.current_context().get_memory_info()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    return Limits(name, device.MULTIPROCESSOR_COUNT, device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, free)


def map_host(memory: np.ndarray) -> Callable[[np.ndarray], Any]:
    """Let kernels reach page-aligned host memory where it is; returns what turns a view of it into a device array.

    The memory is locked and stays mapped while this process lives, also while the process is stopped.
    """
    from cuda.bindings import driver

    base, context = memory.ctypes.data, cuda.current_context()
    portable_and_mapped = 3
    (error,) = driver.cuMemHostRegister(base, memory.nbytes, portable_and_mapped)
    if int(error):
        raise BlinkError(f"the driver refuses to map the window's {memory.nbytes} bytes (error {int(error)})")
    error, there = driver.cuMemHostGetDevicePointer(base, 0)
    if int(error):
        raise BlinkError(f"the window has no address on the GPU (error {int(error)})")

    def view(a: np.ndarray) -> Any:
        pointer = driver.CUdeviceptr(int(there) + a.ctypes.data - base)
        owned = cuda_driver.MemoryPointer(context, pointer, a.nbytes, owner=memory)
        return cuda.devicearray.DeviceNDArray(a.shape, a.strides, a.dtype, gpu_data=owned)

    return view


def copy_bandwidth(size: int = 1 << 29) -> float:
    """Bytes per second of a device-to-device copy, read and written both counted; median of 5."""
    from cuda.bindings import driver

    a, b = cuda.device_array(size, np.uint8), cuda.device_array(size, np.uint8)
    there, here = (driver.CUdeviceptr(int(array.device_ctypes_pointer.value)) for array in (b, a))
    times = []
    for _ in range(6):
        begin, end = cuda.event(), cuda.event()
        begin.record()
        driver.cuMemcpyDtoDAsync(there, here, size, 0)
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
def kernel(fn: DeviceFunction, lanes: int) -> Any:
    """The ``@cuda.jit`` kernel that runs `fn`, for blocks of up to `lanes` threads."""
    body = fn.cuda

    @cuda.jit(launch_bounds=(lanes, 1))
    def run(grid, args):
        shared = _arena()
        turn = cuda.shared.array(1, u32)
        if cuda.threadIdx.x == 0:
            turn[0] = u32(0)
        cuda.syncthreads()
        body(Block(i64(cuda.blockIdx.x), i64(cuda.gridDim.x), shared, grid, turn), *args)

    run._cache = _KernelCache(fn.python, lanes)
    return run


class _KernelLocator(Locator):
    TARGET = "cuda"


class _KernelCacheImplementation(cuda_dispatcher.CUDACacheImpl):
    _locator_classes = [_KernelLocator]  # noqa: RUF012 - numba's name and form


class _KernelCache(cuda_dispatcher.CUDACache):
    """Compiled kernels on disk, keyed by the closure of the device function they run, and the launch bound."""

    _impl_class = _KernelCacheImplementation

    def __init__(self, fn: FunctionType, lanes: int) -> None:
        super().__init__(fn)
        self._lanes = lanes

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._lanes


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
    run = kernel(fn, lanes)
    grid = cuda.to_device(np.zeros(1, np.uint32))
    compiled = run.compile((typeof(grid), typeof(args)))
    compiled.cooperative = True
    _allow_shared(compiled, shared * 4)
    stream, done = cuda.stream(), cuda.event(timing=False)
    cuda.synchronize()  # what was copied for the kernel is there
    run[blocks, lanes, stream, shared * 4](grid, args)
    done.record(stream)
    return Running(done, (grid, args, stream))


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
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = compiled._codelibrary.get_cufunc().handle
    (error,) = driver.cuKernelSetAttribute(attribute, size, handle, cuda.get_current_device().id)
    if int(error):
        limit = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        raise BlinkError(f"a block wants {size} bytes of shared memory; this GPU gives at most {limit}")


def compile_to_ptx(fn: DeviceFunction, argument_types: tuple[Any, ...], lanes: int, cc: tuple[int, int]) -> str:
    """PTX of `fn`'s kernel for compute capability `cc`; needs no GPU."""
    grid = types.Array(types.uint32, 1, "C")
    current = cuda_dispatcher.get_current_device
    # numba-cuda asks the present GPU which capability to compile a callee for
    cuda_dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        kernel.cache_clear()
        _forget(fn)
        code, _ = cuda.compile_ptx(
            kernel(fn, lanes).py_func,
            (grid, types.BaseTuple.from_types(argument_types)),
            cc=cc,
            launch_bounds=(lanes, 1),
        )
    finally:
        cuda_dispatcher.get_current_device = current
        kernel.cache_clear()
        _forget(fn)
    return code


def _forget(fn: DeviceFunction) -> None:
    """Drop compiled forms of `fn` and of what it calls: they are for one compute capability."""
    queue, seen = [fn], set()
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        current.__dict__.pop("cuda", None)
        cells = [c.cell_contents for c in current.python.__closure__ or ()]
        values = [current.python.__globals__.get(n) for n in current.python.__code__.co_names]
        queue += [v for v in (*values, *cells) if isinstance(v, DeviceFunction)]


# --- words


def _define(word: Any) -> Any:
    def decorate(define: Any) -> Any:
        register(templates, cuda_types.Function, "cuda", word, define)
        return define

    return decorate


def _python(word: Any) -> Any:
    """Lower `word` by a function that numba-cuda compiles."""

    def decorate(make: Any) -> Any:
        overload(word, target="cuda", strict=False)(make)
        return make

    return decorate


for _word, _definition in COMMON.items():
    _define(_word)(_definition)


def _define_id(word: Any, text: str) -> None:
    @_define(word)
    def _(typing_context):
        def codegen(context, builder, signature, args):
            return builder.zext(asm(builder, I32, text, "=r", []), I64)

        return types.int64(), codegen


_define_id(words.thread_id, ptx.THREAD)
_define_id(words.block_threads, ptx.THREADS)
_python(words.warp_width)(lambda: lambda: 32)
_python(words.lane_id)(lambda: lambda: thread_id() & 31)
_python(words.warp_id)(lambda: lambda: thread_id() >> 5)
_python(words.warps)(lambda: lambda: block_threads() >> 5)


def _arena():
    """The block's dynamic shared memory as float32 [n]. A word of this file only."""
    raise NotImplementedError("compiled code only")


@_define(_arena)
def _(typing_context):
    def codegen(context, builder, signature, args):
        return cudaimpl._generic_array(
            context, builder, (0,), types.float32, "arena", 3, can_dynsized=True, alignment=128
        )

    return types.Array(types.float32, 1, "C")(), codegen


def _define_text(word: Any, text: str) -> None:
    @_define(word)
    def _(typing_context):
        def codegen(context, builder, signature, args):
            asm(builder, VOID, text, "", [])
            return context.get_dummy_value()

        return types.none(), codegen


_define_text(words.barrier, ptx.BARRIER)
_define_text(words.warp_barrier, ptx.WARP_BARRIER)


def _keep_rolled():
    """At a loop's head: do not unroll it. A word of this file only."""
    raise NotImplementedError("compiled code only")


_define_text(_keep_rolled, ptx.NO_UNROLL)


@_define(words.clock_ns)
def _(typing_context):
    return types.int64(), lambda context, builder, signature, args: asm(builder, I64, ptx.GLOBAL_TIMER, "=l", [])


def _sleep(ns):
    """``nanosleep``. A word of this file only."""
    raise NotImplementedError("compiled code only")


@_define(_sleep)
def _(typing_context, ns):
    def codegen(context, builder, signature, args):
        asm(builder, VOID, ptx.NANOSLEEP, "r", args)
        return context.get_dummy_value()

    return types.none(types.uint32), codegen


@_python(words.relax)
def _(spins):
    def relax(spins):
        if spins > 20000:
            _sleep(u32(2000))
        elif spins > 2000:
            _sleep(u32(100))

    return relax


@_python(words.lane_sum)
def _(x):
    def lane_sum(x):
        for distance in (16, 8, 4, 2, 1):
            x += cuda.shfl_xor_sync(FULL_WARP, x, distance)
        return x

    return lane_sum


@_python(words.lane_max)
def _(x):
    def lane_max(x):
        for distance in (16, 8, 4, 2, 1):
            x = max(x, cuda.shfl_xor_sync(FULL_WARP, x, distance))
        return x

    return lane_max


_python(words.lane_broadcast)(lambda x, source: lambda x, source: cuda.shfl_sync(FULL_WARP, x, source))
_python(words.lane_any)(lambda x: lambda x: cuda.any_sync(FULL_WARP, x) != 0)


# --- ordered accesses


def _scope(scope: Any) -> int | None:
    """The scope of an access, or None while it is not yet known as a constant."""
    if scope is None or isinstance(scope, types.Omitted):
        return words.GPU
    return scope.literal_value if isinstance(scope, types.IntegerLiteral) else None


def _register_class(dtype: Any) -> str:
    return "r" if dtype.bitwidth == 32 else "l"


def _access(context, builder, signature, args):
    index = index_argument(context, builder, signature, args, 1)
    return element_pointer(context, builder, signature.args[0], args[0], index)


def _define_load(word: Any, order: str) -> None:
    @_define(word)
    def _(typing_context, a, i, scope=None):
        level = _scope(scope)
        if level is None:
            return None
        bits = a.dtype.bitwidth

        def codegen(context, builder, signature, args):
            pointer = _access(context, builder, signature, args)
            constraints = f"={_register_class(a.dtype)},l"
            return asm(builder, ir.IntType(bits), ptx.load(order, level, bits), constraints, [pointer])

        return a.dtype(a, i, scope or DEFAULT), codegen


_define_load(words.load_relaxed, "relaxed")
_define_load(words.load_acquire, "acquire")


@_define(words.store_release)
def _(typing_context, a, i, value, scope=None):
    level = _scope(scope)
    if level is None:
        return None

    def codegen(context, builder, signature, args):
        pointer = _access(context, builder, signature, args)
        text = ptx.store_release(level, a.dtype.bitwidth)
        asm(builder, VOID, text, f"l,{_register_class(a.dtype)}", [pointer, args[2]])
        return context.get_dummy_value()

    return types.none(a, i, a.dtype, scope or DEFAULT), codegen


def _define_rmw(word: Any, operation: str) -> None:
    @_define(word)
    def _(typing_context, a, i, value, scope=None):
        level = _scope(scope)
        if level is None:
            return None
        # addition wraps alike for both, and PTX has no 64-bit signed form of it
        signed = "s" if a.dtype.signed and operation == "max" else "u"

        def codegen(context, builder, signature, args):
            pointer = _access(context, builder, signature, args)
            text = ptx.atomic(operation, level, f"{signed}{a.dtype.bitwidth}")
            r = _register_class(a.dtype)
            return asm(builder, ir.IntType(a.dtype.bitwidth), text, f"={r},l,{r}", [pointer, args[2]])

        return a.dtype(a, i, a.dtype, scope or DEFAULT), codegen


_define_rmw(words.atomic_add, "add")
_define_rmw(words.atomic_max, "max")


@_define(words.atomic_cas)
def _(typing_context, a, i, expected, value, scope=None):
    level = _scope(scope)
    if level is None:
        return None

    def codegen(context, builder, signature, args):
        pointer = _access(context, builder, signature, args)
        text = ptx.compare_and_swap(level, a.dtype.bitwidth)
        r = _register_class(a.dtype)
        return asm(builder, ir.IntType(a.dtype.bitwidth), text, f"={r},l,{r},{r}", [pointer, args[2], args[3]])

    return a.dtype(a, i, a.dtype, a.dtype, scope or DEFAULT), codegen


# --- inner loops


def _eight(a, i):
    """Elements ``a[i:i+8]`` as eight float32 in a tuple, by 16-byte loads. A word of this file only."""
    raise NotImplementedError("compiled code only")


def _floats(builder, pointer, index):
    """``pointer[index : index+4]`` of float32 as four values, by one 16-byte load."""
    vector = ir.VectorType(F32, 4)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    loaded = builder.load(at, align=16)
    return [builder.extract_element(loaded, ir.Constant(I32, lane)) for lane in range(4)]


def _halves(builder, word, dtype):
    """The two stored 16-bit numbers in a 32-bit word, as float32, the lower first."""
    if dtype == types.uint16:
        texts = (ptx.LOW_HALF, ptx.HIGH_HALF)
        return [builder.bitcast(asm(builder, I32, t, "=r,r", [word], effects=False), F32) for t in texts]
    parts = (builder.trunc(word, I16), builder.trunc(builder.lshr(word, ir.Constant(I32, 16)), I16))
    return [builder.fpext(builder.bitcast(part, ir.HalfType()), F32) for part in parts]


@_define(_eight)
def _(typing_context, a, i):
    if not is_vector(a):
        return None
    result = types.UniTuple(types.float32, 8)

    def codegen(context, builder, signature, args):
        index = index_argument(context, builder, signature, args, 1)
        pointer = context.make_array(a)(context, builder, args[0]).data
        if a.dtype == types.float32:
            values = _floats(builder, pointer, index)
            values += _floats(builder, pointer, builder.add(index, ir.Constant(I64, 4)))
        else:
            four = ir.LiteralStructType([I32] * 4)
            at = builder.gep(pointer, [index])
            loaded = asm(builder, four, ptx.LOAD_WEIGHTS, "=r,=r,=r,=r,l", [at], effects=False)
            pairs = [builder.extract_value(loaded, k) for k in range(4)]
            values = [v for pair in pairs for v in _halves(builder, pair, a.dtype)]
        return context.make_tuple(builder, result, values)

    return result(a, i), codegen


def _four(a, i):
    """Elements ``a[i:i+4]`` of float32 in a tuple, by one 16-byte load. A word of this file only."""
    raise NotImplementedError("compiled code only")


@_define(_four)
def _(typing_context, a, i):
    result = types.UniTuple(types.float32, 4)

    def codegen(context, builder, signature, args):
        index = index_argument(context, builder, signature, args, 1)
        pointer = context.make_array(a)(context, builder, args[0]).data
        return context.make_tuple(builder, result, _floats(builder, pointer, index))

    return result(a, i), codegen


def _store_four(a, i, values):
    """``a[i:i+4] = values`` of float32, by one 16-byte store. A word of this file only."""
    raise NotImplementedError("compiled code only")


@_define(_store_four)
def _(typing_context, a, i, values):
    def codegen(context, builder, signature, args):
        pointer = _access(context, builder, signature, args)
        vector = ir.Constant(ir.VectorType(F32, 4), ir.Undefined)
        for lane in range(4):
            value = builder.extract_value(args[2], lane)
            vector = builder.insert_element(vector, value, ir.Constant(I32, lane))
        builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=16)
        return context.get_dummy_value()

    return types.none(a, i, values), codegen


@_define(words.opaque)
def _(typing_context, x):
    def codegen(context, builder, signature, args):
        return asm(builder, I64, ptx.COPY, "=l,l", args)

    return types.int64(types.int64), codegen


@_python(words.exp)
def _(x):
    return lambda x: math.exp(x)


@_python(words.block_copy)
def _(out, k, a, i, n):
    def block_copy(out, k, a, i, n):
        step = block_threads() * 4
        c = thread_id() * 4
        while c + 3 * step < n:  # four loads in flight: a store waits for its load, and the next load for it
            a0, a1 = _four(a, i + c), _four(a, i + c + step)
            a2, a3 = _four(a, i + c + 2 * step), _four(a, i + c + 3 * step)
            _store_four(out, k + c, a0)
            _store_four(out, k + c + step, a1)
            _store_four(out, k + c + 2 * step, a2)
            _store_four(out, k + c + 3 * step, a3)
            c += 4 * step
        while c < n:
            _store_four(out, k + c, _four(a, i + c))
            c += step

    return block_copy


@_python(words.block_scale)
def _(out, k, a, i, scale, gain, g, n):
    def block_scale(out, k, a, i, scale, gain, g, n):
        c = thread_id() * 4
        while c < n:
            x, y = _four(a, i + c), _four(gain, g + c)
            scaled = (x[0] * scale * y[0], x[1] * scale * y[1], x[2] * scale * y[2], x[3] * scale * y[3])
            _store_four(out, k + c, scaled)
            c += block_threads() * 4

    return block_scale


@cuda.jit(device=True)
def _dot8(a, b):
    s = a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
    return s + (a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7])


@_python(words.row_dot)
def _(w, i, x, j, n):
    def of_floats(w, i, x, j, n):
        s = f32(0.0)
        k = lane_id() * 8
        while k < n:
            _keep_rolled()
            s += _dot8(_eight(w, i + k), _eight(x, j + k))
            k = opaque(k + 256)
        return lane_sum(s)

    def of_halves(w, i, x, j, n):
        lane8 = lane_id() * 8
        i += lane8
        j += lane8
        s, t = f32(0.0), f32(0.0)
        k = lane8
        while k + 768 < n:  # four loads in flight
            w0, w1, w2, w3 = _eight(w, i), _eight(w, i + 256), _eight(w, i + 512), _eight(w, i + 768)
            s += _dot8(w0, _eight(x, j))
            t += _dot8(w1, _eight(x, j + 256))
            s += _dot8(w2, _eight(x, j + 512))
            t += _dot8(w3, _eight(x, j + 768))
            i += 1024
            j += 1024
            k += 1024
        while k < n:
            s += _dot8(_eight(w, i), _eight(x, j))
            i += 256
            j += 256
            k += 256
        return lane_sum(s + t)

    return of_floats if w.dtype == types.float32 else of_halves


def _prefetch_line(w, i):
    """Fetch the 128 bytes at ``w[i]`` into L2. A word of this file only."""
    raise NotImplementedError("compiled code only")


@_define(_prefetch_line)
def _(typing_context, w, i):
    def codegen(context, builder, signature, args):
        asm(builder, VOID, ptx.PREFETCH_L2, "l", [_access(context, builder, signature, args)])
        return context.get_dummy_value()

    return types.none(w, i), codegen


@_python(words.prefetch)
def _(w, i, n):
    line = 128 * 8 // w.dtype.bitwidth

    def prefetch(w, i, n):
        k = lane_id() * line
        while k < n:
            _prefetch_line(w, i + k)
            k += 32 * line

    return prefetch


@_python(words.dot)
def _(a, i, b, j, n):
    def dot(a, i, b, j, n):
        s, k = f32(0.0), i64(0)
        while k < n:
            _keep_rolled()
            s += _dot8(_eight(a, i + k), _eight(b, j + k))
            k = opaque(k + 8)
        return s

    return dot


@_python(words.row_mix)
def _(weight, i, n, rows, j, width, out, k):
    def row_mix(weight, i, n, rows, j, width, out, k):
        c = lane_id()
        while c < width:
            s = out[k + c]
            for p in range(n):
                s += weight[i + p] * rows[j + p * width + c]
            out[k + c] = s
            c += 32

    return row_mix
