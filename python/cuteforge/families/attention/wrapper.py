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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seqlens_k: torch.Tensor | None = None, mask: torch.Tensor |
    None = None,
    bias: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    num_splits: int | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
    stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of a few query tokens over dense keys and values; see `GQADecode` for the operation, arguments and
    numerics.

    Args:
        q, k, v: ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``, bf16 or fp16 on one GPU.
        seqlens_k: ``(B,)`` int32, or int64, which is converted.
        sinks: ``(Hq,)`` fp32.
        return_lse: also return the log-sum-exp.
        out: where to write the result; it overlaps no input. None allocates it.
        stream: where allocation, copies and launch happen. None is torch's current stream on q's device, and the only
            choice under torch.compile.

    Returns:
        ``TupleDict(out=(B, L, Hq, Dv))`` in the dtype of q, with ``lse=(B, Hq, L)`` fp32 if asked for.

    If the kernel cannot read an input's strides or alignment, the input is copied first, on the launch stream. Never
    falls back to another implementation.

    Raises:
        ContractError: the arguments contradict each other, or one requires grad in grad mode; names the argument.
            Nothing was launched.
        UnsupportedError: a head dim or a GPU that the kernel does not serve.

    Examples:
        >>> import torch
        >>> from cuteforge import gqa_decode_wrapper
        >>> q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> seqlens_k = torch.tensor([512, 1], device="cuda", dtype=torch.int32)
        >>> out, lse = gqa_decode_wrapper(q, k, v, seqlens_k=seqlens_k, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 32, 128]), torch.Size([2, 32, 1]))
        >>> torch.equal(out[1, 0], v[1, 0].repeat_interleave(4, dim=0))  # request 1 has one key
        True
    """
    tensors = (q, k, v, seqlens_k, mask, bias, sinks, out)
    options = (causal, window, softcap, num_splits, softmax_scale, return_lse)
    return _attend(DECODE_ROAD, tensors, options, stream)


def gqa_prefill_wrapper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k:
    torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None, return_lse: bool =
    False,
    out: torch.Tensor | None = None, stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of many query tokens, dense or packed.

    See `GQAPrefill` for the operation, and `gqa_decode_wrapper` for `return_lse`, `out`, `stream`, copies and errors.
    Index tensors may be int64, which is converted.

    Returns:
        ``TupleDict(out=(B, L, Hq, Dv))``, or ``(T, Hq, Dv)`` if packed, with ``lse=(B, Hq, L)`` or ``(Hq, T)`` if asked
        for.

    Examples:
        >>> import torch
        >>> from cuteforge import gqa_prefill_wrapper
        >>> q = torch.randn(25, 32, 128, device="cuda", dtype=torch.bfloat16)  # prompts of 20 and 5 tokens, packed
        >>> k, v = torch.randn(2, 25, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)
        >>> packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        >>> out = gqa_prefill_wrapper(q, k, v, **packed, causal=True, window=(8, 0))["out"]
        >>> out.shape
        torch.Size([25, 32, 128])
        >>> torch.equal(out[20], v[20].repeat_interleave(4, dim=0))  # the first query of request 1 sees one key
        True
    """
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqlens_k, mask, bias, sinks, out)
    options = (causal, window, softcap, None, softmax_scale, return_lse)
    return _attend(PREFILL_ROAD, tensors, options, stream)


