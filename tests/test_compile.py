"""The persistent kernel compiles for GPUs that are not here, and fits them."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from blink_ref.engine import compile as command
from blink_ref.engine.settings import CUDA_LANES
from blink_ref.errors import BlinkError
from blink_ref.simt import capability
from blink_ref.simt.assembler import Report

CAPABILITIES = [(9, 0), (8, 0), (7, 5)]
"""`make compile-all` compiles for all that there are, and weights of other types."""
KERNELS = [*((cc, "bfloat16", command.KV_DTYPE) for cc in CAPABILITIES), command.ALL[-1]]
"""Each with the types of weights, and of keys and values; the last one with the other of these."""

pytest.importorskip("numba_cuda", reason="needs numba-cuda and ptxas: pip install 'blink-ref[cuda13]'")

pytestmark = pytest.mark.timeout(900)  # four kernels at once, on two cores that others may use too


@pytest.fixture(scope="module")
def compiled():
    """PTX and report of each of KERNELS: most of a minute each, at once."""
    with ProcessPoolExecutor(len(KERNELS), multiprocessing.get_context("spawn")) as pool:
        return dict(zip(KERNELS, pool.map(command.compile_kernel, *zip(*KERNELS, strict=True)), strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{capability.name(kernel[0])}-{kernel[2]}")
def test_the_persistent_kernel_has_no_spill_no_local_memory_and_no_double_precision(compiled, kernel):
    ptx, report = compiled[kernel]
    cc, _, kv_dtype = kernel
    assert report.faults() == []
    assert f".target sm_{cc[0]}{cc[1]}" in ptx
    assert report.max_threads >= CUDA_LANES
    assert f"ld.global.nc.L1::no_allocate{'.L2::cache_hint' * (cc >= (8, 0))}.v4.u32" in ptx
    assert "barrier.sync" in ptx
    for text in ("mma.sync", "cp.async.bulk", "ldmatrix"):
        assert (text in ptx) == (cc >= (9, 0)), text
    assert ("wgmma.mma_async" in ptx) == (cc == (9, 0))
    assert ("ld.shared.v4.b32" in ptx) == (cc >= (9, 0))  # pieces of keys and values
    assert ("cvt.rn.bf16.f32" in ptx) == (kv_dtype == "bfloat16" and cc >= (8, 0))


def test_each_fault_of_a_kernel_is_named():
    good = Report("9.0", 100, spill_bytes=0, local_bytes=0, shared_bytes=0, f64=0, serialized=0, max_threads=512)
    assert good.faults() == []
    for field, word in (
        ("spill_bytes", "spilled"),
        ("local_bytes", "local"),
        ("f64", "double"),
        ("serialized", "wait for each other"),
    ):
        (fault,) = Report(**{**good.as_dict(), field: 8}).faults()
        assert word in fault


def test_the_command_reports_in_json(compiled, capsys, monkeypatch):
    monkeypatch.setattr(command, "compile_kernel", lambda *kernel: compiled[kernel])
    assert command.main(["--cc", "9.0", "--kv-dtype", "bfloat16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"registers", "spill_bytes", "local_bytes", "shared_bytes", "f64", "serialized"} <= report.keys()
    assert 0 < report["registers"] <= 128
    assert report["shared_bytes"] > 200_000


def test_the_command_compiles_for_all_and_tells_of_faults(compiled, capsys, monkeypatch):
    class Here:
        """A pool of processes that is none."""

        def __init__(self, *_):
            self.map = map

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def kernel(cc, *_):
        _, report = compiled[KERNELS[0]]
        return "", replace(report, cc=f"{cc[0]}.{cc[1]}", spill_bytes=8 * (cc == (12, 0)))

    monkeypatch.setattr(command, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(command, "compile_kernel", kernel)
    assert command.main(["--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [[capability.name(cc), *types] for cc, *types in command.ALL]
    assert {cc for cc, *_ in command.ALL} == set(capability.SHARED_LIMIT)
    registers = compiled[KERNELS[0]][1].registers
    assert [line for line in lines if not line.endswith("no fault")] == [
        f"12.0  bfloat16  {command.KV_DTYPE:9}  {registers} registers  8 bytes of spilled registers"
    ]


def test_a_gpu_older_than_the_oldest_served_is_refused():
    with pytest.raises(BlinkError, match=r"7\.0 is older than 7\.5"):
        command.compile_kernel((7, 0))
