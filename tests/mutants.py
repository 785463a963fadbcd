"""``make mutants``: does the checker notice when one barrier, acquire or release is gone from the engine?

Every barrier, arrival, wait and fence of the device code is left out, every
``load_acquire`` and ``store_release`` made a plain access, one at a time, and the engine of
``blink-ref check`` is run. A mutant that survives has its reason in ``REDUNDANT``.

``python -m tests.mutants`` takes words that choose mutants: ``python -m tests.mutants retire``.
"""

import ast
import importlib
import inspect
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from blink_ref.check import scenario
from blink_ref.simt.checker import Finding

ROOT = Path(__file__).parent.parent
SOURCES = ("kernels", "kvcache", "scheduler", "ring", "engine", "simt/grid.py")

BARRIERS = {"barrier", "warp_barrier", "grid_barrier", "acquire_fence"}
BARRIERS |= {"mbarrier_arrive", "mbarrier_expect_bytes", "mbarrier_wait", "async_fence"}

SEEDS = 0, 1, 2, 3, 7
LIMIT = 150
"""Seconds for a mutant; no report by then is none."""

AT_ONCE = 2

MOST_SURVIVORS = 0.05
"""Of all mutants, however good the reasons."""

REDUNDANT = {
    "engine.forward.layers_in_tiles: barrier 1": (
        "it orders the first keys and values that come ahead with what tiles have left in the arena, on CUDA: in "
        "Python nothing comes ahead"
    ),
    "kernels.penalties.adjust: barrier 1": (
        "where there are penalties, another barrier follows before `adjusted` is touched again; where there are "
        "none, each lane reads what it has written itself"
    ),
    "kernels.flash_decoding.attend_noted: warp_barrier 1": (
        "it stands for a team without items, where another one has some: in Python a block has one team"
    ),
    "kernels.flash_decoding.attend_noted: warp_barrier 2": (
        "without it a lane may be left in a wait, if two phases end before it looks again: that takes one lane's "
        "standing still for a whole item, which the interleavings of these seeds do not have"
    ),
    "kernels.flash_decoding.merge_item: warp_barrier 2": "the same",
    "kernels.stream.prepare: warp_barrier 1": (
        "it stands for a block without a strip of a product, which comes to no barrier behind what it has read: "
        "here each block has one of each"
    ),
    "kernels.stream.fetch_some: warp_barrier 1": (
        "it is not run: the arena of this model, which has tiles too, has room for all activations at once"
    ),
    "kernels.stream.begin: async_fence 1": (
        "it orders copies with what tiles have written where the stages are, and keys and values, on CUDA: in "
        "Python the tiles of this model end below them, and keys and values are not copied"
    ),
}
"""Why a mutant that survives is as good as the original."""


class Mutant(NamedTuple):
    """One call in one device function, to be weakened."""

    module: str
    function: str
    word: str
    nth: int
    """of this word in this function, from 1 on"""
    line: int

    def __str__(self) -> str:
        return f"{self.module.removeprefix('blink_ref.')}.{self.function}: {self.word} {self.nth}"


def mutants() -> Iterator[Mutant]:
    """All there are, in the order of the source."""
    for source in SOURCES:
        path = ROOT / "blink_ref" / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for function in _device_functions(ast.parse(file.read_text())):
                counts: Counter[str] = Counter()
                for call in _calls(function):
                    counts[call.func.id] += 1
                    yield Mutant(module, function.name, call.func.id, counts[call.func.id], call.lineno)


def _device_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            getattr(d, "id", "") == "device" for d in node.decorator_list
        ):
            yield node


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    words = BARRIERS | {"load_acquire", "store_release"}
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in words]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


class _Weaken(ast.NodeTransformer):
    """Leaves out a barrier; makes an ordered access a plain one."""

    def __init__(self, call: ast.Call) -> None:
        self.call = call

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if node.value is not self.call or self.call.func.id == "load_acquire":
            return self.generic_visit(node)
        if self.call.func.id in BARRIERS:
            return ast.copy_location(ast.Pass(), node)
        array, i, value, *_ = self.call.args
        element = ast.Subscript(array, i, ast.Store())
        return ast.copy_location(ast.Assign([element], value), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self.call:
            return self.generic_visit(node)
        array, i, *_ = node.args
        return ast.copy_location(ast.Subscript(array, i, ast.Load()), node)


def apply(mutant: Mutant) -> None:
    """Put the mutant in its function's place, in this process."""
    module = importlib.import_module(mutant.module)
    file = inspect.getsourcefile(module)
    functions = _device_functions(ast.parse(Path(file).read_text()))
    function = next(f for f in functions if f.name == mutant.function)
    call = [c for c in _calls(function) if c.func.id == mutant.word][mutant.nth - 1]
    function = _Weaken(call).visit(function)
    function.decorator_list = []
    made: dict = {}
    tree = ast.fix_missing_locations(ast.Module([function], []))
    exec(compile(tree, file, "exec"), vars(module), made)
    getattr(module, mutant.function).python = made[mutant.function]


def report(mutant: Mutant | None) -> str:
    """The finding's text, or nothing, of a mutant or of the engine as it is; in a process of its own."""
    signal.signal(signal.SIGALRM, _over)
    signal.alarm(LIMIT)
    if mutant is not None:
        apply(mutant)
    for seed in SEEDS:
        try:
            scenario.run(seed)
        except Finding as finding:
            return str(finding)
        except Over:
            return "" if mutant is not None else f"no end within {LIMIT} s"
    return ""


class Over(BaseException):
    """The time for a mutant is over."""


def _over(*_: object) -> None:
    raise Over


def main(chosen: Sequence[str]) -> int:
    """Run them all, or those whose names hold all of some words; 1 if one survives without a reason."""
    begin = time.monotonic()
    todo = [m for m in mutants() if all(word in str(m) for word in chosen)]
    survivors = []
    with multiprocessing.get_context("fork").Pool(AT_ONCE, maxtasksperchild=1) as pool:
        if text := pool.apply(report, [None]):
            print(f"the engine as it is has a finding, so what is said of mutants would mean nothing\n{text}")
            return 1
        for mutant, text in zip(todo, pool.imap(report, todo), strict=True):
            first = text.partition("\n")[0]
            print(f"{'reported' if text else 'SURVIVED'}  {mutant!s:50} {first}", flush=True)
            survivors += [] if text else [str(mutant)]
    print(f"\n{len(todo) - len(survivors)} of {len(todo)} reported, {time.monotonic() - begin:.0f} s")
    for name in survivors:
        print(f"survived: {name}\n  {REDUNDANT.get(name, 'NO REASON KNOWN')}")
    for name in REDUNDANT.keys() & {str(m) for m in todo} - set(survivors):
        print(f"reported, though it is said to be redundant: {name}")
    return int(any(name not in REDUNDANT for name in survivors) or len(survivors) > MOST_SURVIVORS * len(todo))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
