"""The rotary embedding as ops of torch: what autograd, torch.compile, export and checkpointing follow.

On CUDA they launch the kernel as the wrappers do; on a CPU they compute the eager reference in fp32. An op takes one
tensor of heads or
q and k, and has a twin that writes over them.
"""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.errors import ContractError
from cuteforge.families.rotary import reference
from cuteforge.families.rotary.operands import schema_of_angles
from cuteforge.families.rotary.road import ONE, QUERIES_AND_KEYS, RotaryRoad, op_of
from cuteforge.op.road import Invocation
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.op.torch_library import register_inplace_op, register_op

_TABLES = ("freqs_cis", "cos", "sin")
_REST = f"{schema_of_angles()}, bool interleaved, bool inverse"
_NUM_REST = 6


def _call_of(arguments: tuple, in_place: bool = False) -> tuple[RotaryRoad, Invocation]:
    """The arguments of an op as a call, checked as by the wrappers."""
    *heads, freqs_cis, cos, sin, positions, interleaved, inverse = arguments
    road = ONE if len(heads) == 1 else QUERIES_AND_KEYS
    outputs = heads if in_place else [None] * len(heads)
    tensors = (*heads, freqs_cis, cos, sin, positions, *outputs)
    return road, road.validate(tensors, (interleaved, inverse))


def _fake(*arguments: Any) -> Any:
    road, call = _call_of(arguments)
    return _one_or_both(tuple(road.new_results(call).values()))


def _cuda(*arguments: Any) -> Any:
    road, call = _call_of(arguments)
    return _one_or_both(road.launch(call))


def _cuda_inplace(*arguments: Any) -> None:
    road, call = _call_of(arguments, in_place=True)
    road.launch(call)


def _cpu(*arguments: Any) -> Any:
    return _one_or_both(_rotate_on_cpu(*_call_of(arguments)))


def _cpu_inplace(*arguments: Any) -> None:
    road, call = _call_of(arguments, in_place=True)
    for x, result in zip(call.outputs.values(), _rotate_on_cpu(road, call)):
        x.copy_(result)


def _rotate_on_cpu(road: RotaryRoad, call: Invocation) -> tuple:
    """The reference, after the checks of the kernel, so that a model meets its errors there too."""
    inputs, (interleaved, inverse) = call.inputs, call.options
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in inputs.items()}
    results = {name: specs[head] for name, head in zip(road.outputs, road.heads)}
    try:
        op_of(specs, results, interleaved).check_support()
    except ContractError as error:
        if road is ONE:
            raise
        raise road.in_terms_of_caller(error) from error
    table = inputs["freqs_cis"] if "freqs_cis" in inputs else (inputs["cos"], inputs["sin"])
    options = {"interleaved": interleaved, "inverse": inverse}
    return tuple(reference.rotate(inputs[name], table, inputs.get("positions"), **options) for name in road.heads)


def _one_or_both(results: tuple) -> Any:
    return results[0] if len(results) == 1 else results


def _save(ctx: Any, inputs: tuple, result: Any) -> None:
    """The angles are all that the backward reads. Each result has a gradient where its own input wants one."""
    *_, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(*inputs[-_NUM_REST:-2])
    ctx.set_materialize_grads(False)
    results = result if isinstance(result, tuple) else (result,)
    ctx.mark_non_differentiable(*(r for r, needed in zip(results, ctx.needs_input_grad) if not needed))


def _differentiate(ctx: Any, *grads: torch.Tensor | None) -> tuple:
    """The inverse rotation of the gradients that there are, in one launch, by an op that has derivatives itself."""
    given = tuple(grad for grad in grads if grad is not None)
    op = torch.ops.cuteforge.rotary if len(given) == 1 else torch.ops.cuteforge.rotary_qk
    rotated = op.default(*given, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse) if given else ()
    remaining = iter((rotated,) if len(given) == 1 else rotated)
    return (*(None if grad is None else next(remaining) for grad in grads), *[None] * _NUM_REST)


for _name, _sources, _written, _result in (
    ("rotary", "Tensor x", "Tensor(a!) x", "Tensor"),
    ("rotary_qk", "Tensor q, Tensor k", "Tensor(a!) q, Tensor(b!) k", "(Tensor, Tensor)"),
):
    register_op(
        f"{_name}({_sources}, {_REST}) -> {_result}",
        cuda=_cuda,
        cpu=_cpu,
        fake=_fake,
        save=_save,
        backward=_differentiate,
        constants=_TABLES,
    )
    register_inplace_op(
        f"{_name}_({_written}, {_REST}) -> ()",
        functional=_name,
        cuda=_cuda_inplace,
        cpu=_cpu_inplace,
    )
