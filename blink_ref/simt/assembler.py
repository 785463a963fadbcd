"""PTX to machine code with NVIDIA's ptxas, for what it tells of a kernel: registers, spills, shared memory."""

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import BlinkError
from . import capability

REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel, and how many double-precision instructions its PTX holds."""

    cc: str
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    f64: int
    serialized: int
    """how often ptxas says that `wgmma` instructions wait for each other"""
    max_threads: int
    """threads in a block that the registers allow"""

    def faults(self) -> list[str]:
        """What a kernel of this project must not have."""
        checks = (
            (self.f64, f"{self.f64} double-precision (.f64) instructions: write f32(0.0), not 0.0"),
            (self.spill_bytes, f"{self.spill_bytes} bytes of spilled registers"),
            (self.local_bytes, f"{self.local_bytes} bytes of local memory"),
            (self.serialized, "wgmma instructions that wait for each other"),
        )
        return [text for found, text in checks if found]

    def as_dict(self) -> dict[str, int | str]:
        return asdict(self)


def find_ptxas() -> Path:
    """The ptxas of the nvidia-cuda-nvcc wheel, whose version fits the PTX. Raises BlinkError without it."""
    try:
        import nvidia
    except ImportError:
        nvidia = None
    for folder in getattr(nvidia, "__path__", []):
        for found in sorted(Path(folder).glob("*/bin/ptxas"), reverse=True):
            return found
    raise BlinkError("ptxas is not installed; pip install 'blink-ref[cuda13]' brings it (wheel nvidia-cuda-nvcc)")


def assemble(ptx: str, cc: tuple[int, int]) -> Report:
    """Assemble PTX for compute capability `cc` and report. Raises BlinkError with ptxas's words if it refuses."""
    arch = capability.architecture(cc)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(find_ptxas()), "-v", "-arch", arch, str(source), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    text = done.stderr + done.stdout
    if done.returncode:
        raise BlinkError(f"ptxas refuses the kernel for {arch}: {text.strip().splitlines()[0]}")

    def number(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, text)), default=0)

    registers = number(r"Used (\d+) registers")
    return Report(
        cc=capability.name(cc),
        registers=registers,
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        local_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
        f64=len(re.findall(r"\.f64\b", ptx)),
        serialized=len(re.findall(r"wgmma\S* instructions are serialized", text)),
        max_threads=REGISTERS_PER_SM // max(registers, 1) // 32 * 32,
    )
