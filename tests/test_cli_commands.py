"""The command line itself, and its small commands."""

import json
import os
import subprocess
import sys

import pytest
from processes import Bench

from blink_ref import __version__
from blink_ref.model.store import TINY
from blink_ref.ring.layout import Layout


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["serve"], ["model"], ["model", "pull"], ["layout"], ["bench"]]
)
def test_every_command_has_a_help_with_an_example(bench, command):
    out, err = bench.run(*command, "--help")
    assert "example: blink-ref" in out
    assert err == ""


def test_the_version_is_the_packages(bench):
    assert bench.run("--version")[0] == f"blink-ref {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: COMMAND; see blink-ref --help"),
        (["sing"], "argument COMMAND: invalid choice: 'sing'"),
        (["model", "pull"], "the following arguments are required: name; see blink-ref model pull --help"),
        (["serve", "--port", "70000"], "argument --port: 70000 is no port; it must be between 0 and 65535"),
        (["layout", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(bench, arguments, complaint):
    out, err = bench.run(*arguments, code=2)
    assert out == ""
    assert err.startswith(f"blink-ref: error: {complaint}")
    assert err.count("\n") == 1


def test_the_layout_is_printed_as_it_is(bench):
    said = json.loads(bench.run("layout", "--json")[0])
    layout = Layout()
    rows = {row["field"]: row for row in said["fields"]}
    assert said["size"] == layout.size
    for half, start in ((layout.nic_half, 0), (layout.gpu_half, said["gpu_half"])):
        for name in half.names:
            assert rows[name]["offset"] == start + half.fields[name][1]
            assert rows[name]["bytes"] == half.fields[name][0].itemsize
    assert rows["doorbell"]["type"] == "u32[4096]"
    assert (rows["doorbell"]["writer"], rows["outbox"]["writer"], rows["stop"]["writer"]) == ("NIC", "GPU", "host")
    assert rows["request[0].temperature"]["offset"] == rows["request"]["offset"] + 16
    text, _ = bench.run("layout")
    assert len(text.splitlines()) == len(rows) + 2


def test_the_models_are_listed(bench):
    said = json.loads(bench.run("model", "list", "--json")[0])
    assert {model["name"] for model in said} == {"smollm2", "tiny"}
    text, _ = bench.run("model", "list")
    assert [line.split()[0] for line in text.splitlines()] == [model["name"] for model in said]


def test_the_path_of_a_model_is_printed(bench):
    for action in ("pull", "path"):
        assert bench.run("model", action, "tiny")[0] == f"{TINY}\n"
    assert json.loads(bench.run("model", "path", "tiny", "--json")[0]) == {"name": "tiny", "path": str(TINY)}


def test_a_model_that_is_not_here_says_how_it_comes(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path / "empty"))
    _, err = bench.run("model", "path", "smollm2", code=1)
    assert err == "blink-ref: error: smollm2 is not here yet; run `blink-ref model pull smollm2`\n"
    _, err = bench.run("model", "path", "nothing", code=1)
    assert "there is no model 'nothing'" in err


def test_serve_without_its_extra_says_what_to_install(tmp_path):
    program = """
import sys
sys.modules["uvicorn"] = None
from blink_ref.cli import main
sys.exit(main(["serve", "--model", "tiny"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "blink-ref: error: serve needs uvicorn; install it with `pip install 'blink-ref[serve]'`\n",
    )


def test_a_full_disk_under_standard_output_is_one_line(bench):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full; run the test on Linux")
    with open("/dev/full", "w") as full:
        process = bench.start("layout", stdout=full)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err == b"blink-ref: error: [Errno 28] No space left on device\n"
