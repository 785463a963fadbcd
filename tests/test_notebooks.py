"""The walkthroughs run from top to bottom, and say what they show."""

import itertools
import re
import time
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="jupytext is missing: pip install -e '.[dev]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is missing: pip install -e '.[dev]'")

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
BAR = 180
"""Seconds that a walkthrough may take on two cores, with nothing compiled before."""

notebooks = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@pytest.mark.timeout(2 * BAR)
@notebooks
def test_every_cell_runs_within_three_minutes(source, tmp_path, monkeypatch):
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path))
    notebook = jupytext.read(source)
    begin = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=BAR, resources={"metadata": {"path": str(source.parent)}}).execute()
    seconds = time.monotonic() - begin
    print(f"{source.stem}: {seconds:.0f} s")
    assert seconds < BAR
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr", f"a cell warns: {output.text}"


@notebooks
def test_every_cell_is_introduced(source):
    cells = jupytext.read(source).cells
    for before, cell in itertools.pairwise(cells):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", f"nothing says what this cell shows:\n{cell.source}"


@notebooks
def test_no_outputs_are_kept(source):
    assert not any(cell.get("outputs") for cell in jupytext.read(source).cells)
    assert not source.with_suffix(".ipynb").exists() or ".ipynb" in (ROOT / ".gitignore").read_text()


@notebooks
def test_names_of_files_in_the_text_exist(source):
    text = "\n".join(cell.source for cell in jupytext.read(source).cells if cell.cell_type == "markdown")
    for name in re.findall(r"`((?:blink_ref|docs)/[\w/.]+)`", text):
        assert (ROOT / name).is_file(), f"{source.name} names {name}"
