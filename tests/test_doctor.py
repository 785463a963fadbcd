"""``blink-ref doctor``: what it says of machines that are not this one."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from blink_ref.cli import main
from blink_ref.doctor import finding, gpu, machine, report, software
from blink_ref.doctor.finding import FAILURE, NOTE, OK, WARNING, Finding

GOOD_CARD = "NVIDIA H200, 9.0, 580.65.06, 140000, Disabled\n"


@pytest.fixture
def card(monkeypatch):
    """A machine with a good GPU; what is passed replaces what nvidia-smi and CUDA say of it."""

    def make(row=GOOD_CARD, cuda="13.0", apps="", limit=False, lacking=(), toolkit="13.0.1", reason=""):
        def smi(*arguments):
            if not arguments:
                return f"| NVIDIA-SMI 580.65  CUDA Version: {cuda}     |"
            return apps if "compute-apps" in arguments[0] else row

        monkeypatch.setattr(gpu, "smi", smi)
        monkeypatch.setattr(gpu, "kernel_time_limit", lambda: limit)
        monkeypatch.setattr(gpu, "lacks", lambda extra: list(lacking))
        monkeypatch.setattr(gpu, "why_no_cuda", lambda: reason)
        monkeypatch.setattr(gpu.metadata, "version", lambda name: toolkit)
        return {found.name: found for found in gpu.gpu()}

    return make


def test_this_machine_can_run_the_main_job(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert out.splitlines()[-1].startswith("generate runs on: ")


def test_json_has_every_finding_and_the_targets(capsys):
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "cpu" in said["targets"]
    assert set(report.PROBES) <= {found["name"] for found in said["findings"]}
    assert all(found.keys() == {"name", "level", "found", "mend"} for found in said["findings"])


def test_a_failure_is_exit_code_1_and_names_its_mend(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("BLINK_REF_WINDOW_DIR", str(tmp_path / "missing"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  window folder" in out
    assert "-> export BLINK_REF_WINDOW_DIR=FOLDER" in out
    assert "generate cannot run" in out


def test_every_warning_and_failure_comes_with_a_mend(card, monkeypatch, tmp_path):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1, total=2))
    monkeypatch.setattr(software, "lacks", lambda extra: ["numba is not installed"])
    monkeypatch.setattr(software.platform, "python_version", lambda: "3.10.1")
    cards = card(apps="123, 4000\n", limit=True, toolkit="14.0", reason="no")
    findings = [*finding.examine(report.PROBES), *cards.values()]
    lacks = [found for found in findings if found.level in (WARNING, FAILURE)]
    assert len(lacks) >= 9
    assert [found for found in lacks if not found.mend] == []


def test_a_probe_that_fails_is_a_note_and_stops_no_other(monkeypatch):
    def broken():
        yield Finding("half", OK, "seen before it broke")
        raise PermissionError("no /proc here")

    monkeypatch.setattr(machine, "memory", broken)
    half, note, after = finding.examine({"memory": "machine.memory", "rdma": "machine.rdma"})
    assert half.name == "half"
    assert note == Finding("memory", NOTE, "cannot be told here (PermissionError: no /proc here)")
    assert after.name == "RDMA"


def test_a_machine_without_proc_sys_and_nvidia_smi_is_no_crash(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "SYS", tmp_path)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert main(["doctor"]) == 0
    assert "no NVIDIA GPU found" in capsys.readouterr().out


def test_without_numba_and_numpy_it_still_says_so(tmp_path):
    program = """
import sys
from importlib import metadata
from blink_ref.cli import main
have = metadata.version
def version(name):
    if name in ("numba", "numpy"):
        raise metadata.PackageNotFoundError(name)
    return have(name)
metadata.version = version
sys.modules["numba"] = sys.modules["numpy"] = None
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "numba is not installed; numpy is not installed" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("version", "wanted", "met"),
    [
        ("0.68.1", "==0.68.*", True),
        ("0.69.0", "==0.68.*", False),
        ("2.4.6", "<2.5,>=2.0", True),
        ("2.5.0", "<2.5,>=2.0", False),
        ("3.9.18", "<3.15,>=3.11", False),
        ("3.11.7", "<3.15,>=3.11", True),
        ("3.15.0rc1", "<3.15,>=3.11", False),
        ("13", ">=13", True),
        ("1", "", True),
    ],
)
def test_ranges_of_versions_are_understood(version, wanted, met):
    assert software.satisfies(version, wanted) == met


