"""Traps of docs/traps.md that are seen in the text of device code, for the whole package, or in its arguments."""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from dataclasses import replace

import pytest
from engine_bench import SMALL, Bench, chosen, small
from kernel_bench import model_of

import blink_ref
from blink_ref.simt import DeviceFunction

NEEDS_CUDA = "blink_ref.simt.cuda_loops", "blink_ref.simt.cuda_words", "blink_ref.simt.numba_cuda"


@pytest.fixture(scope="module")
def modules():
    """All modules that can be imported without numba-cuda and that start no program."""
    names = [module.name for module in pkgutil.walk_packages(blink_ref.__path__, "blink_ref.")]
    left_out = ("__main__", "on_cuda", "cuda_memory")
    return [
        importlib.import_module(name)
        for name in names
        if name not in NEEDS_CUDA and not name.endswith(left_out) and ".tiny" not in name
    ]


def test_no_device_function_divides_in_64_bits(modules):
    """No ``//``, no ``%``, and no range with a step: on CUDA each is a call of a division."""
    ours = [fn for fn in DeviceFunction.known if fn.__module__.startswith("blink_ref.")]
    assert len(ours) > 50
    for fn in ours:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(fn)))):
            if isinstance(node, ast.BinOp | ast.AugAssign):
                assert not isinstance(node.op, ast.FloorDiv | ast.Mod), f"{fn}: {ast.unparse(node)}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
                assert len(node.args) < 3, f"{fn}: {ast.unparse(node)}"


def test_no_field_that_device_code_sees_is_named_index(modules):
    tuples = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, tuple) and hasattr(value, "_fields")
    }
    assert len(tuples) > 5
    for kind in tuples:
        assert "index" not in kind._fields, f"{kind.__name__}.index is a method of tuples to numba-cuda"


def test_nothing_that_is_launched_on_a_gpu_holds_none():
    args = Bench(small(), replace(chosen(SMALL), target="cuda")).args
    held = [value for each in (*args, model_of()[0]) for value in (each if isinstance(each, tuple) else (each,))]
    assert not any(value is None for value in held)
