"""Files that only this process uses: code for loaders that want a path, and the linker's work."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Not on Windows.
    fcntl = None

PREFIX = ".new-"
"""Names of what is written in a cache directory before it is renamed into place, or removed, begin so."""

LEFTOVER_AGE_S = 3600
"""Anything older was left by a killed process: a compile takes seconds."""

_TEMPORARY_PREFIX = "cuteforge-"
_TEMPORARY_NAME = re.compile(_TEMPORARY_PREFIX + r"[a-z0-9_]{8}")
_CLOSE_ON_EXEC = 1
_serial = itertools.count(1)


@contextlib.contextmanager
def path_of(content: bytes, suffix: str) -> Iterator[str]:
    """A path that reads as `content`, while the context is open. Nobody else can change what is behind it.

    It is in memory, so neither a full disk nor one mounted noexec or read-only matters. Where the system has no such
    files it is a private temporary file.
    """
    handle = _memory_file(content)
    if handle is None:
        with work_directory(None) as directory:
            path = directory / f"kernel{suffix}"
            path.write_bytes(content)
            yield str(path)
        return
    try:
        yield _unique_path(handle)
    finally:
        os.close(handle)


def written_by(write: Callable[[Path], None]) -> bytes:
    """What `write` writes to the path that it is given, in memory too where the system allows."""
    handle = _memory_file(b"")
    if handle is None:
        with work_directory(None) as directory:
            path = directory / "kernel.o"
            write(path)
            return path.read_bytes()
    with open(handle, "rb") as file:
        write(Path(f"/proc/self/fd/{handle}"))
        file.seek(0)
        return file.read()


def _memory_file(content: bytes) -> int | None:
    """A file in memory that holds `content`; None where there are none."""
    try:
        handle = _create_memory_file()
    except (OSError, AttributeError):
        return None
    try:
        with open(os.dup(handle), "wb") as file:
            file.write(content)
        if os.path.exists(f"/proc/self/fd/{handle}"):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _create_memory_file() -> int:
    name = "cuteforge-kernel"
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _CLOSE_ON_EXEC)
    # A Python that was built with an old C library runs with a newer one.
    handle = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _CLOSE_ON_EXEC)
    if handle < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return handle


def _unique_path(handle: int) -> str:
    """A path of `handle` that no other file had: dlopen takes a name that it has seen for the library loaded then.

    The digits of a serial number are written as "/" and "./", which mean nothing in a path.
    """
    digits = f"{next(_serial):b}".replace("0", "/").replace("1", "./")
    return f"/proc/self/fd/{digits}{handle}"


@contextlib.contextmanager
def work_directory(beside: Path | None) -> Iterator[Path]:
    """A new private directory, removed afterwards: in the cache directory `beside`, or with None in the system's own.

    Raises:
        OSError: it cannot be made.
    """
    if beside is not None:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=beside))
    else:
        directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX))
    try:
        with _locked(directory):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove work directories that killed processes of this user left in the system's temporary directory."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as found:
        for item in found:
            if _TEMPORARY_NAME.fullmatch(item.name):
                with contextlib.suppress(OSError):
                    _remove_leftover(item)


def _remove_leftover(item: os.DirEntry) -> None:
    status = item.stat(follow_symlinks=False)
    is_old = time.time() - status.st_mtime > LEFTOVER_AGE_S
    if not (is_old and status.st_uid == os.geteuid() and item.is_dir(follow_symlinks=False)):
        return
    with _locked(Path(item.path)) as is_free:
        # Only what we write: a directory of such a name may be somebody's work.
        if is_free and set(os.listdir(item.path)) <= {"kernel.o", "kernel.so"}:
            shutil.rmtree(item.path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Mark `directory` as in use; False where another process has done so. True where that cannot be known."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
