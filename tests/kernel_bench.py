"""What tests of kernels share: random models of any shape, an arena full of NaN, and bounds of rounding errors.

Kernels are float32, specifications are evaluated in float64. u = 2**-24 is the rounding error of one
operation, relative; a sum of n products is off by at most gamma(n) times the sum of their sizes, in whatever
order (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). exp is taken to be right to
three units in the last place, 6 u (see test_simt_numbers.py).
"""

import numpy as np

from blink_ref.engine.memory import device_model
from blink_ref.kernels import staging
from blink_ref.kernels.tensors import Model
from blink_ref.model.config import ModelConfig
from blink_ref.model.tensorfile import from_float32, to_float32
from blink_ref.model.weights import STORED_AS, Weights
from blink_ref.scheduler import state
from blink_ref.simt import aligned, device
from blink_ref.simt.on_python import WARP_WIDTH
from blink_ref.simt.vocabulary import DOTS_COLUMNS, FRAGMENT, barrier, block_threads, f32, thread_id

U = 2**-24

KV_DTYPES = "float32", "bfloat16"
"""What keys and values are stored as."""


def gamma(n):
    return n * U / (1 - n * U)


def model_of(dtype="float32", scale=0.3, seed=0, **shape) -> tuple[Model, Weights, ModelConfig]:
    """A random model: as the kernels see it, as a matrix can be taken out of it, and its shape."""
    defaults = {
        "vocab": 61,
        "hidden": 72,
        "ffn": 104,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 24,
        "context": 64,
    }
    config = ModelConfig(
        name="small",
        rms_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied=True,
        bos_id=None,
        eos_ids=(),
        dtype=dtype,
        **(defaults | shape),
    )
    weights = Weights.random(config, seed=seed, dtype=dtype, scale=scale)
    model = device_model(config, weights, config.context, packed=aligned(8, np.int16))  # CUDA takes no None
    return model, weights, config


def plan_of(rows: int, **columns) -> state.Plan:
    """A plan of `rows` rows and samples, its columns filled from their start."""
    plan = state.allocate_plan(rows, running=rows)
    for name, values in columns.items():
        getattr(plan, name)[: len(values)] = values
    return plan


def floats(*shape: int, seed: int) -> np.ndarray:
    """Normally distributed float32, at an aligned address."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    array = aligned(values.size, np.float32)
    array[:] = values.reshape(-1)
    return array.reshape(shape)


def in_halves(target: str) -> bool:
    """Whether activations are kept as float16: on a GPU whose tensor cores are used."""
    if target != "cuda":
        return False
    from numba import cuda

    return bool(cuda.get_current_device().compute_capability >= (9, 0))


def packed_values(x: np.ndarray, target: str) -> np.ndarray:
    """float32 of the room that activations have taken, in the order in which they lie there."""
    if not in_halves(target):
        return x
    from blink_ref.simt.cuda_fragments import BACK

    return np.ascontiguousarray(x[: x.size // 2]).view(np.float16).astype(np.float32) * BACK


def fragment_values(x: np.ndarray, rows: int, target: str) -> np.ndarray:
    """float32 [rows, n] of the room that so many rows of n have taken by `fragment_put`."""
    values = packed_values(x, target).reshape(-1, rows, FRAGMENT)
    if in_halves(target):  # the pairs of a row's halves take turns
        values = values.reshape(-1, rows, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(values.shape)
    return values.transpose(1, 0, 2).reshape(rows, -1)


def block_values(x: np.ndarray, rows: int, target: str) -> np.ndarray:
    """The same of `block_put`."""
    return packed_values(x, target).reshape(-1, rows, DOTS_COLUMNS).transpose(1, 0, 2).reshape(rows, -1)


def nans(n: int, dtype: str = "float32") -> np.ndarray:
    """A buffer in which nothing has been written; of float32, or of what stands for it."""
    array = aligned(n, STORED_AS[dtype])
    array[:] = from_float32(np.full(1, np.nan, np.float32), array.dtype)
    return array


def kept_exactly(values: np.ndarray, kv_dtype: str) -> np.ndarray:
    """The float32 values nearest to these that a cache of that type keeps as they are."""
    return to_float32(from_float32(values, STORED_AS[kv_dtype]))


@device
def poison_arena(block):
    """Fill the arena with NaN, so that what a kernel reads there without having written it shows."""
    i = thread_id()
    while i < block.shared.shape[0]:
        block.shared[i] = f32(np.nan)
        i += block_threads()
    barrier()


def check(got: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> None:
    """Every element is within its bound of the exact one."""
    assert got.shape == exact.shape
    error = np.abs(got - exact)
    assert (error <= bound).all(), (
        f"off by {np.max(error / bound):.2f} times the bound; NaN: {np.isnan(got).sum()}"
    )


def warps_of(target, lanes):
    return lanes // {"python": WARP_WIDTH, "cpu": 1, "cuda": 32}[target]


def room_for(tile: int, width: int, target: str, lanes: int) -> int:
    """Floats of arena for `tile` staged rows, and for most of one more, which must not be used."""
    return staging.arena(tile, width, warps_of(target, lanes)) + width - 4
