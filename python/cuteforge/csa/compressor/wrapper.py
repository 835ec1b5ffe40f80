"""One-call compressor: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from cuteforge.api_base import TupleDict
from cuteforge.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.errors import ContractError
from cuteforge.op_cache import dense, run_op
from cuteforge.torch_library import call_op, explicit_stream, is_traced, needs_op, refuse_grad

_NO_CONTEXT = contextlib.nullcontext()
_INTS = (int, torch.SymInt)
_INPUT_NAMES = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out")


def csa_compressor_forward_wrapper(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_comp: torch.Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    total_comp: int | None = None,
    stream: Any = None,
) -> TupleDict:
    """Gated pooling of a packed token stream; see `CSACompressorForward` for the operation and its numerics.

    Dims: T packed tokens, B segments, N output rows, d head dim.

    Args:
        kv, score: ``(T, coff*d)`` bf16, fp16 or fp32, one dtype.
        ape: ``(ratio, coff*d)`` fp32.
        cu_seqlens, cu_seqlens_comp: ``(B+1,)`` offsets; int32, or int64 which is converted.
        ratio, coff: the window: 1 to 256 tokens a block, 1 or 2 blocks.
        head_dim: d; None takes it from kv.
        total_comp: N. None reads ``cu_seqlens_comp[-1]``, which synchronizes. More rows than that is capacity padding, fewer truncates.
        stream: where allocation, copies and launch happen, and the backward's; None is torch's current stream of kv's device, and the
            only choice under torch.compile.

    Returns:
        ``TupleDict(out=(N, d))``, dtype of kv. In grad mode it carries a graph for kv, score and ape, once differentiable.

    An operand whose strides or alignment the kernel does not read is copied first, on the launch stream. Never falls back to another
    implementation.

    Raises:
        ContractError: the arguments contradict each other; names the argument. Nothing was launched.
        UnsupportedError: a GPU or a ratio that the kernels do not serve.
    """
    check_sizes(kv, head_dim, ratio, coff)
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    with _NO_CONTEXT if stream is None else explicit_stream(stream, kv.device):
        if total_comp is None:
            total_comp = _last_offset(cu_seqlens_comp)
        total_comp = row_count(total_comp)
        if needs_op(kv, score, ape):
            operands = dict(zip(_INPUT_NAMES, inputs))
            out = call_op("csa_compressor_forward", operands, (*inputs, total_comp, ratio, coff), stream)
        else:
            out = run_forward(inputs, total_comp, ratio, coff, stream)
    return TupleDict(out=out)


def csa_compressor_backward_wrapper(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_comp: torch.Tensor,
    grad_out: torch.Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    deterministic: bool = True,
    stream: Any = None,
) -> TupleDict:
    """Gradients of the compressor; see `CSACompressorBackward` for the operation and its numerics.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff, stream: as in `csa_compressor_forward_wrapper`.
        grad_out: ``(N, d)``, dtype of kv; rows at or past ``cu_seqlens_comp[-1]`` are ignored.
        deterministic: False sums grad_ape with atomics instead of a workspace in a fixed order.

    Returns:
        ``TupleDict(grad_kv=(T, coff*d), grad_score=(T, coff*d), grad_ape=(ratio, coff*d))``; the first two in the dtype of kv, the last fp32.

    Raises:
        ContractError, UnsupportedError: as the forward wrapper; also for an operand that requires grad in grad mode, since no graph is
            recorded.
        RuntimeError: ``deterministic=False`` while torch asks for deterministic algorithms.
    """
    check_sizes(kv, head_dim, ratio, coff)
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
    with _NO_CONTEXT if stream is None else explicit_stream(stream, kv.device):
        if is_traced(kv):
            refuse_grad(_INPUT_NAMES, inputs, CSACompressorBackward.__name__)
            operands = dict(zip(_INPUT_NAMES, inputs))
            grads = call_op("csa_compressor_backward", operands, (*inputs, ratio, coff, deterministic), stream)
        else:
            grads = run_backward(inputs, ratio, coff, deterministic, stream)
    grad_kv, grad_score, grad_ape = grads
    return TupleDict(grad_kv=grad_kv, grad_score=grad_score, grad_ape=grad_ape)


def new_gradients(kv: torch.Tensor, ratio: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised ``grad_kv, grad_score, grad_ape``."""
    grad_ape = kv.new_empty((ratio, kv.shape[1]), dtype=torch.float32)
    return kv.new_empty(kv.shape), kv.new_empty(kv.shape), grad_ape


