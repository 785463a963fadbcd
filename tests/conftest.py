"""What tests of device code share: the three targets, and a skip that says why."""

import functools
import importlib.util
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor

import hypothesis
import pytest

from blink_ref.engine.compile import compile_kernel
from blink_ref.simt.launch import why_no_cuda

BEGUN = pytest.StashKey()

LANES = {"python": 8, "cpu": 1, "cuda": 64}
"""Lanes in a block: two warps, but on the CPU, where a block has one lane."""

KERNELS = [
    ((9, 0), "bfloat16"),
    ((8, 0), "bfloat16"),
    ((7, 5), "bfloat16"),
    ((9, 0), "float16"),
]
"""Compute capabilities and types of weights that test_compile.py looks at."""

# A first example compiles device code, and machines that run tests are busy.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@functools.cache
def cuda_is_missing() -> str:
    return why_no_cuda()


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and (reason := cuda_is_missing()):
        pytest.skip(f"no CUDA here: {reason}; run `make test-cuda` on a machine with an NVIDIA GPU")


def pytest_collection_modifyitems(items):
    """What waits for the kernels of test_compile.py comes last."""
    items.sort(key=lambda item: "begun" in item.fixturenames)


def pytest_collection_finish(session):
    """They are compiled from now on, a minute each, on what the tests leave of the processors."""
    wanted = any("begun" in item.fixturenames for item in session.items)
    if wanted and not session.config.option.collectonly and importlib.util.find_spec("numba_cuda"):
        pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), os.nice, (19,))
        session.stash[BEGUN] = pool, {kernel: pool.submit(compile_kernel, *kernel) for kernel in KERNELS}


def pytest_sessionfinish(session):
    if begun := session.stash.get(BEGUN, None):
        begun[0].shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def begun(request) -> dict[tuple, Future]:
    """PTX and report, some time later, of each of KERNELS."""
    return request.session.stash[BEGUN][1]


@pytest.fixture(params=["python", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def target(request) -> str:
    """Each target in turn."""
    return request.param


@pytest.fixture
def lanes(target) -> int:
    """Lanes in a block on that target."""
    return LANES[target]
