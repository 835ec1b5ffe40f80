"""From key to kernel: memory, disk, compiler; under threads, processes, forks, damage and failure.

There is no GPU here. A loaded entry is known to be one by its own argument check, which answers before any launch.
"""

import errno
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cuteforge.errors import ContractError
from cuteforge.runtime import compile_cache, cutlass_compat, disk_cache, scratch, sources, streams
from cuteforge.runtime.compile_cache import KernelKey, load_kernel, stats
from cuteforge.runtime.disk_cache import DiskCache
from helpers import process
from helpers.tiny_traits import tiny_key


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty cache directory and an empty memory, before and after."""
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUTEFORGE_DISK_CACHE", "CUTEFORGE_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    compile_cache.clear()
    # As a new process would: sources edited since the last test are what is compiled now.
    sources.forget()
    yield tmp_path / "cache"
    compile_cache.clear()


def is_entry(function) -> bool:
    try:
        function()
    except TypeError as error:
        return "Expects 4 parameters" in str(error)
    return False


def counts():
    now = stats()
    assert now.not_stored == ()
    return now.hits, now.disk_hits, now.compiles, now.size


# Where a kernel comes from.


def test_compiled_then_memory_then_disk(root):
    kernel = load_kernel(tiny_key())
    assert kernel.origin == "compiled"
    assert is_entry(kernel.entry)
    assert load_kernel(tiny_key()).origin == "memory"
    assert counts() == (1, 0, 1, 1)
    compile_cache.clear()
    again = load_kernel(tiny_key())
    assert again.origin == "disk"
    assert counts() == (0, 1, 0, 1)
    assert again.entry is kernel.entry, "equal machine code is loaded once"


def test_each_fact_of_the_key_is_another_kernel(root):
    keys = [tiny_key(), tiny_key(dtype="float16"), tiny_key(num_threads=64), tiny_key(arch="sm_80")]
    assert [load_kernel(key).origin for key in keys] == ["compiled"] * 4
    assert len(DiskCache(root).ls()) == 4


def test_second_process_loads_from_disk_without_cutlass(root):
    load_kernel(tiny_key())
    if ".so" not in str(DiskCache(root).ls()[0].files):
        pytest.skip("no linker here, so the first process could not store a shared object")
    process.run(
        f"{process.WITHOUT_TORCH}"
        "from cuteforge.runtime.compile_cache import load_kernel\n"
        "from helpers.tiny_traits import tiny_key\n"
        "assert load_kernel(tiny_key()).origin == 'disk'\n"
        "assert 'cutlass' not in sys.modules and 'helpers.tiny_kernel' not in sys.modules\n"
    )


def test_without_a_linker_the_object_file_serves(root, monkeypatch):
    monkeypatch.setattr(cutlass_compat, "link_shared", lambda obj, shared: None)
    assert is_entry(load_kernel(tiny_key(num_threads=32)).entry)
    assert list(DiskCache(root).ls()[0].files) == ["kernel.o"]
    compile_cache.clear()
    assert load_kernel(tiny_key(num_threads=32)).origin == "disk"


def test_a_library_that_may_not_be_mapped_falls_back_to_its_object_file(root, monkeypatch):
    """As in a cache directory mounted noexec."""

    def noexec(path, symbol):
        raise OSError("failed to map segment from shared object: Operation not permitted")

    monkeypatch.setattr(cutlass_compat, "load_shared", noexec)
    assert is_entry(load_kernel(tiny_key(num_threads=33)).entry)
    compile_cache.clear()
    assert load_kernel(tiny_key(num_threads=33)).origin == "disk"


def test_disk_cache_off(root, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE", "0")
    assert is_entry(load_kernel(tiny_key()).entry)
    assert not root.exists()
    compile_cache.clear()
    assert load_kernel(tiny_key()).origin == "compiled"


def test_unusable_directory_means_one_warning_and_memory_only(root, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "_warned", set())
    root.write_text("a file in the place of the directory")
    for num_threads in (128, 64):
        assert is_entry(load_kernel(tiny_key(num_threads=num_threads)).entry)
    assert load_kernel(tiny_key()).origin == "memory"
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1


def test_nothing_is_left_in_the_temporary_directory(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    load_kernel(tiny_key(num_threads=31))
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE", "0")
    load_kernel(tiny_key(num_threads=30))
    assert list(scratch.iterdir()) == []


def no_room(monkeypatch, places):
    """Directories of `places` cannot hold another file: where they are in the arguments of mkdtemp, it fails."""
    make = scratch.tempfile.mkdtemp

    def mkdtemp(prefix, dir=None):
        if dir in places:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", mkdtemp)


def test_without_a_temporary_directory_the_kernel_is_linked_beside_the_cache(root, monkeypatch):
    no_room(monkeypatch, [None])
    assert is_entry(load_kernel(tiny_key(num_threads=38)).entry)
    if shutil.which("cc"):
        assert list(DiskCache(root).ls()[0].files) == ["kernel.so", "kernel.o"]


def test_with_room_nowhere_a_kernel_still_runs_and_the_reason_is_kept(root, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "_warned", set())
    no_room(monkeypatch, [None, root])
    assert is_entry(load_kernel(tiny_key(num_threads=39)).entry)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"compiled kernels are not stored in {root}: [Errno 28] No space left on device"
    ]
    assert stats().not_stored == ("[Errno 28] No space left on device",)
    assert stats().compiles == 1


def test_where_files_in_memory_do_not_exist_temporary_ones_serve(root, monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(scratch, "_create_memory_file", missing)
    monkeypatch.setattr(compile_cache, "_loaded", {})
    assert is_entry(load_kernel(tiny_key(num_threads=40)).entry)
    compile_cache.clear()
    monkeypatch.setattr(compile_cache, "_loaded", {})
    assert load_kernel(tiny_key(num_threads=40)).origin == "disk"


def test_a_python_that_was_built_without_files_in_memory_has_them_all_the_same(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with scratch.path_of(b"code", ".o") as path:
        assert path.startswith("/proc/self/fd/")
        with open(path, "rb") as file:
            assert file.read() == b"code"


def test_no_two_libraries_are_loaded_by_one_name():
    """The loader takes a name that it has seen for what it loaded then, and numbers of closed files come back."""
    paths = []
    for i in range(20):
        with scratch.path_of(b"%d" % i, ".so") as path:
            paths.append(path)
            with open(path, "rb") as file:
                assert file.read() == b"%d" % i
    assert len(set(paths)) == 20


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def leave(name, age_s=10_000, content="kernel.o"):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).write_text("")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)

    leave("cuteforge-abcd_123")
    leave("cuteforge-inuse_01")
    leave("cuteforge-young_01", age_s=60)
    leave("cuteforge-mywork_1", content="notes.txt")
    leave("cuteforge-checkout", content="setup.py")
    leave("cuteforge-0.1.0")
    with scratch._locked(tmp_path / "cuteforge-inuse_01"):
        scratch.remove_leftovers()
    left = {path.name.removeprefix("cuteforge-") for path in tmp_path.iterdir()}
    assert left == {"inuse_01", "young_01", "mywork_1", "checkout", "0.1.0"}


def test_a_compiler_that_is_installed_but_does_not_import_is_refused_with_the_remedy(root):
    """As after `pip install --target`: Python reads no .pth file in that folder."""
    out = process.run(NO_PATH_FILE)
    assert "cutlass: the compiler does not import: No module named 'cutlass'" in out
    assert "nvidia_cutlass_dsl_packages.pth was not read" in out
    assert "nvidia_cutlass_dsl/dsl_packages to PYTHONPATH" in out


NO_PATH_FILE = """
import sys
sys.path[:] = [path for path in sys.path if "dsl_packages" not in path]
from cuteforge import UnsupportedError
from cuteforge.runtime.compile_cache import load_kernel
from helpers.tiny_traits import tiny_key
try:
    load_kernel(tiny_key())
