"""The attention ops as classes: validate, compile, launch into buffers that the caller gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.attention.base import AttentionOp
from cuteforge.families.attention.forward.config import Problem, Traits, select_decode
from cuteforge.families.attention.options import Window, checked_splits
from cuteforge.op.base import Sample
from cuteforge.op.signature import Dims
from cuteforge.runtime.arch import Arch

MAX_DECODE_TOKENS = 16


class _Decode(AttentionOp):
    """A few query tokens for many keys, which several CTAs share."""

    def __init__(self, num_splits: int | None, *options: Any, **samples: Any) -> None:
        self.num_splits: int | None = checked_splits(num_splits)
        super().__init__(*options, **samples)

    @property
    def _splits(self) -> bool:
        return self.num_splits != 1

    def _select(self, problem: Problem, arch: Arch) -> Traits:
        # The samples' rows choose the tile; it serves any number.
        q, keys = (self.samples[name].shape for name in self._REQUIRED[:2])
        rows = decode_rows(q, keys[-2])
        return select_decode(problem, rows, arch, self._splits)

    def _check_relations(self, dims: Dims) -> None:
        super()._check_relations(dims)
        if dims.get("L", 1) > MAX_DECODE_TOKENS:
            raise UnsupportedError(
                f"q: decode serves L = 1 to {MAX_DECODE_TOKENS}, got L = {dims['L']}; prefill serves any"
            )


class GQADecode(_Decode):
    """Attention of a few query tokens over dense keys and values.

    Dims: B requests, L query tokens (1 to 16), S keys, Hq = G * Hkv heads, D = 8, 16, ... 256; Dv = D, or (D, Dv) = (192, 128).

    Args:
        q, out: ``(B, L, Hq, D)`` and ``(B, L, Hq, Dv)``, bf16 or fp16.
        k, v: ``(B, S, Hkv, D)`` and ``(B, S, Hkv, Dv)``, dtype of q. Any strides, 0 too; last dim contiguous, rows 16-byte aligned.
        seqlens_k: ``(B,)`` int32, keys of each request, at most S; those past it may hold anything. 0 or less: none.
        mask: bool, True keeps a score: ``(B, S)``, ``(B, L, S)`` or ``(B, 1|Hq, 1|L, S)``; B and L of 1 are broadcast.
        lse: ``(B, Hq, L)`` fp32, the natural logarithm of each row's sum of exponentials.
        sinks: ``(Hq,)`` fp32, one more logit of each query head, natural log, not scaled: it joins the sums of exponentials, lse included, and
            has no value. None or -inf: none.
        causal: query i of L sees key j iff ``j <= i + (S - L)``, S being the request's number of keys.
        softmax_scale: D**-0.5 when None; any finite number.
        window: (left, right): query i at position ``p = i + (S - L)`` sees key j iff ``p - left <= j <= p + right``; None on a side is no limit, with
            causal right is 0. Keys that no query of a tile sees are not read.
        softcap: from 1e-6 to 1e4: scores ``s`` become ``softcap * tanh(s / softcap)``; None or 0: they do not.
        num_splits: the most CTAs that share a request's keys; None lets sizes and GPU decide. 1 gives the same bits whatever else is in
            the batch, and needs no workspace.

    A row that sees no key gives 0, and an lse of -inf, or of its sink. B, L, S and the head counts may differ from call to call without compiling
    again; ops that differ in the numbers of a window or a softcap share a binary.

    Numerics: products of 16-bit operands summed in fp32; maxima, exponentials and sums fp32; the weights are rounded to the dtype of v where they
    meet it, and divided by the sum of the rounded ones (prefill on sm_90a: of the weights before); one rounding of the result. The same bits at every
    run.
    """

    _REQUIRED = ("q", "k", "v", "out")

    def __init__(
        self, q: Sample, k: Sample, v: Sample, out: Sample, *, seqlens_k: Sample | None = None,
        mask: Sample | None = None, lse: Sample | None = None, sinks: Sample | None = None, causal: bool = False,
        softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None,
        num_splits: int | None = None,
    ) -> None:  # fmt: skip
        tensors = {"q": q, "k": k, "v": v, "out": out, "seqlens_k": seqlens_k, "mask": mask, "lse": lse, "sinks": sinks}
        super().__init__(num_splits, causal, softmax_scale, window, softcap, **tensors)

    def _layouts(self, ranks, given):
        return "batch", "batch"


class GQAPrefill(AttentionOp):
    """Attention of many query tokens over dense or packed keys and values; dims, numerics and what is not said here as `GQADecode`.

    Args:
        q, k, v, out: ``(B, L, Hq, D)`` and so on; or packed, ``(T, Hq, D)`` and ``(Tk, Hkv, D)``, with the offsets
        cu_seqlens_q, cu_seqlens_k: ``(B+1,)`` int32 of the requests' tokens and keys, from 0. Both or neither. Tokens past the last
            request see nothing.
        seqlens_k: ``(B,)`` int32, only with dense keys.
        mask: as in decode; of packed requests it has a row for each of the request's tokens, and what it lacks counts as masked.
        lse: ``(B, Hq, L)``, or packed ``(Hq, T)``.
    """

    _REQUIRED = ("q", "k", "v", "out")

    def __init__(
        self, q: Sample, k: Sample, v: Sample, out: Sample, *, cu_seqlens_q: Sample | None = None,
        cu_seqlens_k: Sample | None = None, seqlens_k: Sample | None = None, mask: Sample | None = None,
        lse: Sample | None = None, sinks: Sample | None = None, causal: bool = False,
        softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        tensors = {"q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        tensors |= {"seqlens_k": seqlens_k, "mask": mask, "lse": lse, "sinks": sinks}
        super().__init__(causal, softmax_scale, window, softcap, **tensors)

    @staticmethod
    def _check_presence(given: Mapping[str, Any]) -> None:
        for name, other in (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q")):
            if name not in given and other in given:
                raise ContractError(f"{name}: wanted a tensor, as {other} is given, got None")
        if "cu_seqlens_k" in given and "seqlens_k" in given:
            raise ContractError("seqlens_k: wanted None with cu_seqlens_k, got a tensor")

    def _layouts(self, ranks, given):
        layout = "packed" if "cu_seqlens_q" in given else "batch"
        return layout, layout


class _Paged:
    """What the paged ops share."""

    @staticmethod
    def _check_presence(given: Mapping[str, Any]) -> None:
        if ("seqlens_k" in given) == ("kv_indptr" in given):
            problem = (
                "a tensor, or else kv_indptr, got neither"
                if "seqlens_k" not in given
                else "None with kv_indptr, got a tensor"
            )
            raise ContractError(f"seqlens_k: wanted {problem}")
        for name, other in (("new_k", "new_v"), ("new_v", "new_k")):
            if name not in given and other in given:
                raise ContractError(f"{name}: wanted a tensor, as {other} is given, got None")


def _pool_layout(ranks: Mapping[str, int]) -> str:
    return "tokens" if ranks["k_cache"] == 3 else "pages"


class PagedGQADecode(_Paged, _Decode):
    """Attention of a few query tokens over keys and values in pages; dims, numerics and what is not said here as `GQADecode`.

    Args:
        q, out: ``(B, Hq, D)`` and ``(B, Hq, Dv)`` for one token, or ``(B, L, Hq, D)`` and so on.
        k_cache, v_cache: ``(P, ps, Hkv, D)`` and ``(P, ps, Hkv, Dv)``, P pages of ps >= 1 tokens; or ``(P, Hkv, D)``, pages of one. They may be
            views of one pool and have different strides.
        page_table: ``(R, C)`` int32 page numbers. Those past a request's length are never read.
        seqlens_k: ``(B,)`` int32, or else
        kv_indptr: ``(B+1,)`` int32, whose differences are the lengths.
        page_table_rows: ``(B,)`` int32, each request's row of the table; None: request b has row b, and R == B.
        new_k, new_v: ``(B, Hkv, D)`` and ``(B, Hkv, Dv)``: the last key and value of each request. They are used instead of what the pool holds, and
            stored there; a negative page number stores nothing. Both or neither. Requests must not share the page of their last token.
        mask: as in decode, its columns absolute positions; what it lacks counts as masked.
    """

    _REQUIRED = ("q", "k_cache", "v_cache", "page_table", "out")

    def __init__(
        self, q: Sample, k_cache: Sample, v_cache: Sample, page_table: Sample, out: Sample, *,
        seqlens_k: Sample | None = None, kv_indptr: Sample | None = None, page_table_rows: Sample | None = None,
        new_k: Sample | None = None, new_v: Sample | None = None, mask: Sample | None = None, lse: Sample | None = None,
        sinks: Sample | None = None, causal: bool = False, softmax_scale: float | None = None,
        window: Window | None = None, softcap: float | None = None, num_splits: int | None = None,
    ) -> None:  # fmt: skip
        pool = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": page_table, "out": out}
        lengths = {"seqlens_k": seqlens_k, "kv_indptr": kv_indptr, "page_table_rows": page_table_rows}
        others = {"new_k": new_k, "new_v": new_v, "mask": mask, "lse": lse, "sinks": sinks}
        super().__init__(num_splits, causal, softmax_scale, window, softcap, **pool, **lengths, **others)

    def _layouts(self, ranks, given):
        return "single" if ranks["q"] == 3 else "batch", _pool_layout(ranks)


class PagedGQAPrefill(_Paged, AttentionOp):
    """Attention of packed query tokens over keys and values in pages; dims, numerics and what is not said here as `PagedGQADecode`.

    Args:
        q, out: ``(T, Hq, D)`` and ``(T, Hq, Dv)``.
        cu_seqlens_q: ``(B+1,)`` int32 offsets of the requests' tokens, from 0. Which tile is whose is found on the device. Tokens past the last
            request see nothing.
        lse: ``(Hq, T)``.
    """

    _REQUIRED = ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "out")

    def __init__(
        self, q: Sample, k_cache: Sample, v_cache: Sample, page_table: Sample, cu_seqlens_q: Sample, out: Sample, *,
        seqlens_k: Sample | None = None, kv_indptr: Sample | None = None, page_table_rows: Sample | None = None,
        mask: Sample | None = None, lse: Sample | None = None, sinks: Sample | None = None, causal: bool = False,
        softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        pool = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "cu_seqlens_q": cu_seqlens_q,
            "out": out,
        }
        lengths = {"seqlens_k": seqlens_k, "kv_indptr": kv_indptr, "page_table_rows": page_table_rows}
        others = {"mask": mask, "lse": lse, "sinks": sinks}
        super().__init__(causal, softmax_scale, window, softcap, **pool, **lengths, **others)

    def _layouts(self, ranks, given):
        return "packed", _pool_layout(ranks)


def decode_rows(q_shape: tuple[int, ...], kv_heads: int) -> int:
    """Query rows that read one KV head: the heads of its group times the tokens."""
    return q_shape[-2] // max(kv_heads, 1) * (q_shape[1] if len(q_shape) == 4 else 1)
