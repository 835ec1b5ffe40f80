"""Checks of tensors and devices that every family makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cuteforge.arguments import described
from cuteforge.errors import ContractError, UnsupportedError


def usable_device(device: Any) -> torch.device:
    """`device` as a torch.device on which torch can make tensors here.

    Raises:
        ContractError: no device of torch.
        UnsupportedError: one that torch cannot use on this machine.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ContractError(f"device: wanted a torch.device or its name, got {described(device)}") from error
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(f"device: torch cannot use {found} here: {reason:.200}") from error
    return found


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is sparse, nested or quantized.

    Raises:
        ContractError: names the tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        raise ContractError(f"{name}: wanted a dense tensor, got a {kind} one")


def require_one_device(operands: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors on more than one device.

    Raises:
        ContractError: names the first that is not where the first of all is.
    """
    (first_name, first), *others = operands.items()
    for name, tensor in others:
        if tensor.device != first.device:
            raise ContractError(
                f"{name}: wanted a tensor on {first.device}, as {first_name}, got one on {tensor.device}"
            )