except UnsupportedError as error:
    print(error)
"""


# Damage and staleness.


def damage_object(path):
    (path / "kernel.o").write_bytes(b"\0" * 100)


def damage_json(path):
    (path / "entry.json").write_text("{")


def truncate_library(path):
    for library in path.glob("*.so"):
        damaged = library.read_bytes()[:100]
        # this process has the old file mapped: cut short in place, it would be gone under running code
        library.unlink()
        library.write_bytes(damaged)


@pytest.mark.parametrize("damage", [damage_object, damage_json, truncate_library])
def test_damaged_entry_is_rebuilt(root, damage):
    load_kernel(tiny_key())
    damage(DiskCache(root).ls()[0].path)
    compile_cache.clear()
    kernel = load_kernel(tiny_key())
    assert kernel.origin == "compiled"
    assert is_entry(kernel.entry)
    assert DiskCache(root).verify() == []
    compile_cache.clear()
    assert load_kernel(tiny_key()).origin == "disk"


def test_intact_files_that_do_not_load_are_compiled_again(root, caplog):
    key = tiny_key(num_threads=34)
    garbage = {"kernel.o": b"garbage, faithfully recorded"}
    DiskCache(root).store(compile_cache._facts(key.identity), "tiny_scale", garbage)
    kernel = load_kernel(key)
    assert kernel.origin == "compiled"
    assert is_entry(kernel.entry)
    assert "does not load" in caplog.text


def rename_symbol(path):
    manifest = json.loads((path / "entry.json").read_text())
    (path / "entry.json").write_text(json.dumps({**manifest, "symbol": "not_there"}))


def swap_files(path):
    """A sound entry: the digests are those of the files."""
    manifest = json.loads((path / "entry.json").read_text())
    for name in manifest["files"]:
        (path / name).write_bytes(b"no machine code")
        manifest["files"][name] = disk_cache.sha256(b"no machine code")
    (path / "entry.json").write_text(json.dumps(manifest))


ONCE = f"""{process.WITHOUT_TORCH}
from cuteforge.runtime.compile_cache import load_kernel
from helpers.tiny_traits import tiny_key
for num_threads in (35, 36):
    print(load_kernel(tiny_key(num_threads=num_threads)).origin)
