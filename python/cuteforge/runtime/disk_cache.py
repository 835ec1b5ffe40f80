"""Compiled kernels on disk, for every process of one user.

One directory holds one entry a kernel: a directory named by the sha256 of everything that decided the machine code,
with the object file, the shared library where a linker was found, and `entry.json` (key, symbol, digests). An entry is
written aside and renamed into place, so a reader sees all of it or nothing; it is checked before each load, and one
that is damaged counts as absent. Native code is loaded from here, so nothing that another user could have written is
used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuteforge.runtime import env

try:
    import fcntl
except ImportError:  # Not on Windows; every step is correct without the lock, which only saves double work.
    fcntl = None

logger = logging.getLogger("cuteforge.runtime")

MAX_BYTES = 2 * 1024**3
"""Entries used longest ago are removed beyond this size."""

_MANIFEST = "entry.json"
_LOCK_TIMEOUT_S = 120
_LOCK_POLL_S = 0.02
_ASIDE_PREFIX = ".new-"
_ASIDE_MAX_AGE_S = 3600


def default_root() -> Path:
    """CUTEFORGE_CACHE_DIR, else `cuteforge` in $XDG_CACHE_HOME, else ~/.cache/cuteforge."""
    named = env.cache_dir()
    if named is not None:
        return named
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "cuteforge"


def source_digest(package: str = "cuteforge") -> str:
    """sha256 of all .py files of a top-level package or module (relative path and bytes), computed once a process."""
    return _cached_source_digest(package)


def read_source_digest(package: str) -> str:
    """`source_digest` of the files as they are now."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    roots = [Path(path) for path in spec.submodule_search_locations or ()]
    named = [(path.relative_to(root).as_posix(), path) for root in roots for path in root.rglob("*.py")]
    if not roots and spec.origin:
        named = [(Path(spec.origin).name, Path(spec.origin))]
    digest = hashlib.sha256()
    for name, path in sorted(named):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


_cached_source_digest = functools.cache(read_source_digest)


@dataclass(frozen=True)
class Entry:
    """One compiled kernel on disk.

    Attributes:
        path: its directory.
        key: the facts it was compiled for, as given to `store`.
        symbol: name of the entry function.
        files: file name -> sha256, in the order they were given.
        size_bytes: of its files.
        used_at: time of the last load, seconds since the epoch.
    """

    path: Path
    key: Mapping[str, Any]
    symbol: str
    files: Mapping[str, str]
    size_bytes: int
    used_at: float

    @property
    def builder(self) -> str:
        """Name of the function that built it, "module:function"."""
        return str(self.key.get("builder", "unknown"))

    @property
    def arch(self) -> str:
        """The architecture that it was compiled for."""
        return str(self.key.get("arch", "unknown"))

    def intact(self) -> bool:
        """Whether every file is present, private and has the recorded digest."""
        try:
            paths = {self.path / name: digest for name, digest in self.files.items()}
            return all(_is_private(path.lstat()) and file_sha256(path) == digest for path, digest in paths.items())
        except OSError:
            return False


