"""The cache directory: private, atomic, checked before use, and never the cause of an exception."""

import errno
import json
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuteforge.errors import ContractError
from cuteforge.runtime import disk_cache, scratch
from cuteforge.runtime.disk_cache import DiskCache, default_root, open_disk_cache

KEY = {"builder": "module:build", "traits": "Traits(d=1)", "sources": {"cuteforge": "0" * 64}}
OTHER = {**KEY, "traits": "Traits(d=2)"}


@pytest.fixture(autouse=True)
def warn_anew(monkeypatch):
    monkeypatch.setattr(disk_cache, "_warned", set())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def files():
    return {"kernel.so": b"shared" * 100, "kernel.o": b"object" * 100}


def warnings(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_default_root(monkeypatch, tmp_path):
    monkeypatch.delenv("CUTEFORGE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "cuteforge"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "cuteforge"
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "own"))
    assert default_root() == tmp_path / "own"
    assert DiskCache().root == tmp_path / "own"


def test_switched_off(monkeypatch, root):
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(root))
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE", "0")
    assert open_disk_cache() is None
    assert not root.exists()


def test_stored_entry_comes_back_and_everything_is_private(root, files):
    cache = DiskCache(root)
    assert cache.find(KEY) is None
    cache.store(KEY, "entry", files)
    found = DiskCache(root).find(KEY)
    assert found.symbol == "entry"
    assert list(found.files) == ["kernel.so", "kernel.o"]
    assert found.contents == files
    assert cache.find(OTHER) is None
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_parents_are_made(tmp_path, files):
    cache = DiskCache(tmp_path / "a" / "b")
    assert cache.store(KEY, "entry", files)


