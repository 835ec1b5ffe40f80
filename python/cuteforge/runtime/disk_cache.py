"""Compiled kernels on disk, for every process of one user, and for other users to read.

One directory holds one entry a kernel: a directory named by the sha256 of everything that decided the machine code,
with the object file, the shared library where a linker was found, and `entry.json` (key, symbol, digests). An entry is
written aside and renamed into place, so a reader sees all of it or nothing. It is read once, checked, and the bytes
that were checked are what is loaded. One that is damaged counts as absent. Native code is loaded from here, so nothing
that another user could have written is used; root's files are.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cuteforge.runtime import env, ownership, scratch
from cuteforge.runtime.disk_entry import MANIFEST, Entry, is_sound, modified_at, name_of, read_entry, sha256, size_bytes

try:
    import fcntl
except ImportError:  # Not on Windows; every step is correct without the lock, which only saves double work.
    fcntl = None

logger = logging.getLogger("cuteforge.runtime")

_LOCK_TIMEOUT_S = 120
_LOCK_POLL_S = 0.02


def default_root() -> Path:
    """CUTEFORGE_CACHE_DIR, else that of `personal_root`."""
    return env.cache_dir() or personal_root()


def personal_root() -> Path:
    """This user's own: `cuteforge` in $XDG_CACHE_HOME, else ~/.cache/cuteforge."""
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "cuteforge"


_warned: set[str] = set()


def _warn_once(topic: str, text: str) -> None:
    if topic not in _warned:
        _warned.add(topic)
        logger.warning("%s: %s", topic, text)


def _prepare_root(root: Path) -> Path:
    """The real path of `root`, created private if missing.

    Raises:
        OSError: it cannot be used, or another user could write it; the text says why and what to do.
    """
    if not root.exists():
        _make_directories(root)
    real = root.resolve(strict=True)
    if not real.is_dir():
        raise NotADirectoryError(f"{real} is not a directory")
    ownership.check_directory(real)
    if not os.access(real, os.R_OK | os.X_OK):
        raise PermissionError(f"{real} cannot be read by this user; run `chmod -R a+rX {real}` as its owner")
    return real


def _make_directories(root: Path) -> None:
    """`root` for this user only; those above it as the umask says, but for nobody else to write."""
    missing = [path for path in root.parents if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)


