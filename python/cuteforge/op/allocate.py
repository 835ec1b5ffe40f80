"""Uninitialised memory of kinds that are known: torch takes half of the time of an allocation to find out what it is
asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch

try:  # what the code calls that torch.compile makes
    from torch._C import _cuda_getDevice as current_device
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:  # a torch without them, or without CUDA
    current_device, _empty_strided_cuda = (lambda: None), None

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def ways_to_empty(device: torch.device) -> tuple[Empty, Empty]:
    """``empty(shape, strides, dtype)`` on `device`: a quick one for where it is torch's current GPU (`current_device`),
    and one for anywhere."""

    def anywhere(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return anywhere if _empty_strided_cuda is None or device.type != "cuda" else _empty_strided_cuda, anywhere
