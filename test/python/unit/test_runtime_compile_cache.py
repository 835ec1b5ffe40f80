"""From key to kernel: memory, disk, compiler; under threads, processes, forks, damage and failure.

There is no GPU here. A loaded entry is known to be one by its own argument check, which answers before any launch.
"""

import gc
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cuteforge.errors import ContractError
from cuteforge.runtime import compile_cache, cutlass_compat, disk_cache, streams
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
    disk_cache._cached_source_digest.cache_clear()
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
        "import sys\n"
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
    monkeypatch.setattr(compile_cache.tempfile, "tempdir", str(scratch))
    load_kernel(tiny_key(num_threads=31))
    assert list(scratch.iterdir()) == []


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


def test_intact_files_that_do_not_load_are_compiled_again(root, tmp_path, caplog, monkeypatch):
    key = tiny_key(num_threads=34)
    (tmp_path / "kernel.o").write_bytes(b"garbage, faithfully recorded")
    DiskCache(root).store(compile_cache._facts(key.identity), "tiny_scale", [tmp_path / "kernel.o"])
    kernel = load_kernel(key)
    assert kernel.origin == "compiled"
    assert is_entry(kernel.entry)
    assert "does not load" in caplog.text


def test_other_sources_and_toolchains_share_the_directory(root, monkeypatch):
    load_kernel(tiny_key())
    for name, other in (("source_digest", lambda package: "f" * 64), ("read_source_digest", lambda package: "f" * 64)):
        monkeypatch.setattr(compile_cache, name, other)
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
    monkeypatch.setattr(compile_cache, "read_source_digest", lambda package: "edited")
    assert is_entry(load_kernel(tiny_key()).entry)
    assert DiskCache(root).ls() == []


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
        "from cuteforge.runtime.compile_cache import load_kernel\n"
        "from helpers.tiny_traits import tiny_key\n"
        f"kernel = load_kernel(tiny_key(build_log={str(log)!r}))\n"
        "try:\n"
        "    kernel.entry()\n"
        "except TypeError as error:\n"
        "    assert 'Expects 4 parameters' in str(error)\n"
    )
    started = [process.start(code) for _ in range(4)]
    for each in started:
        process.finish(each)
    assert build_count(log) == 1
    assert DiskCache(root).verify() == []
    assert len(DiskCache(root).ls()) == 1


def test_processes_without_locks_are_still_right(root, tmp_path):
    code = (
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
    in_flight[key.identity] = compile_cache.Future()
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
