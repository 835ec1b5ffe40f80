"""A bounded mapping that drops what was used least recently. Thread-safe."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class _Entry(Generic[V]):
    __slots__ = ("last_use", "value")

    def __init__(self, value: V, last_use: int) -> None:
        self.value = value
        self.last_use = last_use


class LRU(Generic[V]):
    """Holds at most ``bound()`` values; the bound is read at each insertion. Made once a module, and never freed.

    A look-up takes no lock, 0.1 us instead of 0.2: it stamps what it finds with a number that only grows, and an
    insertion that finds the mapping full drops the lowest stamp.
    """

    def __init__(self, bound: Callable[[], int]) -> None:
        self._entries: dict[Hashable, _Entry[V]] = {}
        self._bound = bound
        self._next_use = itertools.count().__next__
        self._renew_lock()
        # A child of a fork must not wait for a lock that another thread held in the parent.
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value of `key`, now the most recent one, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.last_use = self._next_use()
        return entry.value

    def put(self, key: Hashable, value: V) -> V:
        """Insert unless another thread did first; returns the value that stays."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(value, 0))
            entry.last_use = self._next_use()
            while len(self._entries) > self._bound():
                del self._entries[min(self._entries, key=lambda k: self._entries[k].last_use)]
            return entry.value

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
