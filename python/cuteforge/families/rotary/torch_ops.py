"""The rotary embedding as ops of torch: what autograd, torch.compile, export and checkpointing follow.

On CUDA they launch the kernel as the wrappers do; on a CPU they compute the eager reference in fp32. An op takes one tensor of heads or
q and k, and has a twin that writes over them.
"""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.errors import ContractError
from cuteforge.families.rotary import reference
from cuteforge.families.rotary.api import RotaryEmbedding
from cuteforge.families.rotary.operands import schema_of_angles
from cuteforge.families.rotary.wrapper import (
    SOURCE_NAMES,
    Angles,
    Heads,
    angles_of,
    check_heads,
    class_arguments,
    in_terms_of_q,
    new_results,
    run_rotary,
)
from cuteforge.op.signature import TensorSpec
from cuteforge.op.torch_library import register_inplace_op, register_op

_TABLES = ("freqs_cis", "cos", "sin")
_REST = f"{schema_of_angles()}, bool interleaved, bool inverse"
_NUM_REST = 6


def _split(arguments: tuple) -> tuple[Heads, Angles, bool, bool]:
    """Arguments of an op: one tensor of heads or two, where their angles are, the flags. Checked as by the wrappers."""
    *sources, freqs_cis, cos, sin, positions, interleaved, inverse = arguments
    for name, x in zip(SOURCE_NAMES[len(sources)], sources):
        check_heads(x, name)
    return tuple(sources), angles_of(freqs_cis, cos, sin, positions), interleaved, inverse


def _fake(*arguments: Any) -> Any:
    sources, *_ = _split(arguments)
    return _one_or_both(new_results(sources))


def _cuda(*arguments: Any) -> Any:
    sources, angles, interleaved, inverse = _split(arguments)
    results = new_results(sources)
    run_rotary(sources, results, angles, interleaved, inverse)
    return _one_or_both(results)


def _cuda_inplace(*arguments: Any) -> None:
    sources, angles, interleaved, inverse = _split(arguments)
    run_rotary(sources, sources, angles, interleaved, inverse)


def _cpu(*arguments: Any) -> Any:
    return _one_or_both(_rotate_on_cpu(*_split(arguments)))


def _cpu_inplace(*arguments: Any) -> None:
    sources, *rest = _split(arguments)
    for x, result in zip(sources, _rotate_on_cpu(sources, *rest)):
        x.copy_(result)


def _rotate_on_cpu(sources: Heads, angles: Angles, interleaved: bool, inverse: bool) -> Heads:
    """The reference, after the checks of the kernel, so that a model meets its errors there too."""
    specs = tuple(TensorSpec(tuple(t.shape), t.dtype) for t in (*sources, *angles))
    positional, keys = class_arguments(specs, specs[: len(sources)])
    try:
        RotaryEmbedding(*positional, **keys, interleaved=interleaved).check_support()
    except ContractError as error:
        if len(sources) == 1:
            raise
        raise in_terms_of_q(error) from error
    table, positions = (angles[0], None) if len(angles) == 1 else (angles[:2], angles[2])
    options = {"interleaved": interleaved, "inverse": inverse}
    return tuple(reference.rotate(x, table, positions, **options) for x in sources)


def _one_or_both(results: Heads) -> Any:
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
