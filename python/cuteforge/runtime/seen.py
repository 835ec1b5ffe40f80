"""What was found out about some tensors, for others just like them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch without it: nothing is ever found
    TensorGuards = None

_MOST = 4  # kinds of tensors of one op or wrapper call
_PERIOD = 64


class Seen:
    """A few findings, each about tensors of one type, dtype, device, shape, strides and `requires_grad`, and alike in what torch dispatches by.

    Attributes:
        findings: (whether tensors are alike, finding) each, for who cannot afford the 0.2 us of `find`.

    torch.compile asks the same of the inputs of a graph, in C++: 0.5 us for eight tensors, for which Python takes 5. Tensors themselves are not kept.
    """

    __slots__ = ("findings", "_misses")

    def __init__(self) -> None:
        self.findings: tuple[tuple[Callable[..., bool], Any], ...] = ()
        self._misses = 0

    def find(self, tensors: Sequence[Any]) -> Any:
        """What was kept about tensors just like these, or None. Takes anything for a tensor, and as many as were kept.

        Raises:
            TypeError: there are more of them, or fewer.
        """
        for is_alike, finding in self.findings:
            if is_alike(*tensors):
                return finding
        return None

    def is_due(self) -> bool:
        """Whether what was found out about tensors that were not known is to be kept; asked once for each time.

        To describe tensors takes 10 us, which does not pay where each call has other shapes: the first few are kept, then one of 64.
        """
        self._misses += 1
        return TensorGuards is not None and (self._misses <= _MOST or self._misses % _PERIOD == 0)

    def keep(self, tensors: Sequence[Any], finding: Any, varying: Sequence[int | None] | None = None) -> None:
        """Keep a finding, which must not be None and must hold for all tensors like these; nothing is kept or found of those that
        require grad in grad mode.

        Past the first few it takes the place of all before it, so that calls that all differ look at one.

        Args:
            varying: for each tensor a dim whose extent may be any, and the strides with it but the last; None where none may. With the first dim,
                which has to step over all others, no stride may differ.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return
        guard = _guard_of(tensors, varying or [None] * len(tensors))
        # a tuple that is replaced: another thread sees the old one or the new one
        self.findings = ((guard, finding), *(self.findings if self._misses <= _MOST else ()))


def _guard_of(tensors: Sequence[Any], varying: Sequence[int | None]) -> Callable[..., bool]:
    """Whether others are alike."""
    firsts = [next(i for i, other in enumerate(tensors) if other is x) for x in tensors]
    distinct = sorted(set(firsts))
    facts = [_facts_of(tensors[i], varying[i]) for i in distinct]
    is_alike = TensorGuards(
        *(tensors[i] for i in distinct),
        dynamic_dims_sizes=[sizes for sizes, _ in facts],
        dynamic_dims_strides=[strides for _, strides in facts],
    ).check
    if any(x.requires_grad for x in tensors):
        is_alike = _without_grad_mode(is_alike)
    if len(distinct) == len(tensors):
        return is_alike
    # a guard takes no tensor twice: keys that were the values as well have to be so again
    names = [f"x{i}" for i in range(len(tensors))]
    repeats = [f"x{i} is x{first}" for i, first in enumerate(firsts) if i != first]
    once = [names[i] for i in distinct]
    condition = " and ".join((*repeats, f"is_alike({', '.join(once)})"))
    return eval(_code(f"lambda {', '.join(names)}: {condition}"), {"is_alike": is_alike})


@functools.lru_cache
def _code(source: str) -> CodeType:
    """A loop over the repeats would take as long as the guard."""
    return compile(source, "<tensors alike>", "eval")


def _without_grad_mode(is_alike: Callable[..., bool]) -> Callable[..., bool]:
    """A guard compares whether tensors require grad, whatever the mode."""
    return lambda *others: not torch.is_grad_enabled() and is_alike(*others)


def _facts_of(tensor: Any, varying: int | None) -> tuple[list[int | None], list[int | None]]:
    """Sizes and strides that are to be the same, None for others."""
    sizes: list[int | None] = list(tensor.shape)
    strides: list[int | None] = list(tensor.stride())
    if varying == 0:
        span = sum((size - 1) * stride for size, stride in zip(sizes[1:], strides[1:]))
        # else more elements along the dim could share addresses, and the stride of a single one says nothing
        if sizes[0] > 1 and strides[0] > span:
            sizes[0] = None
    elif varying is not None:
        sizes[varying] = None
        strides[:-1] = [None] * (len(strides) - 1)
    return sizes, strides
