"""Whether tensors are like earlier ones, in all that a launch reads of them but their addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuteforge.op.generated import code_of

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch without it: no call is remembered
    TensorGuards = None

AVAILABLE = TensorGuards is not None
# What may differ of a tensor whose shape the compiled entry checks in full: to compare it here as well takes as long again.
ANY_SHAPE = "any shape"

Varying = int | str | None
Guard = Callable[..., bool]


def guard_of(
    tensors: Sequence[Any],
    varying: Sequence[Varying] | None = None,
    agree: Callable[..., bool] | None = None,
    agreeing: Sequence[int] = (),
) -> Guard:
    """``guard(*others)``: whether other tensors are alike: of one type, dtype, device, shape, strides and
    `requires_grad`, and alike in what torch dispatches by.

    torch.compile asks the same of the inputs of a graph, in C++: 0.5 us for eight tensors, for which Python takes 5.
    The guard does not keep the tensors. It is written out, since a loop over what is None or repeated would take as
    long as the comparison.

    Args:
        tensors: None for one that was not given, and is not given by calls alike.
        varying: for each tensor a dim whose extent may be any, and the strides with it but the last; ANY_SHAPE; or
            None where nothing may differ. With the first dim, which has to step over all others, no stride may differ.
        agree: whether extents that vary go together, asked of the tensors with the indices `agreeing`.
    """
    varying = varying or [None] * len(tensors)
    # a guard of torch takes no tensor twice, and nothing but tensors
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
    code = code_of(f"lambda {', '.join(names)}: {' and '.join(conditions)}", "guard", "eval")
    return eval(code, {"guard": guard, "agree": agree, "grad_enabled": torch.is_grad_enabled})


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
