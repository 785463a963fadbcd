"""Finds, and mends, barriers that CPython's compiler has copied.

CPython copies a short exit block into each of its predecessors (3.12 does it to a function that ends
with ``barrier()`` after an ``if``; 3.13 to ``return barrier()`` after if/for-else). Numba compiles
the bytecode, so the GPU meets one barrier of the source at two program points: lanes of one warp wait
at different places, and the grid hangs. The copy is made before LLVM, so no LLVM attribute helps.

The cure: count each synchronising call in the source and in the bytecode. Where the bytecode has
more, pad the block after the call, so that it is too long to be copied; refuse what stays copied.

This file needs nothing but the standard library, so that any interpreter can check the device code:
``python3.12 blink_ref/simt/sites.py blink_ref``.
"""

import ast
import copy
import dis
import inspect
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WORDS = frozenset(
    {"barrier", "warp_barrier", "lane_sum", "lane_max", "lane_broadcast", "lane_any"}
    | {"row_dot", "row_dots", "row_dots_of_two", "fragment_dots", "awaited_sum"}
    | {"dots_ask", "dots_forget", "block_dots"}
    | {"tile_attend", "tile_end", "heads_weigh", "heads_mix"}
)
"""Vocabulary words that several lanes must reach together."""

READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD"})
"""Instructions that read a function by its name, or out of a module."""

PAD = "_pad_"


class CopiedBarrier(TypeError):
    """A device function whose synchronising calls CPython copies, and that padding does not mend."""


def uses_in_source(function: ast.FunctionDef, names: frozenset[str]) -> Counter[str]:
    """How often each of `names` is read, to be called, in the text of a function."""
    nodes = (
        n for n in ast.walk(function) if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load)
    )
    read = (node.id if isinstance(node, ast.Name) else node.attr for node in nodes)
    return Counter(name for name in read if name in names)


def uses_in_bytecode(code: types.CodeType, names: frozenset[str]) -> Counter[str]:
    """How often each of `names` is read, to be called, in a function's bytecode."""
    reads = (i.argval for i in dis.get_instructions(code) if i.opname in READS)
    return Counter(name for name in reads if name in names)


def copied(function: ast.FunctionDef, code: types.CodeType, names: frozenset[str]) -> list[str]:
    """The names that the bytecode calls at more places than the source does."""
    source = uses_in_source(function, names)
    return sorted(name for name, n in uses_in_bytecode(code, names).items() if n > source[name] > 0)


class _Pad(ast.NodeTransformer):
    """Two assignments after each statement that synchronises: more than the copier takes."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def _synchronises(self, node: ast.stmt) -> bool:
        calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
        return any((getattr(f, "id", None) or getattr(f, "attr", None)) in self.names for f in calls)

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt] | ast.Expr:
        return [node, *self._padding(node)] if self._synchronises(node) else node

    visit_Assign = visit_AugAssign = visit_Expr  # type: ignore[assignment]

    def visit_Return(self, node: ast.Return) -> list[ast.stmt] | ast.Return:
        if node.value is None or not self._synchronises(node):
            return node
        keep = ast.parse(f"{PAD}result = None").body[0]
        assert isinstance(keep, ast.Assign)
        keep.value = node.value
        back = ast.parse(f"return {PAD}result").body[0]
        return [ast.copy_location(keep, node), *self._padding(node), ast.copy_location(back, node)]

    def _padding(self, node: ast.stmt) -> list[ast.stmt]:
        return [ast.copy_location(pad, node) for pad in ast.parse(f"{PAD} = 0\n{PAD} = 0").body]


def padded(function: ast.FunctionDef, names: frozenset[str]) -> ast.FunctionDef:
    """A copy of a function's tree with padding after each synchronising statement."""
    return ast.fix_missing_locations(_Pad(names).visit(copy.deepcopy(function)))


