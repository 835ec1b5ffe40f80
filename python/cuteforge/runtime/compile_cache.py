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
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cuteforge.errors import ContractError
from cuteforge.runtime import cutlass_compat, env, scratch, streams
from cuteforge.runtime.build import Build
from cuteforge.runtime.disk_cache import LayeredCache, open_disk_cache, sha256
from cuteforge.runtime.garbage import only_new_garbage
from cuteforge.runtime.sources import PACKAGE, kernel_sources, read_kernel_sources

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
    """Counters since the start of the process or the last `clear`, and the number of kernels in memory.

    `not_stored` says, for each kernel compiled that the disk cache in use does not hold, why not.
    """

    hits: int
    disk_hits: int
    compiles: int
    size: int
    not_stored: tuple[str, ...] = ()


class _Abandoned(Exception):
    """The thread that was building was interrupted; another one has to build."""


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
        self._not_stored: list[str] = []

    def get(self, key: KernelKey, build: Callable[[KernelKey, Identity], Kernel]) -> Kernel:
        """The kernel of `key`; `build` makes it if it is not in memory, in one of the threads that ask for it."""
        identity, bound = key.identity, env.cache_size()
        while True:
            with self._lock:
                kernel = self._kernels.get(identity)
                if kernel is not None:
                    self._kernels.move_to_end(identity)
                    self._counts["memory"] += 1
                    return replace(kernel, origin="memory")
                future = self._in_flight.get(identity)
                if future is None:
                    mine = self._in_flight[identity] = Future()
                    break
            with contextlib.suppress(_Abandoned):
                return replace(future.result(), origin="memory")
        return self._build(key, build, bound, mine)

    def _build(self, key: KernelKey, build: Callable, bound: int, future: Future[Kernel]) -> Kernel:
        identity = key.identity
        try:
            kernel = build(key, identity)
        except BaseException as error:
            with self._lock:
                self._in_flight.pop(identity, None)
            # An interrupt, or an exit, is for this thread alone.
            future.set_exception(error if isinstance(error, Exception) else _Abandoned())
            raise
        with self._lock:
            self._in_flight.pop(identity, None)
            self._kernels[identity] = kernel
            while len(self._kernels) > bound:
                self._kernels.popitem(last=False)
            self._counts[kernel.origin] += 1
        future.set_result(kernel)
        return kernel

    def note_not_stored(self, reason: str) -> None:
        with self._lock:
            self._not_stored.append(reason)

    def stats(self) -> CacheStats:
        with self._lock:
            counts = self._counts
            size, not_stored = len(self._kernels), tuple(self._not_stored)
            return CacheStats(counts["memory"], counts["disk"], counts["compiled"], size, not_stored)

    def clear(self) -> None:
        with self._lock:
            self._kernels.clear()
            self.reset_counts()


_cache = _MemoryCache()
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
    builder, traits, arch = identity
    return {
        "builder": builder,
        "traits": traits,
        "arch": arch,
        "sources": dict(kernel_sources(builder)),
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
    for place in ([disk.own.root] if disk and disk.own.is_writable else []) + [None]:
        with contextlib.suppress(OSError), scratch.work_directory(place) as directory:
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
