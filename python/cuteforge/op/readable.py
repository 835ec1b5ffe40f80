"""Copies of tensors that kernels cannot read as they are."""

from __future__ import annotations

from typing import Any

import torch


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
