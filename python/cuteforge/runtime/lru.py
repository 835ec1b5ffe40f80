"""A bounded mapping that drops what was used least recently. Thread-safe."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LRU(Generic[V]):
    """Holds at most ``bound()`` values; the bound is read at each insertion. Made once a module, for the life of the process."""

    def __init__(self, bound: Callable[[], int]) -> None:
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._bound = bound
        self._renew_lock()
        # A child of a fork must not wait for a lock that another thread held in the parent.
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value of `key`, now the most recent one, or None."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: Hashable, value: V) -> V:
        """Insert unless another thread did first; returns the value that stays."""
        with self._lock:
            value = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            while len(self._values) > self._bound():
                self._values.popitem(last=False)
            return value

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