def _compile(function: ast.FunctionDef, filename: str, free: tuple[str, ...]) -> types.CodeType:
    """The code object of a function's tree, its free variables kept free."""
    function = copy.deepcopy(function)
    function.decorator_list = []
    body: list[ast.stmt] = [function]
    if free:
        outer = ast.parse(f"def outer({', '.join(free)}): pass").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body = [function]
        body = [outer]
    code = compile(ast.fix_missing_locations(ast.Module(body, [])), filename, "exec")
    for name in ("outer", function.name) if free else (function.name,):
        # by name: 3.14 puts the code of a function's annotations before its own
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    return code


def mend(fn: types.FunctionType, names: frozenset[str]) -> types.FunctionType:
    """`fn` itself, or an equal function whose synchronising calls stand once each in the bytecode.

    `names` are the globals of `fn` that synchronise. Raises CopiedBarrier where padding does not help.
    """
    if not names:
        return fn
    try:
        lines, first = inspect.getsourcelines(fn)
    except OSError:
        raise TypeError(
            f"the source of device function '{fn.__name__}' cannot be read, so its barriers cannot be checked; "
            "define it in a file or a notebook cell"
        ) from None
    function = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(function, ast.FunctionDef):
        raise TypeError(
            f"device function '{fn.__name__}' at {fn.__code__.co_filename}:{first} is not a plain 'def', so its "
            "barriers cannot be checked; write it as one"
        )
    ast.increment_lineno(function, first - 1)
    if not copied(function, fn.__code__, names):
        return fn
    tree = padded(function, names)
    code = _compile(tree, fn.__code__.co_filename, fn.__code__.co_freevars)
    if still := copied(tree, code, names):
        raise CopiedBarrier(_explain(function.name, fn.__code__.co_filename, first, still))
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    mended = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    mended.__kwdefaults__ = fn.__kwdefaults__
    mended.__dict__.update(fn.__dict__)
    mended.__doc__, mended.__qualname__, mended.__module__ = fn.__doc__, fn.__qualname__, fn.__module__
    return mended


def _explain(name: str, filename: str, line: int, words: list[str]) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    return (
        f"{filename}:{line}: CPython {version} copies {', '.join(words)} in '{name}' to several places, where "
        "lanes would wait for each other for ever; let one statement that every lane reaches hold the call, "
        "not the end of a branch or a return"
    )


# --- the same check on files, for interpreters without numba


def _device_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
            if any(getattr(n, "id", getattr(n, "attr", None)) == "device" for n in names):
                yield node


def collective(functions: list[ast.FunctionDef]) -> frozenset[str]:
    """WORDS, and the names of all device functions that reach one of them through calls."""
    names = WORDS
    while True:
        more = names | {f.name for f in functions if uses_in_source(f, names)}
        if more == names:
            return names
        names = more


def check_files(paths: list[Path]) -> tuple[int, list[str], list[str]]:
    """Check every `@device` function in some files under the running interpreter.

    Returns how many functions were read, those that needed mending, and an explanation for each that
    cannot be mended.
    """
    functions = [(path, f) for path in paths for f in _device_functions(ast.parse(path.read_text()))]
    names = collective([f for _, f in functions])
    mended, refused = [], []
    for path, function in functions:
        if not copied(function, _compile(function, str(path), ()), names):
            continue
        tree = padded(function, names)
        if still := copied(tree, _compile(tree, str(path), ()), names):
            refused.append(_explain(function.name, str(path), function.lineno, still))
        else:
            mended.append(f"{path}:{function.lineno}: {function.name}")
    return len(functions), mended, refused


def main(arguments: list[str]) -> int:
    paths = [p for a in arguments for p in (sorted(Path(a).rglob("*.py")) if Path(a).is_dir() else [Path(a)])]
    count, mended, refused = check_files(paths)
    print(
        f"python {sys.version.split()[0]}: {count} device functions, {len(mended)} mended, {len(refused)} refused"
    )
    for line in [f"mended {m}" for m in mended] + refused:
        print(line)
    return 1 if refused or not count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