def file_sha256(path: Path) -> str:
    """sha256 of the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_private(status: os.stat_result) -> bool:
    """Owned by this user and writable by nobody else."""
    owned = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    return owned and (os.name == "nt" or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"))


_warned: set[str] = set()


def _warn_once(topic: str, text: str) -> None:
    if topic not in _warned:
        _warned.add(topic)
        logger.warning("%s: %s", topic, text)


def _prepare_root(root: Path | None) -> Path | None:
    """The real path of a private `root`, created if missing; None, after one warning, where there is none."""
    topic = f"disk cache {root or 'directory'} not used, kernels are kept in memory only"
    try:
        root = root or default_root()
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
        real = root.resolve(strict=True)
        status = real.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{real} is not a directory")
    except (OSError, RuntimeError) as error:
        _warn_once(topic, str(error))
        return None
    if not _is_private(status):
        found = f"got owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        _warn_once(topic, f"{real}: wanted a directory of this user that nobody else can write, {found}")
        return None
    return real


class DiskCache:
    """The cache directory `root` (None: the default one). Unusable directories warn once and hold nothing."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = _prepare_root(root)

    def find(self, key: Mapping[str, Any]) -> Entry | None:
        """The entry of `key` if it is there, private and intact."""
        if self.root is None:
            return None
        entry = _read_entry(self._path(key))
        if entry is None or _canonical(entry.key) != _canonical(key) or not entry.intact():
            return None
        with contextlib.suppress(OSError):
            os.utime(entry.path)
        return entry

    def store(self, key: Mapping[str, Any], symbol: str, files: Sequence[Path]) -> Entry | None:
        """Copy `files` in as the entry of `key`; a sound one already there is kept.

        None, after one warning, where that fails.
        """
        if self.root is None:
            return None
        try:
            aside = Path(tempfile.mkdtemp(prefix=_ASIDE_PREFIX, dir=self.root))
            try:
                _write_entry(aside, key, symbol, files)
                self._commit(aside, self._path(key))
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            self._prune()
        except OSError as error:
            _warn_once(f"compiled kernels are not stored in {self.root}", str(error))
            return None
        return self.find(key)

    @contextlib.contextmanager
    def lock(self, key: Mapping[str, Any]) -> Iterator[None]:
        """Keep other processes from building `key` meanwhile. Gives up after a while, and where locks fail."""
        handle = self._acquire(key)
        try:
            yield
        finally:
            if handle is not None:
                # Explicit: a child forked meanwhile shares the handle, and its copy would hold the lock on.
                fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def ls(self) -> list[Entry]:
        """All readable entries, the one used last first."""
        entries = map(_read_entry, self.paths())
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.used_at)

    def size_bytes(self) -> int:
        """Size of all entries, damaged ones too."""
        return sum(_size_bytes(path) for path in self.paths())

    def verify(self) -> list[Path]:
        """Directories of the entries that are damaged or not private; they would be rebuilt when asked for."""
        return [path for path in self.paths() if not _is_sound(path)]

    def clear(self) -> int:
        """Remove every entry; returns how many. Kernels already loaded go on working."""
        paths = self.paths()
        return len(paths) - len(self.remove(paths))

    def remove(self, paths: Iterable[Path]) -> list[Path]:
        """Remove entries by their directories, of `paths`, `verify` or `ls`; returns those that are still there."""
        paths = list(paths)
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
        return [path for path in paths if path.exists()]

    def paths(self) -> list[Path]:
        """Directories of all entries, damaged ones too."""
        if self.root is None:
            return []
        with os.scandir(self.root) as found:
            return [Path(item.path) for item in found if len(item.name) == 64 and item.is_dir(follow_symlinks=False)]

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self.root / hashlib.sha256(_canonical(key).encode()).hexdigest()

    def _commit(self, aside: Path, target: Path) -> None:
        """Rename `aside` to `target`; keeps a sound entry there, which another process has just stored."""
        for _ in range(10):
            try:
                os.rename(aside, target)
                return
            except OSError:
                if not os.path.lexists(target):
                    raise
            if _is_sound(target):
                return
            retired = Path(tempfile.mkdtemp(prefix=_ASIDE_PREFIX, dir=self.root))
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, retired / "damaged")
            shutil.rmtree(retired, ignore_errors=True)
        raise FileExistsError(f"{target} is being replaced by others all the time")

    def _acquire(self, key: Mapping[str, Any]) -> int | None:
        if self.root is None or fcntl is None:
            return None
        # 256 lock files shared by all keys: they are never removed, which could not be done without a race.
        path = self.root / f".lock-{self._path(key).name[:2]}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_LOCK_POLL_S)
                    continue
            except OSError:
                pass
            os.close(handle)
            return None

    def _prune(self) -> None:
        """Remove the entries used longest ago beyond MAX_BYTES, and what crashed processes left aside.

        Looks at file sizes and times only: full, the cache holds some 20 000 entries.
        """
        sizes = {path: _size_bytes(path) for path in self.paths()}
        excess = sum(sizes.values()) - MAX_BYTES
        if excess > 0:
            for path in sorted(sizes, key=_modified_at):
                shutil.rmtree(path, ignore_errors=True)
                excess -= sizes[path]
                if excess <= 0:
                    break
        for path in self.root.glob(_ASIDE_PREFIX + "*"):
            if time.time() - _modified_at(path) > _ASIDE_MAX_AGE_S:
                shutil.rmtree(path, ignore_errors=True)


def open_disk_cache() -> DiskCache | None:
    """The cache that the environment names now; None with CUTEFORGE_DISK_CACHE=0."""
    return DiskCache() if env.disk_cache() else None


def _modified_at(path: Path) -> float:
    """Time of last change; now, for what another process has just removed."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return time.time()


def _size_bytes(directory: Path) -> int:
    try:
        with os.scandir(directory) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:
        return 0


def _write_entry(directory: Path, key: Mapping[str, Any], symbol: str, files: Sequence[Path]) -> None:
    """Files first and the manifest last, so a copy of a half-written entry is never taken for a whole one."""
    digests = {}
    for file in files:
        copy = directory / file.name
        shutil.copyfile(file, copy)
        copy.chmod(0o600)
        digests[file.name] = file_sha256(copy)
    manifest = {"key": key, "symbol": symbol, "files": digests}
    partial = directory / (_MANIFEST + ".partial")
    partial.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(directory / _MANIFEST)


def _read_entry(directory: Path) -> Entry | None:
    """What `directory` says it holds; None if it is not a private, readable entry of the right form."""
    try:
        status = directory.lstat()
        if not (_is_private(status) and _is_private((directory / _MANIFEST).lstat())):
            return None
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        key, symbol, files = manifest["key"], manifest["symbol"], manifest["files"]
        if not (isinstance(key, dict) and isinstance(symbol, str) and isinstance(files, dict) and files):
            return None
        if any(os.path.basename(name) != name for name in files):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(directory, key, symbol, files, _size_bytes(directory), status.st_mtime)


def _is_sound(directory: Path) -> bool:
    entry = _read_entry(directory)
    if entry is None or hashlib.sha256(_canonical(entry.key).encode()).hexdigest() != directory.name:
        return False
    return entry.intact()