"""


def test_an_entry_that_does_not_load_is_built_again_once_and_not_for_ever(root):
    spoilt = set()
    for num_threads, spoil in ((35, rename_symbol), (36, swap_files)):
        assert load_kernel(tiny_key(num_threads=num_threads)).origin == "compiled"
        (path,) = {entry.path for entry in DiskCache(root).ls()} - spoilt
        spoil(path)
        spoilt.add(path)
    assert DiskCache(root).verify() == [], "their digests are sound"
    assert [process.run(ONCE).split() for _ in range(2)] == [["compiled"] * 2, ["disk"] * 2]


def test_what_does_not_load_stays_until_a_kernel_that_does_can_replace_it(root, monkeypatch):
    """Perhaps it is this process in which nothing loads."""
    load_kernel(tiny_key())
    compile_cache.clear()

    def fail(*_):
        raise OSError("nothing loads here")

    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "_load_content", fail)
        with pytest.raises(OSError, match="nothing loads here"):
            load_kernel(tiny_key())
    assert load_kernel(tiny_key()).origin == "disk"


def test_only_entries_of_other_sources_or_toolchains_are_stale(root, monkeypatch):
    load_kernel(tiny_key())
    key = DiskCache(root).ls()[0].key
    assert not compile_cache.is_stale(key)
    assert not compile_cache.is_stale({**key, "sources": {**key["sources"], "a_package_that_is_not_here": "0"}})
    assert compile_cache.is_stale({**key, "sources": {**key["sources"], "cuteforge": "0"}})
    assert compile_cache.is_stale({**key, "toolchain": {**key["toolchain"], "cuda": "cu99"}})
    assert compile_cache.is_stale({"builder": "of another form"})
    removed = {**key, "builder": "cuteforge.families.removed.kernel:build"}
    assert compile_cache.is_stale(removed), "a kernel that this package no longer has"
    assert not compile_cache.is_stale({**key, "builder": "a_package_that_is_not_here.kernel:build"})


def test_other_sources_and_toolchains_share_the_directory(root, monkeypatch):
    load_kernel(tiny_key())
    for name in ("kernel_sources", "read_kernel_sources"):
        monkeypatch.setattr(compile_cache, name, lambda builder: {"cuteforge": "f" * 64})
    compile_cache.clear()
    assert load_kernel(tiny_key()).origin == "compiled"
    monkeypatch.setattr(cutlass_compat, "toolchain_fingerprint", lambda: {"nvidia-cutlass-dsl": "another"})
    compile_cache.clear()
    assert load_kernel(tiny_key()).origin == "compiled"
    assert len(DiskCache(root).ls()) == 3
    monkeypatch.undo()
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(root))
    compile_cache.clear()
    assert load_kernel(tiny_key()).origin == "disk"


def test_sources_edited_while_compiling_are_not_stored_under_the_old_key(root, monkeypatch):
    monkeypatch.setattr(compile_cache, "read_kernel_sources", lambda builder: {"cuteforge": "edited"})
    assert is_entry(load_kernel(tiny_key()).entry)
    assert DiskCache(root).ls() == []


def test_sources_that_are_gone_after_compiling_are_no_failure(root, monkeypatch):
    def gone(builder):
        raise PermissionError(13, "Permission denied", builder)

    monkeypatch.setattr(compile_cache, "read_kernel_sources", gone)
    assert is_entry(load_kernel(tiny_key()).entry)
    assert DiskCache(root).ls() == []
    assert stats().not_stored == ("sources changed since this process read them",)


def test_entry_names_everything_that_decided_the_code(root):
    load_kernel(tiny_key())
    manifest = json.loads((DiskCache(root).ls()[0].path / "entry.json").read_text())
    key = manifest["key"]
    assert key["builder"] == "helpers.tiny_kernel:build"
    assert key["arch"] == "sm_90a"
    assert "num_threads=128" in key["traits"]
    assert set(key["sources"]) == {"cuteforge", "helpers"}
    assert {"nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda"} <= set(key["toolchain"])


# Bounds.


def test_memory_is_bounded_and_what_was_dropped_comes_back(root, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_CACHE_SIZE", "3")
    keys = [tiny_key(num_threads=32 * i) for i in range(1, 6)]
    entries = []
    for key in keys:
        entries.append(load_kernel(key).entry)
        assert stats().size <= 3
    assert [load_kernel(key).origin for key in reversed(keys)] == ["memory"] * 3 + ["disk"] * 2
    assert load_kernel(keys[0]).entry is entries[0], "loaded code is found again, not loaded twice"
    monkeypatch.setenv("CUTEFORGE_CACHE_SIZE", "1")
    load_kernel(keys[4])
    load_kernel(keys[3])
    assert stats().size == 1


def test_the_kernel_used_last_stays(root, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_CACHE_SIZE", "2")
    first, second, third = (tiny_key(num_threads=32 * i) for i in (1, 2, 3))
    for key in (first, second, first, third):
        load_kernel(key)
    assert load_kernel(first).origin == "memory"
    assert load_kernel(second).origin == "disk"


def test_an_entry_works_after_its_kernel_was_dropped(root, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_CACHE_SIZE", "1")
    entry = load_kernel(tiny_key(num_threads=96)).entry
    load_kernel(tiny_key(num_threads=64))
    compile_cache.clear()
    gc.collect()
    assert is_entry(entry)


def test_a_bad_bound_is_refused_before_anything_is_built(root, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_CACHE_SIZE", "none")
    with pytest.raises(ContractError, match="CUTEFORGE_CACHE_SIZE"):
        load_kernel(tiny_key())
    monkeypatch.delenv("CUTEFORGE_CACHE_SIZE")
    assert load_kernel(tiny_key()).origin == "compiled"


# Threads, processes, forks.


def build_count(log) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_eight_threads_compile_each_key_once(root, tmp_path):
    log = tmp_path / "log"
    keys = [tiny_key(build_log=str(log)), tiny_key(build_log=str(log), num_threads=64)]
    barrier = threading.Barrier(8)

    def load(i):
        barrier.wait()
        return load_kernel(keys[i % 2]).entry

    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(load, range(8)))
    assert build_count(log) == 2
    assert all(map(is_entry, entries))
    assert len(set(map(id, entries))) == 2
    assert (stats().compiles, stats().size) == (2, 2)


def test_processes_on_a_cold_directory_compile_once(root, tmp_path):
    log = tmp_path / "log"
    code = (
        f"{process.WITHOUT_TORCH}"
        "from cuteforge.runtime.compile_cache import load_kernel\n"
        "from helpers.tiny_traits import tiny_key\n"
        f"kernel = load_kernel(tiny_key(build_log={str(log)!r}))\n"
        "try:\n"
        "    kernel.entry()\n"
        "except TypeError as error:\n"
        "    assert 'Expects 4 parameters' in str(error)\n"
    )
    started = [process.start(code) for _ in range(2)]
    for each in started:
        process.finish(each)
    assert build_count(log) == 1
    assert DiskCache(root).verify() == []
    assert len(DiskCache(root).ls()) == 1


def test_processes_without_locks_are_still_right(root, tmp_path):
    code = (
        f"{process.WITHOUT_TORCH}"
        "from cuteforge.runtime import disk_cache\n"
        "disk_cache.fcntl = None\n"
        "from cuteforge.runtime.compile_cache import load_kernel\n"
        "from helpers.tiny_traits import tiny_key\n"
        "load_kernel(tiny_key())\n"
    )
    started = [process.start(code) for _ in range(2)]
    for each in started:
        process.finish(each)
    assert DiskCache(root).verify() == []
    assert load_kernel(tiny_key()).origin == "disk"


def test_child_forked_during_a_compile_can_compile(root, tmp_path):
    """The parent's locks are held by a thread that the child does not have."""
    load_kernel(tiny_key())
    lock, in_flight = compile_cache._cache.compile_lock, compile_cache._cache._in_flight
    key = tiny_key(num_threads=64)
    in_flight[key.identity] = Future()
    lock.acquire()
    try:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if is_entry(load_kernel(key).entry) else 2
            finally:
                os._exit(status)
    finally:
        lock.release()
        in_flight.clear()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert load_kernel(key).origin == "disk"


