"""``blink-ref trace`` as a process, with a fake engine and with the real one."""

import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager

import pytest
from processes import ENGINES, Bench

FAKE_SLOWLY = {"delay": 0.01}


@pytest.fixture
def fake(tmp_path):
    return Bench(tmp_path / "windows").fake()


@pytest.fixture(autouse=True)
def windows(tmp_path):
    (tmp_path / "windows").mkdir()


@pytest.fixture
def files(tmp_path):
    """The options that name both files, and the files."""
    out, picture = tmp_path / "t.json", tmp_path / "t.svg"
    return ["--out", str(out), "--picture", str(picture)], out, picture


def names(out, kind):
    return [event["name"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == kind]


@contextmanager
def answering(bench):
    """A ``generate`` that goes on for ten seconds; its window."""
    process = bench.start("generate", "--model", "tiny", "--ignore-eos", "--max-tokens", "1000", "It was")
    assert process.stdout.read(3)
    yield next(bench.windows.iterdir())
    process.terminate()
    process.communicate(timeout=20)


def test_prompts_are_answered_and_traced(fake, files):
    options, out, picture = files
    said, err = fake.run("trace", "--model", "tiny", *options, "--max-tokens", "5", "It was", "She had", "The end")
    assert err == ""
    first, second, *wrote = said.splitlines()
    assert re.fullmatch(r"tiny on python, 1 block: 3 requests \(3 length\), \d+ steps in [\d.e-]+ s", first)
    assert re.fullmatch(r"\d+ events, 0 lost", second)
    assert [line.partition(":")[0] for line in wrote] == [str(out), str(picture)]
    assert names(out, "i").count("finish: length") == 3
    assert names(out, "B").count("prefill") == 3
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    assert fake.left() == []


def test_the_json_object_says_everything(fake, files, tmp_path):
    options, out, picture = files
    (tmp_path / "prompts").write_text("It was\n\nShe — had\n")
    more = ["--file", str(tmp_path / "prompts"), "--max-tokens", "7", "--json"]
    said = json.loads(fake.run("trace", "--model", "tiny", *options, *more, "The end")[0])
    assert said["requests"] == 3
    assert said["ends"] == {"length": 3}
    assert said["steps"] >= 7
    assert said["seconds"] > 0
    assert said["events"] > 3 * 7
    assert (said["lost"], said["preempted"], said["paused"], said["found_in_cache"]) == (0, 0, 0, 0)
    assert (said["trace"], said["picture"]) == (str(out), str(picture))


@pytest.mark.parametrize("engine", ENGINES)
def test_without_prompts_a_scenario_shows_what_a_scheduler_does(engine, files, tmp_path):
    options, out, _ = files
    bench = Bench(tmp_path / "windows", ENGINES[engine])
    process = bench.start("trace", "--model", "tiny", *options, "--json")
    said = json.loads(process.communicate(timeout=250)[0])
    assert process.returncode == 0
    assert said["ends"] == {"length": 12}
    assert said["lost"] == 0
    if engine == "real":
        assert said["found_in_cache"] > 0
        assert names(out, "B").count("prefill") > 12
        assert names(out, "B").count("attend") >= said["steps"]


def test_a_request_that_fails_is_in_the_trace(files, tmp_path):
    bench = Bench(tmp_path / "windows").fake(refuse=5)
    said = json.loads(bench.run("trace", "--model", "tiny", *files[0], "--json", "x")[0])
    assert said["ends"] == {"failed: the KV cache can never hold it": 1}


def test_more_prompts_than_slots_take_turns(files, tmp_path):
    bench = Bench(tmp_path / "windows").fake(slots=2)
    said = json.loads(bench.run("trace", "--model", "tiny", *files[0], "--max-tokens=3", "--json", *"abcde")[0])
    assert said["ends"] == {"length": 5}


@pytest.mark.parametrize("named", [True, False])
def test_an_engine_that_runs_is_recorded_for_a_while(files, tmp_path, named):
    options, out, _ = files
    bench = Bench(tmp_path / "windows").fake(**FAKE_SLOWLY)
    with answering(bench) as window:
        attach = ["--attach", str(window)] if named else ["--attach"]
        said = json.loads(bench.run("trace", *attach, "--seconds", "0.4", *options, "--json")[0])
        assert said["steps"] > 5
        assert said["requests"] == 1
        assert said["ends"] == {}
        assert "decode" in names(out, "B")
        # it goes on, and nobody asks for events any more
        assert window.exists()
        bench.run("trace", *attach, "--seconds", "0.1", *options)


def test_an_interrupt_ends_an_attached_recording_and_keeps_it(files, tmp_path):
    options, out, _ = files
    bench = Bench(tmp_path / "windows").fake(**FAKE_SLOWLY)
    with answering(bench):
        process = bench.start("trace", "--attach", "--seconds", "60", *options, "--json")
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        said = json.loads(process.communicate(timeout=10)[0])
        assert process.returncode == 0
        assert said["steps"] > 0
        assert out.exists()


def test_the_end_of_the_engine_ends_an_attached_recording(files, tmp_path):
    bench = Bench(tmp_path / "windows").fake(**FAKE_SLOWLY)
    with answering(bench):
        process = bench.start("trace", "--attach", "--seconds", "60", *files[0], "--json")
        time.sleep(1.5)
    said = json.loads(process.communicate(timeout=10)[0])
    assert said["steps"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ([""], 1, "the prompt is empty"),
        (["x", "--max-tokens", "2000"], 1, "exceed the context of 1024"),
        (["x", "--max-tokens", "0"], 2, "argument --max-tokens: 0 is too small"),
        (["x", "--seconds", "-1"], 2, "argument --seconds: -1 is no time"),
        (["x", "--file", "/nowhere"], 1, "cannot read prompts from /nowhere: [Errno 2] No such file"),
        (["--file", "/dev/null"], 1, "there is no prompt in /dev/null; write one a line"),
        (["x", "--out", "/nowhere/t.json"], 1, "there is no folder /nowhere for t.json; make it first"),
        (["x", "--picture", "/tmp"], 1, "/tmp is a folder; name a file in it"),
        (["x", "--attach"], 1, "--attach records the requests of others; leave the prompts out"),
        (["--attach"], 1, "no engine runs; start one"),
        (["--attach", "/nowhere"], 1, "cannot open the window /nowhere (No such file"),
        (["x", "--model", "/nowhere"], 1, "there is no model '/nowhere'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_starts_no_engine(tmp_path, arguments, code, complaint):
    bench = Bench(tmp_path / "windows", {"BLINK_REF_ENGINE": "/never/started"})
    out, err = bench.run("trace", "--model", "tiny", *arguments, code=code)
    assert out == ""
    assert err.startswith("blink-ref: error: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_of_two_engines_one_has_to_be_named(files, tmp_path):
    bench = Bench(tmp_path / "windows").fake(**FAKE_SLOWLY)
    with answering(bench), answering(bench):
        _, err = bench.run("trace", "--attach", *files[0], code=1)
        assert err.startswith("blink-ref: error: 2 engines run (")
        assert err.endswith("name one, for instance with `blink-ref trace --attach WINDOW`\n")


def test_an_engine_without_work_gives_no_trace_and_says_why(files, tmp_path):
    options, out, _ = files
    bench = Bench(tmp_path / "windows").fake()
    with bench.serve():
        _, err = bench.run("trace", "--attach", "--seconds", "0.2", *options, code=1)
        assert err.endswith("did no step while it was recorded; is there a request that runs?\n")
        assert not out.exists()


def test_help_has_an_example(fake):
    assert "example: blink-ref trace" in fake.run("trace", "--help")[0]


def test_it_imports_no_device_code_and_no_cuda():
    program = """
import sys
import blink_ref.trace.command
forbidden = ("numba", "cuda", "llvmlite", "blink_ref.simt", "blink_ref.kernels", "blink_ref.kvcache",
             "blink_ref.scheduler", "blink_ref.engine", "blink_ref.ring.device")
found = [name for name in sys.modules for prefix in forbidden if (name + ".").startswith(prefix + ".")]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
