"""The GPU: is there one, is it served, and will it let a kernel run for ever."""

import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from blink_ref.errors import BlinkError
from blink_ref.simt import assembler, capability

from .finding import NOTE, OK, WARNING, Finding
from .software import lacks

ON_CPU = "--target cpu"


class Card(NamedTuple):
    """A GPU as nvidia-smi lists it."""

    name: str
    cc: tuple[int, int]
    driver: str
    free_mb: int
    display: bool


def gpu() -> Iterator[Finding]:
    """All about the GPU that the `cuda` target would use, the first one."""
    cards = list_cards()
    if not cards:
        yield Finding("GPU", NOTE, "no NVIDIA GPU found by nvidia-smi; the cpu target runs without")
        return
    card = cards[0]
    found = f"{card.name}, compute capability {capability.name(card.cc)}, {card.free_mb} MB free"
    if card.cc < capability.OLDEST:
        yield Finding("GPU", WARNING, f"{found}; served from {capability.name(capability.OLDEST)} on", ON_CPU)
        return
    yield Finding("GPU", OK, found)
    major = int(cuda_version().partition(".")[0])
    # the assembler's package is not needed to serve; ptxas() tells of it
    if lacking := [wish for wish in lacks(f"cuda{major}") if not wish.startswith("nvidia-cuda-nvcc")]:
        yield Finding("CUDA packages", WARNING, "; ".join(lacking), f"pip install 'blink-ref[cuda{major}]'")
        return
    yield from _driver(card, major)
    yield from _limit(card)
    yield from _others()
    yield from _usable()


def ptxas() -> Iterator[Finding]:
    """NVIDIA's assembler, which ``blink-ref compile`` needs and serving does not."""
    try:
        yield Finding("ptxas", OK, str(assembler.find_ptxas()))
    except BlinkError:
        lacking = "blink-ref compile cannot report registers without it"
        yield Finding("ptxas", NOTE, lacking, "pip install 'blink-ref[cuda13]'")


def list_cards() -> list[Card]:
    """The GPUs that nvidia-smi lists; none where it does not work."""
    rows = smi(
        "--query-gpu=name,compute_cap,driver_version,memory.free,display_active", "--format=csv,noheader,nounits"
    )
    return [_card(row) for row in rows.splitlines() if row.count(",") >= 4]


def _card(row: str) -> Card:
    name, cc, driver, free, display = (part.strip() for part in row.rsplit(",", 4))
    major, _, minor = cc.partition(".")
    return Card(name, (int(major), int(minor)), driver, int(free) if free.isdigit() else 0, display == "Enabled")


def cuda_version() -> str:
    """The CUDA version that the driver speaks, such as 13.0."""
    return smi().partition("CUDA Version:")[2].split()[0]


def smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty where it is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return ""
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    return done.stdout if done.returncode == 0 else ""


def kernel_time_limit() -> bool | None:
    """Whether the driver ends kernels that run long; None where CUDA does not say."""
    try:
        from blink_ref.simt.numba_cuda import cuda

        return bool(cuda.get_current_device().KERNEL_EXEC_TIMEOUT)
    except Exception:  # numba-cuda raises its own kinds, which may not be importable
        return None


def why_no_cuda() -> str:
    """Why the `cuda` target cannot be used, as a launch would say; empty if it can."""
    from blink_ref.simt.launch import why_no_cuda

    return why_no_cuda()


def _driver(card: Card, major: int) -> Iterator[Finding]:
    toolkit = metadata.version("cuda-bindings")
    found = f"driver {card.driver} speaks CUDA {cuda_version()}, the packages are of {toolkit}"
    if int(toolkit.partition(".")[0]) > major:
        yield Finding("CUDA driver", WARNING, found, f"update the driver, or pip install 'blink-ref[cuda{major}]'")
    else:
        yield Finding("CUDA driver", OK, found)


def _limit(card: Card) -> Iterator[Finding]:
    limited = kernel_time_limit()
    if limited or (limited is None and card.display):
        found = "a display hangs on this GPU: the driver ends kernels after a few seconds"
        yield Finding("kernel time", WARNING, found, f"boot to a text console, use another GPU, or {ON_CPU}")
    else:
        yield Finding("kernel time", OK, "no limit")


def _others() -> Iterator[Finding]:
    rows = smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits").splitlines()
    if rows := [row for row in rows if row[:1].isdigit()]:
        pids = ", ".join(row.partition(",")[0] for row in rows)
        found = f"processes {pids} use the GPU; a persistent kernel shares badly"
        yield Finding("GPU's users", WARNING, found, f"end them, or set CUDA_VISIBLE_DEVICES, or {ON_CPU}")


def _usable() -> Iterator[Finding]:
    if reason := why_no_cuda():
        yield Finding("cuda target", WARNING, reason, ON_CPU)
    else:
        yield Finding("cuda target", OK, "usable")
