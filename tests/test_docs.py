"""What the README and the docs show, works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