# Failures.


def test_failure_does_not_poison_the_key(root, tmp_path):
    ready = tmp_path / "ready"
    key = tiny_key(needs_file=str(ready))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not there yet"):
            load_kernel(key)
    assert counts() == (0, 0, 0, 0)
    assert DiskCache(root).ls() == []
    ready.touch()
    assert is_entry(load_kernel(key).entry)


def test_all_threads_that_wait_for_a_failing_build_get_its_error(root, tmp_path):
    key = tiny_key(needs_file=str(tmp_path / "never"))
    barrier = threading.Barrier(4)

    def load(_):
        barrier.wait()
        with pytest.raises(RuntimeError, match="not there yet"):
            load_kernel(key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(4)))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_thread_that_compiles_and_the_others_compile_themselves(root, monkeypatch, interrupt):
    compiling, go_on = threading.Event(), threading.Event()
    compile_kernel = compile_cache._compile

    def interrupted_once(*args):
        monkeypatch.setattr(compile_cache, "_compile", compile_kernel)
        compiling.set()
        assert go_on.wait(60)
        raise interrupt

    monkeypatch.setattr(compile_cache, "_compile", interrupted_once)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(load_kernel, tiny_key())
        assert compiling.wait(60)
        others = [pool.submit(load_kernel, tiny_key()) for _ in range(3)]
        deadline = time.monotonic() + 60
        while pool._work_queue.qsize() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        go_on.set()
        with pytest.raises(interrupt):
            first.result()
        assert all(is_entry(other.result().entry) for other in others)
    assert stats().compiles == 1


