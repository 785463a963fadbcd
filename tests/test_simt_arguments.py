"""A kernel's arguments arrive as words: addresses and numbers first, lengths behind them."""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba.cuda.cudadrv.driver", reason="numba-cuda is missing: pip install 'blink-ref[cuda13]'")

from numba import types

from blink_ref import simt
from blink_ref.simt import device, on_cuda
from blink_ref.simt.cuda_arguments import count_of, words_of
from blink_ref.simt.vocabulary import thread_id


class Pair(NamedTuple):
    grid: Any
    scale: Any
    steps: int


class OnGpu:
    """What words_of() asks of a device array."""

    def __init__(self, address, shape, contiguous=True):
        self.__cuda_array_interface__ = {"data": (address, False)}
        self.shape, self._contiguous = shape, contiguous

    def is_c_contiguous(self):
        return self._contiguous


f32s, i32s = types.Array(types.float32, 2, "C"), types.Array(types.int32, 1, "C")
KIND = types.BaseTuple.from_types((types.NamedTuple((f32s, types.float32, types.int64), Pair), types.int32, i32s))


@device
def scaled(block, pair, times, out):
    n = thread_id()
    if n < out.shape[0]:
        row = pair.grid[n]
        out[n] = np.int32(row[row.shape[0] - 1] * pair.scale) * times + pair.steps


def test_addresses_and_numbers_come_first():
    value = Pair(OnGpu(4096, (3, 5)), np.float32(1.5), -7), 9, OnGpu(8192, (3,))
    assert words_of(value) == (4096, 0x3FC00000, -7, 9, 8192, 3, 5, 3)
    assert count_of(KIND) == 8


def test_an_array_with_gaps_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        words_of((OnGpu(0, (2, 2), contiguous=False),))


def test_a_kernel_has_a_parameter_for_each_word_and_no_more():
    ptx = on_cuda.compile_to_ptx(scaled, tuple(KIND), 32, (9, 0))
    of_grid = 2
    assert len(re.findall(r"\.param \.u64 \w*_param_\d+[,\n]", ptx)) == count_of(KIND) + of_grid
    assert "ld.global" in ptx
    assert not re.search(r"\bld\.[bfsuv]", ptx), "an address of a kernel is one of global memory"


@pytest.mark.parametrize("target", ["cpu", "python", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_kernel_gets_what_it_was_given(target):
    lanes = 1 if target == "cpu" else 32
    grid, out = np.arange(15, dtype=np.float32).reshape(3, 5), np.zeros(3, np.int32)
    simt.launch(scaled, 1, lanes, Pair(grid, np.float32(1.5), -7), np.int32(2), out, target=target)
    expected = (grid[:, -1] * 1.5).astype(np.int32) * 2 - 7
    assert out[: 1 if target == "cpu" else 3].tolist() == expected[: 1 if target == "cpu" else 3].tolist()
