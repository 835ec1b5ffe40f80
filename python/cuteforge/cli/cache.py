"""`cache`: lists, clears and verifies the compiled kernels on disk."""

from __future__ import annotations

import time

from rich.table import Table
from rich.text import Text

from cuteforge.cli.console import open_console
from cuteforge.cli.families import split_builder
from cuteforge.errors import UnsupportedError
from cuteforge.runtime.compile_cache import is_stale
from cuteforge.runtime.disk_cache import DiskCache, Entry

_DAY_S = 24 * 3600
# The largest unit of which there are two.
_AGES = (("days", _DAY_S), ("hours", 3600), ("min", 60), ("s", 1))


def run(
    action: str,
    older_than: float | None = None,
    arch: str | None = None,
    stale: bool = False,
    remove: bool = False,
) -> int:
    """List, clear or verify the cache directory that the environment names.

    It need not be in use now.

    Args:
        action: "ls", "clear" or "verify".
        older_than: clear only what was not used for so many days.
        arch: clear only what was compiled for this architecture.
        stale: clear only what was compiled from other sources or by another toolchain than those here.
        remove: remove what `verify` finds damaged.

    Returns:
        0, or 1 when `verify` leaves damaged entries or `clear` could not remove one.

    Raises:
        UnsupportedError: the directory cannot be used; or `stale`, and there is no toolchain here.
    """
    cache = open_cache()
    if action == "ls":
        return _list(cache)
    return _clear(cache, older_than, arch, stale) if action == "clear" else _verify(cache, remove)


def open_cache() -> DiskCache:
    """The cache directory; raises UnsupportedError where it cannot be used, after the warning that says why."""
    cache = DiskCache()
    if cache.root is None:
        raise UnsupportedError("the disk cache cannot be used; `python -m cuteforge doctor` says why")
    return cache


def format_age(seconds: float) -> str:
    """E.g. "36 hours"."""
    name, seconds_each = next((pair for pair in _AGES if seconds >= 2 * pair[1]), _AGES[-1])
    return f"{max(seconds, 0) / seconds_each:.0f} {name}"


def _list(cache: DiskCache) -> int:
    console, entries = open_console(), cache.ls()
    table = Table("family", "kernel", "for", "KiB", "last used", "traits")
    for entry in entries:
        family, kernel = split_builder(entry.builder)
        age = f"{format_age(time.time() - entry.used_at)} ago"
        traits = Text(str(entry.key.get("traits", "")), overflow="fold")
        table.add_row(family, kernel, entry.arch, f"{entry.size_bytes / 1024:.0f}", age, traits)
    if entries:
        console.print(table)
    _say(f"{_size(len(entries), cache.size_bytes())} in {cache.root}")
    return 0


def _clear(cache: DiskCache, older_than: float | None, arch: str | None, stale: bool) -> int:
    if older_than is None and arch is None and not stale:
        chosen, size_bytes = cache.paths(), cache.size_bytes()
    else:
        listed = cache.ls()
        entries = [entry for entry in listed if _is_chosen(entry, older_than, arch, stale)]
        chosen, size_bytes = [entry.path for entry in entries], sum(entry.size_bytes for entry in entries)
        archs = sorted({entry.arch for entry in listed})
        if arch is not None and archs and arch not in archs:
            _say(f"no entry is for {arch}; there are some for {', '.join(archs)}")
    left = cache.remove(chosen)
    _say(f"removed {_size(len(chosen) - len(left), size_bytes)} from {cache.root}")
    return _say_left(left)


def _is_chosen(entry: Entry, older_than: float | None, arch: str | None, stale: bool) -> bool:
    is_old = older_than is None or time.time() - entry.used_at > older_than * _DAY_S
    return is_old and arch in (None, entry.arch) and (not stale or is_stale(entry.key))


def _verify(cache: DiskCache, remove: bool) -> int:
    damaged = cache.verify()
    _say(f"{len(cache.paths()) - len(damaged)} sound, {len(damaged)} damaged in {cache.root}")
    left = cache.remove(damaged) if remove else damaged
    for path in damaged:
        _say(f"damaged{'' if path in left else ', removed'}: {path.name}")
    return _say_left(left) if remove else bool(left)


def _say_left(left: list) -> int:
    for path in left:
        _say(f"could not be removed: {path}")
    return 1 if left else 0


def _size(count: int, size_bytes: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}, {size_bytes / 2**20:.1f} MiB"


def _say(text: str) -> None:
    open_console().print(text, markup=False, soft_wrap=True)
