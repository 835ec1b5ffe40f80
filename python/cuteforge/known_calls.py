"""Calls of wrappers on tensors just like those of an earlier one: what that one found out, so that only allocations and the launch are left.

A wrapper of attention takes 8 us of Python to check its arguments, find its op and put its operands in order, on the host of an H200 18: four
launches.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from cuteforge import api_base
from cuteforge.runtime import env
from cuteforge.runtime.allocate import current_device, ways_to_empty
from cuteforge.runtime.seen import Seen

# By what no tensor says: the op, its options, and which tensors are given. All are forgotten when there are too many: to stamp each look-up with its
# time, as `LRU` does, takes as long as the look-up.
_seen: dict[Hashable, Seen] = {}
forget = _seen.clear


class Result(NamedTuple):
    """A tensor that a call allocates, contiguous; an extent of None is the length of the call."""

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


class Call:
    """What holds for all calls of one key on tensors of one kind.

    Args:
        op: compiled, and launched once on such tensors.
        given: names of operands of the op. One that is neither given nor a result is written over the operand that it may be in place of.
        results: other operands, which are allocated.
        device: the GPU.
        call_scalars: of the launch, after those of the op.
        length_of: the length of a call, as the name of a tensor that is given and a dim; None where the caller says it.
        written: names of those given that are written, for torch's counts of versions.
        agrees: whether tensors of varying extents go together, as far as the entry does not say; None if nothing varies, or it says all.
        varying: of each name of those given that has one, the dim that may vary.

    Attributes:
        run: ``run(tensors, length=None)`` launches on the tensors given, and returns the results. Raises what the entry raises.
    """

    __slots__ = ("agrees", "run", "varying")

    def __init__(
        self, op: Any, given: Sequence[str], results: Sequence[Result], device: torch.device, call_scalars: tuple = (), *,
        length_of: tuple[str, int] | None = None, written: Sequence[str] = (), agrees: Callable[[Sequence[Any]], bool] | None = None,
        varying: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.agrees, self.varying = agrees, [varying.get(name) for name in given]
        self.run = _written_out(op, given, results, device, call_scalars, length_of, written)

    def with_first_fixed(self) -> Call:
        """The same for calls whose first tensor is just like that of the earlier one."""
        call = copy.copy(self)
        call.varying = [None, *self.varying[1:]]
        return call


def _written_out(
    op: Any, given: Sequence[str], results: Sequence[Result], device: torch.device, call_scalars: tuple, length_of: tuple[str, int] | None,
    written: Sequence[str],
) -> Callable[..., tuple]:  # fmt: skip
    """`Call.run`, written out as code: to look places, kinds and scalars up in lists takes as long as to launch (0.5 us of 1.6).

    For rotary of q and k::

        def run(tensors, length=None):
            (x, k, cos, sin, positions, ) = tensors
            length = x.size(0)
            empty = here if current_device() == device else elsewhere
            out = empty((length, out_1, out_2, ), (out_step_0, out_step_1, out_step_2, ), out_dtype)
            k_out = empty((length, k_out_1, k_out_2, ), (k_out_step_0, k_out_step_1, k_out_step_2, ), k_out_dtype)
            entry(x, out, k, k_out, cos, sin, positions, scalar_0, raw_stream(device))
            return (out, k_out, )
    """
    here, elsewhere = ways_to_empty(device)
    scalars = {f"scalar_{i}": x for i, x in enumerate((*op._compiled.scalars[device.index], *call_scalars))}
    names = {
        "entry": op._compiled.kernel.entry, "raw_stream": api_base.raw_stream, "device": device.index, "current_device": current_device,
        "here": here, "elsewhere": elsewhere, "increment_version": increment_version, "uint8": torch.uint8, **scalars,
    }  # fmt: skip
    lines = ["def run(tensors, length=None):", f"{_tuple(given)} = tensors"]
    if length_of is not None:
        lines.append("length = {}.size({})".format(*length_of))
    if results:
        lines.append("empty = here if current_device() == device else elsewhere")
    for result in results:
        source, numbers = _allocation(result)
        lines.append(source)
        names |= numbers
    own = [x.name if x.name in (*given, *(r.name for r in results)) else x.in_place_of for x in op.signature.operands]
    operands = own if op._arrange is None else [[*own, "None"][place] for place in op._arrange.places]
    operands = ["mask.view(uint8)" if name == "mask" else name for name in operands]
    if written:
        # before the launch: after it nothing may raise, or the wrapper would launch again
        lines.append(f"increment_version({_tuple(written)})")
    lines.append(f"entry({', '.join((*operands, *scalars))}, raw_stream(device))")
    lines.append(f"return {_tuple(result.name for result in results)}")
    exec(_code("\n    ".join(lines)), names)
    return names["run"]


def _allocation(result: Result) -> tuple[str, dict[str, Any]]:
    """The line that allocates a result, and the values of the names in it: the text is the same for all sizes, and compiled once."""
    name, shape = result.name, result.shape
    sizes, steps, numbers = [], [], {f"{name}_dtype": result.dtype}
    for dim, extent in enumerate(shape):
        later = shape[dim + 1 :]
        numbers[f"{name}_{dim}"] = extent
        numbers[f"{name}_step_{dim}"] = math.prod(max(n, 1) for n in later if n is not None)
        sizes.append("length" if extent is None else f"{name}_{dim}")
        steps.append(f"{name}_step_{dim} * length" if None in later else f"{name}_step_{dim}")
    return f"{name} = empty({_tuple(sizes)}, {_tuple(steps)}, {name}_dtype)", numbers


def _tuple(terms: Iterable[str]) -> str:
    """Their source."""
    return f"({''.join(f'{term}, ' for term in terms)})"


@functools.lru_cache
def _code(source: str) -> CodeType:
    return compile(source, "<a known call>", "exec")


def serve(key: Hashable, tensors: Sequence[Any], length: int | None = None) -> Sequence[Any] | None:
    """What a call like an earlier one allocates, after its launch, on tensors that nothing follows.

    None if there was none, if more than autograd follows the call, or if the entry refuses it: for an address, say. Then the wrapper does all it
    does, which copies or raises.

    Args:
        key: all of a call but its tensors.
        length: of what is allocated, where the tensors do not say it.
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
                return call.run(tensors, length) if agrees is None or agrees(tensors) else None
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