class DiskCache:
    """The cache directory `root` (None: the default one). Unusable directories warn once and hold nothing.

    Attributes:
        root: real path of the directory; None where it cannot be used.
        is_writable: whether this user may store entries. Those of root may be for others to read only.
        max_bytes: CUTEFORGE_DISK_CACHE_SIZE.
        problem: why it cannot be used, or why the last `store` failed; None without one.
    """

    def __init__(self, root: Path | None = None, *, quiet: bool = False) -> None:
        self.root: Path | None = None
        self.problem: str | None = None
        try:
            root = root or default_root()
            self.root = _prepare_root(root)
        except (OSError, RuntimeError) as error:
            self.problem = str(error)
            if not quiet:
                _warn_once(f"disk cache {root or 'directory'} not used, kernels are kept in memory only", self.problem)
        self.max_bytes = env.disk_cache_size()
        self.is_writable = self.root is not None and os.access(self.root, os.W_OK)

    def find(self, key: Mapping[str, Any]) -> Entry | None:
        """The entry of `key`, with its contents, if it is there, trusted and intact."""
        if self.root is None:
            return None
        entry = read_entry(self._path(key), with_contents=True)
        if entry is not None:
            with contextlib.suppress(OSError):
                os.utime(entry.path)
        return entry

    def store(
        self, key: Mapping[str, Any], symbol: str, contents: Mapping[str, bytes], *, replace: bool = False
    ) -> Entry | None:
        """Write `contents`, file name -> bytes, as the entry of `key`. A sound entry stays unless `replace`.

        None, after one warning, where that fails; `problem` then says why.
        """
        if self.root is None:
            return None
        try:
            with scratch.work_directory(self.root) as aside:
                self._write_entry(aside, key, symbol, contents)
                self._commit(aside, self._path(key), replace)
            self._prune(spared=self._path(key))
        except OSError as error:
            self.problem = str(error)
            _warn_once(f"compiled kernels are not stored in {self.root}", self.problem)
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
        entries = map(read_entry, self.paths())
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.used_at)

    def size_bytes(self) -> int:
        """Size of all entries, damaged ones too."""
        return sum(size_bytes(path) for path in self.paths())

    def verify(self) -> list[Path]:
        """Directories of the entries that are damaged or not private; they would be rebuilt when asked for."""
        return [path for path in self.paths() if not is_sound(path)]

    def clear(self) -> int:
        """Remove every entry; returns how many. Kernels already loaded go on working."""
        paths = self.paths()
        return len(paths) - len(self.remove(paths))

    def remove(self, paths: Iterable[Path]) -> list[Path]:
        """Remove entries by their directories, of `paths`, `verify` or `ls`; returns those that could not be."""
        return [path for path in paths if not self._discard(path)]

    def paths(self) -> list[Path]:
        """Directories of all entries, damaged ones too."""
        if self.root is None:
            return []
        with os.scandir(self.root) as found:
            return [Path(item.path) for item in found if len(item.name) == 64 and item.is_dir(follow_symlinks=False)]

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self.root / name_of(key)

    def _write_entry(self, directory: Path, key: Mapping[str, Any], symbol: str, contents: Mapping[str, bytes]) -> None:
        """Files first and the manifest last, so a copy of a half-written entry is never taken for a whole one.

        Those who may read the cache directory may read the entry.
        """
        readers = self.root.stat().st_mode & 0o055
        manifest = {"key": key, "symbol": symbol, "files": {name: sha256(data) for name, data in contents.items()}}
        files = {**contents, MANIFEST: json.dumps(manifest, indent=1).encode()}
        for name, data in files.items():
            path = directory / name
            path.write_bytes(data)
            path.chmod(0o600 | readers & 0o044)
        directory.chmod(0o700 | readers)

    def _commit(self, aside: Path, target: Path, replace: bool) -> None:
        """Rename `aside` to `target`; without `replace` a sound entry stays, which another process has just stored."""
        for _ in range(10):
            try:
                os.rename(aside, target)
                return
            except OSError as error:
                # A file or a full directory is in the way, or was until a moment ago.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if not replace and is_sound(target):
                return
            self._discard(target)
        raise FileExistsError(f"{target} is being replaced by others all the time")

    def _discard(self, path: Path) -> bool:
        """Remove an entry as a whole: it is renamed first, so nobody sees half of it. False if it is still there."""
        try:
            # `work_directory` removes what was moved into it.
            with scratch.work_directory(self.root) as retired:
                os.rename(path, retired / "entry")
        except FileNotFoundError:
            return True
        except OSError:
            # No room for the new directory, perhaps; or all of this is for others to write.
            shutil.rmtree(path, ignore_errors=True)
            return not os.path.lexists(path)
        return True

    def _acquire(self, key: Mapping[str, Any]) -> int | None:
        if self.root is None or fcntl is None:
            return None
        # 256 lock files shared by all keys: they are never removed, which could not be done without a race.
        path = self.root / f".lock-{name_of(key)[:2]}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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

    def _prune(self, spared: Path) -> None:
        """Shrink the cache to CUTEFORGE_DISK_CACHE_SIZE, and remove what killed processes left.

        The least recently used entries go first; `spared` stays in any case. A full cache has some 20 000 entries, so
        this looks at file sizes and times only.
        """
        sizes = {path: size_bytes(path) for path in self.paths()}
        excess = sum(sizes.values()) - self.max_bytes
        for path in sorted(sizes.keys() - {spared}, key=modified_at):
            if excess <= 0:
                break
            self._discard(path)
            excess -= sizes[path]
        for path in self.root.glob(scratch.PREFIX + "*"):
            if time.time() - modified_at(path) > scratch.LEFTOVER_AGE_S:
                shutil.rmtree(path, ignore_errors=True)


class LayeredCache:
    """The cache that the environment names; beside one that this user may only read, the user's own for new kernels."""

    def __init__(self, named: DiskCache) -> None:
        self.named = named

    @functools.cached_property
    def own(self) -> DiskCache:
        """Where new kernels go."""
        if self.named.root is None or self.named.is_writable:
            return self.named
        try:
            return DiskCache(personal_root(), quiet=True)
        except RuntimeError:  # no home directory
            return self.named

    def entries(self, key: Mapping[str, Any]) -> Iterator[Entry]:
        """The intact entries of `key`, of the named directory first."""
        entry = self.named.find(key)
        if entry is not None:
            yield entry
        entry = self.own.find(key) if self.own.root != self.named.root else None
        if entry is not None:
            yield entry

    def lock(self, key: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """`DiskCache.lock` where new kernels go."""
        return self.own.lock(key)

    def store(
        self, key: Mapping[str, Any], symbol: str, contents: Mapping[str, bytes], *, replace: bool = False
    ) -> str | None:
        """`DiskCache.store` where new kernels go. If the named directory does not hold the entry now, says why."""
        if self.named.root is None or self.named.is_writable:
            return None if self.named.store(key, symbol, contents, replace=replace) else self.named.problem
        if self.own.is_writable:
            self.own.store(key, symbol, contents, replace=replace)
        topic = f"disk cache {self.named.root} is read-only for this user"
        _warn_once(topic, self.place_of_new())
        return f"{topic}: {self.place_of_new()}"

    def place_of_new(self) -> str:
        """Where new kernels go, as a sentence."""
        if self.own.is_writable:
            return f"new kernels go to {self.own.root}"
        return f"new kernels are kept in memory only ({self.own.problem or f'{self.own.root} is read-only too'})"


def open_disk_cache() -> LayeredCache | None:
    """The cache that the environment names now; None with CUTEFORGE_DISK_CACHE=0."""
    return LayeredCache(DiskCache()) if env.disk_cache() else None
