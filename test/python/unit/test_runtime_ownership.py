"""Whose files are loaded: other users, modes, links, directories above, and what changes between check and load.

Other users are real: a process of root becomes one of them after it has imported everything.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from cuteforge.runtime import compile_cache, disk_cache, ownership
from cuteforge.runtime.compile_cache import load_kernel
from cuteforge.runtime.disk_cache import DiskCache
from helpers import process
from helpers.tiny_traits import tiny_key

KEY = {"builder": "module:build", "traits": "Traits(d=1)"}
FILES = {"kernel.o": b"object"}
NOBODY = 65534


def is_in_reach(path: Path) -> bool:
    """Whether everybody can enter the directories above."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


COMPILER = importlib.util.find_spec("cutlass")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not is_in_reach(Path(__file__)) or (COMPILER and not is_in_reach(Path(COMPILER.origin))),
    reason="only root can become another user, who must be able to read this checkout and the compiler",
)


@pytest.fixture(autouse=True)
def warn_anew(monkeypatch):
    monkeypatch.setattr(disk_cache, "_warned", set())


@pytest.fixture
def base():
    """A directory that everybody may enter, unlike `tmp_path`."""
    made = Path(tempfile.mkdtemp(prefix="test-cuteforge-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def make(path: Path, mode: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    return path


def problem(root: Path) -> str | None:
    return DiskCache(root).problem


# Modes.


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o757, 0o2775])
def test_a_directory_for_others_to_write_is_refused_and_both_remedies_work(base, mode):
    root = make(base / "cache", mode)
    text = problem(root)
    assert f"mode {mode:o}, so others can write it" in text
    assert f"`chmod go-w {root}`" in text
    assert f"use a subdirectory of it after `chmod +t {root}`" in text
    root.chmod(mode | 0o1000)
    assert problem(root).endswith("or use a subdirectory of it")
    assert problem(root / "own") is None
    root.chmod(mode & ~0o022)
    assert problem(root) is None


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_above_in_which_others_can_rename_is_refused_with_its_remedy(base, mode):
    above = make(base / "above", mode)
    root = make(above / "between" / "cache", 0o700)
    text = problem(root)
    assert text.startswith(f"{above} has mode {mode:o}, so others can write it and exchange {root} below it")
    assert f"`chmod go-w {above}` or `chmod +t {above}`" in text
    above.chmod(0o1777)
    assert problem(root) is None, "sticky: nobody can rename what is not theirs"
    above.chmod(0o755)
    assert problem(root) is None


def test_what_counts_are_the_directories_above_the_real_one(base):
    real = make(make(base / "above", 0o777) / "cache", 0o700)
    (base / "link").symlink_to(real)
    assert f"{base / 'above'} has mode 777" in problem(base / "link")


def test_a_private_home_keeps_others_from_what_a_loose_umask_made_in_it(base):
    make(base / "home", 0o700)
    make(base / "home" / ".cache", 0o775)
    assert problem(base / "home" / ".cache" / "cuteforge") is None


def test_directories_that_are_made_are_for_nobody_else_to_write(base):
    before = os.umask(0)
    try:
        cache = DiskCache(base / "a" / "b" / "cache")
        cache.store(KEY, "entry", FILES)
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (base / "a", base / "a" / "b", cache.root)] == [0o755, 0o755, 0o700]
    assert all(not path.stat().st_mode & 0o077 for path in (cache.root, *cache.root.rglob("*")))


def test_entries_may_be_read_by_those_who_may_read_the_directory(base):
    cache = DiskCache(make(base / "cache", 0o755))
    entry = cache.store(KEY, "entry", FILES)
    assert entry.path.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in entry.path.iterdir()} == {0o644}