def truncate(path):
    path.write_bytes(path.read_bytes()[:10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_key(path):
    edit(path, key={**KEY, "traits": "Traits(d=3)"})


def nested(depth):
    return '{"k":' * depth + "1" + "}" * depth


DAMAGE = {
    "object flipped": ("kernel.o", flip),
    "object truncated": ("kernel.o", truncate),
    "object missing": ("kernel.o", os.unlink),
    "library flipped": ("kernel.so", flip),
    "library writable by others": ("kernel.so", lambda path: path.chmod(0o666)),
    "json truncated": ("entry.json", truncate),
    "json empty": ("entry.json", lambda path: path.write_bytes(b"")),
    "json binary": ("entry.json", lambda path: path.write_bytes(b"\xff\x00")),
    "json of another form": ("entry.json", lambda path: path.write_text("[]")),
    "json with a path": (
        "entry.json",
        lambda path: path.write_text(json.dumps({"key": KEY, "symbol": "entry", "files": {"../x.so": "0"}})),
    ),
    "json missing": ("entry.json", os.unlink),
    "json nested too deep": ("entry.json", lambda path: path.write_text("[" * 200_000)),
    "json with a key nested too deep": (
        "entry.json",
        lambda path: path.write_text(f'{{"symbol": "e", "files": {{"a": "0"}}, "key": {nested(900)}}}'),
    ),
    "json with a NUL in a name": ("entry.json", lambda path: edit(path, files={"kernel\0.o": "0"})),
    "json with a NUL in the symbol": ("entry.json", lambda path: edit(path, symbol="entry\0")),
    "json with half a character in the symbol": ("entry.json", lambda path: edit(path, symbol="\ud800")),
    "json without files": ("entry.json", lambda path: edit(path, files={})),
    "json with other digests": ("entry.json", lambda path: edit(path, files={"kernel.o": 5})),
    "json with a directory": ("entry.json", lambda path: edit(path, files={".": "0"})),
    "json with a key that is a list": ("entry.json", lambda path: edit(path, key=[1])),
    "key of another kernel": ("entry.json", edit_key),
    "json writable by others": ("entry.json", lambda path: path.chmod(0o602)),
    "directory writable by others": (".", lambda path: path.chmod(0o770)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_counts_as_absent_and_is_replaced(root, files, damage):
    cache = DiskCache(root)
    entry = cache.store(KEY, "entry", files)
    name, spoil = DAMAGE[damage]
    spoil(entry.path / name)
    assert cache.find(KEY) is None
    assert cache.verify() == [entry.path]
    assert cache.store(KEY, "entry", files) is not None
    assert cache.verify() == []
    assert cache.find(KEY).contents == files


def test_a_file_in_the_place_of_an_entry_is_replaced(root, files):
    cache = DiskCache(root)
    entry = cache.store(KEY, "entry", files)
    shutil.rmtree(entry.path)
    entry.path.write_text("not a directory")
    assert cache.find(KEY) is None
    assert cache.store(KEY, "entry", files) is not None


def test_a_sound_entry_is_not_replaced(root, files):
    """Another process may be reading it."""
    cache = DiskCache(root)
    entry = cache.store(KEY, "entry", files)
    inode = entry.path.stat().st_ino
    assert cache.store(KEY, "entry", files).path.stat().st_ino == inode


def test_nothing_is_left_aside(root, files):
    cache = DiskCache(root)
    entry = cache.store(KEY, "entry", files)
    flip(entry.path / "kernel.o")
    cache.store(KEY, "entry", files)
    assert [path.name for path in root.iterdir()] == [entry.path.name]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_directory_that_others_can_write_is_refused_with_one_warning(root, files, caplog, mode):
    root.mkdir()
    root.chmod(mode)
    for _ in range(2):
        cache = DiskCache(root)
        assert cache.root is None
        assert cache.store(KEY, "entry", files) is None
        assert cache.find(KEY) is None
        assert (cache.ls(), cache.verify(), cache.size_bytes(), cache.clear()) == ([], [], 0, 0)
        with cache.lock(KEY):
            pass
    assert len(warnings(caplog)) == 1
    assert f"mode {mode:o}" in caplog.text


def test_it_is_the_directory_behind_a_link_that_counts(tmp_path, root, caplog):
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o777)
    root.symlink_to(target)
    assert DiskCache(root).root is None
    assert str(target) in caplog.text


def test_directory_that_cannot_be_made_warns_once(tmp_path, caplog):
    """A file where a parent should be: permissions would not stop root."""
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert DiskCache(tmp_path / "file" / "cache").root is None
        assert DiskCache(tmp_path / "file").root is None
    assert len(warnings(caplog)) == 2, "one for each directory"


def test_no_home_directory_warns(monkeypatch, caplog):
    monkeypatch.delenv("CUTEFORGE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert DiskCache().root is None
    assert len(warnings(caplog)) == 1


def test_store_that_fails_warns_once_and_existing_entries_stay_usable(root, files, caplog, monkeypatch):
    cache = DiskCache(root)
    cache.store(KEY, "entry", files)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", str(kwargs))

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", full)
    for _ in range(2):
        assert cache.store(OTHER, "entry", files) is None
    assert len(warnings(caplog)) == 1
    assert cache.find(KEY) is not None


def test_listing_size_and_clear(root, files):
    cache = DiskCache(root)
    cache.store(KEY, "entry", files)
    cache.store(OTHER, "entry", files)
    os.utime(cache.find(KEY).path, (10**9, 10**9))
    assert [entry.key["traits"] for entry in cache.ls()] == ["Traits(d=2)", "Traits(d=1)"]
    assert cache.size_bytes() == sum(entry.size_bytes for entry in cache.ls()) > 2 * 1200
    assert cache.clear() == 2
    assert cache.ls() == []
    assert root.exists()


def test_removing_some_leaves_the_others_and_says_what_is_left(root, files, monkeypatch):
    cache = DiskCache(root)
    kept, gone = cache.store(KEY, "entry", files), cache.store(OTHER, "entry", files)
    assert sorted(cache.paths()) == sorted((kept.path, gone.path))
    assert cache.remove([gone.path]) == []
    assert cache.paths() == [kept.path]
    assert cache.remove([gone.path]) == [], "another process may have removed it"

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", read_only)
    monkeypatch.setattr(disk_cache.shutil, "rmtree", lambda path, ignore_errors: None)
    assert cache.remove([kept.path]) == [kept.path]
    assert cache.clear() == 0


def test_entry_says_what_built_it_and_for_what(root, files):
    entry = DiskCache(root).store({**KEY, "arch": "sm_90a"}, "entry", files)
    assert (entry.builder, entry.arch) == ("module:build", "sm_90a")
    assert DiskCache(root).store({"name": "of another form"}, "entry", files).arch == "unknown"


def test_entries_used_longest_ago_are_removed_beyond_the_bound(root, files, monkeypatch):
    cache = DiskCache(root)
    keys = [{**KEY, "traits": str(i)} for i in range(4)]
    for age, key in enumerate(keys[:3]):
        path = cache.store(key, "entry", files).path
        os.utime(path, (10**9 + age, 10**9 + age))
    cache.find(keys[0])
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE_SIZE", str(int(3.5 * cache.size_bytes() / 3)))
    DiskCache(root).store(keys[3], "entry", files)
    assert [bool(cache.find(key)) for key in keys] == [True, False, True, True]


def test_leftovers_of_crashed_processes_are_removed_when_old(root, files):
    cache = DiskCache(root)
    for name, age in ((".new-old", 10**6), (".new-fresh", 0)):
        (root / name).mkdir()
        os.utime(root / name, (root.stat().st_mtime - age,) * 2)
    cache.store(KEY, "entry", files)
    assert not (root / ".new-old").exists()
    assert (root / ".new-fresh").exists(), "its process may be writing it"


def test_lock_excludes_a_second_holder_and_gives_up_in_time(root, monkeypatch):
    cache = DiskCache(root)
    with cache.lock(KEY):
        monkeypatch.setattr(disk_cache, "_LOCK_TIMEOUT_S", 0.1)
        assert cache._acquire(KEY) is None
    handle = cache._acquire(KEY)
    assert handle is not None
    os.close(handle)


def test_lock_is_released_although_a_forked_child_holds_the_file(root):
    cache = DiskCache(root)
    wait, wake = os.pipe()
    with cache.lock(KEY):
        child = os.fork()
        if child == 0:
            os.read(wait, 1)
            os._exit(0)
    handle = cache._acquire(KEY)
    os.write(wake, b"x")
    os.waitpid(child, 0)
    assert handle is not None
    for descriptor in (handle, wait, wake):
        os.close(descriptor)


def test_clearing_beside_writers_fails_nobody(root, files, caplog):
    """Writers store, readers find all of an entry or nothing, and every removal counts as one."""
    cache, stop = DiskCache(root), threading.Event()
    keys = [{**KEY, "traits": str(i)} for i in range(3)]

    def clear():
        while not stop.is_set():
            cache.remove(cache.paths()) and failures.append("left")

    def write(key):
        for i in range(150):
            cache.store(key, "entry", files, replace=i % 2 == 0)

    failures = []
    clearers = [threading.Thread(target=clear) for _ in range(2)]
    with ThreadPoolExecutor(6) as pool:
        for thread in clearers:
            thread.start()
        list(pool.map(write, keys * 2))
        stop.set()
    for thread in clearers:
        thread.join()
    assert (failures, warnings(caplog)) == ([], [])
    assert all(cache.store(key, "entry", files) for key in keys)
    assert cache.verify() == []


def test_an_entry_in_the_way_that_is_gone_a_moment_later_is_no_failure(root, files, caplog, monkeypatch):
    """As when another process clears the cache between the two looks: Errno 39 for a directory that is not there."""
    cache, rename, refusals = DiskCache(root), os.rename, iter([errno.ENOTEMPTY, errno.EEXIST])

    def refuse_first(source, target):
        refusal = next(refusals, None) if len(os.path.basename(target)) == 64 else None
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_first)
    assert cache.store(KEY, "entry", files) is not None
    assert warnings(caplog) == []


def test_a_full_disk_can_be_cleared(root, files, monkeypatch):
    cache = DiskCache(root)
    cache.store(KEY, "entry", files)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", full)
    assert cache.clear() == 1
    assert cache.paths() == []


def test_a_kernel_larger_than_the_bound_is_stored_alone(root, files, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE_SIZE", "100")
    cache = DiskCache(root)
    assert cache.store(KEY, "entry", files) is not None
    assert cache.store(OTHER, "entry", files) is not None
    assert [entry.key for entry in cache.ls()] == [OTHER]


def test_a_bound_that_makes_no_sense_is_refused_before_anything_is_stored(root, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE_SIZE", "plenty")
    with pytest.raises(ContractError, match="CUTEFORGE_DISK_CACHE_SIZE: wanted a size such as 500M or 4GiB"):
        DiskCache(root)


def test_where_locks_do_not_exist_work_goes_on(root, files, monkeypatch):
    cache = DiskCache(root)
    monkeypatch.setattr(disk_cache, "fcntl", None)
    with cache.lock(KEY):
        assert cache.store(KEY, "entry", files) is not None
