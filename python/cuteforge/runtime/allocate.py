"""Uninitialised memory of the same kinds again and again: torch takes half of the time of an allocation to find out what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

try:  # what the code calls that torch.compile makes
    from torch._C import _cuda_getDevice as _current_device
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:  # a torch without them, or without CUDA
    _current_device = _empty_strided_cuda = None


# (shape, dtype) of a contiguous tensor
Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]


def allocations(kinds: Kinds, device: torch.device, by_length: Kinds = ()) -> Callable[..., list[torch.Tensor]]:
    """``make(tensors, length=None)``, which makes a tensor of each kind at each call.

    Args:
        by_length: kinds without their first extent, which is `length`, or that of the first of `tensors`. Tensors of these come first.
    """

    def make(tensors: Sequence[torch.Tensor], length: int | None = None) -> list[torch.Tensor]:
        length = tensors[0].size(0) if by_length and length is None else length
        shapes = [((length, *rest), dtype) for rest, dtype in by_length] + list(kinds)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]

    if _empty_strided_cuda is None or device.type != "cuda":
        return make
    # the short way allocates on the current GPU
    index = device.index
    fixed = [(shape, _strides(shape), dtype) for shape, dtype in kinds]
    growing = [(rest, _strides((1, *rest)), dtype) for rest, dtype in by_length]

    def make_here(tensors: Sequence[torch.Tensor], length: int | None = None) -> list[torch.Tensor]:
        if _current_device() != index:
            return make(tensors, length)
        if not growing:
            return [_empty_strided_cuda(*kind) for kind in fixed]
        length = tensors[0].size(0) if length is None else length
        results = [_empty_strided_cuda((length, *rest), strides, dtype) for rest, strides, dtype in growing]
        return results + [_empty_strided_cuda(*kind) for kind in fixed] if fixed else results

    return make_here


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
