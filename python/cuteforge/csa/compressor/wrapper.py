"""One-call compressor: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from cuteforge.api_base import TupleDict
from cuteforge.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.errors import ContractError
from cuteforge.runtime import env
from cuteforge.runtime.lru import LRU
from cuteforge.runtime.streams import stream_context

_ops: LRU[CSACompressorForward | CSACompressorBackward] = LRU(env.cache_size)
_NO_CONTEXT = contextlib.nullcontext()


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
        stream: where allocation, copies and launch happen; None is torch's current stream of kv's device.

    Returns:
        ``TupleDict(out=(N, d))``, dtype of kv.

    An operand whose strides or alignment the kernel does not read is copied first, on the launch stream. Never falls back to another
    implementation.

    Raises:
        ContractError: the arguments contradict each other; names the argument. Nothing was launched.
        UnsupportedError: a GPU or a ratio that the kernels do not serve.
    """
    _check_sizes(kv, head_dim, ratio, coff)
    with _NO_CONTEXT if stream is None else stream_context(stream, kv.device):
        if total_comp is None:
            total_comp = _last_offset(cu_seqlens_comp)
        out = kv.new_empty((_row_count(total_comp), kv.shape[1] // coff))
        key = ("forward", kv.dtype, kv.shape[1], ratio, coff, kv.get_device())
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
        _execute(key, CSACompressorForward, inputs, (out,), (ratio, coff), stream)
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
        ContractError, UnsupportedError: as the forward wrapper.
        RuntimeError: ``deterministic=False`` while torch asks for deterministic algorithms.
    """
    _check_sizes(kv, head_dim, ratio, coff)
    with _NO_CONTEXT if stream is None else stream_context(stream, kv.device):
        grad_kv, grad_score = kv.new_empty(kv.shape), kv.new_empty(kv.shape)
        grad_ape = kv.new_empty((ratio, kv.shape[1]), dtype=torch.float32)
        key = ("backward", kv.dtype, kv.shape[1], ratio, coff, kv.get_device(), bool(deterministic))
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
        _execute(
            key, CSACompressorBackward, inputs, (grad_kv, grad_score, grad_ape), (ratio, coff, deterministic), stream
        )
    return TupleDict(grad_kv=grad_kv, grad_score=grad_score, grad_ape=grad_ape)


def _execute(key, op_class, inputs: tuple, outputs: tuple, config: tuple, stream: Any) -> None:
    """Launch the compiled op of `key`. Operands are looked at closely only when the op refuses them: then copies are tried."""
    op = _ops.get(key)
    try:
        if op is None:
            op = _ops.put(key, op_class(*inputs, *outputs, *config).compile())
        _launch(op, inputs, outputs, stream)
    except ContractError:
        copies = tuple(map(_readable, inputs))
        if all(copy is given for copy, given in zip(copies, inputs)):
            raise
        op = _ops.get(key) or _ops.put(key, op_class(*copies, *outputs, *config).compile())
        _launch(op, copies, outputs, stream)


def _launch(op, inputs: tuple, outputs: tuple, stream: Any) -> None:
    needed = op.workspace_bytes_on(inputs[0].get_device())
    if needed:
        op.execute(*inputs, *outputs, workspace=inputs[0].new_empty(needed, dtype=torch.uint8), stream=stream)
    else:
        op.execute(*inputs, *outputs, stream=stream)


def _readable(tensor: Any) -> Any:
    """`tensor`, or a copy that the kernels read: offsets as int32, rows contiguous and aligned."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dtype == torch.int64:
        return tensor.to(torch.int32)
    is_dense = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    return tensor if is_dense else tensor.clone(memory_format=torch.contiguous_format)


def _check_sizes(kv: Any, head_dim: int | None, ratio: int, coff: int) -> None:
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
    return int(cu_seqlens_comp[-1])


def _row_count(total_comp: Any) -> int:
    if isinstance(total_comp, bool) or not isinstance(total_comp, int) or total_comp < 0:
        raise ContractError(f"total_comp: wanted an int of 0 or more, got {total_comp!r}")
    return total_comp
