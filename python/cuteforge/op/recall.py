"""Calls of wrappers on tensors just like those of an earlier one: what that one found out, so that only allocations and the launch are left.

A wrapper of attention takes 8 us of Python to check its arguments, find its op and put its operands in order, on the host of an H200 18: four
launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from cuteforge.op import base as api_base
from cuteforge.op.alike import Seen, Varying
from cuteforge.op.allocate import current_device, ways_to_empty
from cuteforge.op.launch import count_writes
from cuteforge.runtime import env

# By what no tensor says: the op and its options. All are forgotten when there are too many: to stamp each look-up with its time, as `LRU` does, takes
# as long as the look-up.
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
        given: the operand of the op that each tensor of a call is; None for those that were not given.
        results: the other operands, which are allocated.
        device: the GPU.
        call_scalars: of the launch, after those of the op.
        length_of: the length of a call, as the name of a tensor that is given and a dim; None where the caller says it.
        written: names of those given that are written, for torch's counts of versions.
        returned: names of what a call returns; None for its results.
        agree: whether extents that vary go together, as far as the entry does not say, of the tensors named `agreeing`.
        varying: of each name of those given that has one, what may vary, as `Seen.keep` takes it.

    Attributes:
        run: ``run(tensors, length=None)`` launches on the tensors of a call, and returns what it returns. Raises what the entry raises.
    """

    __slots__ = ("_facts", "agree", "agreeing", "run", "varying")

    def __init__(
        self, op: Any, given: Sequence[str | None], results: Sequence[Result], device: torch.device, call_scalars: tuple = (), *,
        length_of: tuple[str, int] | None = None, written: Sequence[str] = (), returned: Sequence[str] | None = None,
        agree: Callable[..., bool] | None = None, agreeing: Sequence[str] = (), varying: Mapping[str, Varying] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        returned = [result.name for result in results] if returned is None else returned
        self.run = _written_out(op, given, results, device, call_scalars, length_of, written, returned)
        self.agree, self.agreeing = agree, [given.index(name) for name in agreeing]
        self.varying = [varying.get(name) for name in given]
        launch = {"op": op, "results": results, "device": device, "call_scalars": call_scalars, "length_of": length_of}
        self._facts = {
            **launch, "written": written, "returned": returned, "agree": agree, "agreeing": agreeing, "varying": varying,
        }  # fmt: skip

    def of(self, given: Sequence[str | None], **varying: Varying) -> Call:
        """The same for calls that are given their tensors in another order, and may vary otherwise in those named."""
        return Call(**{**self._facts, "given": given, "varying": {**self._facts["varying"], **varying}})


def _written_out(
    op: Any, given: Sequence[str | None], results: Sequence[Result], device: torch.device, call_scalars: tuple,
    length_of: tuple[str, int] | None, written: Sequence[str], returned: Sequence[str],
) -> Callable[..., tuple]:  # fmt: skip
    """`Call.run`, written out as code: to look places, kinds and scalars up in lists takes as long as to launch (0.5 us of 1.6).

    For rotary of q and k::

        def run(tensors, length=None):
            (x, k, _, _, _, cos, sin, positions, ) = tensors
            length = x.shape[0]
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
        "here": here, "elsewhere": elsewhere, "count_writes": count_writes, "uint8": torch.uint8, **scalars,
    }  # fmt: skip
    lines = ["def run(tensors, length=None):", f"{_tuple(name or '_' for name in given)} = tensors"]
    if results and length_of is not None:
        lines.append("length = {}.shape[{}]".format(*length_of))
    if results:
        lines.append("empty = here if current_device() == device else elsewhere")
    for result in results:
        source, numbers = _allocation(result)
        lines.append(source)
        names |= numbers
    operands = op.signature.names
    if op._arrange is not None:
        operands = [(*operands, "None")[place] for place in op._arrange.places]
    operands = ["mask.view(uint8)" if name == "mask" else name for name in operands]
    if written:
        # before the launch: after it nothing may raise, or the wrapper would launch again
        lines.append(f"count_writes({_tuple(written)})")
    lines.append(f"entry({', '.join((*operands, *scalars))}, raw_stream(device))")
    lines.append(f"return {_tuple(returned)}")
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
    """What a call like an earlier one returns, after its launch, on tensors that nothing follows.

    None if there was none, if more than autograd follows the call, or if the entry refuses it: for an address, say. Then the wrapper does all it
    does, which copies or raises.

    Args:
        key: all of a call but its tensors.
        tensors: those that the call may be given, None for those that it is not.
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
                return call.run(tensors, length)
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
        seen.keep(tensors, call, call.varying, call.agree, call.agreeing)


def find(key: Hashable, tensors: Sequence[Any]) -> Call | None:
    """What was kept of a call like this one."""
    seen = _seen.get(key)
    return None if seen is None else seen.find(tensors)
