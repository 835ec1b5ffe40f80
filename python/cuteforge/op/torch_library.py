"""Ops that torch's dispatcher knows: how one is registered, and when an eager call has to go through it.

Registered through `torch.library.Library` with an autograd kernel of its own, an op takes 5 us a call on top of what it
does, 10 us where it records a graph; `torch.library.custom_op` takes 40 us and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch._C import _are_functorch_transforms_active
from torch._C import _AutoDispatchBelowADInplaceOrView as _BelowVersions
from torch._C import _AutoDispatchBelowAutograd as _BelowAutograd
from torch.autograd import forward_ad

from cuteforge.arguments import kind_of
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.op.checks import check_layout, require_one_device
from cuteforge.op.launch import count_writes
from cuteforge.op.tracing import without_autocast

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

    As `register_op`. It has no derivative, and what it writes would leave the graph: in grad mode, tensors that require
    grad are refused
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


def _check_gpu_tensors(operands: Mapping[str, Any]) -> None:
    """What the dispatcher would refuse without naming it, or would run on the CPU."""
    for name, tensor in operands.items():
        if not isinstance(tensor, _Tensor):
            raise ContractError(f"{name}: wanted a torch.Tensor, got {kind_of(tensor)}")
        check_layout(name, tensor)
    for name, tensor in operands.items():
        if tensor.device.type != "cuda":
            raise ContractError(f"{name}: wanted a CUDA device, got {tensor.device}")


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
