"""Compiled CPU code on disk: keyed by all that a function calls, found by the next process."""

import importlib
import json
import os
import pickle
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

from blink_ref.errors import BlinkError
from blink_ref.simt import cache, device, launch
from blink_ref.simt.vocabulary import i64

PACKAGE = {
    "outer_part": """
        import numpy as np
        from blink_ref.simt import device
        from blink_ref.simt.vocabulary import i64
        import constants_part
        import inner_part
        from inner_part import twice

        STEP = 3
        TABLE = np.arange(5000)

        def add(n):
            @device
            def add_n(x):
                return x + n
            return add_n

        add_some = add(100)

        @device
        def unrelated(x):
            return x - 1

        @device
        def change(block, out):
            # this comment is no code
            out[0] = add_some(twice(i64(out[0])) + STEP) + inner_part.shifted(i64(0)) + constants_part.BIG
            def bump(x):
                return x + 2
            out[1] = bump(TABLE[2500])
    """,
    "inner_part": """
        from blink_ref.simt import device
        from deep_part import doubled

        @device
        def twice(x):
            return doubled(x) + 0

        @device
        def shifted(x):
            return x + 1000
    """,
    "deep_part": """
        from blink_ref.simt import device

        @device
        def doubled(x):
            return 2 * x
    """,
    "constants_part": """
        BIG = 10000
    """,
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write the package, with edits {part: (old text, new)}, and load it afresh."""
    count = iter(range(99))

    def load(edits=None):
        folder = tmp_path / str(next(count))
        write(folder, edits)
        with monkeypatch.context() as inside:
            inside.syspath_prepend(folder)
            for name in PACKAGE:
                sys.modules.pop(name, None)
            made = importlib.import_module("outer_part")
        for name in PACKAGE:
            sys.modules.pop(name)
        return made

    return load


def write(folder, edits=None):
    folder.mkdir(exist_ok=True)
    for name, text in PACKAGE.items():
        text = textwrap.dedent(text)
        if edits and name in edits:
            old, new = edits[name]
            assert text.count(old) == 1
            text = text.replace(old, new)
        (folder / f"{name}.py").write_text(text)


def hashed(module):
    return cache.closure_hash(module.change.python)


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param({"outer_part": ("TABLE[2500]", "TABLE[2501]")}, id="its body"),
        pytest.param({"outer_part": ("x + 2", "x + 3")}, id="a function inside it"),
        pytest.param({"outer_part": ("STEP = 3", "STEP = 4")}, id="a global constant"),
        pytest.param({"outer_part": ("STEP = 3", "STEP = 3.0")}, id="the type of a global constant"),
        pytest.param({"outer_part": ("np.arange(5000)", "np.arange(5000)[::-1]")}, id="a constant array"),
        pytest.param({"outer_part": ("add(100)", "add(101)")}, id="the cell of a closure it calls"),
        pytest.param({"outer_part": ("return x + n", "return x - n")}, id="a closure it calls"),
        pytest.param({"constants_part": ("10000", "10001")}, id="a constant in another module"),
        pytest.param({"inner_part": ("doubled(x) + 0", "doubled(x) + 1")}, id="a callee in another file"),
        pytest.param({"inner_part": ("x + 1000", "x + 1001")}, id="a callee named through its module"),
        pytest.param({"deep_part": ("2 * x", "3 * x")}, id="a callee of a callee"),
    ],
)
def test_the_hash_changes_with(package, edits):
    assert hashed(package()) != hashed(package(edits))


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"outer_part": ("# this comment is no code", "# nor is this one")}, id="a comment"),
        pytest.param({"outer_part": ("STEP = 3", "\n\n\nSTEP = 3")}, id="the line it stands on"),
        pytest.param({"outer_part": ("return x - 1", "return x - 2")}, id="a function it does not call"),
        pytest.param({"constants_part": ("BIG", "SMALL = 1\nBIG")}, id="a constant it does not use"),
    ],
)
def test_the_hash_does_not_change_with(package, edits):
    assert hashed(package()) == hashed(package(edits))


def test_the_hash_changes_with_the_meaning_of_the_words(package, monkeypatch):
    before = hashed(package())
    monkeypatch.setattr(cache, "_lowering", lambda: "other files in this folder")
    assert hashed(package()) != before


def test_functions_that_call_each_other_have_a_hash():
    @device
    def one(x):
        return other(x - 1) if x > 0 else x

    @device
    def other(x):
        return one(x)

    assert cache.closure_hash(one.python) != cache.closure_hash(other.python)


PROCESS = """
    import json
    import numpy as np
    from blink_ref.simt import cache, launch
    import deep_part, inner_part, outer_part

    out = np.array([5, 0])
    launch(outer_part.change, 1, 1, out, target="cpu")
    functions = {"change": outer_part.change, "twice": inner_part.twice, "shifted": inner_part.shifted}
    launched = {"change"}
    stats = {name: (fn.cpu if name in launched else fn.cpu_callee).stats for name, fn in functions.items()}
    print(json.dumps({
        "out": out.tolist(),
        "hash": cache.closure_hash(outer_part.change.python),
        "loaded": sorted(name for name in stats if sum(stats[name].cache_hits.values())),
        "compiled": sorted(name for name in stats if sum(stats[name].cache_misses.values())),
    }))
"""


@pytest.fixture
def process(tmp_path):
    """Run PROCESS on the package as it is then; returns what it reports."""
    (tmp_path / "process.py").write_text(textwrap.dedent(PROCESS))

    def run(edits=None):
        write(tmp_path, edits)
        environment = {**os.environ, "BLINK_REF_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "random"}
        # Python's own cache of bytecode goes by the second: an edit within one would be missed
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        done = subprocess.run(
            [sys.executable, tmp_path / "process.py"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_next_process_loads_what_the_first_compiled_and_an_edit_recompiles_only_what_it_touches(
    process, tmp_path
):
    first = process()
    assert first["out"] == [2 * 5 + 3 + 100 + 1000 + 10000, 2502]
    assert first["compiled"] == ["change", "shifted", "twice"]
    assert list((tmp_path / "cache" / "cpu").glob("*change*"))

    second = process()
    assert second["out"] == first["out"]
    assert second["hash"] == first["hash"]
    assert (second["loaded"], second["compiled"]) == (["change"], [])  # callees are within

    edited = process({"deep_part": ("2 * x", "4 * x")})
    assert edited["out"] == [4 * 5 + 3 + 100 + 1000 + 10000, 2502]
    assert edited["hash"] != first["hash"]
    assert edited["compiled"] == ["change", "twice"]
    assert edited["loaded"] == ["shifted"]

    back = process()
    assert back["out"] == first["out"]


TALK = """
    import numpy as np
    from blink_ref.simt import device, launch

    @device
    def say(x):
        print("sees", x)

    @device
    def talk(block, x):
        say((x[0], x[1]))
        x[0] += 1

    x = np.array([2, 3])
    launch(talk, 1, 1, x, target="cpu")
    launch(talk, 1, 1, x, target="cpu")
"""


def test_a_callee_prints_whether_it_is_compiled_or_loaded_or_its_caller_is(tmp_path):
    """Printing a tuple takes numba's environment, which a callee's code has only inside its caller's."""
    environment = {**os.environ, "BLINK_REF_CACHE": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    program = tmp_path / "program.py"

    def said(text):
        program.write_text(textwrap.dedent(text))
        return subprocess.check_output([sys.executable, program], env=environment, text=True).split("\n")

    assert said(TALK) == ["sees (2, 3)", "sees (3, 3)", ""]
    assert said(TALK) == ["sees (2, 3)", "sees (3, 3)", ""]
    assert said(TALK.replace("x[0] += 1", "x[0] += 2")) == ["sees (2, 3)", "sees (4, 3)", ""]


def test_an_index_that_names_a_type_that_is_gone_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path))

    @device
    def nothing(block):
        pass

    launch(nothing, 1, 1, target="cpu")
    assert cache.ClosureCache(nothing.python)._cache_file._load_index()
    (index,) = tmp_path.rglob("*nothing*.nbi")
    gone = types.ModuleType("gone")
    gone.Gone = type("Gone", (), {"__module__": "gone"})
    monkeypatch.setitem(sys.modules, "gone", gone)
    with index.open("r+b") as opened:
        pickle.load(opened)  # the version comes first
        pickle.dump(("stamp", {gone.Gone: "file"}), opened)
    monkeypatch.delitem(sys.modules, "gone")
    assert cache.ClosureCache(nothing.python)._cache_file._load_index() == {}


def test_closures_of_one_function_do_not_take_each_others_code():
    def adder(n):
        @device
        def add(block, out):
            out[0] += i64(n)

        return add

    out = np.zeros(1, np.int64)
    for n in (1, 20, 300, 1, 20):
        launch(adder(n), 1, 1, out, target="cpu")
    assert out[0] == 342


def test_a_cache_folder_that_cannot_be_written_is_named_with_the_mend(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path / "file"))

    @device
    def nothing(block):
        pass

    with pytest.raises(BlinkError, match=r"cannot be kept in .*file/cpu \(.*\); set BLINK_REF_CACHE to a folder"):
        launch(nothing, 1, 1, target="cpu")


def test_the_persistent_kernel_has_one_hash_in_every_process():
    """Else no start of the engine finds what the last one compiled."""
    program = (
        "from blink_ref.engine.persistent import serve\n"
        "from blink_ref.simt.cache import closure_hash\n"
        "print(closure_hash(serve.python))"
    )

    def said(seed):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        return subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)

    assert len({said(seed) for seed in range(8)}) == 1