def test_what_an_extra_asks_for_is_judged_apart(monkeypatch):
    asked = ["numba==0.68.*", "starlette>=0.40; extra == 'serve'", 'uvicorn[x]>=0.30; extra == "serve"']
    monkeypatch.setattr(metadata, "requires", lambda name: asked)
    monkeypatch.setattr(metadata, "version", {"numba": "0.61.0", "starlette": "0.41", "uvicorn": "0.20"}.get)
    assert software.lacks("") == ["numba is 0.61.0, not ==0.68.*"]
    assert software.lacks("serve") == ["uvicorn is 0.20, not >=0.30"]


def test_a_quota_below_the_cores_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    monkeypatch.setattr(machine, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "fs/cgroup/cpu.max").write_text("250000 100000\n")
    (found,) = machine.cores()
    assert found.level == WARNING
    assert "a quota leaves 2.5" in found.found
    assert "--sms 2" in found.mend
    (tmp_path / "fs/cgroup/cpu.max").write_text("max 100000\n")
    assert next(machine.cores()).level == OK


@pytest.mark.parametrize(
    ("cpuinfo", "level", "names"),
    [
        ("flags\t\t: fpu avx2 f16c\n", OK, "AVX2, F16C"),
        ("processor: 0\nFeatures\t: fp asimd sve bf16\n", OK, "NEON, SVE, BF16"),
        ("flags\t\t: fpu sse2\n", WARNING, "slow"),
    ],
)
def test_vector_units_are_read_from_flags_and_features(monkeypatch, tmp_path, cpuinfo, level, names):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "PROC", tmp_path)
    (found,) = machine.vectors()
    assert found.level == level
    assert names in found.found


def test_little_memory_points_to_the_tiny_model(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 900000 kB\nMemAvailable: 500000 kB\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    (found,) = machine.memory()
    assert found.level == WARNING
    assert "--model tiny" in found.mend


def test_windows_beneath_linux_is_named(monkeypatch):
    monkeypatch.setattr(machine.platform, "release", lambda: "5.15.0-microsoft-standard-WSL2")
    assert next(machine.system()).level == WARNING


def test_rdma_devices_are_listed(monkeypatch, tmp_path):
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(machine, "SYS", tmp_path)
    assert next(machine.rdma()) == Finding("RDMA", OK, "mlx5_0")


def test_a_good_gpu_has_only_good_findings_and_makes_cuda_the_first_target(card):
    findings = card()
    assert {found.level for found in findings.values()} == {OK}
    assert "NVIDIA H200, compute capability 9.0" in findings["GPU"].found
    assert report.targets(list(findings.values()))[0] == "cuda"


def test_a_gpu_serves_without_the_package_of_the_assembler(card):
    findings = card(lacking=["nvidia-cuda-nvcc is not installed"])
    assert report.targets(list(findings.values()))[0] == "cuda"


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"row": "Tesla V100, 7.0, 535.1, 16000, Disabled\n"}, "GPU", "served from 7.5 on"),
        ({"lacking": ["numba-cuda is not installed"]}, "CUDA packages", "numba-cuda is not installed"),
        ({"cuda": "12.8"}, "CUDA driver", "speaks CUDA 12.8, the packages are of 13.0.1"),
        ({"limit": True}, "kernel time", "the driver ends kernels"),
        ({"limit": None, "row": GOOD_CARD.replace("Disabled", "Enabled")}, "kernel time", "a display hangs"),
        ({"apps": "4242, 1000\n"}, "GPU's users", "4242"),
        ({"reason": "the driver is too old"}, "cuda target", "the driver is too old"),
    ],
)
def test_a_gpu_with_a_fault_is_a_warning_that_names_it(card, changes, name, words):
    found = card(**changes)[name]
    assert found.level == WARNING
    assert words in found.found


def test_a_row_that_nvidia_smi_cannot_fill_in_is_no_crash(card):
    assert card(row="NVIDIA GB10, 12.1, 580.95, [N/A], [N/A]\n")["GPU"].level == OK
    assert card(row="No devices were found\n")["GPU"].level == NOTE


def test_a_checkout_that_is_not_installed_asks_for_the_same(monkeypatch):
    installed = software.asked()

    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.metadata, "metadata", nothing)
    wanted, wishes = software.asked()
    assert sorted(wanted.split(",")) == sorted(installed[0].split(","))
    names = {extra: sorted(re.split(r"[\[=<>]", wish)[0] for wish in some) for extra, some in wishes.items()}
    assert names["serve"] == ["starlette", "uvicorn"]
    assert {"numba", "numpy"} <= set(names[""])
