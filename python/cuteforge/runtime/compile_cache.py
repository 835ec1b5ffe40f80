"""From a key to a callable: memory, then disk, then the compiler.

The kernels in memory are bounded; those used longest ago are dropped, and come back from disk or the compiler. Dropping
one never unloads machine code. Measured on an H200: unloading a library while any thread captures a CUDA graph breaks
the capture, replaying a graph whose kernel was unloaded crashes the process, and each unload waits for the GPU. A
loaded kernel costs 0.1 MB of host and 0.01 MB of device memory, and equal machine code is loaded once, so memory levels
off with the number of distinct binaries.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cuteforge.errors import ContractError
from cuteforge.runtime import cutlass_compat, scratch, streams
from cuteforge.runtime.build import Build
from cuteforge.runtime.disk_cache import LayeredCache, open_disk_cache, sha256
from cuteforge.runtime.garbage import only_new_garbage
from cuteforge.runtime.kernel import Identity, Kernel, KernelKey
from cuteforge.runtime.memory_cache import CacheStats, MemoryCache
from cuteforge.runtime.sources import PACKAGE, kernel_sources, read_kernel_sources

logger = logging.getLogger("cuteforge.runtime")

_cache = MemoryCache()
# Loaded entries, by the sha256 of their file and their symbol. They stay loaded as long as the process lives.
_loaded: dict[tuple[str, str], Callable[..., None]] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cache.reset_locks)


def load_kernel(key: KernelKey) -> Kernel:
    """The kernel of `key`: from memory, else from disk, else compiled and stored.

    Needs no GPU. Safe from any number of threads and processes. Equal keys share one binary.

    Raises:
        ContractError: the key is not canonical.
        UnsupportedError: the compiler is not installed.
        RuntimeError: it would have to be compiled while the current stream is capturing a CUDA graph; nothing was done.
        Exception: whatever the builder or the compiler raises; the next call tries again.
    """
    return _cache.get(key, _load_or_compile)


def stats() -> CacheStats:
    """Counters of the in-memory cache."""
    return _cache.stats()


def clear() -> None:
    """Forget the kernels in memory and zero the counters. Loaded machine code and the disk are left alone."""
    _cache.clear()


def _load_or_compile(key: KernelKey, identity: Identity) -> Kernel:
    facts = _facts(identity)
    disk = open_disk_cache()
    entry, _ = _load_stored(disk, facts)
    if entry is None and streams.is_capturing():
        raise RuntimeError(
            f"{key.builder}: would have to be compiled for {key.traits} while a CUDA graph is being captured; "
            "call compile(), or make the call once, before the capture"
        )
    if entry is not None:
        logger.debug("%s from disk for %s %s", key.builder, key.arch, key.traits)
        return Kernel(key, entry, "disk")
    with disk.lock(facts) if disk else contextlib.nullcontext():
        # Another process may have stored it while this one waited for the lock.
        entry, failed = _load_stored(disk, facts)
        if entry is not None:
            return Kernel(key, entry, "disk")
        symbol, contents = _compile(key, disk)
        kernel = Kernel(key, _load_contents(contents, symbol), "compiled")
        if disk:
            _store(disk, facts, symbol, contents, replace=failed)
        return kernel


def _facts(identity: Identity) -> dict[str, Any]:
    """Everything that decides the machine code: the name of the binary on disk."""
    return {
        **identity._asdict(),
        "sources": dict(kernel_sources(identity.builder)),
        "toolchain": cutlass_compat.toolchain_fingerprint(),
    }


def is_stale(key: Mapping[str, Any]) -> bool:
    """Whether the key of an entry on disk is of other sources or of another toolchain than those here.

    Sources of packages that are not here are not held against it.

    Raises:
        UnsupportedError: there is no toolchain here.
    """
    builder, sources = key.get("builder"), key.get("sources")
    if key.get("toolchain") != cutlass_compat.toolchain_fingerprint():
        return True
    if not isinstance(builder, str) or not isinstance(sources, dict):
        return True
    try:
        return any(sources.get(package) != digest for package, digest in kernel_sources(builder).items())
    except ModuleNotFoundError:
        # A kernel of this package that is gone was renamed or removed. Another package may be installed elsewhere.
        return builder.startswith(f"{PACKAGE}.")
    except (ImportError, ValueError):
        return False


def _load_stored(disk: LayeredCache | None, facts: dict[str, Any]) -> tuple[Callable[..., None] | None, bool]:
    """The kernel from disk; and whether there is an entry that does not load, although it is what was written."""
    failed = False
    for stored in disk.entries(facts) if disk else ():
        try:
            return _load_contents(stored.contents, stored.symbol), failed
        except Exception as error:
            failed = True
            logger.warning("%s: stored kernel does not load, compiling it again: %s", stored.path, error)
    return None, failed


def _load_contents(contents: Mapping[str, bytes], symbol: str) -> Callable[..., None]:
    """The entry of the linked library, else of the object file, which needs no linker and may be mapped anywhere.

    `contents` maps file names to bytes. Those very bytes are loaded, whatever becomes of files on disk meanwhile.
    """
    library_first = sorted(contents.items(), key=lambda item: not item[0].endswith(".so"))
    for name, content in library_first[:-1]:
        try:
            return _load_content(name, content, symbol)
        except Exception as error:
            logger.debug("%s does not load: %s", name, error)
    return _load_content(*library_first[-1], symbol)


def _load_content(name: str, content: bytes, symbol: str) -> Callable[..., None]:
    loaded = (sha256(content), symbol)
    if loaded not in _loaded:
        suffix = Path(name).suffix
        load = cutlass_compat.load_shared if suffix == ".so" else cutlass_compat.load_object
        with scratch.path_of(content, suffix) as path:
            _loaded[loaded] = load(path, symbol)
    return _loaded[loaded]


def _compile(key: KernelKey, disk: LayeredCache | None) -> tuple[str, dict[str, bytes]]:
    """Compile `key`. Returns its entry's name and files, name -> bytes: the object, and what was linked from it."""
    started = time.perf_counter()
    symbol, obj = _compile_object(key)
    shared = _link(obj, disk)
    seconds = time.perf_counter() - started
    logger.debug("%s compiled in %.2f s for %s %s", key.builder, seconds, key.arch, key.traits)
    return symbol, {"kernel.so": shared, "kernel.o": obj} if shared else {"kernel.o": obj}