def run_forward(inputs: tuple, total_comp: int, ratio: int, coff: int, stream: Any = None) -> torch.Tensor:
    """The forward wrapper on CUDA tensors that nothing follows; `stream` is torch's current one, or None."""
    kv = inputs[0]
    columns = kv.shape[1]
    out = kv.new_empty((total_comp, columns // coff))

    def make(*given: torch.Tensor) -> CSACompressorForward:
        return CSACompressorForward(*given, out, ratio, coff)

    def launch(op: CSACompressorForward, given: tuple) -> None:
        op.execute(*given, out, stream=stream)

    key = ("csa forward", kv.dtype, columns, ratio, coff, kv.get_device())
    run_op(key, make, inputs, launch, readable)
    return out


def run_backward(
    inputs: tuple, ratio: int, coff: int, deterministic: bool, stream: Any = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward wrapper, as `run_forward`."""
    kv = inputs[0]
    grads = new_gradients(kv, ratio)

    def make(*given: torch.Tensor) -> CSACompressorBackward:
        return CSACompressorBackward(*given, *grads, ratio, coff, deterministic)

    def launch(op: CSACompressorBackward, given: tuple) -> None:
        needed = op.workspace_bytes_on(kv.get_device())
        workspace = kv.new_empty(needed, dtype=torch.uint8) if needed else None
        op.execute(*given, *grads, workspace=workspace, stream=stream)

    key = ("csa backward", kv.dtype, kv.shape[1], ratio, coff, kv.get_device(), bool(deterministic))
    run_op(key, make, inputs, launch, readable)
    return grads


def readable(tensor: Any) -> Any:
    """`tensor`, or a copy that the kernels read: offsets as int32, rows contiguous and aligned."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64:
        return tensor.to(torch.int32)
    return dense(tensor)


def check_sizes(kv: Any, head_dim: int | None, ratio: int, coff: int) -> None:
    """What is needed to allocate the results; the op checks everything else."""
    if not isinstance(kv, torch.Tensor) or kv.dim() != 2:
        got = f"shape {tuple(kv.shape)}" if isinstance(kv, torch.Tensor) else type(kv).__name__
        raise ContractError(f"kv: wanted a tensor of shape (T, coff*d), got {got}")
    if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 1:
        raise ContractError(f"ratio: wanted an int of 1 or more, got {ratio!r}")
    if coff not in (1, 2):
        raise ContractError(f"coff: wanted 1 or 2, got {coff!r}")
    if kv.shape[1] % coff or (head_dim is not None and kv.shape[1] != coff * head_dim):
        wanted = f"coff*d with coff = {coff}" + ("" if head_dim is None else f" and d = {head_dim}")
        raise ContractError(f"kv: wanted {wanted} columns, got {kv.shape[1]}")


def _last_offset(cu_seqlens_comp: Any) -> int:
    if not isinstance(cu_seqlens_comp, torch.Tensor) or cu_seqlens_comp.dim() != 1 or not len(cu_seqlens_comp):
        raise ContractError("cu_seqlens_comp: wanted a tensor of shape (B+1), to read total_comp from")
    count = int(cu_seqlens_comp[-1])
    if is_traced(cu_seqlens_comp):
        torch._check(count >= 0, lambda: "cu_seqlens_comp: wanted a last offset of 0 or more")
    return count


def row_count(total_comp: Any) -> int:
    if isinstance(total_comp, bool) or not isinstance(total_comp, _INTS) or total_comp < 0:
        raise ContractError(f"total_comp: wanted an int of 0 or more, got {total_comp!r}")
    return total_comp
