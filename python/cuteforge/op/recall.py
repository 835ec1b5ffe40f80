"""The memory of earlier calls: when inputs are like those of an earlier call, validation and look-up are skipped.

A wrapper of attention takes 8 us of Python to check its arguments, find its op and put its operands in order, on the
host of an H200 18: four launches. A call that is recalled takes the comparison, the allocations and the launch.

There is one memory, bounded by CUTEFORGE_CACHE_SIZE; what was used longest ago is dropped first. It holds the compiled
ops of wrappers, and for each way of calling a wrapper or a policy function a few `Replays`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from cuteforge.op.guards import AVAILABLE
from cuteforge.op.replay import Replay, Serve
from cuteforge.runtime import env
from cuteforge.runtime.lru import LRU

_MOST = 4  # replays of one op, or of one way of calling a wrapper
_PERIOD = 64

_memory: LRU[Any] = LRU(env.cache_size)
forget = _memory.clear


class Replays:
    """A few replays of one op, or of one way of calling a wrapper, each for tensors of one kind.

    Attributes:
        serves: the functions `Replay.written_out` of each; call one after the other until one returns something.
    """

    __slots__ = ("_entries", "_misses", "serves")

    def __init__(self) -> None:
        self.serves: tuple[Serve, ...] = ()
        self._entries: tuple[tuple[Callable[..., bool], Replay], ...] = ()
        self._misses = 0

    def find(self, tensors: Sequence[Any]) -> Replay | None:
        """The replay for tensors like these, or None. Takes anything for a tensor, and as many as `add` was given.

        Raises:
            TypeError: there are more of them, or fewer.
        """
        for is_alike, replay in self._entries:
            if is_alike(*tensors):
                return replay
        return None

    def is_due(self) -> bool:
        """Whether a call that was not found is to be added; ask once for each.

        To describe tensors takes 10 us, which does not pay where each call has other shapes: the first few calls are
        added, then one of 64.
        """
        self._misses += 1
        return AVAILABLE and (self._misses <= _MOST or self._misses % _PERIOD == 0)

    def add(self, tensors: Sequence[Any], replay: Replay) -> None:
        """Add a replay for all tensors like these.

        Tensors that require grad in grad mode are passed over. Past the first few, a replay takes the place of all
        before it, so that calls that all differ look at one.
        """
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return
        serve, is_alike = replay.written_out(tensors)
        stays = self._misses <= _MOST
        # tuples that are replaced: another thread sees the old one or the new one
        self._entries = ((is_alike, replay), *(self._entries if stays else ()))
        self.serves = (serve, *(self.serves if stays else ()))


def recall(key: Hashable, tensors: Sequence[Any], length: int | None = None) -> Sequence[Any] | None:
    """Launch as an earlier call like this one did, on tensors that nothing follows: what the call returns.

    None if there was no such call, if more than autograd follows this one, or if the entry refuses it: for an address,
    say. Then the caller does all its work, which copies or raises.

    Args:
        key: all of a call but its tensors.
        tensors: those that the call may be given, None for those that it was not.
        length: the extent of what is allocated, where no tensor says it.
    """
    # what else may follow a call, guards tell from the tensors
    if is_dynamo_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        replays = _memory.get(key)
        if replays is None or not env.launch_is_plain():
            return None
        for serve in replays.serves:
            results = serve(tensors, length)
            if results is not None:
                return results
    except (TypeError, ValueError, RuntimeError):  # also an option that cannot be hashed
        pass
    return None


def remember(key: Hashable, tensors: Sequence[Any], make: Callable[..., Replay | None], *args: Any) -> None:
    """Keep the replay ``make(*args)`` of a call, if it is time to and there is one.

    Nothing is kept of a call whose key cannot be hashed.
    """
    try:
        replays = _memory.get(key) or _memory.put(key, Replays())
    except TypeError:
        return
    if replays.is_due() and (replay := make(*args)) is not None:
        replays.add(tensors, replay)


def find(key: Hashable, tensors: Sequence[Any]) -> Replay | None:
    """The replay of a call like this one."""
    replays = _memory.get(key)
    return None if replays is None else replays.find(tensors)


def op_of(key: Hashable) -> Any:
    """The op that was kept under a key, or None."""
    return _memory.get(key)


def keep_op(key: Hashable, op: Any) -> Any:
    """Keep a compiled op unless another thread did first; returns the one that stays."""
    return _memory.put(key, op)