def _link(obj: bytes, disk: LayeredCache | None) -> bytes | None:
    """The object as a shared library; None where no linker can. It works beside the cache, else where TMPDIR says."""
    scratch.remove_leftovers()
    for parent in ([disk.own.root] if disk and disk.own.is_writable else []) + [None]:
        with contextlib.suppress(OSError), scratch.work_directory(parent) as directory:
            path = directory / "kernel.o"
            path.write_bytes(obj)
            shared = cutlass_compat.link_shared(path, path.with_suffix(".so"))
            if shared is not None:
                return shared.read_bytes()
    logger.info("no linker, or no room for its work: this kernel loads with the DSL, which takes seconds")
    return None


def _store(
    disk: LayeredCache, facts: dict[str, Any], symbol: str, contents: Mapping[str, bytes], *, replace: bool
) -> None:
    if _sources_unchanged(facts):
        reason = disk.store(facts, symbol, contents, replace=replace)
    else:
        reason = "sources changed since this process read them"
    if reason:
        _cache.note_not_stored(reason)


def _compile_object(key: KernelKey) -> tuple[str, bytes]:
    """Compile `key`; returns the name of its entry and the object file."""
    module, _, function = key.builder.partition(":")
    with _cache.compile_lock, only_new_garbage():
        cutlass_compat.require_compiler()
        build: Build = getattr(importlib.import_module(module), function)(key.traits)
        symbol = build.name
        if not (isinstance(symbol, str) and symbol.isidentifier()):
            raise ContractError(f"name: wanted a C identifier, got {symbol!r} from {key.builder}")
        compiled = cutlass_compat.compile_host(build.host, build.args, arch=key.arch, options=build.options)
        obj = scratch.written_by(functools.partial(cutlass_compat.export_object, compiled, symbol=symbol))
        # The compiled object holds its whole MLIR module, 2 MB, in reference cycles.
        del compiled, build
        gc.collect()
    return symbol, obj


def _sources_unchanged(facts: dict[str, Any]) -> bool:
    """Whether the files compiled are still those of the key: code edited meanwhile must not be stored under it."""
    try:
        unchanged = read_kernel_sources(facts["builder"]) == facts["sources"]
    except (OSError, ImportError):  # uninstalled meanwhile
        unchanged = False
    if not unchanged:
        logger.info("sources changed since this process read them: %s is not stored", facts["builder"])
    return unchanged
