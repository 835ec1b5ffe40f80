"""The kernels that a process has in memory, and who builds one that is not."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from cuteforge.runtime import env
from cuteforge.runtime.kernel import Identity, Kernel, KernelKey


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


class MemoryCache:
    """Bounded LRU of kernels; one build for each key however many threads ask."""

    def __init__(self) -> None:
        self._kernels: OrderedDict[Identity, Kernel] = OrderedDict()
        self.reset_locks()
        self.reset_counts()

    def reset_locks(self) -> None:
        """Forget locks and running builds. A forked child needs that: the threads that held them do not exist there."""
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
