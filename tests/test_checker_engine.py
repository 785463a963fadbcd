"""The engine has no fault that the checker sees, and lacks one of its barriers with notice."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blink_ref.check import report, scenario
from blink_ref.cli import main
from blink_ref.simt.checker import Race
from tests import mutants

SOME = [
    "kernels.rmsnorm.rmsnorm: barrier 2",
    "scheduler.admit.choose: barrier 1",
    "scheduler.arrivals.list_rung: acquire_fence 1",
    "ring.device.write_record: store_release 1",
    "engine.persistent.serve: grid_barrier 1",
]


@pytest.mark.parametrize("seed", [0, 7])
def test_the_engine_is_in_order(seed):
    assert scenario.run(seed)


@pytest.mark.parametrize("name", SOME)
def test_a_barrier_or_an_order_that_is_gone_is_reported(name):
    code = f"from tests.mutants import *; print(*[report(m) for m in mutants() if str(m) == {name!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "data race: " in done.stdout, done.stderr


def test_every_reason_is_of_a_mutant_that_exists():
    assert mutants.REDUNDANT.keys() <= {str(mutant) for mutant in mutants.mutants()}


def test_the_report_in_the_docs_is_what_comes(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "checker.md").read_text()
    for code, report_shown in re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", page, re.S):
        file = re.search(r"\w+\.py", report_shown).group()
        (tmp_path / file).write_text(code)
        done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout == report_shown, done.stderr


def test_the_command_says_what_it_found(monkeypatch, capsys):
    assert main(["check", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["seed"] == 0
    assert said["finding"] is None
    assert said["accesses"]["shared loads"] > 10_000

    def race(seed):
        finding = Race("act.x[3]", [])
        finding.seed = seed
        raise finding

    monkeypatch.setattr(report.scenario, "run", race)
    assert main(["check", "--seed", "5", "--seeds", "3"]) == 1
    assert capsys.readouterr().out == "data race: act.x[3]\n  seed 5 replays it\n"
