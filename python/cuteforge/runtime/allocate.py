"""Uninitialised memory of the same kinds again and again: torch takes half of the time of an allocation to find out what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

try:  # what the code calls that torch.compile makes
    from torch._C import _cuda_getDevice as _current_device
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:  # a torch without them, or without CUDA
    _current_device = _empty_strided_cuda = None


def allocations(
    kinds: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> Callable[[], list[torch.Tensor]]:
    """A function that makes a contiguous tensor of each shape and dtype at each call."""

    def make() -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]

    if _empty_strided_cuda is None or device.type != "cuda":
        return make
    index = device.index
    strided = [(shape, torch.empty(shape, device="meta").stride(), dtype) for shape, dtype in kinds]

    def make_here() -> list[torch.Tensor]:
        # the short way allocates on the current GPU
        return [_empty_strided_cuda(*kind) for kind in strided] if _current_device() == index else make()

    return make_here