def test_compiler_errors_pass_through(root):
    with pytest.raises(Exception, match="no-such-option"):
        load_kernel(tiny_key(options="--no-such-option"))
    assert load_kernel(tiny_key()).origin == "compiled"


def test_compiling_is_refused_while_a_graph_is_captured(root, tmp_path, monkeypatch):
    log = tmp_path / "log"
    key = tiny_key(build_log=str(log))
    monkeypatch.setattr(streams, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"would have to be compiled for TinyTraits.*before the capture"):
        load_kernel(key)
    assert build_count(log) == 0
    monkeypatch.setattr(streams, "is_capturing", lambda: False)
    load_kernel(key)
    monkeypatch.setattr(streams, "is_capturing", lambda: True)
    assert load_kernel(key).origin == "memory"
    compile_cache.clear()
    assert load_kernel(key).origin == "disk", "loading is allowed under capture"


# Keys.


class Opaque:
    pass


@dataclass(frozen=True)
class Holder:
    thing: object


def test_a_key_whose_text_has_an_address_is_refused():
    with pytest.raises(ContractError, match="^traits: wanted a repr made of values only"):
        load_kernel(KernelKey("helpers.tiny_kernel:build", Holder(Opaque()), "sm_90a"))


@pytest.mark.parametrize("builder", ["", "module", "module:", ":function", "module:not a name"])
def test_a_builder_is_module_and_function(builder):
    with pytest.raises(ContractError, match="^builder: wanted"):
        load_kernel(KernelKey(builder, Holder(1), "sm_90a"))


def test_memory_and_disk_tell_the_same_keys_apart():
    """1, 1.0 and True are equal and hash alike, yet trace differently."""
    keys = {KernelKey("m:f", Holder(value), "sm_90a").identity for value in (1, 1.0, True, 0.0, -0.0)}
    assert len(keys) == 5
    assert KernelKey("m:f", Holder("a"), "sm_90a").identity == KernelKey("m:f", Holder("a"), "sm_90a").identity
