"""What follows a call beside the call itself: autograd, torch.compile, dispatch modes, autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from cuteforge.errors import ContractError

# Module globals: the launch path of every wrapper asks for them.
_Tensor = torch.Tensor
_grad_enabled = torch.is_grad_enabled


def needs_op(*tensors: Any) -> bool:
    """Whether a call has to go through the dispatcher: something that a launch would leave out follows it.

    That is a graph of autograd (one of `tensors` requires grad, in grad mode), or what `is_traced` tells.

    Args:
        tensors: what the op can be differentiated for, the first of them known to be a tensor. Another that is none is
            left to be refused by name.
    """
    if is_traced(tensors[0]):
        return True
    if _grad_enabled():
        try:
            for tensor in tensors:
                if tensor.requires_grad:
                    return True
        except AttributeError:
            return False
    return False


def is_traced(tensor: Any) -> bool:
    """Whether more than autograd follows a call on `tensor`.

    torch.compile and export, dispatch modes (fake tensors, tracers, counters), torch.func transforms, forward-mode
    differentiation, tensor subclasses with a dispatch of their own.
    """
    return (
        is_dynamo_compiling()
        or (type(tensor) is not _Tensor and _dispatches_itself(tensor))
        or _len_torch_dispatch_stack() > 0
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def refuse_grad(names: Iterable[str], tensors: Iterable[Any], op_name: str) -> None:
    """Refuse tensors that autograd would have to follow through an op without a derivative.

    Raises:
        ContractError: names the tensor.
    """
    for name, tensor in zip(names, tensors):
        if _grad_enabled() and getattr(tensor, "requires_grad", False):
            raise ContractError(
                f"{name}: wanted a tensor that does not require grad, got requires_grad=True; {op_name} records no "
                "graph: call it under torch.no_grad()"
            )


def _dispatches_itself(tensor: Any) -> bool:
    dispatch = getattr(type(tensor), "__torch_dispatch__", _Tensor.__torch_dispatch__)
    return dispatch is not _Tensor.__torch_dispatch__


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device. The meta device has none, and torch refuses the question."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(function: Callable) -> Callable:
    """`function`, which takes a tensor first, under no autocast: eager code keeps the dtypes that it asks for."""

    @functools.wraps(function)
    def run(*inputs: Any) -> Any:
        device_type = inputs[0].device.type
        if not autocasts(device_type):
            return function(*inputs)
        with torch.autocast(device_type, enabled=False):
            return function(*inputs)

    return run
