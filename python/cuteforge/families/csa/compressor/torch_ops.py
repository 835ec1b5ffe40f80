"""The compressor as ops of torch: what autograd, torch.compile, export and checkpointing follow.

On CUDA they launch the kernels as the wrappers do; on a CPU they compute the eager reference in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.families.csa.compressor import reference
from cuteforge.families.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.families.csa.compressor.operands import BACKWARD, FORWARD, schema_of
from cuteforge.families.csa.compressor.wrapper import (
    check_sizes,
    new_gradients,
    row_count,
    run_backward,
    run_forward,
)
from cuteforge.op.cache import readable
from cuteforge.op.signature import TensorSpec
from cuteforge.op.torch_library import register_op

_FORWARD = f"{FORWARD}({schema_of(FORWARD)}, SymInt total_comp, int ratio, int coff) -> Tensor"
_BACKWARD = f"{BACKWARD}({schema_of(BACKWARD)}, int ratio, int coff, bool deterministic) -> (Tensor, Tensor, Tensor)"

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _forward_fake(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp, ratio: int, coff: int) -> torch.Tensor:
    check_sizes(kv, None, ratio, coff)
    return kv.new_empty((total_comp, kv.shape[1] // coff))


def _backward_fake(
    kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio: int, coff: int, deterministic: bool
) -> Gradients:
    check_sizes(kv, None, ratio, coff)
    return new_gradients(kv, ratio)


def _forward_cuda(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp, ratio: int, coff: int) -> torch.Tensor:
    check_sizes(kv, None, ratio, coff)
    return run_forward((kv, score, ape, cu_seqlens, cu_seqlens_comp), row_count(total_comp), ratio, coff)


def _backward_cuda(
    kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio: int, coff: int, deterministic: bool
) -> Gradients:
    check_sizes(kv, None, ratio, coff)
    return run_backward((kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out), ratio, coff, deterministic)


def _forward_cpu(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp, ratio: int, coff: int) -> torch.Tensor:
    check_sizes(kv, None, ratio, coff)
    inputs = tuple(map(readable, (kv, score, ape, cu_seqlens, cu_seqlens_comp)))
    out = _forward_fake(*inputs, row_count(total_comp), ratio, coff)
    _check_as_kernel(CSACompressorForward, (*inputs, out), ratio, coff)
    return reference.compress_forward(*inputs, total_comp, ratio, coff)


def _backward_cpu(
    kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio: int, coff: int, deterministic: bool
) -> Gradients:
    """Always in one order, whatever `deterministic` says."""
    check_sizes(kv, None, ratio, coff)
    inputs = tuple(map(readable, (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)))
    _check_as_kernel(CSACompressorBackward, (*inputs, *new_gradients(kv, ratio)), ratio, coff)
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
