"""Ops that torch's dispatcher knows: how one is registered, and when an eager call has to go through it.

Registered through `torch.library.Library` with an autograd kernel of its own, an op takes 5 us a call on top of what it
does, 10 us where it records a graph; `torch.library.custom_op` takes 40 us and more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C import _AutoDispatchBelowADInplaceOrView as _BelowVersions
from torch._C import _AutoDispatchBelowAutograd as _BelowAutograd
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from cuteforge.arguments import described, kind_of
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.op.launch import count_writes
from cuteforge.runtime.streams import record_streams, stream_context

_NAMESPACE = "cuteforge"
# A Library takes its ops along when it is collected: kept when this module is reloaded.
_library = globals().get("_library") or torch.library.Library(_NAMESPACE, "FRAGMENT")
# Module globals: the launch path of every wrapper asks for them.
_Tensor = torch.Tensor
_grad_enabled = torch.is_grad_enabled
_NO_CONTEXT = nullcontext()


def register_op(
    schema: str,
    *,
    cuda: Callable,
    cpu: Callable,
    fake: Callable,
    save: Callable | None = None,
    backward: Callable | None = None,
    constants: Iterable[str] = (),
) -> None:
    """Register ``cuteforge::<schema>``, an op that writes no argument and returns tensors of its own.

    An op of that name stays as it is, so importing a family's module again is harmless.

    Args:
        schema: as in `torch.library.define`, without defaults and keyword-only arguments, so that the functions below
            get every argument, by position.
        cuda, cpu: what the op does. Called below autograd; the results may not alias an argument.
        fake: results without contents, of the shape, dtype and strides that `cuda` and `cpu` return. Reads no tensor.
        save: ``save(ctx, inputs, result)`` keeps what `backward` needs.
        backward: ``backward(ctx, *grads)`` gives a gradient or None for each argument. Without it the op has no
            derivative: its result may be used, and differentiating through it raises UnsupportedError.
        constants: arguments that `backward` has no gradient for: refused by name where autograd would want one.
    """
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.cuteforge, name):
        _define(schema, cuda, cpu, fake)
        _library.impl(name, _autograd_kernel(_op(name), save, backward, frozenset(constants)), "Autograd")


def register_inplace_op(schema: str, *, functional: str, cuda: Callable, cpu: Callable) -> None:
    """Register ``cuteforge::<schema>``, which writes the results of op `functional` over its own first arguments.

    As `register_op`. Where autograd follows the call, the results of `functional` are computed and copied into the
    arguments instead: torch then has its rules for leaves, views and versions.

    Args:
        schema: the arguments of `functional`, those to write as ``Tensor(a!)``, and no result.
        cuda, cpu: write the arguments and return None.
    """
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.cuteforge, name):
        _define(schema, cuda, cpu, lambda *_: None)
        op, num_written = _op(name), schema.count("!)")
        _library.impl(name, _inplace_autograd_kernel(op, _op(functional), num_written), "Autograd")
        _library.impl(name, _version_kernel(op), "ADInplaceOrView")


def register_updating_op(schema: str, *, cuda: Callable, cpu: Callable, fake: Callable) -> None:
    """Register ``cuteforge::<schema>``, which writes some of its arguments and returns tensors of its own.

    As `register_op`. It has no derivative, and what it writes would leave the graph: in grad mode, tensors that require grad are refused
    by name.

    Args:
        schema: the arguments to write as ``Tensor(a!)``, ``Tensor(b!)``, wherever they stand.
        cuda, cpu: write the arguments and return the results.
    """
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.cuteforge, name):
        _define(schema, cuda, cpu, fake)
        op = _op(name)
        _library.impl(name, _updating_autograd_kernel(op), "Autograd")
        _library.impl(name, _version_kernel(op), "ADInplaceOrView")


def needs_op(*tensors: Any) -> bool:
    """Whether a call has to go through the dispatcher: something that a launch would leave out follows it.

    That is a graph of autograd (one of `tensors` requires grad, in grad mode), or what `is_traced` tells.

    Args:
        tensors: what the op can be differentiated for, the first of them known to be a tensor. Another that is none is left
            to be refused by name.
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


