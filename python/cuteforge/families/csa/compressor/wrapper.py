"""One-call compressor: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

import torch

from cuteforge.families.csa.compressor.road import BACKWARD_ROAD, FORWARD_ROAD, MOST_ROWS, read_row_count, row_count
from cuteforge.op.tuple_dict import TupleDict
from cuteforge.runtime.streams import Stream


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
    stream: Stream | None = None,
) -> TupleDict:
    """Gated pooling of a packed token stream; see `CSACompressorForward` for the operation and its numerics.

    Dims: T packed tokens, B segments, N output rows, d head dim.

    Args:
        kv, score: ``(T, coff*d)`` bf16, fp16 or fp32, of one dtype.
        ape: ``(ratio, coff*d)`` fp32.
        cu_seqlens, cu_seqlens_comp: ``(B+1,)`` int32, or int64, which is converted.
        ratio, coff: tokens of a block, 1 to 256, and the blocks that a row pools, 1 or 2.
        head_dim: d; None takes it from kv.
        total_comp: N. None reads ``cu_seqlens_comp[-1]``, which waits for the GPU. More rows than that are padding up
            to a fixed capacity; with fewer the rest is left out.
        stream: where allocation, copies and launch happen, and the backward's. None is torch's current stream on kv's
            device, and the only choice under torch.compile.

    Returns:
        ``TupleDict(out=(N, d))``, dtype of kv. In grad mode it carries a graph for kv, score and ape, once
        differentiable.

    If the kernel cannot read an input's strides or alignment, the input is copied first, on the launch stream. Never
    falls back to another implementation.

    Raises:
        ContractError: the arguments contradict each other; names the argument. Nothing was launched.
        UnsupportedError: a GPU or a ratio that the kernels do not serve.

    Examples:
        >>> import torch
        >>> from cuteforge import csa_compressor_forward_wrapper
        >>> kv, score = torch.randn(2, 25, 2 * 64, device="cuda", dtype=torch.bfloat16)  # segments of 20 and 5 tokens
        >>> ape = torch.randn(4, 2 * 64, device="cuda")
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)
        >>> cu_seqlens_comp = torch.tensor([0, 5, 6], device="cuda", dtype=torch.int32)  # a row for every 4 tokens
        >>> out = csa_compressor_forward_wrapper(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp=6)["out"]
        >>> out.shape
        torch.Size([6, 64])
    """
    inputs, options = (kv, score, ape, cu_seqlens, cu_seqlens_comp), (ratio, head_dim, coff)
    if total_comp is None:
        total_comp = read_row_count(inputs, options, stream)
    elif type(total_comp) is not int or not 0 <= total_comp <= MOST_ROWS:
        total_comp = row_count(total_comp)
    results = FORWARD_ROAD.call(inputs, options, stream, total_comp)
    return TupleDict(out=results[0])


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
    stream: Stream | None = None,
) -> TupleDict:
    """Gradients of the compressor; see `CSACompressorBackward` for the operation and its numerics.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff, stream: as in
            `csa_compressor_forward_wrapper`.
        grad_out: ``(N, d)``, dtype of kv; rows at or past ``cu_seqlens_comp[-1]`` are ignored.
        deterministic: False sums grad_ape with atomics instead of a workspace in a fixed order.

    Returns:
        ``TupleDict(grad_kv=(T, coff*d), grad_score=(T, coff*d), grad_ape=(ratio, coff*d))``; the first two in the dtype
        of kv, the last fp32.

    Raises:
        ContractError, UnsupportedError: as the forward wrapper; also for an operand that requires grad in grad mode,
        since no graph is
            recorded.
        RuntimeError: ``deterministic=False`` while torch asks for deterministic algorithms.

    Examples:
        >>> import torch
        >>> from cuteforge import csa_compressor_backward_wrapper
        >>> kv, score = torch.randn(2, 25, 64, device="cuda", dtype=torch.bfloat16)
        >>> ape, grad_out = torch.zeros(4, 64, device="cuda"), torch.ones(6, 64, device="cuda", dtype=torch.bfloat16)
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)
        >>> cu_seqlens_comp = torch.tensor([0, 5, 6], device="cuda", dtype=torch.int32)
        >>> tensors = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
        >>> grad_kv, grad_score, grad_ape = csa_compressor_backward_wrapper(*tensors, ratio=4, coff=1)
        >>> bool(grad_kv[24].eq(0).all())  # the last token is in no block
        True
    """
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
    results = BACKWARD_ROAD.call(inputs, (ratio, head_dim, coff, deterministic), stream)
    return TupleDict(grad_kv=results[0], grad_score=results[1], grad_ape=results[2])
