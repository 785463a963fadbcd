"""The edit loop: change one device function, and see what it does within seconds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import blink_ref

FUNCTION_BAR, ENGINE_BAR = 5.0, 40.0
"""Seconds from an edit to the answer of simt.launch of the function, and of the whole engine: from the start
of the interpreter on, and of its own time, so that what else the machine does is left out."""

EDIT = ("kernels/embedding.py", "x[t * width + i] = ", "x[t * width + i] = 2 * ")

LAUNCH = """
import time
import numpy as np
from engine_bench import SMALL, Bench, chosen, small
from blink_ref import simt
from blink_ref.kernels.embedding import embedding
made = Bench(small(), chosen(SMALL, slots=1))
made.plan.token[0] = 9
simt.launch(embedding, 2, 1, made.plan, made.draft, 1, made.model, made.act.x, target="cpu")
table = small()[1].dense(made.model.embed, SMALL.vocab, SMALL.hidden)
print(time.process_time(), made.act.x[5] / table[9, 5])
"""

ENGINE = """
import time
from engine_bench import Bench, Request, answers_alone, chosen, tiny
answer = answers_alone(Bench(tiny(), chosen(tiny()[0], context=64)))(Request((16, 44, 291), 5, ignore_eos=True))
print(time.process_time(), len(answer.tokens))
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, with a cache of compiled code of its own."""
    folder = tmp_path / "blink_ref"
    shutil.copytree(Path(blink_ref.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(copy, program):
    """The two numbers that a program prints which imports the copy."""
    folder = copy.parent
    changes = {
        "BLINK_REF_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(folder), os.path.dirname(__file__)]),
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | changes, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return map(float, done.stdout.split())


def test_after_an_edit_its_function_answers_in_seconds_and_the_engine_soon_after(copy):
    """The edited function and its callers are compiled again; all else comes from the cache."""
    _, before = run(copy, LAUNCH)
    cold, _ = run(copy, ENGINE)
    file, old, new = EDIT
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    function, after = run(copy, LAUNCH)
    assert (before, after) == (1, 2), "the edit shows"
    engine, tokens = run(copy, ENGINE)
    print(f"function {function:.1f} s, engine {engine:.1f} s (never compiled before: {cold:.1f} s)")
    assert tokens == 5
    assert function < FUNCTION_BAR
    assert engine < ENGINE_BAR