def asked_stream(stream: Any, *given: Any) -> AbstractContextManager:
    """A context for all the work of a wrapper, on the stream that was asked for; None is torch's current one.

    The stream becomes torch's current one: what is allocated, copied and launched inside belongs to it. The caller's
    tensors belong to other streams, so they are recorded on it: torch does not reuse their memory while the stream
    may still read or write it.

    Args:
        given: the arguments of the call that may be tensors; the first one is a tensor.

    Raises:
        ContractError: not a stream; a stream of another GPU; or a stream inside a compiled function, where
            torch.compile orders the launches.
    """
    if stream is None:
        return _NO_CONTEXT
    if is_dynamo_compiling():
        raise ContractError(f"stream: wanted None under torch.compile, got {type(stream).__name__}")
    if not given[0].is_cuda:
        return _NO_CONTEXT  # the op refuses the tensor by name
    device = given[0].get_device()
    record_streams(
        [x for x in given if isinstance(x, _Tensor) and x.is_cuda and x.get_device() == device], stream, device
    )
    return stream_context(stream, device)


def call_op(name: str, operands: Mapping[str, Any], arguments: tuple) -> Any:
    """Call ``cuteforge::<name>(*arguments)`` for a wrapper: on CUDA tensors, launched on torch's current stream.

    Args:
        operands: the tensors of the call by name.
        arguments: all that the op takes.

    Raises:
        ContractError: an operand is no CUDA tensor, by name.
    """
    _check_gpu_tensors(operands)
    return _op(name)(*arguments)


def refuse_grad(names: Iterable[str], tensors: Iterable[Any], op_name: str) -> None:
    """Refuse tensors that autograd would have to follow through an op without a derivative.

    Raises:
        ContractError: names the tensor.
    """
    for name, tensor in zip(names, tensors):
        if _grad_enabled() and getattr(tensor, "requires_grad", False):
            raise ContractError(
                f"{name}: wanted a tensor that does not require grad, got requires_grad=True; {op_name} records no graph: "
                "call it under torch.no_grad()"
            )


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


def _check_gpu_tensors(operands: Mapping[str, Any]) -> None:
    """What the dispatcher would refuse without naming it, or would run on the CPU."""
    for name, tensor in operands.items():
        if not isinstance(tensor, _Tensor):
            raise ContractError(f"{name}: wanted a torch.Tensor, got {kind_of(tensor)}")
        check_layout(name, tensor)
    for name, tensor in operands.items():
        if tensor.device.type != "cuda":
            raise ContractError(f"{name}: wanted a CUDA device, got {tensor.device}")


def _dispatches_itself(tensor: Any) -> bool:
    dispatch = getattr(type(tensor), "__torch_dispatch__", _Tensor.__torch_dispatch__)
    return dispatch is not _Tensor.__torch_dispatch__


def _op(name: str) -> Any:
    return getattr(torch.ops.cuteforge, name).default


def _define(schema: str, cuda: Callable, cpu: Callable, fake: Callable) -> None:
    """All of an op but its autograd."""
    name = schema.partition("(")[0]
    qualified = f"{_NAMESPACE}::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, cuda, "CUDA")
    _library.impl(name, without_autocast(cpu), "CPU")
    names = [argument.name for argument in _op(name)._schema.arguments]
    torch.library.register_fake(qualified, _on_one_device(names, fake), lib=_library)
    torch.library.register_vmap(qualified, lambda *_: _refuse(qualified, "is not served by torch.vmap"), lib=_library)


def _on_one_device(names: Iterable[str], fake: Callable) -> Callable:
    """`fake`, for tensors on one device only: torch calls it as soon as any tensor is on the meta device."""

    def checked(*inputs: Any) -> Any:
        require_one_device({name: x for name, x in zip(names, inputs) if isinstance(x, _Tensor)})
        return fake(*inputs)

    return checked


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


