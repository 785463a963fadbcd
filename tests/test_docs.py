"""What the README and the docs show, works."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from blink_ref.engine import compile as compiling
from blink_ref.simt.assembler import Report

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in re.findall(r"```\n(.*?)```", page.read_text(), re.S)]
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("blink-ref ")
]
TARGETS = re.findall(r"^(?:.* && )?make ([\w-]+)", "\n".join(BLOCKS), re.M)
PYTHON = [
    pytest.param(block, id=f"{page.name}-{n}")
    for page in PAGES
    for n, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] not in ("serve", "compile")], ids=" ".join)
def test_commands_run_here_with_the_smallest_model_and_few_tokens(command, tmp_path):
    quick = {"generate": ["--model", "tiny", "--max-tokens", "4", "--target", "cpu"], "check": ["--seeds", "1"]}
    words = [sys.executable, "-m", "blink_ref", *command, *quick.get(command[0], [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # what they write lies elsewhere
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "compile"], ids=" ".join)
def test_a_kernel_is_compiled_as_it_is_shown(command, monkeypatch, capsys):
    """Up to the compilation, which takes a minute, and which test_compile.py does."""
    report = Report("9.0", 100, spill_bytes=0, local_bytes=0, shared_bytes=0, f64=0, serialized=0, max_threads=512)
    monkeypatch.setattr(compiling, "compile_kernel", lambda cc, dtype, kv_dtype: ("", report))
    assert compiling.main(command[1:]) == 0
    assert "registers" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "serve"], ids=" ".join)
def test_a_server_that_is_shown_serves(command):
    command = [*command[: command.index("--port")], "--port", "0", "--model", "tiny", "--target", "cpu", "--json"]
    words = [sys.executable, "-m", "blink_ref", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert '"url"' in server.stdout.readline()
        server.terminate()


def test_make_targets_that_are_shown_exist():
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= set(TARGETS)
    for target in TARGETS:
        assert re.search(rf"^{target}:", makefile, re.M), f"there is no make {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_functions_that_a_page_names_exist(page):
    text = page.read_text()
    package = ROOT / "blink_ref"
    for name in re.findall(r"`(?:blink_ref/)?([a-z_]+/[a-z_]+\.py)", text):
        assert (package / name).is_file() or (ROOT / name).is_file(), f"{page.name} names {name}"
    for name, function in re.findall(r"`([a-z_]+/[a-z_]+\.py): (?:[A-Z]\w+\.)?(\w+)`", text):
        source = next(root / name for root in (package, ROOT) if (root / name).is_file()).read_text()
        assert re.search(rf"^ *(def|class) {function}\b", source, re.M), f"{name} has no {function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page):
    named = re.findall(r"`(bench/)?(test_\w+\.py):\s+(test_\w+)`", page.read_text())
    for folder, name, function in named:
        source = (ROOT / (folder or "tests") / name).read_text()
        assert re.search(rf"^def {function}\(", source, re.M), f"{folder}{name} has no {function}"


def test_every_trap_names_what_holds_it():
    text = (ROOT / "docs" / "traps.md").read_text()
    traps = [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.startswith("**")]
    assert len(traps) > 15
    for trap in traps:
        assert "*Cure:*" in trap, trap
        assert "*Held by*" in trap or "No test" in trap, trap


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