def test_an_unmapped_owner_is_known_in_user_namespaces_only(monkeypatch):
    """There, everybody whom the namespace does not know, the host's root too, appears as one user."""
    files = {"/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(ownership.Path, "read_text", lambda self: files[str(self)])
    for uid_map, owner in (("0 0 4294967295\n", None), ("1000 1000 1\n", 65534), ("0 1000 1\n1 5000 65536\n", None)):
        files["/proc/self/uid_map"] = uid_map
        ownership._unmapped_uid.cache_clear()
        assert ownership._unmapped_uid() == owner
    ownership._unmapped_uid.cache_clear()


# Between check and load.


def test_links_pipes_and_directories_in_the_place_of_a_file_are_not_read(base):
    cache = DiskCache(base / "cache")
    library = cache.store(KEY, "entry", FILES).path / "kernel.o"
    (base / "same").write_bytes(library.read_bytes())
    for put in (lambda: library.symlink_to(base / "same"), lambda: os.mkfifo(library), library.mkdir):
        library.unlink()
        put()
        assert cache.find(KEY) is None
        assert cache.store(KEY, "entry", FILES) is not None


def test_the_bytes_that_were_checked_are_loaded_whatever_becomes_of_the_files(base, monkeypatch):
    root = base / "cache"
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(root))
    compile_cache.clear()
    load_kernel(tiny_key(num_threads=44))
    entries = disk_cache.LayeredCache.entries

    def swapped_after_the_check(self, key):
        for entry in entries(self, key):
            for name in entry.files:
                (entry.path / name).unlink()
                (entry.path / name).write_bytes(b"another user's code")
            yield entry

    monkeypatch.setattr(disk_cache.LayeredCache, "entries", swapped_after_the_check)
    monkeypatch.setattr(compile_cache, "_loaded", {})
    compile_cache.clear()
    assert load_kernel(tiny_key(num_threads=44)).origin == "disk"
    compile_cache.clear()


# Other users.

# Everything is imported, and both loaders are used, before the user is changed: the interpreter may be root's alone.
NOBODY_TAKES_OVER = """
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
"""
AS_NOBODY = f"""{process.WITHOUT_TORCH}
import os
from cuteforge.runtime import compile_cache, disk_cache
from cuteforge.runtime.compile_cache import load_kernel, stats
from helpers.tiny_traits import tiny_key
directory, os.environ["CUTEFORGE_DISK_CACHE"] = os.environ["CUTEFORGE_CACHE_DIR"], "0"
load_kernel(tiny_key(num_threads=991))
compile_cache.clear()
compile_cache._loaded.clear()
del os.environ["CUTEFORGE_DISK_CACHE"]
{NOBODY_TAKES_OVER}"""


def as_nobody(code: str, root: Path, home: Path) -> tuple[str, str]:
    """Standard output and error of `code` run as another user, with the tiny kernels imported."""
    return run_for(AS_NOBODY + code, root, home)


def run_for(code: str, root: Path, home: Path) -> tuple[str, str]:
    started = process.start(code, CUTEFORGE_CACHE_DIR=root, HOME=home, XDG_CACHE_HOME=None)
    out, err = started.communicate(timeout=180)
    assert started.returncode == 0, err
    return out, err


def owned(path: Path, uid: int, mode: int = 0o755) -> Path:
    make(path, mode)
    os.chown(path, uid, uid)
    return path


def fill(root: Path, monkeypatch, *keys) -> None:
    """Compile the kernels into `root`, as this user."""
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(root))
    for key in keys:
        compile_cache.clear()
        load_kernel(key)
    compile_cache.clear()


LOAD = """
for key in {keys}:
    print(load_kernel(key).origin)
print(stats().compiles, len(stats().not_stored))
"""


