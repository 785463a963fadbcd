"""The window's file: where the memory of :mod:`.layout` lives, who holds it, and who clears it away.

The engine creates the file and holds an exclusive ``flock`` on it as long as it lives. The kernel drops
that lock with the process, however the process ends, so a window whose lock can be had is a dead one:
the NIC learns from it that its engine is gone, and the next start removes what a SIGKILL left behind.
"""

import errno
import fcntl
import mmap
import os
import secrets
import stat
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np

from blink_ref.errors import BlinkError

from .layout import HEADER, MAGIC, VERSION, Layout

SHARED_MEMORY = Path("/dev/shm")
DIRECTORY = "BLINK_REF_WINDOW_DIR"
"""The environment variable that names another folder for windows."""


class Window:
    """A mapped window.

    ``nic`` and ``gpu`` are zero-copy views of the two halves, 0-d arrays of ``layout.nic_half`` and
    ``layout.gpu_half``: ``window.nic["doorbell"]`` is u32[slots]. The side that opened the window cannot
    write through ``gpu``. The memory stays mapped while a view of it is held.
    """

    def __init__(self, path: Path, layout: Layout, file: int, owner: bool) -> None:
        """Map the open ``file``, which holds ``layout.size`` bytes. For :meth:`create` and :meth:`open`."""
        self.path = path
        self.layout = layout
        self._file = file
        self._owner = owner
        memory = mmap.mmap(file, layout.size)
        self.nic: np.ndarray = np.ndarray((), layout.nic_half, memory)
        self.gpu: np.ndarray = np.ndarray((), layout.gpu_half, memory, layout.nic_half.itemsize)
        if not owner:
            self.gpu.flags.writeable = False

    @classmethod
    def create(cls, layout: Layout, engine_pid: int | None = None, directory: Path | None = None) -> "Window":
        """A new window of zeros with its header written, held by this process until :meth:`close`.

        ``engine_pid`` (default: this process) goes into the header. ``directory`` is, by default,
        ``$BLINK_REF_WINDOW_DIR``, else ``/dev/shm``, else the folder for temporary files (macOS;
        untested). Windows there of this user whose engine is dead are removed first.

        Raises BlinkError: the folder is missing, not writable, or has no room for ``layout.size`` bytes.
        """
        directory = directory or default_directory()
        reap(directory)
        path, file = _new_locked_file(directory)
        try:
            _reserve(file, layout.size, directory)
            window = cls(path, layout, file, owner=True)
        except BaseException:
            path.unlink()
            os.close(file)
            raise
        header = window.nic["header"]
        for field in fields(layout):
            header[field.name] = getattr(layout, field.name)
        header["version"] = VERSION
        header["engine_pid"] = engine_pid or os.getpid()
        header["magic"] = MAGIC
        return window

    @classmethod
    def open(cls, path: Path) -> "Window":
        """The window that a living engine of this user created at ``path``.

        Raises BlinkError: there is none, it is another user's, it has another version, it is damaged,
        or its engine is gone.
        """
        file = _open_own(path)
        try:
            window = cls(path, _checked_layout(file, path), file, owner=False)
        except BaseException:
            os.close(file)
            raise
        if not window.alive():
            window.close()
            raise BlinkError(f"the engine of the window {path} is gone; start an engine again")
        return window

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return int(self.nic["header"]["engine_pid"])

    def alive(self) -> bool:
        """Whether the engine still holds the window: one system call, no wait, no effect on others."""
        return self._owner or not _lock(self._file, fcntl.LOCK_SH)

    def unlink(self) -> None:
        """Remove the file's name; those who have the window open keep it. Once is enough, twice no harm."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock and the views. The owner unlinks first, else a reaper would."""
        # Closing the file would not be enough: the mapping holds a duplicate of it, and so the lock.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        del self.nic, self.gpu


def default_directory() -> Path:
    """Where windows go when nobody says otherwise."""
    if chosen := os.environ.get(DIRECTORY):
        return Path(chosen)
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def reap(directory: Path) -> list[Path]:
    """Remove the windows of this user in ``directory`` whose engine is dead; returns what was removed."""
    removed = []
    for path in directory.glob(f"{_prefix()}*.window"):
        try:
            file = _open_own(path)
        except BlinkError:
            continue
        if _lock(file, fcntl.LOCK_EX, keep=True):
            path.unlink(missing_ok=True)
            removed.append(path)
        os.close(file)
    return removed


def _prefix() -> str:
    return f"blink_ref-{os.getuid()}-"


def _lock(file: int, kind: int, keep: bool = False) -> bool:
    """Whether nobody else held a lock that excludes ``kind``; kept only if asked for."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not keep:
        fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _new_locked_file(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{_prefix()}{secrets.token_hex(6)}.window"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise BlinkError(
                f"cannot create a window in {directory} ({error.strerror}); set {DIRECTORY} to another folder"
            ) from None
        # A reaper may come between these two lines. It holds the lock while it removes the name, so
        # whoever has the lock and still has a name has escaped all reapers.
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)


def _reserve(file: int, size: int, directory: Path) -> None:
    """Take ``size`` bytes now: a page that cannot be had later is a SIGBUS in the middle of serving."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:  # macOS; untested
            with open(file, "wb", closefd=False) as zeros:
                zeros.write(bytes(size))
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ENOSPC:
            disk = os.statvfs(directory)
            reason = f"{disk.f_bavail * disk.f_frsize / 1e6:.1f} MB are free"
        raise BlinkError(
            f"no room for a window of {size / 1e6:.1f} MB in {directory} ({reason}); free some, give a "
            f"container a larger --shm-size, or set {DIRECTORY} to another folder"
        ) from None


def _open_own(path: Path) -> int:
    # /dev/shm is everybody's: another user may have put a link or a pipe under this name.
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BlinkError(
            f"cannot open the window {path} ({error.strerror}); is its engine running, and is it yours?"
        ) from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(file)
        raise BlinkError(f"{path} is not a file of user {os.getuid()}; open a window of your own engine")
    return file


def _checked_layout(file: int, path: Path) -> Layout:
    raw = os.pread(file, HEADER.itemsize, 0).ljust(HEADER.itemsize, b"\0")
    header = np.frombuffer(raw, HEADER)[0]
    if header["magic"] != MAGIC:
        raise BlinkError(f"{path} is not a window; pass the path that the engine printed")
    if header["version"] != VERSION:
        raise BlinkError(
            f"{path} has layout version {header['version']}, this program speaks {VERSION}; "
            "run engine and NIC from one version of blink_ref"
        )
    layout = Layout(**{field.name: int(header[field.name]) for field in fields(Layout)})
    held = os.fstat(file).st_size
    if held != layout.size:
        raise BlinkError(f"{path} has {held} bytes, its header says {layout.size}; start an engine again")
    return layout
