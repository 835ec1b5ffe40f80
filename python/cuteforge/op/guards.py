"""Whether tensors are like earlier ones, in all that a launch reads of them but their addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch without it: no call is remembered
    TensorGuards = None

AVAILABLE = TensorGuards is not None
# What may differ of a tensor whose shape the compiled entry checks in full: to compare it here as well takes as long
# again.
ANY_SHAPE = "any shape"

Varying = int | str | None


class Likeness(NamedTuple):
    """How tensors have to be like some others.

    Attributes:
        tensors: None for one that was not given, and is not given by calls alike. They are not kept.
        varying: for each tensor a dim whose extent may be any, and the strides with it but the last; ANY_SHAPE; or
            None where nothing may differ. With the first dim, which has to step over all others, no stride may differ.
        agree: whether extents that vary go together, asked of the tensors with the indices `agreeing`.
    """

    tensors: Sequence[Any]
    varying: Sequence[Varying] | None = None
    agree: Callable[..., bool] | None = None
    agreeing: Sequence[int] = ()

    def condition(self, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """The comparison of other tensors as the source of an expression, and what is behind the names in it.

        They have to be of the same type, dtype, device, shape, strides and `requires_grad`, and alike in what torch
        dispatches by. torch.compile asks the same of the inputs of a graph, in C++: 0.5 us for eight tensors, for
        which Python takes 5.

        Args:
            names: of the other tensors, in the same order.
        """
        tensors, varying = self.tensors, self.varying or [None] * len(self.tensors)
        # a guard of torch takes no tensor twice, and nothing but tensors
        firsts = [next(i for i, other in enumerate(tensors) if other is x) for x in tensors]
        distinct = [i for i, first in enumerate(firsts) if i == first and tensors[i] is not None]
        facts = [_facts_of(tensors[i], [varying[j] for j, first in enumerate(firsts) if first == i]) for i in distinct]
        guard = TensorGuards(
            *(tensors[i] for i in distinct),
            dynamic_dims_sizes=[sizes for sizes, _ in facts],
            dynamic_dims_strides=[strides for _, strides in facts],
        ).check
        terms = [
            f"{names[i]} is None" if x is None else f"{names[i]} is {names[firsts[i]]}"
            for i, x in enumerate(tensors)
            if i not in distinct
        ]
        if any(tensors[i].requires_grad for i in distinct):
            # a guard compares whether tensors require grad, whatever the mode
            terms.append("not grad_enabled()")
        terms.append(f"guard({', '.join(names[i] for i in distinct)})")
        if self.agree is not None:
            terms.append(f"agree({', '.join(names[i] for i in self.agreeing)})")
        return " and ".join(terms), {"guard": guard, "agree": self.agree, "grad_enabled": torch.is_grad_enabled}


def _facts_of(tensor: Any, varying: Sequence[Varying]) -> tuple[list[int | None], list[int | None]]:
    """Sizes and strides that are to be the same, None for others.

    Args:
        varying: what may differ, for each time that the tensor appears in a call.
    """
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
