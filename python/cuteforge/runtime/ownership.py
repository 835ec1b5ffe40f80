"""Who could have written a file. Native code is loaded only from files that this user or root alone may write."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_ROOT_UID = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


class UntrustedError(OSError):
    """Another user can write it. The text names the file, what is wrong with it and the remedy."""


def is_trusted(status: os.stat_result) -> bool:
    """Whether this user or root owns it and nobody else can write it."""
    return status.st_uid in (os.geteuid(), _ROOT_UID) and not status.st_mode & _OTHERS_WRITE


def check_directory(path: Path) -> None:
    """Refuse the real directory `path`, or one above it, if another user can write it.

    Raises:
        UntrustedError: another user can write `path` or exchange it for a directory of theirs.
        OSError: it cannot be looked at.
    """
    _check_ancestors(path)
    status = path.stat()
    if status.st_uid not in (os.geteuid(), _ROOT_UID):
        raise UntrustedError(
            f"{path} belongs to user {status.st_uid}; wanted a directory of user {os.geteuid()} or root. "
            "Name another one with CUTEFORGE_CACHE_DIR"
        )
    if status.st_mode & _OTHERS_WRITE:
        subdirectory = f"use a subdirectory of it{'' if _is_sticky(status) else f' after `chmod +t {path}`'}"
        raise UntrustedError(f"{_describe_mode(path, status)}; run `chmod go-w {path}`, or {subdirectory}")


def _check_ancestors(path: Path) -> None:
    """Refuse directories above `path` in which another user could rename things, as sshd does.

    Below a directory that only its owner may enter nobody else gets that far, whatever the modes there: with a umask
    of 002, what programs make in a private home is open to a group.
    """
    for parent in reversed(path.parents):
        status = parent.stat()
        if status.st_uid not in (os.geteuid(), _ROOT_UID, _unmapped_uid()):
            raise UntrustedError(
                f"{parent}, above {path}, belongs to user {status.st_uid}, who could exchange what is in it; wanted "
                f"user {os.geteuid()} or root. Name another directory with CUTEFORGE_CACHE_DIR"
            )
        if status.st_mode & _OTHERS_WRITE and not _is_sticky(status):
            raise UntrustedError(
                f"{_describe_mode(parent, status)} and exchange {path} below it; "
                f"run `chmod go-w {parent}` or `chmod +t {parent}`"
            )
        if not status.st_mode & _OTHERS_ENTER:
            return


@functools.cache
def _unmapped_uid() -> int | None:
    """The uid that a user namespace shows for users it does not know, the host's root among them; None outside one."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    is_mapped = any(first <= overflow < first + count for first, _, count in ranges)
    return None if is_mapped else overflow


def _is_sticky(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_ISVTX)


def _describe_mode(path: Path, status: os.stat_result) -> str:
    return f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so others can write it"


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """A handle of a trusted directory, for `read_file`.

    Raises:
        UntrustedError: another user can write it.
        OSError: it is not there, a link, or not a directory.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_trusted(os.fstat(handle), path)
        yield handle
    finally:
        os.close(handle)


def read_file(name: str, directory: int) -> bytes:
    """The bytes of a trusted regular file in an open directory. What was looked at is what is read.

    Raises:
        UntrustedError: another user can write it.
        OSError: it is not there, or no regular file.
    """
    # If the file is a named pipe, opening it without O_NONBLOCK would wait for a writer.
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a regular file")
        _require_trusted(status, name)
        return file.read()


def _require_trusted(status: os.stat_result, name: str | Path) -> None:
    if not is_trusted(status):
        found = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        raise UntrustedError(f"{name}: wanted a file of this user or root that nobody else can write, got {found}")
