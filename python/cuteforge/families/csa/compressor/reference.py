"""Gated pooling of a packed token stream in eager torch.

The oracle of tests and benchmarks and the fallback where no kernel serves. Runs on CPU and CUDA; no loop over segments.

Dims: ``T`` packed tokens, ``B`` segments, ``N`` output rows, ``d`` head dim, ``K = coff * ratio`` window positions.
Segment ``s`` owns tokens ``cu_seqlens[s] .. cu_seqlens[s + 1]`` and output rows from ``cu_seqlens_comp[s]`` on. Block
``i`` starts at token ``t0 = cu_seqlens[s] + i * ratio`` and is one output row. Window position ``k`` of column ``j``:

* coff 1: token ``t0 + k``, column ``j``, ape row ``k``;
* coff 2, ``k < ratio``: token ``t0 - ratio + k``, column ``j``, ape row ``k``; weight 0 in a segment's first block;
* coff 2, ``k >= ratio``: token ``t0 + k - ratio``, column ``d + j``, ape row ``k - ratio``.

``out = sum_k v_k * softmax_k(score + ape)``. A row that is no block of its segment (capacity padding, damaged offsets)
pools tokens ``0 .. ratio - 1`` as a first block would, and has no gradient. In fp32 the softmax and its backward are
torch's own, so on CUDA this is the eager autograd that the kernels equal bitwise for ratio <= 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from cuteforge.errors import ContractError

# Window elements pooled at once: about eight intermediates of 128 MiB each in fp32, 256 MiB in fp64.
_CHUNK_ELEMENTS = 1 << 25


class Blocks(NamedTuple):
    """The tokens each output row pools; all ``(N,)``.

    ``row``: the output row (int64). ``start``: its first token (int64). ``first``: has no preceding block (bool).
    ``real``: is a block of its segment (bool).
    """

    row: torch.Tensor
    start: torch.Tensor
    first: torch.Tensor
    real: torch.Tensor

    def only_real(self) -> Blocks:
        return Blocks(*(t[self.real] for t in self))

    def chunks(self, window_elements: int) -> Iterator[Blocks]:
        """Runs of rows whose windows of ``window_elements = K * d`` fit the chunk; at least one, possibly empty."""
        rows = max(1, _CHUNK_ELEMENTS // max(1, window_elements))
        return (Blocks(*part) for part in zip(*(t.split(rows) for t in self), strict=True))


class CompressorGrads(NamedTuple):
    """``grad_kv``, ``grad_score``: as kv. ``grad_ape``: as ape."""

    grad_kv: torch.Tensor
    grad_score: torch.Tensor
    grad_ape: torch.Tensor


def build_cu_seqlens_comp(cu_seqlens: torch.Tensor, ratio: int) -> torch.Tensor:
    """Output-row offsets ``(B + 1,)`` int32 of segments ``cu_seqlens (B + 1,)``: ``len_s // ratio`` rows each.

    Runs on the device of ``cu_seqlens`` without a sync.
    """
    blocks = cu_seqlens.diff().clamp(min=0) // ratio
    return torch.nn.functional.pad(blocks.cumsum(0), (1, 0)).to(torch.int32)


def locate_blocks(
    cu_seqlens: torch.Tensor, cu_seqlens_comp: torch.Tensor, total_comp: int, num_tokens: int, ratio: int
) -> Blocks:
    """Where each of ``total_comp`` output rows reads.

    A row belongs to the last segment with ``cu_seqlens_comp[s] <= row < cu_seqlens_comp[s + 1]``. It is real if its
    block number is below ``len_s // ratio``, the segment starts at 0 or later and the block ends inside the tokens;
    else it reads as a first block at 0.
    """
    # One more, empty segment: where rows past the last block land, and what there is when B = 0.
    cu, cuc = (torch.cat((t, t[-1:])).long() for t in (cu_seqlens, cu_seqlens_comp))
    row = torch.arange(total_comp, device=cu.device)
    segment = (torch.searchsorted(cuc, row, right=True) - 1).clamp(0, cu.numel() - 2)
    block = row - cuc[segment]
    length = cu[segment + 1] - cu[segment]
    start = cu[segment] + block * ratio
    inside = (cu[segment] >= 0) & (start + ratio <= num_tokens)
    real = (block >= 0) & (row < cuc[segment + 1]) & (block < length // ratio) & inside
    return Blocks(row, torch.where(real, start, 0), ~real | (block == 0), real)


def compress_forward(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_comp: torch.Tensor,
    total_comp: int | None = None,
    ratio: int = 4,
    coff: int = 2,
    compute_dtype: torch.dtype | None = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Pooled rows ``out (total_comp, d)`` of ``kv, score (T, coff * d)`` and ``ape (ratio, coff * d)``.

    Args:
        cu_seqlens, cu_seqlens_comp: ``(B + 1,)`` int32 or int64 on the device of ``kv``.
        total_comp: output rows; may exceed or truncate ``cu_seqlens_comp[-1]``, which None reads (a sync).
        compute_dtype: arithmetic; None is the dtype of ``kv``.
        out_dtype: None is the dtype of ``kv``.

    Differentiable in ``kv``, ``score`` and ``ape``.

    Raises:
        ContractError: ``total_comp > 0`` with fewer than ``ratio`` tokens, whose rows have nothing to pool.
    """
    total_comp = int(cu_seqlens_comp[-1]) if total_comp is None else total_comp
    if total_comp > 0 and kv.shape[0] < ratio:
        raise ContractError(f"kv: wanted at least ratio = {ratio} tokens for {total_comp} rows, got {kv.shape[0]}")
    blocks = locate_blocks(cu_seqlens, cu_seqlens_comp, total_comp, kv.shape[0], ratio)
    dtype = compute_dtype or kv.dtype
    rows = [_pool(kv, score, ape, part, coff, dtype) for part in blocks.chunks(ape.numel())]
    return torch.cat(rows).to(out_dtype or kv.dtype)


