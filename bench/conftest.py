"""Benches skip without a GPU as the tests do."""

import pytest

from blink_ref.model.config import ModelConfig
from blink_ref.model.weights import Weights
from tests.conftest import pytest_runtest_setup
from tests.engine_bench import load

from . import shapes

__all__ = ["pytest_runtest_setup"]


@pytest.fixture
def show(capsys):
    """A function that prints some lines on the terminal, whatever becomes of the bench."""

    def lines(*text: str) -> None:
        with capsys.disabled():
            print("", *text, sep="\n")

    return lines


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def target(request) -> str:
    """Both compiled targets."""
    return request.param


@pytest.fixture(scope="module")
def model(target) -> tuple[ModelConfig, Weights]:
    """The tiny model on the CPU; on a GPU a 1B shape, whose weights pass through the caches as a real one's do."""
    if target == "cpu":
        return load("tiny")
    torch = pytest.importorskip("torch", reason="it makes the weights: pip install torch")
    weights, flat = shapes.random_weights(shapes.LLAMA_1B, torch)
    del flat
    torch.cuda.empty_cache()
    return shapes.LLAMA_1B, weights
