"""Safetensors files, memory-mapped and aligned, and the 16-bit floats that NumPy lacks.

Throughout the package an array of 16-bit floats is its bits: ``uint16`` is bfloat16 and ``int16``
is float16, so that a device function can tell them apart by dtype.

The format is an 8-byte little-endian header length, a JSON header (name to dtype, shape and byte
range), then the data without holes: https://github.com/huggingface/safetensors#format
"""

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blink_ref.errors import BlinkError

# How the floats of a file are held in memory.
STORED: dict[str, np.dtype] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.int16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# Data starts at a multiple of this, so that aligned vector loads work on the mapping itself.
ALIGNMENT = 64


@dataclass(frozen=True)
class Tensor:
    """One tensor of a mapped file: ``start`` bytes into ``data`` (uint8, the whole file)."""

    file: Path
    data: np.ndarray
    start: int
    dtype: str
    shape: tuple[int, ...]

    def view(self) -> np.ndarray:
        """The tensor without a copy where its address allows, in the dtype of ``STORED``."""
        stored = STORED[self.dtype]
        count = int(np.prod(self.shape, dtype=np.int64))
        raw = self.data[self.start : self.start + count * stored.itemsize]
        if self.start % stored.itemsize:
            raw = raw.copy()
        return raw.view(stored).reshape(self.shape)


def open_safetensors(file: Path) -> dict[str, Tensor]:
    """Map ``file`` and list its tensors, reading none. Tensors of a dtype not in STORED are listed too.

    Raises BlinkError: the file is missing, truncated or no safetensors file.
    """
    try:
        with file.open("rb") as opened:
            # Copy-on-write: pages come from the file, yet the arrays are writable to NumPy, so that
            # compiled code has one type for mapped and for allocated weights.
            data = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    except FileNotFoundError:
        raise BlinkError(f"{file} is missing; fetch the model again") from None
    except (OSError, ValueError) as error:
        raise BlinkError(f"{file} cannot be mapped ({error}); fetch the model again") from None
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        base = 8 + length
        if base > len(data):
            raise _broken(file, f"its header should end at byte {base} and the file has {len(data)}")
        header = json.loads(data[8:base].tobytes())
        header.pop("__metadata__", None)
        return {name: _entry(file, data, base, name, **entry) for name, entry in header.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(file, f"its header is corrupt: {error}") from None


def save_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write uint16 (as BF16), int16 (as F16) and float32 arrays so that ``Weights.load`` need not copy.

    The header is padded until the data starts at a multiple of ``ALIGNMENT``; the format forbids
    holes between tensors, so those that keep the alignment come first.
    """
    names: dict[np.dtype, str] = {
        np.dtype(np.uint16): "BF16",
        np.dtype(np.int16): "F16",
        np.dtype(np.float32): "F32",
    }
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, name))
    end = 0
    for name in ordered:
        array = tensors[name]
        start, end = end, end + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            out.write(np.ascontiguousarray(tensors[name]).data)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16 (uint16, same shape), to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out = rounded.astype(np.uint16)
    # The carry would turn a NaN whose payload is all ones into -0.
    nan = np.isnan(values)
    out[nan] = (bits[nan] >> 16) | 0x40
    return out


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 (uint16) to float32 of the same shape; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_float32(stored: np.ndarray) -> np.ndarray:
    """Any array in a dtype of ``STORED`` as float32; float32 comes back without a copy."""
    if stored.dtype == np.uint16:
        return from_bf16(stored)
    if stored.dtype == np.int16:
        return stored.view(np.float16).astype(np.float32)
    return stored.astype(np.float32, copy=False)


def from_float32(values: np.ndarray, stored: np.dtype) -> np.ndarray:
    """float32 rounded to nearest into uint16 (bfloat16), int16 (float16) or float32."""
    if stored == np.uint16:
        return to_bf16(values)
    if stored == np.int16:
        return values.astype(np.float16).view(np.int16)
    return values


def _broken(file: Path, what: str) -> BlinkError:
    return BlinkError(f"{file} is truncated or corrupt: {what}; fetch the model again")


def _entry(
    file: Path, data: np.ndarray, base: int, name: str, dtype: str, shape: list[int], data_offsets: list[int]
) -> Tensor:
    start, end = data_offsets
    if not 0 <= start <= end or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"tensor {name} has shape {shape} and byte range {data_offsets}")
    if base + end > len(data):
        raise _broken(file, f"tensor {name} should end at byte {base + end} and the file has {len(data)}")
    if dtype in STORED and end - start != int(np.prod(shape, dtype=object)) * STORED[dtype].itemsize:
        raise ValueError(f"tensor {name} has {end - start} bytes for shape {shape} of {dtype}")
    return Tensor(file, data, base + start, dtype, tuple(shape))
