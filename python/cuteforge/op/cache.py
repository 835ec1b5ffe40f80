"""How a wrapper finds, or makes, the op for a call, and what it copies when the op refuses a layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from cuteforge.errors import ContractError
from cuteforge.runtime import env
from cuteforge.runtime.lru import LRU
from cuteforge.runtime.streams import is_capturing

_ops: LRU[Any] = LRU(env.cache_size)


def run_op(
    key: Hashable,
    make: Callable[..., Any],
    inputs: tuple,
    launch: Callable[..., None],
    copy: Callable[..., tuple] | None = None,
    args: tuple = (),
) -> Any:
    """Launch the compiled op of `key`. Returns it, or None where inputs had to be copied.

    Inputs are looked at closely only when the op refuses them: then those that it cannot read are copied, on torch's current stream.
    In checked mode the op looks at the contents of those that were given, before a copy cuts an index off.

    Args:
        key: what the op was compiled for, the GPU included. The family's name comes first.
        make: ``make(*inputs, *args)`` -> op, when there is none yet.
        inputs: what may be copied.
        launch: ``launch(op, inputs, *args)``.
        copy: ``copy(inputs, *args)`` -> those that the kernels read, and copies of others; `dense` of each when None.
        args: what else both take: plain functions with `args` cost a call 0.15 us less than two closures.

    Raises:
        ContractError: as the op's, when copies do not help.
        UnsupportedError: as the op's, or CUTEFORGE_KERNELS=0.
    """
    op = _ops.get(key)
    try:
        if op is None:
            env.require_kernels()  # before anything is compiled; the launch of an op that exists asks itself
            op = _ops.put(key, make(*inputs, *args).compile())
        launch(op, inputs, *args)
        return op
    except ContractError:
        copies = tuple(map(dense, inputs)) if copy is None else copy(inputs, *args)
        if all(kept is given for kept, given in zip(copies, inputs)):
            raise
        op = _ops.get(key) or _ops.put(key, make(*copies, *args).compile())
        if env.check() and not is_capturing():
            make(*copies, *args).check_given(inputs)
        launch(op, copies, *args)
        return None


def readable(tensor: Any) -> Any:
    """`tensor`, or a copy that kernels read: indices as int32, rows contiguous and aligned."""
    return tensor.to(torch.int32) if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64 else dense(tensor)


def dense(tensor: Any) -> Any:
    """`tensor`, or a copy with contiguous rows aligned to 16 bytes."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor  # the op refuses it by name
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
