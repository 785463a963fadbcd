"""The sizes an engine runs with, chosen from the model and the machine."""

import os
from dataclasses import dataclass

from ..errors import BlinkError
from ..kernels import attention, staging, stream, tiles
from ..kvcache.pages import pages_spec
from ..model.config import ModelConfig
from ..simt.capability import STATIC_SHARED
from ..simt.on_python import WARP_WIDTH

GIB = 1 << 30

CUDA_LANES = 512

STAGED_IN_L1 = 28 * 1024 // 4
"""Floats of staged rows on the CPU: read again for each row of weights, they should stay in the first cache."""

MOST_BLOCKS = 64
"""On a CPU of fewer cores: beyond it, blocks do little but wait for each other."""


WEIGHT_BYTES = 2
"""Of a bfloat16, the only one that is packed."""

KV_BYTES = {"float32": 4, "bfloat16": 2}
"""What keys and values can be stored as, and the bytes of a number."""

KV_DTYPE = {"cuda": "bfloat16", "cpu": "float32", "python": "float32"}
"""What they are stored as where nobody asks for another, by target."""

MANY = 32
"""Blocks from which on one that does not compute is hardly missed."""


@dataclass(frozen=True)
class Settings:
    """Launch shape and sizes of one engine."""

    target: str
    blocks: int
    lanes: int
    """threads in a block; 1 on the CPU"""
    shared: int
    """floats of arena in a block"""
    rows: int = 32
    """most rows in a step: the token budget of chunked prefill"""
    running: int = 32
    """most requests in the batch"""
    slots: int = 4096
    context: int = 2048
    """most positions of one request"""
    page_size: int = 16
    pages: int = 1024
    reserved: int = 0
    """places in the batch that only latency-sensitive requests get"""
    layer_preemption: bool = True
    """whether those interrupt a step between two layers, or wait for its end"""
    scheduler_block: bool = False
    """whether block 0 only schedules, while the others compute; there are two blocks then at least"""
    rehearsals: bool = False
    """whether the scheduler, when it has nothing to do, rehearses a request, so that its instructions are at hand
    (scheduler/rehearsal.py)"""
    tiles: int = 0
    """steps of more rows are computed in tiles, if model and GPU allow it: much faster, but a request's tokens may
    then depend on what is computed beside it; 0 = no step is"""
    stream_rows: int = 0
    """steps of up to so many rows are computed from a stream of packed weights, if model and GPU allow it; with
    the same effect on tokens; 0 = no step is"""
    sharing: bool = True
    """whether requests that begin alike share pages"""
    kv_dtype: str = "float32"
    """what keys and values are stored as: float32, or bfloat16, which takes half the room and of each number keeps
    8 bits, so that tokens may differ"""

    @property
    def warps(self) -> int:
        """Warps of a block."""
        width = {"cuda": 32, "cpu": 1, "python": WARP_WIDTH}[self.target]
        return -(-self.lanes // width)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a number of the KV cache."""
        return KV_BYTES[self.kv_dtype]

    def __post_init__(self) -> None:
        check_kv_dtype(self.kv_dtype)
        if self.scheduler_block and self.blocks < 2:
            raise BlinkError(
                "--scheduler-block takes a block for itself, and there is one in all; add --sms 2, or leave it out"
            )


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises BlinkError where keys and values cannot be stored as that."""
    if kv_dtype not in KV_BYTES:
        raise BlinkError(f"--kv-dtype is '{kv_dtype}'; keys and values are stored as {' or '.join(KV_BYTES)}")


def choose(
    config: ModelConfig,
    target: str,
    sms: int = 0,
    cache_bytes: int = 0,
    scheduler_block: bool | None = None,
    batch_invariant: bool = False,
    kv_dtype: str | None = None,
) -> Settings:
    """Settings for a model on a target of this machine.

    `sms` is the number of blocks (0 = all SMs, or all cores); `cache_bytes` bounds the KV cache
    (0 = 1 GiB on the CPU, a third of the free memory on a GPU). With `scheduler_block` one of the blocks only
    schedules; None = on a GPU, if there are MANY. `batch_invariant`: a request's tokens never depend on what is
    computed beside it, which on a GPU makes steps of many rows slower (docs/architecture.md: "One source, three
    targets"). `kv_dtype`: see :class:`Settings`; None = KV_DTYPE of the target. Raises BlinkError where the model
    cannot fit, or keys and values cannot be stored so.
    """
    kv_dtype = kv_dtype or KV_DTYPE[target]
    check_kv_dtype(kv_dtype)
    if sms < 0:
        raise BlinkError(f"--sms is {sms}; give the number of blocks, or 0 for all")
    context = min(config.context, 8192)
    width = max(config.hidden, config.ffn, config.heads * config.head_dim)
    if target == "cuda":
        from ..simt import on_cuda

        machine = on_cuda.limits()
        blocks, lanes, running = sms or machine.sms, CUDA_LANES, 64
        rows = 64 if batch_invariant else 256
        shared = (machine.shared_bytes - STATIC_SHARED) // 4
        cache_bytes = cache_bytes or machine.free_bytes // 3
        if blocks > machine.sms:
            raise BlinkError(
                f"--sms {sms} asks for more blocks than this GPU's {machine.sms} SMs; give at most that"
            )
        warps = lanes // 32
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        on_python = target == "python"
        blocks, lanes, rows, running = sms or (2 if on_python else cores), 4 if on_python else 1, 32, 32
        most = max(MOST_BLOCKS, cores)
        if blocks > most:
            raise BlinkError(
                f"--sms is {sms}; at most {most} blocks make sense on {cores} cores, where each block is a thread "
                "that waits for the others"
            )
        warps = -(-lanes // WARP_WIDTH) if on_python else 1
        staged = rows * width if on_python else max(STAGED_IN_L1, min(rows, 4) * width)
        shared, cache_bytes = staging.arena(1, staged, warps), cache_bytes or GIB
    page_size = (
        32 if target == "cuda" else 16
    )  # as many positions as a warp has lanes, or enough for a vector loop
    needed = max(staging.arena(1, width, warps), attention.arena(config.head_dim, page_size, warps))
    if shared < needed:
        raise BlinkError(
            f"model '{config.name}' needs {4 * needed} bytes of shared memory a block for a row of {width}; "
            f"this GPU gives {4 * shared}; choose a smaller model"
        )
    page_bytes = 2 * KV_BYTES[kv_dtype] * config.layers * config.kv_heads * config.head_dim * page_size
    most = running * pages_spec(context, page_size)
    pages = max(pages_spec(context, page_size), min(most, cache_bytes // page_bytes))
    slots = 64 if target == "python" else 4096
    sizes = rows, running, slots, context, page_size, pages, running // 8
    if scheduler_block is None:
        scheduler_block = target == "cuda" and blocks >= MANY
    fast = target == "cuda" and not batch_invariant
    # the packed weights lie beside the others, and a third of what is free is for the KV cache
    streams = fast and machine.streams and 2 * WEIGHT_BYTES * config.parameters <= 0.6 * machine.free_bytes
    return Settings(
        target,
        blocks,
        lanes,
        shared,
        *sizes,
        scheduler_block=scheduler_block,
        rehearsals=target == "cuda",
        tiles=tiles.FEW if fast else 0,
        stream_rows=stream.MOST_ROWS if streams else 0,
        kv_dtype=kv_dtype,
    )