def paged_gqa_decode_wrapper(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, *, seqlens_k: torch.Tensor
    | None = None,
    kv_indptr: torch.Tensor | None = None, page_table_rows: torch.Tensor | None = None, new_k: torch.Tensor | None =
    None,
    new_v: torch.Tensor | None = None, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None, num_splits: int |
    None = None,
    return_lse: bool = False, out: torch.Tensor | None = None, stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of a few query tokens over pages.

    See `PagedGQADecode` for the operation, and `gqa_decode_wrapper` for `return_lse`, `out`, `stream`, copies and
    errors. Index tensors may be int64, which is converted. With `new_k` and `new_v` the call writes the pools. They are
    then never copied: pools whose layout the kernel does not take are refused by name.

    Returns:
        ``TupleDict(out)``, of q's shape with Dv in place of D, with ``lse=(B, Hq, L)`` if asked for.

    Examples:
        >>> import torch
        >>> from cuteforge import paged_gqa_decode_wrapper
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> seqlens_k = torch.tensor([20, 5], device="cuda", dtype=torch.int32)  # the new tokens included
        >>> q = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> new = dict(zip(("new_k", "new_v"), torch.randn(2, 2, 8, 128, device="cuda", dtype=torch.bfloat16)))
        >>> out = paged_gqa_decode_wrapper(q, k_cache, v_cache, page_table, seqlens_k=seqlens_k, **new)["out"]
        >>> torch.equal(k_cache[7, 3], new["new_k"][0])  # token 19 of request 0 is stored: page 7, slot 3
        True
    """
    tensors = (
        q,
        k_cache,
        v_cache,
        page_table,
        seqlens_k,
        kv_indptr,
        page_table_rows,
        new_k,
        new_v,
        mask,
        bias,
        sinks,
        out,
    )
    options = (causal, window, softcap, num_splits, softmax_scale, return_lse)
    return _attend(PAGED_DECODE_ROAD, tensors, options, stream)


def paged_gqa_prefill_wrapper(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    *,
    seqlens_k: torch.Tensor | None = None, kv_indptr: torch.Tensor | None = None, page_table_rows: torch.Tensor | None =
    None,
    mask: torch.Tensor | None = None, bias: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    causal: bool = False, softmax_scale: float | None = None,
    window: Window | None = None, softcap: float | None = None, return_lse: bool = False, out: torch.Tensor | None =
    None,
    stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of packed query tokens over pages.

    See `PagedGQAPrefill` for the operation, and `gqa_decode_wrapper` for `return_lse`, `out`, `stream`, copies and
    errors. Index tensors may be int64, which is converted.

    Returns:
        ``TupleDict(out=(T, Hq, Dv))``, with ``lse=(Hq, T)`` if asked for.

    Examples:
        >>> import torch
        >>> from cuteforge import paged_gqa_prefill_wrapper
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)  # prompts of 20 and 5 tokens
        >>> q, seqlens_k = torch.randn(25, 32, 128, device="cuda", dtype=torch.bfloat16), cu_seqlens.diff()
        >>> options = {"seqlens_k": seqlens_k, "causal": True, "return_lse": True}
        >>> out, lse = paged_gqa_prefill_wrapper(q, k_cache, v_cache, page_table, cu_seqlens, **options)
        >>> out.shape, lse.shape
        (torch.Size([25, 32, 128]), torch.Size([32, 25]))
    """
    tensors = (
        q,
        k_cache,
        v_cache,
        page_table,
        cu_seqlens_q,
        seqlens_k,
        kv_indptr,
        page_table_rows,
        mask,
        bias,
        sinks,
        out,
    )
    options = (causal, window, softcap, None, softmax_scale, return_lse)
    return _attend(PAGED_PREFILL_ROAD, tensors, options, stream)


def attn_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False, *,
    scale: float | None = None
) -> torch.Tensor:  # fmt: skip
    """``gqa_decode_wrapper(...)["out"]`` under the argument names that model code uses. Never another implementation.

    Args:
        q, k, v: ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``, bf16 or fp16, with L from 1 to 16.
        mask: bool, True keeps a score; shapes as in `GQADecode`.
        is_causal: as `causal` in `GQADecode`.
        scale: of the scores; None is ``D**-0.5``.

    Returns:
        ``(B, L, Hq, Dv)``, dtype of q.

    Raises:
        ContractError: the arguments contradict each other; names the argument as the wrapper does.
        RuntimeError: the kernel does not run here (UnsupportedError).

    Examples:
        >>> import torch
        >>> from cuteforge import attn_decode
        >>> q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> mask = torch.arange(512, device="cuda") < torch.tensor([[512], [40]], device="cuda")  # (B, S)
        >>> attn_decode(q, k, v, mask).shape
        torch.Size([2, 1, 32, 128])
    """
    return gqa_decode_wrapper(q, k, v, mask=mask, causal=is_causal, softmax_scale=scale)["out"]


def attn_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False, *,
    scale: float | None = None
) -> torch.Tensor:  # fmt: skip
    """``gqa_prefill_wrapper(...)["out"]`` of dense tensors; arguments, result and errors as `attn_decode`, with any L.

    Examples:
        >>> import torch
        >>> from cuteforge import attn_prefill
        >>> q = torch.randn(2, 64, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> attn_prefill(q, k, v, is_causal=True).shape
        torch.Size([2, 64, 32, 128])
    """
    return gqa_prefill_wrapper(q, k, v, mask=mask, causal=is_causal, softmax_scale=scale)["out"]


def attn_paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seqlens_k: torch.Tensor,
    mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_gqa_decode_wrapper(...)["out"]``; see `PagedGQADecode` for the shapes, and `attn_decode` for the rest.

    Examples:
        >>> import torch
        >>> from cuteforge import attn_paged_decode
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> seqlens_k = torch.tensor([20, 5], device="cuda", dtype=torch.int32)
        >>> q = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> attn_paged_decode(q, k_cache, v_cache, page_table, seqlens_k).shape
        torch.Size([2, 32, 128])
    """
    config = {"seqlens_k": seqlens_k, "mask": mask, "causal": is_causal, "softmax_scale": scale}
    return paged_gqa_decode_wrapper(q, k_cache, v_cache, page_table, **config)["out"]


def attn_paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_gqa_prefill_wrapper(...)["out"]``; see `PagedGQAPrefill` for the shapes, and `attn_decode` for the rest.

    Examples:
        >>> import torch
        >>> from cuteforge import attn_paged_prefill
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> cu_seqlens_q = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)  # prompts of 20 and 5 tokens
        >>> q, lens = torch.randn(25, 32, 128, device="cuda", dtype=torch.bfloat16), cu_seqlens_q.diff()
        >>> attn_paged_prefill(q, k_cache, v_cache, page_table, cu_seqlens_q, lens, is_causal=True).shape
        torch.Size([25, 32, 128])
    """
    config = {"seqlens_k": seqlens_k, "mask": mask, "causal": is_causal, "softmax_scale": scale}
    return paged_gqa_prefill_wrapper(q, k_cache, v_cache, page_table, cu_seqlens_q, **config)["out"]


def _attend(road: AttentionRoad, tensors: tuple, options: tuple, stream: Any) -> TupleDict:
    results = road.call(tensors, options, stream)
    return TupleDict(out=results[0], lse=results[1]) if options[-1] else TupleDict(out=results[0])
