"""One compiled kernel in the cache directory: what it holds, and whether it is trusted and intact."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuteforge.runtime import ownership

MANIFEST = "entry.json"


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
        contents: file name -> its bytes, of which `files` has the digests; empty in a listing, which reads no file.
    """

    path: Path
    key: Mapping[str, Any]
    symbol: str
    files: Mapping[str, str]
    size_bytes: int
    used_at: float
    contents: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def builder(self) -> str:
        """Name of the function that built it, "module:function"."""
        return str(self.key.get("builder", "unknown"))

    @property
    def arch(self) -> str:
        """The architecture that it was compiled for."""
        return str(self.key.get("arch", "unknown"))


def sha256(content: bytes) -> str:
    """Its digest, as entries record it."""
    return hashlib.sha256(content).hexdigest()


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"))


def name_of(key: Mapping[str, Any]) -> str:
    """Name of the directory of its entry."""
    return sha256(_canonical(key).encode())


def modified_at(path: Path) -> float:
    """Time of last change; now, for what another process has just removed."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return time.time()


def size_bytes(directory: Path) -> int:
    try:
        with os.scandir(directory) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:
        return 0


def read_entry(directory: Path, *, with_contents: bool = False) -> Entry | None:
    """What `directory` holds; None unless it is a trusted, readable entry of the right form and name.

    With its contents, every file is one that nobody else can write and has the recorded digest.
    """
    try:
        with ownership.open_directory(directory) as handle:
            manifest = json.loads(ownership.read_file(MANIFEST, handle))
            key, symbol, files = manifest["key"], manifest["symbol"], manifest["files"]
            if not (isinstance(key, dict) and name_of(key) == directory.name and symbol.isidentifier() and files):
                return None
            if any(os.path.basename(name) != name for name in files):
                return None
            contents = {name: ownership.read_file(name, handle) for name in files} if with_contents else {}
            if any(sha256(content) != files[name] for name, content in contents.items()):
                return None
            used_at = os.fstat(handle).st_mtime
    # Whatever is wrong with it makes it a damaged entry, which is built again. Not only what open and json promise:
    # deep nesting is a RecursionError, a NUL in a name a ValueError.
    except Exception:
        return None
    return Entry(directory, key, symbol, files, size_bytes(directory), used_at, contents)


def is_sound(directory: Path) -> bool:
    return read_entry(directory, with_contents=True) is not None