@needs_root
def test_a_cache_of_root_serves_another_user_without_a_single_compilation(base, tmp_path, monkeypatch):
    log = tmp_path / "log"
    fill(make(base / "cache", 0o755), monkeypatch, tiny_key(build_log=str(log)), tiny_key(num_threads=64))
    assert log.read_text().splitlines() == ["built"]
    home = owned(base / "home", NOBODY, 0o700)
    keys = f"(tiny_key(build_log={str(log)!r}), tiny_key(num_threads=64))"
    out, err = as_nobody(LOAD.format(keys=keys), base / "cache", home)
    assert out.split() == ["disk", "disk", "0", "0"]
    written = [path for path in home.iterdir() if path.name != ".nv"]  # that of NVIDIA's driver, where there is one
    assert (err, written) == ("", []), "nothing to say, nothing written"
    assert log.read_text().splitlines() == ["built"]


@needs_root
def test_new_kernels_beside_a_cache_of_root_go_to_the_users_own_with_one_line(base, monkeypatch):
    root = make(base / "cache", 0o755)
    fill(root, monkeypatch, tiny_key())
    home = owned(base / "home", NOBODY, 0o700)
    own = home / ".cache" / "cuteforge"
    keys = "(tiny_key(), tiny_key(num_threads=64), tiny_key(num_threads=96))"
    out, err = as_nobody(LOAD.format(keys=keys), root, home)
    assert out.split() == ["disk", "compiled", "compiled", "2", "2"]
    assert err.splitlines() == [f"disk cache {root} is read-only for this user: new kernels go to {own}"]
    assert {path.stat().st_uid for path in own.rglob("*")} == {NOBODY}
    assert len(DiskCache(root).paths()) == 1
    out, err = as_nobody(LOAD.format(keys=keys), root, home)
    assert (out.split(), err) == (["disk", "disk", "disk", "0", "0"], "")


@needs_root
def test_without_a_home_new_kernels_stay_in_memory_with_one_line(base, monkeypatch):
    root = make(base / "cache", 0o755)
    fill(root, monkeypatch, tiny_key())
    keys = "(tiny_key(), tiny_key(num_threads=64), tiny_key(num_threads=96))"
    out, err = as_nobody(LOAD.format(keys=keys), root, base / "nothing" / "here")
    assert out.split() == ["disk", "compiled", "compiled", "2", "2"]
    (line,) = err.splitlines()
    assert line.startswith(f"disk cache {root} is read-only for this user: new kernels are kept in memory only (")
    assert "Permission denied" in line


# Nothing is loaded, so there is no compiler to import first.
REFUSE = f"""
import os
from cuteforge.runtime import disk_cache
{NOBODY_TAKES_OVER}
print(disk_cache.DiskCache(quiet=True).problem)
"""


@needs_root
@pytest.mark.parametrize(
    ("uid", "mode", "sentence"),
    [
        (NOBODY - 1, 0o755, f"belongs to user {NOBODY - 1}; wanted a directory of user {NOBODY} or root"),
        (0, 0o700, "cannot be read by this user; run `chmod -R a+rX"),
        (0, 0o777, "mode 777, so others can write it; run `chmod go-w"),
        (0, 0o755, "None"),
        (NOBODY, 0o700, "None"),
    ],
)
def test_a_directory_is_of_this_user_or_of_root(base, uid, mode, sentence):
    out, _ = run_for(REFUSE, owned(base / "cache", uid, mode), base)
    assert sentence in out


@needs_root
def test_a_directory_above_that_is_another_users_is_refused(base):
    above = owned(base / "theirs", NOBODY - 1)
    root = owned(above / "cache", NOBODY)
    out, _ = run_for(REFUSE, root, base)
    assert f"{above}, above {root}, belongs to user {NOBODY - 1}, who could exchange what is in it" in out


@needs_root
@pytest.mark.parametrize("name", [".", "entry.json", "kernel.o"])
def test_root_loads_nothing_of_another_user_in_its_own_directory(base, name):
    cache = DiskCache(base / "cache")
    entry = cache.store(KEY, "entry", FILES)
    os.chown(entry.path / name, NOBODY, NOBODY)
    assert cache.find(KEY) is None
    assert cache.verify() == [entry.path]
