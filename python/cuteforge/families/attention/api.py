"""The attention ops as classes: validate, compile, launch into buffers that the caller gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.attention.base import AttentionOp
from cuteforge.families.attention.forward.config import Load, Problem, Traits, select_decode
from cuteforge.families.attention.options import Window, checked_splits
from cuteforge.op.base import Sample
from cuteforge.op.dims import Dims
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
        # The samples' rows and sizes choose the tile; it serves any.
        q, keys = (self.samples[name].shape for name in self._REQUIRED[:2])
        rows = decode_rows(q, keys[-2])
        load = Load(q[0] * keys[-2], keys[1])
        return select_decode(problem, rows, arch, self._splits, load)

    def _check_relations(self, dims: Dims) -> None:
        super()._check_relations(dims)
        if dims.get("L", 1) > MAX_DECODE_TOKENS:
            raise UnsupportedError(
                f"q: decode serves L = 1 to {MAX_DECODE_TOKENS}, got L = {dims['L']}; prefill serves any"
            )


class GQADecode(_Decode):
    """Attention of a few query tokens over dense keys and values: ``softmax(scale * q k^T) v`` for every query head.

    Several CTAs may share the keys of a request; their parts are then combined.

    Dims: B requests, L query tokens (1 to 16), S keys, Hq query heads and Hkv KV heads with Hq = G * Hkv, where query
    head h reads KV head ``h // G``. D is 8, 16, ... 256 and Dv = D; (D, Dv) = (192, 128) is served too.

    Args:
        q, out: ``(B, L, Hq, D)`` and ``(B, L, Hq, Dv)``, bf16 or fp16. `out` is written and overlaps no other operand.
        k, v: ``(B, S, Hkv, D)`` and ``(B, S, Hkv, Dv)``, dtype of q. Any strides, 0 included, if the last dim is
            contiguous and every row starts at a multiple of 16 bytes. The same holds for q and out, but out must not
            overlap itself.
        seqlens_k: ``(B,)`` int32, the number of keys of each request, at most S. What k and v hold past it does not
            matter, NaN included. 0 or less means no keys.
        mask: bool, True keeps a score: ``(B, S)``, ``(B, L, S)`` or ``(B, 1|Hq, 1|L, S)``. B and L of 1 are broadcast.
        bias: bf16, fp16 or fp32, ``(1|B, 1|Hq, 1|L, S)``, any strides, 0 included. It is added to the scaled scores,
            after a softcap. -inf masks. A NaN comes out as NaN.
        lse: ``(B, Hq, L)`` fp32, written: the natural logarithm of each row's sum of exponentials, scale included.
        sinks: ``(Hq,)`` fp32, one more logit for each query head (as in gpt-oss). It is not scaled, counts in the sum
            of exponentials and so in lse, and has no value. -inf, or None for all heads, means no sink.
        causal: query i of L sees key j only if ``j <= i + (S - L)``, where S is the request's number of keys.
        softmax_scale: any finite number; None is ``D**-0.5``.
        window: ``(left, right)``: query i stands at position ``p = i + (S - L)`` and sees key j only if
            ``p - left <= j <= p + right``. None on a side is no limit; `causal` makes right 0. Keys that no query of a
            tile sees are not read.
        softcap: a number from 1e-6 to 1e4 turns each score s into ``softcap * tanh(s / softcap)`` (Gemma 2, arXiv
            2408.00118). None or 0 leaves scores as they are.
        num_splits: the most CTAs that share a request's keys; None lets sizes and GPU decide. With 1 a request gives
            the same bits whatever else is in the batch, and no workspace is needed.

    A row that sees no key gives 0, and an lse of -inf, or of its sink. B, L, S and the head counts may differ from call
    to call without compiling again, and ops that differ only in the numbers of a window or a softcap share a binary.

    Numerics: products of 16-bit operands are summed in fp32; maxima, exponentials and sums are fp32. The weights are
    rounded to the dtype of v before they multiply it, and the result is divided by the sum of the rounded weights
    (prefill on sm_90a: by the sum of the weights before rounding). The result is rounded once. Every run gives the same
    bits.

    Raises:
        ContractError: the samples or options contradict each other; names the argument.
        UnsupportedError: by `check_support`, a head dim, a number of tokens or a GPU that the kernel does not serve.

    Examples:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from cuteforge import GQADecode
        >>> q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 256, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> out = torch.empty_like(q)
        >>> op = GQADecode(q, k, v, out).compile()
        >>> workspace = torch.empty(op.workspace_bytes(), device="cuda", dtype=torch.uint8)
        >>> op.execute(q, k, v, out, workspace=workspace)
        >>> expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)
        >>> bool((out - expected.transpose(1, 2)).abs().max() < 0.02)
        True
    """

    _REQUIRED = ("q", "k", "v", "out")

    def __init__(
        self, q: Sample, k: Sample, v: Sample, out: Sample, *, seqlens_k: Sample | None = None,
        mask: Sample | None = None, bias: Sample | None = None, lse: Sample | None = None, sinks: Sample | None = None,
        causal: bool = False, softmax_scale: float | None = None, window: Window | None = None,
        softcap: float | None = None, num_splits: int | None = None,
    ) -> None:  # fmt: skip
        tensors = {"q": q, "k": k, "v": v, "out": out, "seqlens_k": seqlens_k, "mask": mask, "bias": bias}
        tensors |= {"lse": lse, "sinks": sinks}
        super().__init__(num_splits, causal, softmax_scale, window, softcap, **tensors)

    def _layouts(self, ranks, given):
        return "batch", "batch"


class GQAPrefill(AttentionOp):
    """Attention of many query tokens over dense or packed keys and values.

    For dims, numerics, errors and arguments that are not listed here see `GQADecode`. L is any number.

    Args:
        q, k, v, out: dense, ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``, ``(B, L, Hq, Dv)``; or packed,
            ``(T, Hq, D)``, ``(Tk, Hkv, D)``, ``(Tk, Hkv, Dv)``, ``(T, Hq, Dv)``, with the requests one after another.
        cu_seqlens_q, cu_seqlens_k: ``(B+1,)`` int32, where each request's tokens and keys start, from 0 to the end of
            the last one. Both or neither. Tokens past the last request see nothing.
        seqlens_k: ``(B,)`` int32, with dense keys only.
        mask, bias: as in `GQADecode`. For packed requests their rows are the tokens of a request, counted from its
            first; rows and columns that they lack count as masked.
        lse: ``(B, Hq, L)``, or ``(Hq, T)`` if packed.

    Examples:
        >>> import torch
        >>> from cuteforge import GQAPrefill
        >>> q = torch.randn(1, 256, 16, 128, device="cuda", dtype=torch.float16)
        >>> k, v = torch.randn(2, 1, 256, 2, 128, device="cuda", dtype=torch.float16)
        >>> out, lse = torch.empty_like(q), torch.empty(1, 16, 256, device="cuda")
        >>> op = GQAPrefill(q, k, v, out, lse=lse, causal=True).compile()
        >>> op.execute(q, k, v, out, lse=lse)
        >>> torch.equal(out[:, 0], v[:, 0].repeat_interleave(8, dim=1))  # the first query sees one key
        True
    """

    _REQUIRED = ("q", "k", "v", "out")

    def __init__(
        self, q: Sample, k: Sample, v: Sample, out: Sample, *, cu_seqlens_q: Sample | None = None,
        cu_seqlens_k: Sample | None = None, seqlens_k: Sample | None = None, mask: Sample | None = None,
        bias: Sample | None = None, lse: Sample | None = None, sinks: Sample | None = None, causal: bool = False,
        softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        tensors = {"q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        tensors |= {"seqlens_k": seqlens_k, "mask": mask, "bias": bias, "lse": lse, "sinks": sinks}
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
    """Attention of a few query tokens over keys and values in pages.

    For dims, numerics, errors and arguments that are not listed here see `GQADecode`.

    Args:
        q, out: ``(B, Hq, D)`` and ``(B, Hq, Dv)`` for one token a request, or ``(B, L, Hq, D)`` and ``(B, L, Hq, Dv)``.
        k_cache, v_cache: ``(P, ps, Hkv, D)`` and ``(P, ps, Hkv, Dv)``: P pages of ps tokens, ps >= 1; or
            ``(P, Hkv, D)`` and ``(P, Hkv, Dv)``, pages of one token. They may be views of one pool and have different
            strides.
        page_table: ``(R, C)`` int32, page numbers. Those past a request's length are never read and may be anything.
        seqlens_k: ``(B,)`` int32, the number of tokens of each request, new ones included. Either this or kv_indptr,
            not both.
        kv_indptr: ``(B+1,)`` int32, whose differences are those numbers.
        page_table_rows: ``(B,)`` int32, each request's row of the table. None: request b has row b, and R == B.
        new_k, new_v: ``(B, Hkv, D)`` and ``(B, Hkv, Dv)``, the last key and value of each request. They are used in
            place of what the pool holds there, and the call stores them in the pool. A negative page number stores
            nothing. Both or neither. Requests must not share the page of their last token.
        mask, bias: as in `GQADecode`; their columns are positions in the request, and columns that they lack count as
            masked.
        lse: ``(B, Hq, L)``, with L = 1 for q of three dims.

    Examples:
        >>> import torch
        >>> from cuteforge import PagedGQADecode
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> seqlens_k = torch.tensor([20, 1], device="cuda", dtype=torch.int32)
        >>> q = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> out = torch.empty_like(q)
        >>> op = PagedGQADecode(q, k_cache, v_cache, page_table, out, seqlens_k=seqlens_k).compile()
        >>> workspace = torch.empty(op.workspace_bytes(), device="cuda", dtype=torch.uint8)
        >>> op.execute(q, k_cache, v_cache, page_table, out, seqlens_k=seqlens_k, workspace=workspace)
        >>> torch.equal(out[1], v_cache[1, 0].repeat_interleave(4, dim=0))  # request 1 has one key
        True
    """

    _REQUIRED = ("q", "k_cache", "v_cache", "page_table", "out")

    def __init__(
        self, q: Sample, k_cache: Sample, v_cache: Sample, page_table: Sample, out: Sample, *,
        seqlens_k: Sample | None = None, kv_indptr: Sample | None = None, page_table_rows: Sample | None = None,
        new_k: Sample | None = None, new_v: Sample | None = None, mask: Sample | None = None,
        bias: Sample | None = None, lse: Sample | None = None, sinks: Sample | None = None, causal: bool = False,
        softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None,
        num_splits: int | None = None,
    ) -> None:  # fmt: skip
        pool = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": page_table, "out": out}
        lengths = {"seqlens_k": seqlens_k, "kv_indptr": kv_indptr, "page_table_rows": page_table_rows}
        others = {"new_k": new_k, "new_v": new_v, "mask": mask, "bias": bias, "lse": lse, "sinks": sinks}
        super().__init__(num_splits, causal, softmax_scale, window, softcap, **pool, **lengths, **others)

    def _layouts(self, ranks, given):
        return "single" if ranks["q"] == 3 else "batch", _pool_layout(ranks)


class PagedGQAPrefill(_Paged, AttentionOp):
    """Attention of packed query tokens over keys and values in pages.

    For dims, numerics, errors and arguments that are not listed here see `PagedGQADecode`. It appends nothing: store
    the new tokens' keys and values in the pool first.

    Args:
        q, out: ``(T, Hq, D)`` and ``(T, Hq, Dv)``, the tokens of all requests one after another.
        cu_seqlens_q: ``(B+1,)`` int32, where each request's tokens start, from 0. The kernel finds on the device which
            tokens belong to whom: nothing is planned or read on the host. Tokens past the last request see nothing.
        lse: ``(Hq, T)``.

    Examples:
        >>> import torch
        >>> from cuteforge import PagedGQAPrefill
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)  # prompts of 20 and 5 tokens
        >>> q, seqlens_k = torch.randn(25, 32, 128, device="cuda", dtype=torch.bfloat16), cu_seqlens.diff()
        >>> out = torch.empty_like(q)
        >>> tensors = (q, k_cache, v_cache, page_table, cu_seqlens, out)
        >>> op = PagedGQAPrefill(*tensors, seqlens_k=seqlens_k, causal=True).compile()
        >>> op.execute(*tensors, seqlens_k=seqlens_k)
        >>> torch.equal(out[20], v_cache[1, 0].repeat_interleave(4, dim=0))  # the first query of request 1 sees one key
        True
    """

    _REQUIRED = ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "out")

    def __init__(
        self, q: Sample, k_cache: Sample, v_cache: Sample, page_table: Sample, cu_seqlens_q: Sample, out: Sample, *,
        seqlens_k: Sample | None = None, kv_indptr: Sample | None = None, page_table_rows: Sample | None = None,
        mask: Sample | None = None, bias: Sample | None = None, lse: Sample | None = None, sinks: Sample | None = None,
        causal: bool = False, softmax_scale: float | None = None, window: Window | None = None,
        softcap: float | None = None,
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
        others = {"mask": mask, "bias": bias, "lse": lse, "sinks": sinks}
        super().__init__(causal, softmax_scale, window, softcap, **pool, **lengths, **others)

    def _layouts(self, ranks, given):
        return "packed", _pool_layout(ranks)


def decode_rows(q_shape: tuple[int, ...], kv_heads: int) -> int:
    """Query rows that read one KV head: the heads of its group times the tokens."""
    return q_shape[-2] // max(kv_heads, 1) * (q_shape[1] if len(q_shape) == 4 else 1)
