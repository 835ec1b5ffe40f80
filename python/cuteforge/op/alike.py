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
# What may differ of a tensor whose shape the compiled entry checks in full: to compare it here as well takes as long again.
ANY_SHAPE = "any shape"

Varying = int | str | None


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

    def keep(
        self, tensors: Sequence[Any], finding: Any, varying: Sequence[Varying] | None = None, agree: Callable[..., bool] | None = None,
        agreeing: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Keep a finding, which must not be None and must hold for all tensors like these; nothing is kept or found of those that
        require grad in grad mode.

        Past the first few it takes the place of all before it, so that calls that all differ look at one.

        Args:
            tensors: None for one that was not given, and is not given by calls alike.
            varying: for each tensor a dim whose extent may be any, and the strides with it but the last; ANY_SHAPE; or None where nothing may
                differ. With the first dim, which has to step over all others, no stride may differ.
            agree: whether extents that vary go together, of the tensors at the places `agreeing`.
        """
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return
        is_alike = _guard_of(tensors, varying or [None] * len(tensors), agree, agreeing)
        # a tuple that is replaced: another thread sees the old one or the new one
        self.findings = ((is_alike, finding), *(self.findings if self._misses <= _MOST else ()))


def _guard_of(
    tensors: Sequence[Any], varying: Sequence[Varying], agree: Callable[..., bool] | None, agreeing: Sequence[int]
) -> Callable[..., bool]:
    """Whether others are alike, written out: a loop over what is None or repeated would take as long as the guard."""
    # a guard takes no tensor twice, and nothing but tensors
    firsts = [next(i for i, other in enumerate(tensors) if other is x) for x in tensors]
    distinct = [i for i, first in enumerate(firsts) if i == first and tensors[i] is not None]
    facts = [_facts_of(tensors[i], [varying[j] for j, first in enumerate(firsts) if first == i]) for i in distinct]
    guard = TensorGuards(
        *(tensors[i] for i in distinct),
        dynamic_dims_sizes=[sizes for sizes, _ in facts],
        dynamic_dims_strides=[strides for _, strides in facts],
    ).check
    names = [f"x{i}" for i in range(len(tensors))]
    conditions = [
        f"x{i} is None" if x is None else f"x{i} is x{firsts[i]}" for i, x in enumerate(tensors) if i not in distinct
    ]
    if any(tensors[i].requires_grad for i in distinct):
        # a guard compares whether tensors require grad, whatever the mode
        conditions.append("not grad_enabled()")
    conditions.append(f"guard({', '.join(names[i] for i in distinct)})")
    if agree is not None:
        conditions.append(f"agree({', '.join(names[i] for i in agreeing)})")
    if len(conditions) == 1:
        return guard
    source = f"lambda {', '.join(names)}: {' and '.join(conditions)}"
    return eval(_code(source), {"guard": guard, "agree": agree, "grad_enabled": torch.is_grad_enabled})


@functools.lru_cache
def _code(source: str) -> CodeType:
    return compile(source, "<tensors alike>", "eval")


def _facts_of(tensor: Any, varying: Sequence[Varying]) -> tuple[list[int | None], list[int | None]]:
    """Sizes and strides that are to be the same, None for others. `varying` is what may differ, by each place of the tensor in a call."""
    sizes: list[int | None] = list(tensor.shape)
    strides: list[int | None] = list(tensor.stride())
    dims = {x for x in varying if x != ANY_SHAPE}
    if not sizes:
        return sizes, strides
    if not dims:
        return [None] * len(sizes), [None] * len(strides)
    if len(dims) > 1:
        return sizes, strides
    (dim,) = dims
    if dim == 0:
        span = sum((size - 1) * stride for size, stride in zip(sizes[1:], strides[1:]))
        # else more elements along the dim could share addresses, and the stride of a single one says nothing
        if sizes[0] > 1 and strides[0] > span:
            sizes[0] = None
    elif dim is not None:
        sizes[dim] = None
        strides[:-1] = [None] * (len(strides) - 1)
    return sizes, strides
