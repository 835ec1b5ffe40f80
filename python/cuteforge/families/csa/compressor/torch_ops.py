"""The compressor as ops of torch: what autograd, torch.compile, export and checkpointing follow.

On CUDA they launch the kernels as the wrappers do; on a CPU they compute the eager reference in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.families.csa.compressor import reference
from cuteforge.families.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.families.csa.compressor.operands import BACKWARD, FORWARD, schema_of
from cuteforge.families.csa.compressor.road import BACKWARD_ROAD, FORWARD_ROAD, row_count
from cuteforge.op.readable import readable
from cuteforge.op.road import Invocation
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.op.torch_library import register_op

_FORWARD = f"{FORWARD}({schema_of(FORWARD)}, SymInt total_comp, int ratio, int coff) -> Tensor"
_BACKWARD = f"{BACKWARD}({schema_of(BACKWARD)}, int ratio, int coff, bool deterministic) -> (Tensor, Tensor, Tensor)"

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _forward_call(*arguments: Any) -> Invocation:
    """The arguments of the op as a call, checked as by the wrapper."""
    *inputs, total_comp, ratio, coff = arguments
    return FORWARD_ROAD.validate(tuple(inputs), (ratio, None, coff), total_comp)


def _backward_call(*arguments: Any) -> Invocation:
    *inputs, ratio, coff, deterministic = arguments
    return BACKWARD_ROAD.validate(tuple(inputs), (ratio, None, coff, deterministic))


def _forward_fake(*arguments: Any) -> torch.Tensor:
    return FORWARD_ROAD.new_results(_forward_call(*arguments))["out"]


def _backward_fake(*arguments: Any) -> Gradients:
    return tuple(BACKWARD_ROAD.new_results(_backward_call(*arguments)).values())


def _forward_cuda(*arguments: Any) -> torch.Tensor:
    call = _forward_call(*arguments)
    row_count(call.length)  # of fake tensors it may be a symbol
    return FORWARD_ROAD.launch(call)[0]


def _backward_cuda(*arguments: Any) -> Gradients:
    return BACKWARD_ROAD.launch(_backward_call(*arguments))


def _forward_cpu(*arguments: Any) -> torch.Tensor:
    call = _forward_call(*arguments)
    row_count(call.length)
    inputs, results = tuple(map(readable, call.inputs.values())), FORWARD_ROAD.new_results(call)
    ratio, coff, _ = call.options
    _check_as_kernel(CSACompressorForward, (*inputs, *results.values()), ratio, coff)
    return reference.compress_forward(*inputs, call.length, ratio, coff)


def _backward_cpu(*arguments: Any) -> Gradients:
    """Always in one order, whatever `deterministic` says."""
    call = _backward_call(*arguments)
    inputs, results = tuple(map(readable, call.inputs.values())), BACKWARD_ROAD.new_results(call)
    ratio, coff, _ = call.options
    _check_as_kernel(CSACompressorBackward, (*inputs, *results.values()), ratio, coff)
    return tuple(reference.compress_backward(*inputs, ratio, coff))


def _check_as_kernel(op_class: type, tensors: tuple, ratio: int, coff: int) -> None:
    """Refuse on the CPU what the kernels refuse, so that a model meets its errors there too."""
    specs = (TensorSpec(tuple(t.shape), t.dtype) for t in tensors)
    op_class(*specs, ratio, coff).check_support()


def _save(ctx: Any, inputs: tuple, out: torch.Tensor) -> None:
    *tensors, _, ctx.ratio, ctx.coff = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad_out: torch.Tensor) -> tuple:
    """Gradients for kv, score and ape where they are needed, summed in a fixed order; one launch gives all three."""
    op = torch.ops.cuteforge.csa_compressor_backward.default
    grads = op(*ctx.saved_tensors, grad_out, ctx.ratio, ctx.coff, True)
    needed = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad))
    return (*needed, None, None, None, None, None)


register_op(_BACKWARD, cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
register_op(_FORWARD, cuda=_forward_cuda, cpu=_forward_cpu, fake=_forward_fake, save=_save, backward=_differentiate)
