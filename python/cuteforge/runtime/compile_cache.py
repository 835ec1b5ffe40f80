"""From a key to a callable: memory, then disk, then the compiler.

The kernels in memory are bounded; those used longest ago are dropped, and come back from disk or the compiler. Dropping
one never unloads machine code. Measured on an H200: unloading a library while any thread captures a CUDA graph breaks
the capture, replaying a graph whose kernel was unloaded crashes the process, and each unload waits for the GPU. A
loaded kernel costs 0.1 MB of host and 0.01 MB of device memory, and equal machine code is loaded once, so memory levels
off with the number of distinct binaries.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cuteforge.errors import ContractError
from cuteforge.runtime import cutlass_compat, env, streams
from cuteforge.runtime.disk_cache import DiskCache, file_sha256, open_disk_cache, read_source_digest, source_digest
from cuteforge.runtime.garbage import only_new_garbage

logger = logging.getLogger("cuteforge.runtime")

Identity = tuple[str, str, str]


@dataclass(frozen=True)
class KernelKey:
    """What was compiled in, and nothing else.

    Attributes:
        builder: "module:function"; the function takes the traits and returns a `Build`. Imported only to compile; it
            must not load kernels itself.
        traits: frozen dataclass of plain values. Its `repr` names the binary, so it must hold all of it.
        arch: compile target, e.g. "sm_90a".
    """

    builder: str
    traits: Hashable
    arch: str

    @property
    def identity(self) -> Identity:
        """The key as texts, the same in every process.

        Raises:
            ContractError: `builder` is not "module:function", or the repr of the traits contains an address.
        """
        module, colon, function = self.builder.partition(":")
        if not (module and colon and function.isidentifier()):
            raise ContractError(f'builder: wanted "module:function", got {self.builder!r}')
        traits = repr(self.traits)
        if " at 0x" in traits:
            raise ContractError(f"traits: wanted a repr made of values only, got one with an address: {traits}")
        return self.builder, traits, self.arch


@dataclass(frozen=True)
class Build:
    """What a builder returns.

    Attributes:
        host: the `@cute.jit` host function.
        args: example arguments: fake tensors, scalars, the stream.
        name: a C identifier, the entry's symbol.
        options: extra compiler options.
    """

    host: Callable
    args: Sequence[Any]
    name: str
    options: str = ""


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        key: what it was compiled for.
        entry: positional function `entry(*tensors, *scalars, raw_stream)`, a `tvm_ffi.Function`; thread-safe. Its
            device code is loaded at the first call and never unloaded. Calling one whose `key.arch` does not run on
            the GPU is an error of the caller.
        origin: where this `load_kernel` found it.
    """

    key: KernelKey
    entry: Callable[..., None]
    origin: Literal["memory", "disk", "compiled"]


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start of the process or the last `clear`, and the number of kernels in memory."""

    hits: int
    disk_hits: int
    compiles: int
    size: int


class _MemoryCache:
    """Bounded LRU of kernels; one build for each key however many threads ask."""

    def __init__(self) -> None:
        self._kernels: OrderedDict[Identity, Kernel] = OrderedDict()
        self.reset_locks()
        self.reset_counts()

    def reset_locks(self) -> None:
        """New locks and no builds in flight: what a forked child needs, whose other threads are gone."""
        self._lock = threading.Lock()
        self._in_flight: dict[Identity, Future[Kernel]] = {}
        # cute.compile keeps its state in process-wide singletons: two at once raise or return the other's code.
        self.compile_lock = threading.Lock()

    def reset_counts(self) -> None:
        self._counts = {"memory": 0, "disk": 0, "compiled": 0}

    def get(self, key: KernelKey, build: Callable[[KernelKey, Identity], Kernel]) -> Kernel:
        """The kernel of `key`; `build` makes it if it is not in memory, in one of the threads that ask for it."""
        identity, bound = key.identity, env.cache_size()
        with self._lock:
            kernel = self._kernels.get(identity)
            if kernel is not None:
                self._kernels.move_to_end(identity)
                self._counts["memory"] += 1
                return replace(kernel, origin="memory")
            future = self._in_flight.get(identity)
            mine = future is None
            if mine:
                future = self._in_flight[identity] = Future()
        return self._build(key, build, bound, future) if mine else replace(future.result(), origin="memory")

    def _build(self, key: KernelKey, build: Callable, bound: int, future: Future[Kernel]) -> Kernel:
        identity = key.identity
        try:
            kernel = build(key, identity)
        except BaseException as error:
            with self._lock:
                self._in_flight.pop(identity, None)
            future.set_exception(error)
            raise
        with self._lock:
            self._in_flight.pop(identity, None)
            self._kernels[identity] = kernel
            while len(self._kernels) > bound:
                self._kernels.popitem(last=False)
            self._counts[kernel.origin] += 1
        future.set_result(kernel)
        return kernel

    def stats(self) -> CacheStats:
        with self._lock:
            counts = self._counts
            return CacheStats(counts["memory"], counts["disk"], counts["compiled"], len(self._kernels))

    def clear(self) -> None:
        with self._lock:
            self._kernels.clear()
            self.reset_counts()


_cache = _MemoryCache()
# Entries by sha256 of the file they came from, for the life of the process.
_loaded: dict[str, Callable[..., None]] = {}
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
    entry = _load_stored(disk, facts)
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
        entry = _load_stored(disk, facts)
        if entry is not None:
            return Kernel(key, entry, "disk")
        return Kernel(key, _compile_and_load(key, facts, disk), "compiled")


def _facts(identity: Identity) -> dict[str, Any]:
    """Everything that decides the machine code: the name of the binary on disk."""
    builder, traits, arch = identity
    return {
        "builder": builder,
        "traits": traits,
        "arch": arch,
        "sources": {package: source_digest(package) for package in _packages(builder)},
        "toolchain": cutlass_compat.toolchain_fingerprint(),
    }


def _packages(builder: str) -> set[str]:
    """Top-level packages whose sources a build reads."""
    return {"cuteforge", builder.partition(":")[0].partition(".")[0]}


def _load_stored(disk: DiskCache | None, facts: dict[str, Any]) -> Callable[..., None] | None:
    stored = disk.find(facts) if disk else None
    if stored is None:
        return None
    try:
        return _load_files({stored.path / name: sha256 for name, sha256 in stored.files.items()}, stored.symbol)
    except Exception as error:
        logger.warning("%s: stored kernel does not load, compiling it again: %s", stored.path, error)
        return None


def _load_files(files: Mapping[Path, str], symbol: str) -> Callable[..., None]:
    """The entry of the linked library, else of the object file: a directory mounted noexec allows only the latter.

    `files` maps each path to its sha256.
    """
    shared_first = sorted(files, key=lambda path: path.suffix != ".so")
    for path in shared_first[:-1]:
        try:
            return _load_file(path, files[path], symbol)
        except Exception as error:
            logger.debug("%s does not load: %s", path, error)
    return _load_file(shared_first[-1], files[shared_first[-1]], symbol)


def _load_file(path: Path, sha256: str, symbol: str) -> Callable[..., None]:
    if sha256 not in _loaded:
        load = cutlass_compat.load_shared if path.suffix == ".so" else cutlass_compat.load_object
        _loaded[sha256] = load(path, symbol)
    return _loaded[sha256]


def _compile_and_load(key: KernelKey, facts: dict[str, Any], disk: DiskCache | None) -> Callable[..., None]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="cuteforge-") as directory:
        obj = Path(directory) / "kernel.o"
        symbol = _compile_object(key, obj)
        shared = cutlass_compat.link_shared(obj, obj.with_suffix(".so"))
        files = [shared, obj] if shared else [obj]
        seconds = time.perf_counter() - started
        logger.debug("%s compiled in %.2f s for %s %s", key.builder, seconds, key.arch, key.traits)
        if disk and _sources_unchanged(facts):
            disk.store(facts, symbol, files)
            entry = _load_stored(disk, facts)
            if entry is not None:
                return entry
        # Both loaders are done with the files when they return.
        return _load_files({file: file_sha256(file) for file in files}, symbol)


def _compile_object(key: KernelKey, obj: Path) -> str:
    """Compile `key` into the object file `obj`; returns the name of its entry."""
    module, _, function = key.builder.partition(":")
    with _cache.compile_lock, only_new_garbage():
        build = getattr(importlib.import_module(module), function)(key.traits)
        symbol = build.name
        if not (isinstance(symbol, str) and symbol.isidentifier()):
            raise ContractError(f"name: wanted a C identifier, got {symbol!r} from {key.builder}")
        compiled = cutlass_compat.compile_host(build.host, build.args, arch=key.arch, options=build.options)
        cutlass_compat.export_object(compiled, obj, symbol)
        # The compiled object holds its whole MLIR module, 2 MB, in reference cycles.
        del compiled, build
        gc.collect()
    return symbol


def _sources_unchanged(facts: dict[str, Any]) -> bool:
    """Whether the files compiled are still those of the key: code edited meanwhile must not be stored under it."""
    unchanged = all(read_source_digest(package) == digest for package, digest in facts["sources"].items())
    if not unchanged:
        logger.info("sources changed since this process read them: %s is not stored", facts["builder"])
    return unchanged
