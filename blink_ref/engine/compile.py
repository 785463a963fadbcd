"""``blink-ref compile``: the persistent kernel as PTX, and what ptxas says of it. Needs no GPU."""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numba
import numpy as np

from ..errors import BlinkError
from ..model.config import ModelConfig
from ..model.store import resolve
from ..model.weights import Weights
from ..simt import assembler, capability
from . import memory, settings
from .persistent import serve

DTYPES = "bfloat16", "float16", "float32"
KV_DTYPE = settings.KV_DTYPE["cuda"]
ALL = [
    *((cc, DTYPES[0], KV_DTYPE) for cc in capability.SHARED_LIMIT),
    *(((9, 0), dtype, KV_DTYPE) for dtype in DTYPES[1:]),
    *(((9, 0), DTYPES[0], kv_dtype) for kv_dtype in settings.KV_BYTES if kv_dtype != KV_DTYPE),
]
"""What ``--all`` compiles: for each compute capability, and for one each type that weights, or keys, can have."""


def argument_types(dtype: str, kv_dtype: str) -> tuple[numba.types.Type, ...]:
    """Numba types of what ``serve`` takes after its block, for weights, and keys and values, stored as that.

    They depend on no size, so the smallest model stands for all.
    """
    config = ModelConfig.load(resolve("tiny"))
    chosen = settings.choose(config, "cpu", kv_dtype=kv_dtype)
    chosen = replace(chosen, target="cuda", slots=64, rows=32, running=32, pages=64)
    layout = memory.window_layout(config, chosen)
    window = memory.device_window(np.zeros((), layout.nic_half), np.zeros((), layout.gpu_half), layout)
    args = memory.arguments(config, Weights.random(config, dtype=dtype), chosen, window)
    max_steps = patience = 0
    return tuple(numba.typeof(a) for a in (*args, max_steps, patience))


def compile_kernel(
    cc: tuple[int, int], dtype: str = "bfloat16", kv_dtype: str = KV_DTYPE
) -> tuple[str, assembler.Report]:
    """PTX of the persistent kernel for a compute capability, and its report.

    `dtype` is that of weights, `kv_dtype` of keys and values.
    """
    if cc < capability.OLDEST:
        have, need = capability.name(cc), capability.name(capability.OLDEST)
        raise BlinkError(f"compute capability {have} is older than {need}, the oldest served")
    try:
        from ..simt import on_cuda
    except ImportError as error:
        raise BlinkError(f"numba-cuda is not installed ({error}); pip install 'blink-ref[cuda13]'") from None
    ptx = on_cuda.compile_to_ptx(serve, argument_types(dtype, kv_dtype), settings.CUDA_LANES, cc)
    report = assembler.assemble(ptx, cc)
    return ptx, replace(report, shared_bytes=report.shared_bytes + capability.arena_bytes(cc))


def main(arguments: list[str]) -> int:
    """Print PTX with a report in comments at its end, or the report as JSON; 1 if the kernel has a fault."""
    options = _parser().parse_args(arguments)
    if options.all:
        return compile_all()
    ptx, report = compile_kernel(options.cc, options.dtype, options.kv_dtype)
    faults = faults_of(report)
    if options.json:
        print(json.dumps(report.as_dict() | {"faults": faults}))
    else:
        if not options.no_ptx:
            print(ptx)
        for name, value in report.as_dict().items():
            print(f"// {name:12} {value}")
    for fault in faults:
        print(f"blink-ref: error: the kernel has {fault}", file=sys.stderr)
    return 1 if faults else 0


def faults_of(report: assembler.Report) -> list[str]:
    """What the kernel must not have, and too few threads a block."""
    faults = report.faults()
    if report.max_threads < settings.CUDA_LANES:
        faults.append(f"{report.registers} registers leave room for {report.max_threads} threads a block only")
    return faults


def compile_all() -> int:
    """A line for each kernel of ALL, two compiled at a time; 1 if one has a fault."""
    failed = 0
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        made = pool.map(compile_kernel, *zip(*ALL, strict=True))
        for (_, dtype, kv_dtype), (_, report) in zip(ALL, made, strict=True):
            faults = faults_of(report)
            failed |= bool(faults)
            said = ", ".join(faults) or "no fault"
            print(f"{report.cc:5} {dtype:9} {kv_dtype:9} {report.registers:4} registers  {said}", flush=True)
    return failed


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a compute capability such as 9.0")
    return int(major), int(minor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blink-ref compile",
        description="Compile the persistent kernel to PTX, with no GPU, and report its registers and spills.",
        epilog="example: blink-ref compile --cc 9.0 --no-ptx",
    )
    parser.add_argument("--all", action="store_true", help="a line for each capability and types, some minutes")
    parser.add_argument("--cc", type=_capability, default=(9, 0), help="compute capability (default 9.0)")
    parser.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="of weights (default bfloat16)")
    kv_dtypes = list(settings.KV_BYTES)
    parser.add_argument(
        "--kv-dtype", default=KV_DTYPE, choices=kv_dtypes, help=f"of the KV cache (default {KV_DTYPE})"
    )
    parser.add_argument("--no-ptx", action="store_true", help="the report only")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    return parser
