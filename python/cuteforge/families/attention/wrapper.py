"""One-call attention: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.families.attention.api import GQADecode, GQAPrefill, PagedGQADecode, PagedGQAPrefill
from cuteforge.families.attention.options import Window
from cuteforge.families.attention.road import ROADS, AttentionRoad
from cuteforge.op.tuple_dict import TupleDict
from cuteforge.runtime.streams import Stream

DECODE_ROAD, PREFILL_ROAD = ROADS[GQADecode], ROADS[GQAPrefill]
PAGED_DECODE_ROAD, PAGED_PREFILL_ROAD = ROADS[PagedGQADecode], ROADS[PagedGQAPrefill]


def gqa_decode_wrapper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seqlens_k: torch.Tensor | None = None, mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, causal: bool = False, softmax_scale: float | None = None, window: Window | None = None,
    softcap: float | None = None, num_splits: int | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
    stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of a few query tokens; see `GQADecode` for the operation, shapes and numerics.

    Args:
        q, k, v: ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``.
        seqlens_k: int32, or int64, which is converted.
        sinks: fp32.
        return_lse: also return the log-sum-exp.
        out: where to write the result; None allocates it.
        stream: where allocation, copies and launch happen; None is torch's current stream of q's device, and the only choice under torch.compile.

    Returns:
        ``TupleDict(out=(B, L, Hq, Dv))``, with ``lse=(B, Hq, L)`` fp32 if asked for.

    An input whose strides or alignment the kernel does not read is copied first, on the launch stream. Never falls back to another implementation.

    Raises:
        ContractError: the arguments contradict each other, or one requires grad in grad mode; names the argument. Nothing was launched.
        UnsupportedError: a head dim or a GPU that the kernel does not serve.
    """
    tensors = (q, k, v, seqlens_k, mask, sinks, out)
    options = (causal, window, softcap, num_splits, softmax_scale, return_lse)
    return _attend(DECODE_ROAD, tensors, options, stream)


def gqa_prefill_wrapper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None, mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None, return_lse: bool = False,
    out: torch.Tensor | None = None, stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of many query tokens, dense or packed; see `GQAPrefill` for the operation, and `gqa_decode_wrapper` for what is not said here.

    Returns:
        ``TupleDict(out=(B, L, Hq, Dv))`` or ``(T, Hq, Dv)``, with ``lse=(B, Hq, L)`` or ``(Hq, T)`` if asked for.
    """
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqlens_k, mask, sinks, out)
    options = (causal, window, softcap, None, softmax_scale, return_lse)
    return _attend(PREFILL_ROAD, tensors, options, stream)


def paged_gqa_decode_wrapper(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, *, seqlens_k: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, page_table_rows: torch.Tensor | None = None, new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None, mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None, num_splits: int | None = None,
    return_lse: bool = False, out: torch.Tensor | None = None, stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of a few query tokens over pages; see `PagedGQADecode` for the operation, and `gqa_decode_wrapper` for what is not said here.

    With `new_k` and `new_v` the pools are written, and refused instead of copied where the kernel cannot.

    Returns:
        ``TupleDict(out)``, shape of q with Dv for D, with ``lse=(B, Hq, L)`` if asked for.
    """
    tensors = (q, k_cache, v_cache, page_table, seqlens_k, kv_indptr, page_table_rows, new_k, new_v, mask, sinks, out)
    options = (causal, window, softcap, num_splits, softmax_scale, return_lse)
    return _attend(PAGED_DECODE_ROAD, tensors, options, stream)


def paged_gqa_prefill_wrapper(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, *,
    seqlens_k: torch.Tensor | None = None, kv_indptr: torch.Tensor | None = None, page_table_rows: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    window: Window | None = None, softcap: float | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
    stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of packed query tokens over pages; see `PagedGQAPrefill` for the operation, and `gqa_decode_wrapper` for what is not said here.

    Returns:
        ``TupleDict(out=(T, Hq, Dv))``, with ``lse=(Hq, T)`` if asked for.
    """
    tensors = (q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, kv_indptr, page_table_rows, mask, sinks, out)
    options = (causal, window, softcap, None, softmax_scale, return_lse)
    return _attend(PAGED_PREFILL_ROAD, tensors, options, stream)


def attn_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None
) -> torch.Tensor:  # fmt: skip
    """``gqa_decode_wrapper(…)["out"]``. Never another implementation.

    Raises:
        RuntimeError: the kernel does not run here (UnsupportedError).
    """
    return gqa_decode_wrapper(q, k, v, mask=mask, causal=is_causal, softmax_scale=scale)["out"]


def attn_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None
) -> torch.Tensor:  # fmt: skip
    """``gqa_prefill_wrapper(…)["out"]`` of dense tensors; as `attn_decode`."""
    return gqa_prefill_wrapper(q, k, v, mask=mask, causal=is_causal, softmax_scale=scale)["out"]


def attn_paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seqlens_k: torch.Tensor,
    mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_gqa_decode_wrapper(…)["out"]``; as `attn_decode`."""
    config = {"seqlens_k": seqlens_k, "mask": mask, "causal": is_causal, "softmax_scale": scale}
    return paged_gqa_decode_wrapper(q, k_cache, v_cache, page_table, **config)["out"]


def attn_paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seqlens_k: torch.Tensor,
    mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_gqa_prefill_wrapper(…)["out"]``; as `attn_decode`."""
    config = {"seqlens_k": seqlens_k, "mask": mask, "causal": is_causal, "softmax_scale": scale}
    return paged_gqa_prefill_wrapper(q, k_cache, v_cache, page_table, cu_seqlens_q, **config)["out"]


def _attend(road: AttentionRoad, tensors: tuple, options: tuple, stream: Any) -> TupleDict:
    results = road.call(tensors, options, stream)
    return TupleDict(out=results[0], lse=results[1]) if options[-1] else TupleDict(out=results[0])
