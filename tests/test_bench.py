"""The benches run: a change that breaks one is seen before somebody wants a figure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_bench import load

from bench import pages_read
from blink_ref.roofline import costs

BENCHES = sorted((Path(__file__).parents[1] / "bench").glob("test_*.py"))


def run(*options: str) -> subprocess.CompletedProcess:
    """pytest on the benches, as a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=BENCHES[0].parents[1], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda path: path.stem)
def test_a_bench_is_collected_or_says_what_to_install(bench):
    done = run("--collect-only", "-rs", str(bench))
    assert f"{bench.name}::" in done.stdout or "pip install" in done.stdout, done.stdout + done.stderr


def test_the_quick_benches_run():
    done = run("--benchmark-disable", "-m", "not cuda", "-k", "not smollm2 and not peers", "bench")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_decode_step_costs_at_least_its_weights_and_two_operations_for_each():
    config, weights = load("tiny")
    size, flops = costs.step(config, rows=1, samples=1, positions=1)
    assert size >= weights.flat.nbytes
    assert flops >= 2 * weights.flat.size


def test_a_prompt_costs_one_pass_over_the_layers_for_each_step():
    config, weights = load("tiny")
    once, twice = costs.prefill(config, 8, 8), costs.prefill(config, 8, 4)
    embedding = config.vocab * config.hidden
    layers = weights.flat.itemsize * (weights.flat.size - embedding)
    assert layers <= twice[0] - once[0] < 1.1 * layers
    assert abs(twice[1] - once[1]) < 0.01 * once[1]


def test_pages_read_are_counted():
    _, weights = load("tiny")
    whole = pages_read.bytes_read(weights.flat, weights.flat.sum)
    if whole is None:
        pytest.skip("/proc/self/clear_refs is Linux's, and cannot be written here")
    half = pages_read.bytes_read(weights.flat, weights.flat[: weights.flat.size // 2].sum)
    page = os.sysconf("SC_PAGE_SIZE")
    assert weights.flat.nbytes <= whole <= weights.flat.nbytes + 2 * page
    assert abs(half - weights.flat.nbytes / 2) <= 2 * page
