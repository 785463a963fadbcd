"""The machine without its GPU: cores, vector units, memory, folders, RDMA devices."""

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from blink_ref.config import cache_dir
from blink_ref.ring.layout import Layout
from blink_ref.ring.window import DIRECTORY, default_directory

from .finding import FAILURE, NOTE, OK, WARNING, Finding

PROC, SYS = Path("/proc"), Path("/sys")
GB = 10**9
MODEL_MEMORY, MODEL_DISK = 1.0 * GB, 0.6 * GB
"""What smollm2 takes: weights and KV cache in memory, and on disk while it is converted."""

VECTORS = {
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "avx2": "AVX2",
    "f16c": "F16C",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}
"""By flag of x86 and feature of Arm, in /proc/cpuinfo."""


def cores() -> Iterator[Finding]:
    """Cores that this process may use, and a container's quota, which spinning blocks would spend."""
    affinity = getattr(os, "sched_getaffinity", None)
    n = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _quota()
    if quota and quota < n:
        mend = f"blink-ref generate --sms {max(1, int(quota))} ..., or give the container {n} CPUs"
        found = f"{n} cores, of which a quota leaves {quota:g}: blocks would wait for each other"
        yield Finding("cores", WARNING, found, mend)
    else:
        yield Finding("cores", OK, f"{n} of {os.cpu_count()}, {platform.machine()}")


def _quota() -> float:
    """CPUs that a control group grants; 0 = no limit known."""
    path = SYS / "fs/cgroup/cpu.max"
    spent, _, period = path.read_text().partition(" ") if path.is_file() else ("max", "", "")
    return 0 if spent == "max" else int(spent) / int(period)


def vectors() -> Iterator[Finding]:
    """Vector units, which decide the speed of the `cpu` target."""
    lines = (PROC / "cpuinfo").read_text().splitlines()
    found = next(line for line in lines if line.startswith(("flags", "Features")))
    have = set(found.partition(":")[2].split())
    names = [name for flag, name in VECTORS.items() if flag in have]
    if have & {"avx2", "avx512f", "asimd"}:
        yield Finding("vector units", OK, ", ".join(names))
    else:
        yield Finding("vector units", WARNING, "none wider than SSE: the cpu target will be slow", "--model tiny")


def memory() -> Iterator[Finding]:
    """Memory that programs can still have."""
    lines = (PROC / "meminfo").read_text().splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if free < MODEL_MEMORY:
        mend = "end other programs, or blink-ref generate --model tiny ..."
        yield Finding(
            "memory", WARNING, f"{free / GB:.1f} GB free; smollm2 takes {MODEL_MEMORY / GB:.1f} GB", mend
        )
    else:
        yield Finding("memory", OK, f"{free / GB:.1f} GB free")


def window_folder() -> Iterator[Finding]:
    """Where windows lie: it is there, can be written, and has room for one."""
    folder, need = default_directory(), Layout().size
    other = f"export {DIRECTORY}=FOLDER (of a memory file system, if a GPU is to use it)"
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        yield Finding("window folder", FAILURE, f"{folder} is missing or not writable", other)
        return
    disk = shutil.disk_usage(folder)
    found = f"{folder}: {disk.free / 1e6:.0f} of {disk.total / 1e6:.0f} MB free; a window takes {need / 1e6:.0f}"
    if disk.free < need:
        mend = f"free some, docker run --shm-size=256m ..., or {other}"
        yield Finding("window folder", FAILURE, found, mend)
    else:
        yield Finding("window folder", OK, found)


def cache_folder() -> Iterator[Finding]:
    """Where models and compiled code are kept."""
    folder = cache_dir()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        found = f"{folder} cannot be written"
        yield Finding("cache folder", FAILURE, found, "export BLINK_REF_CACHE=FOLDER that can be")
        return
    free = shutil.disk_usage(there).free
    if free < MODEL_DISK:
        found = f"{folder}: {free / GB:.1f} GB free; smollm2 takes {MODEL_DISK / GB:.1f} to fetch"
        yield Finding("cache folder", WARNING, found, "free some, or export BLINK_REF_CACHE=FOLDER")
    else:
        yield Finding("cache folder", OK, f"{folder}: {free / GB:.1f} GB free")


def system() -> Iterator[Finding]:
    """The operating system; Windows beneath Linux has a say in how long a kernel may run."""
    name = f"{platform.system()} {platform.release()}"
    if "microsoft" in name.lower():
        found = f"{name}: Windows may end a kernel on the GPU after two seconds"
        yield Finding("system", WARNING, found, "--target cpu, or Linux without Windows")
    elif platform.system() == "Linux":
        yield Finding("system", OK, name)
    else:
        yield Finding("system", NOTE, f"{name}: meant to work, not tested", "")


def rdma() -> Iterator[Finding]:
    """RDMA devices; nothing needs one yet."""
    folder = SYS / "class/infiniband"
    devices = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    yield Finding(
        "RDMA", OK if devices else NOTE, ", ".join(devices) or "no devices; windows lie in shared memory"
    )
