"""What tests of device code share: the three targets, and a skip that says why."""

import functools

import hypothesis
import pytest

from blink_ref.simt.launch import why_no_cuda

LANES = {"python": 8, "cpu": 1, "cuda": 64}
"""Lanes in a block: two warps, but on the CPU, where a block has one lane."""


# A first example compiles device code, and machines that run tests are busy.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@functools.cache
def cuda_is_missing() -> str:
    return why_no_cuda()


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and (reason := cuda_is_missing()):
        pytest.skip(f"no CUDA here: {reason}; run `make test-cuda` on a machine with an NVIDIA GPU")


@pytest.fixture(params=["python", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def target(request) -> str:
    """Each target in turn."""
    return request.param


@pytest.fixture
def lanes(target) -> int:
    """Lanes in a block on that target."""
    return LANES[target]