def compress_backward(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_comp: torch.Tensor,
    grad_out: torch.Tensor,
    ratio: int = 4,
    coff: int = 2,
    compute_dtype: torch.dtype | None = torch.float32,
    grad_dtype: torch.dtype | None = None,
) -> CompressorGrads:
    """Gradients of :func:`compress_forward` for ``grad_out (N, d)``, by formula.

    With ``dp = g * v``, ``t = dp * p``, ``S = sum_k t``: ``grad_score = t - p * S``, ``grad_kv = g * p``, and
    ``grad_ape`` sums ``grad_score`` over the rows in ``compute_dtype``. Positions no row consumes get exact 0;
    gradients of rows that are no block are ignored, NaN included.

    Args:
        compute_dtype: arithmetic; None is the dtype of ``kv``.
        grad_dtype: dtype of all three results; None is that of ``kv`` and, for ``grad_ape``, of ``ape``.
    """
    dtype = compute_dtype or kv.dtype
    grad_kv = torch.zeros(kv.shape, dtype=grad_dtype or kv.dtype, device=kv.device)
    grad_score = torch.zeros_like(grad_kv)
    grad_ape = torch.zeros(ape.shape, dtype=dtype, device=ape.device)
    blocks = locate_blocks(cu_seqlens, cu_seqlens_comp, grad_out.shape[0], kv.shape[0], ratio)
    for part in blocks.only_real().chunks(ape.numel()):
        values, probs = _window(kv, score, ape, part, coff, dtype)
        grad = grad_out[part.row].to(dtype)
        # torch's own softmax backward, so that fp32 on CUDA has the arithmetic order of eager autograd to the bit.
        grad_logits = torch.ops.aten._softmax_backward_data(grad * values, probs, 0, dtype)
        _store_window(grad_kv, grad * probs, part, ratio, coff)
        _store_window(grad_score, grad_logits, part, ratio, coff)
        grad_ape += _sum_rows(grad_logits, part, ratio, coff)
    return CompressorGrads(grad_kv, grad_score, grad_ape.to(grad_dtype or ape.dtype))


def compress_backward_autograd(
    kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio=4, coff=2, compute_dtype=torch.float32
) -> CompressorGrads:
    """The same gradients by torch autograd, in one piece: keeps every intermediate of every window alive."""
    leaves = [t.detach().requires_grad_() for t in (kv, score, ape)]
    blocks = locate_blocks(cu_seqlens, cu_seqlens_comp, grad_out.shape[0], kv.shape[0], ratio)
    blocks = blocks.only_real()
    with torch.enable_grad():
        out = _pool(*leaves, blocks, coff, compute_dtype or kv.dtype)
    return CompressorGrads(*torch.autograd.grad(out, leaves, grad_out[blocks.row].to(out.dtype)))


def _pool(kv, score, ape, blocks: Blocks, coff: int, dtype: torch.dtype) -> torch.Tensor:
    values, probs = _window(kv, score, ape, blocks, coff, dtype)
    return (values * probs).sum(0)


def _window(kv, score, ape, blocks: Blocks, coff: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and softmax weights, both ``(K, rows, d)``: window outermost, where torch reduces it serially."""
    d = ape.shape[1] // coff
    token = _tokens(blocks, ape.shape[0])
    current = slice((coff - 1) * d, coff * d)
    values = kv[:, current][token].to(dtype)
    logits = score[:, current][token].to(dtype) + ape[:, None, current].to(dtype)
    if coff == 2:
        absent = blocks.first[:, None]
        token = torch.where(blocks.first, token, token - ape.shape[0])  # an absent block's tokens only have to exist
        previous = score[:, :d][token].to(dtype) + ape[:, None, :d].to(dtype)
        values = torch.cat((kv[:, :d][token].to(dtype).masked_fill(absent, 0), values))
        logits = torch.cat((previous.masked_fill(absent, -torch.inf), logits))
    return values, torch.softmax(logits, 0)


def _store_window(grad: torch.Tensor, window: torch.Tensor, blocks: Blocks, ratio: int, coff: int) -> None:
    """Write ``window (K, rows, d)`` to the token positions it was gathered from; each has one consumer."""
    d, token = window.shape[2], _tokens(blocks, ratio)
    grad[:, (coff - 1) * d : coff * d][token] = window[(coff - 1) * ratio :].to(grad.dtype)
    if coff == 2:
        later = ~blocks.first
        grad[:, :d][token[:, later] - ratio] = window[:ratio, later].to(grad.dtype)


def _sum_rows(window: torch.Tensor, blocks: Blocks, ratio: int, coff: int) -> torch.Tensor:
    """``window (K, rows, d)`` summed over rows to ``(ratio, coff * d)``; absent blocks add nothing, NaN included."""
    current = window[(coff - 1) * ratio :].sum(1)
    if coff == 1:
        return current
    return torch.cat((window[:ratio].masked_fill(blocks.first[:, None], 0).sum(1), current), 1)


def _tokens(blocks: Blocks, ratio: int) -> torch.Tensor:
    return blocks.start + torch.arange(ratio, device=blocks.start.device)[:, None]