def _autograd_kernel(op: Any, save: Callable | None, backward: Callable | None, constants: frozenset[str]) -> Callable:
    """What the op does for autograd: refuse what cannot be followed, and record a node of the graph in grad mode.

    `torch.library.register_autograd` does the same for twice the time, and its refusals do not name the op.
    """
    node = _graph_node(op, save, backward)
    fixed = [(i, argument.name) for i, argument in enumerate(op._schema.arguments) if argument.name in constants]

    def kernel(*inputs: Any) -> Any:
        _refuse_transforms(op)
        if _grad_enabled():
            _refuse_leaves(op, fixed, inputs, "has no gradient for it")
        if _grad_enabled() or forward_ad._current_level >= 0:
            return node.apply(*inputs)
        with _BelowAutograd():
            return op(*inputs)

    return kernel


def _graph_node(op: Any, save: Callable | None, backward: Callable | None) -> type:
    """The op as an autograd.Function. It asks its inputs itself whether there is anything to record."""

    def run(ctx: Any, *inputs: Any) -> Any:
        with _BelowAutograd():
            result = op(*inputs)
        if save is not None:
            save(ctx, inputs, result)
        return result

    def differentiate(ctx: Any, *grads: Any) -> Any:
        return _refuse(op.name(), "has no derivative") if backward is None else backward(ctx, *grads)

    def push_tangents(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse(op.name(), "has no forward-mode derivative")

    methods = {"forward": run, "backward": differentiate, "jvp": push_tangents}
    name = "".join(word.capitalize() for word in op.name().partition("::")[2].split("_"))
    return type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})


def _inplace_autograd_kernel(op: Any, functional: Any, num_written: int) -> Callable:
    """What an op that writes its arguments does for autograd; see `register_inplace_op`."""

    def kernel(*inputs: Any) -> None:
        _refuse_transforms(op)
        tensors = [x for x in inputs if isinstance(x, _Tensor)]
        if forward_ad._current_level >= 0 or (_grad_enabled() and any(x.requires_grad for x in tensors)):
            results = functional(*inputs)
            for target, result in zip(inputs, results if num_written > 1 else (results,)):
                target.copy_(result)
            return
        with _BelowAutograd():
            op(*inputs)

    return kernel


def _updating_autograd_kernel(op: Any) -> Callable:
    """What an op that writes arguments and has no derivative does for autograd; see `register_updating_op`."""
    arguments = [(i, argument.name) for i, argument in enumerate(op._schema.arguments)]

    def kernel(*inputs: Any) -> Any:
        _refuse_transforms(op)
        if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
            _refuse(op.name(), "has no forward-mode derivative")
        if _grad_enabled():
            _refuse_leaves(op, arguments, inputs, "has no derivative: call it under torch.no_grad()")
        with _BelowAutograd():
            return op(*inputs)

    return kernel


def _has_tangent(x: Any) -> bool:
    return isinstance(x, _Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _refuse_leaves(op: Any, named: Iterable[tuple[int, str]], inputs: tuple, why: str) -> None:
    """Refuse those of the numbered, named arguments that require grad."""
    for i, name in named:
        if getattr(inputs[i], "requires_grad", False):
            wanted = "wanted a tensor that does not require grad, got requires_grad=True"
            raise ContractError(f"{name}: {wanted}; {op.name()} {why}")


def _version_kernel(op: Any) -> Callable:
    """Count a write, also without grad mode: a graph that saved the tensor before then refuses to use it."""
    aliases = [argument.alias_info for argument in op._schema.arguments]
    written = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]

    def kernel(*inputs: Any) -> Any:
        count_writes([inputs[i] for i in written])
        with _BelowVersions():
            return op(*inputs)

    return kernel


def _refuse_transforms(op: Any) -> None:
    if _are_functorch_transforms_active():
        _refuse(op.name(), "is not served by the transforms of torch.func; use torch.autograd")


def _refuse(qualified: str, why: str) -> NoReturn:
    raise UnsupportedError(f"{qualified} {why}")
