"""Uninitialised memory of the same kinds again and again: torch takes half of the time of an allocation to find out what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap

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

    kinds_of = _KindsOf(by_length, kinds)

    def make(tensors: Sequence[torch.Tensor], length: int | None = None) -> list[torch.Tensor]:
        if by_length and length is None:
            length = tensors[0].size(0)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype in kinds_of(length)]

    if _empty_strided_cuda is None or device.type != "cuda":
        return make
    index = device.index

    def make_here(tensors: Sequence[torch.Tensor], length: int | None = None) -> list[torch.Tensor]:
        # the short way allocates on the current GPU
        if _current_device() != index:
            return make(tensors, length)
        if by_length and length is None:
            length = tensors[0].size(0)
        return [*starmap(_empty_strided_cuda, kinds_of(length))]

    return make_here


class _KindsOf:
    """A length -> (shape, strides, dtype) of each tensor; those of the last length are remembered."""

    def __init__(self, by_length: Kinds, fixed: Kinds) -> None:
        # of a contiguous tensor no stride depends on the first extent, unless that is 0
        self._by_length = [(rest, _strides((1, *rest)), dtype) for rest, dtype in by_length]
        self._fixed = [(shape, _strides(shape), dtype) for shape, dtype in fixed]
        # a tuple that is replaced: another thread sees the old one or the new one
        self._last: tuple[int | None, list[tuple]] = (None, self._fixed)

    def __call__(self, length: int | None) -> list[tuple]:
        last = self._last
        if last[0] != length:
            kinds = [((length, *rest), strides, dtype) for rest, strides, dtype in self._by_length]
            last = self._last = length, kinds + self._fixed
        return last[1]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
