"""Calls of wrappers on tensors just like those of an earlier one: what that one found out, so that only allocations and the launch are left.

A wrapper of attention takes 8 us of Python to check its arguments, find its op and put its operands in order, on the host of an H200 18: four
launches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from cuteforge import api_base
from cuteforge.runtime import env
from cuteforge.runtime.seen import Seen

# By what no tensor says: the op, its options, and which tensors are given. All are forgotten when there are too many: to stamp each look-up with its
# time, as `LRU` does, takes as long as the look-up.
_seen: dict[Hashable, Seen] = {}
forget = _seen.clear


class Call:
    """What holds for all calls of one key on tensors of one kind.

    Args:
        op: compiled, and launched once on such tensors.
        names: operands of the op that are given, then those that are allocated. Others are written over the operand that they may be in place of.
        device: the GPU.
        call_scalars: of the launch, after those of the op.
        allocate: the tensors given, and what `run` is called with beside them -> those allocated; None where nothing is.
        written: names of those given that are written, for torch's counts of versions.
        agrees: whether tensors of varying extents go together, as far as the entry does not say; None if nothing varies, or it says all.
        varying: of each name of those given that has one, the dim that may vary.
    """

    __slots__ = ("_allocate", "_arrange", "_device", "_entry", "_mask", "_scalars", "_written", "agrees", "varying")

    def __init__(
        self, op: Any, names: Sequence[str], device: int, call_scalars: tuple, allocate: Callable[..., Sequence[Any]] | None,
        written: Sequence[str] = (), agrees: Callable[[Sequence[Any]], bool] | None = None, varying: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._entry, self._device, self._allocate = op._compiled.kernel.entry, device, allocate
        self.agrees, self.varying = agrees, [varying.get(name) for name in names]
        self._scalars = (*op._compiled.scalars[device], *call_scalars)
        self._mask = names.index("mask") if "mask" in names else None
        self._written = [names.index(name) for name in written]
        # operands of the entry by their places among `names`, those that the op does not have after them
        own = [x.name if x.name in names else x.in_place_of for x in op.signature.operands]
        operands = [names.index(name) for name in own] + [len(names)]
        places = range(len(own)) if op._arrange is None else op._arrange.places
        self._arrange = itemgetter(*(operands[place] for place in places))

    def with_first_fixed(self) -> Call:
        """The same for calls whose first tensor is just like that of the earlier one."""
        call = copy.copy(self)
        call.varying = [None, *self.varying[1:]]
        return call

    def run(self, tensors: Sequence[Any], *sizes: int) -> Sequence[Any]:
        """What is allocated, after the launch; `tensors` are those given. Raises what the entry raises."""
        results = () if self._allocate is None else self._allocate(tensors, *sizes)
        operands = [*tensors, *results, None]
        if self._mask is not None:
            operands[self._mask] = operands[self._mask].view(torch.uint8)
        self._entry(*self._arrange(operands), *self._scalars, api_base.raw_stream(self._device))
        if self._written:
            increment_version([tensors[i] for i in self._written])
        return results


def serve(key: Hashable, tensors: Sequence[Any], *sizes: int) -> Sequence[Any] | None:
    """What a call like an earlier one allocates, after its launch, on tensors that nothing follows.

    None if there was none, if more than autograd follows the call, or if the entry refuses it: for an address, say. Then the wrapper does all it
    does, which copies or raises.

    Args:
        key: all of a call but its tensors.
        sizes: for the `allocate` of the call.
    """
    # of what else may follow a call `Seen` tells the tensors apart
    if is_dynamo_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        seen = _seen.get(key)
        if seen is None or not env.launch_is_plain():
            return None
        for is_alike, call in seen.findings:
            if is_alike(*tensors):
                agrees = call.agrees
                return call.run(tensors, *sizes) if agrees is None or agrees(tensors) else None
    except (TypeError, ValueError, RuntimeError):  # also an option that cannot be hashed
        pass
    return None


def keep(key: Hashable, tensors: Sequence[Any], make: Callable[..., Call | None], *args: Any) -> None:
    """Keep the call ``make(*args)``, if it is time to and there is one; of no call where `key` is None or cannot be hashed."""
    if key is None:
        return
    try:
        seen = _seen.get(key)
    except TypeError:
        return
    if seen is None:
        if len(_seen) >= env.cache_size():
            forget()
        seen = _seen.setdefault(key, Seen())
    if seen.is_due() and (call := make(*args)) is not None:
        seen.keep(tensors, call, call.varying[: len(tensors)])


def find(key: Hashable, tensors: Sequence[Any]) -> Call | None:
    """What was kept of a call like this one."""
    seen = _seen.get(key)
    return None if seen is None else seen.find(tensors)
