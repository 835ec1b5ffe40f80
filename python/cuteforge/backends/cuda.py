"""The library's own attention kernels as a backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cuteforge.backends.interface import (
    DECODE,
    OPTIONS,
    AttentionBackend,
    AttentionCall,
    Request,
    bound_batch,
    mark_stored,
    packed,
)
from cuteforge.backends.kernels import Spec, kernel_refusals, spec_like
from cuteforge.errors import ContractError
from cuteforge.families.attention import (
    GQADecode,
    GQAPrefill,
    PagedGQADecode,
    PagedGQAPrefill,
    gqa_decode_wrapper,
    gqa_prefill_wrapper,
    paged_gqa_decode_wrapper,
    paged_gqa_prefill_wrapper,
)
from cuteforge.families.attention.road import ROADS
from cuteforge.op.base import APIBase
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.runtime.arch import Arch

if TYPE_CHECKING:
    from cuteforge.runtime.kernel_facts import KernelFacts

_NO_DERIVATIVE = {
    "graph": "the kernels have no derivative, and q, k or v requires grad",
    "transform": "the kernels are not served by torch.func and forward-mode differentiation",
}


class CudaBackend(AttentionBackend):
    """The library's own kernels: bf16 and fp16 on CUDA, no derivative. Decode over a cache stores and attends in one
    launch.

    Examples:
        >>> import torch
        >>> from cuteforge import CudaBackend, attention
        >>> q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 256, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> out = attention(q, k, v, backend=CudaBackend)
        >>> bool((out - attention(q, k, v, backend="torch_native")).abs().max() < 0.02)
        True
    """

    name = "cuda"
    priority = 100
    options: ClassVar[tuple[str, ...]] = OPTIONS

    def refuse(self, request: Request) -> str | None:
        return "; ".join(_refusals(request)) or None

    def forward(self, *operands, **options):
        try:
            return super().forward(*operands, **options)
        except ContractError as error:
            raise _as_policy_says(error) from error

    def describe(self, call: AttentionCall, arch: Arch) -> KernelFacts:
        """The kernel of a call, on a GPU of `arch` that need not be here: its tile, its plan, and the reasons.

        Examples:
            >>> import torch
            >>> from cuteforge import attention, explain
            >>> q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="meta")
            >>> k = v = torch.empty(1, 512, 8, 64, dtype=torch.bfloat16, device="meta")
            >>> explain(attention, q, k, v, arch="sm_90a").kernel.kernel
            'attention.forward.kernel'
        """
        from cuteforge.families.attention.explain import describe

        try:
            return describe(_op_of(call), arch)
        except ContractError as error:
            raise _as_policy_says(error) from error

    def fwd_decode(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, **options):
        options = _as_wrappers_take(options) | {"mask": attn_mask, "softmax_scale": scale}
        if kv_cache is None:
            # One query token sees all keys either way: no second kernel for it.
            return gqa_decode_wrapper(q, k, v, causal=is_causal and q.shape[1] > 1, **options)["out"]
        batch = bound_batch(kv_cache)
        rows, new_k, new_v = packed(q, k, v)
        lengths = {"seqlens_k": batch.seqlens_k, "page_table_rows": batch.page_table_rows}
        new = {"new_k": new_k, "new_v": new_v}
        pools = kv_cache.k_pool(layer_id), kv_cache.v_pool(layer_id), batch.page_table
        out = paged_gqa_decode_wrapper(rows, *pools, **lengths, **new, **options)["out"]
        mark_stored(kv_cache, layer_id)
        return out if q.dim() == 3 else out.unsqueeze(1)

    def replay(self, q, k, v, attn_mask, is_causal, fwd, scale):
        is_decode = fwd == DECODE
        road = ROADS[GQADecode if is_decode else GQAPrefill]
        causal = is_causal and q.shape[1] > 1 if is_decode else is_causal
        given = {"q": q, "k": k, "v": v, "mask": attn_mask}
        tensors = tuple(map(given.get, (*road.inputs, *road.outputs)))
        found = road.find(tensors, (causal, None, None, None, scale, False))
        # the number of query tokens decides between decode and prefill
        return (
            None if found is None else found.reordered(("q", "k", "v", None if attn_mask is None else "mask"), q=None)
        )

    def fwd_prefill(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, **options):
        options = _as_wrappers_take(options) | {"mask": attn_mask, "causal": is_causal, "softmax_scale": scale}
        if kv_cache is None:
            return gqa_prefill_wrapper(q, k, v, **options)["out"]
        batch = bound_batch(kv_cache)
        rows, new_k, new_v = packed(q, k, v)
        kv_cache.append(layer_id, new_k, new_v)
        lengths = {"seqlens_k": batch.seqlens_k, "page_table_rows": batch.page_table_rows}
        pools = kv_cache.k_pool(layer_id), kv_cache.v_pool(layer_id), batch.page_table
        out = paged_gqa_prefill_wrapper(rows, *pools, batch.cu_seqlens_q, **lengths, **options)["out"]
        return out if q.dim() == 3 else out.unsqueeze(1)


def _as_policy_says(error: ContractError) -> ContractError:
    """The error of a wrapper under the argument's name in `attention`, which calls mask and bias attn_mask."""
    name, colon, rest = str(error).partition(":")
    return ContractError(f"attn_mask:{rest}") if colon and name in ("mask", "bias") else error


def _op_of(call: AttentionCall) -> APIBase:
    """The op that a call launches, on specs of its tensors."""
    options = {name: spec_like(x) if isinstance(x, torch.Tensor) else x for name, x in call.options.items()}
    options |= {} if call.attn_mask is None else {"mask": spec_like(call.attn_mask)}
    if "sinks" in options:
        options["sinks"] = TensorSpec(options["sinks"].shape, "float32")  # as they are converted
    if "bias" in options and options["bias"].dtype == "float64":
        options["bias"] = replace(options["bias"], dtype="float32")
    is_decode = call.fwd == DECODE
    if call.kv_cache is None:
        q, k, v = map(spec_like, call[:3])
        causal = call.is_causal and not (is_decode and q.shape[1] <= 1)
        return (GQADecode if is_decode else GQAPrefill)(q, k, v, _out_of(q, v), causal=causal, **options)
    batch = bound_batch(call.kv_cache)
    q, new_k, new_v = map(spec_like, packed(*call[:3]))
    pools = call.kv_cache.k_pool(call.layer_id), call.kv_cache.v_pool(call.layer_id), batch.page_table
    operands = (q, *map(spec_like, pools))
    options |= {"seqlens_k": spec_like(batch.seqlens_k), "page_table_rows": spec_like(batch.page_table_rows)}
    if is_decode:
        return PagedGQADecode(*operands, _out_of(q, new_v), new_k=new_k, new_v=new_v, **options)
    offsets = spec_like(batch.cu_seqlens_q)
    return PagedGQAPrefill(*operands, offsets, _out_of(q, new_v), causal=call.is_causal, **options)


def _out_of(q: TensorSpec, v: TensorSpec) -> TensorSpec:
    return TensorSpec((*q.shape[:-1], v.shape[-1]), q.dtype)


def _as_wrappers_take(options: dict[str, Any]) -> dict[str, Any]:
    """The kernels read sinks in fp32; models keep them in the dtype of their weights. A bias they read in fp32 at
    most."""
    sinks, bias = options.get("sinks"), options.get("bias")
    if sinks is not None and sinks.is_floating_point():
        options = options | {"sinks": sinks.float()}
    return options if bias is None or bias.dtype is not torch.float64 else options | {"bias": bias.float()}


def _refusals(request: Request) -> Iterator[str]:
    yield from kernel_refusals(request.device, lambda spec: _sample_op(request, spec), request.target)
    if request.derivative is not None:
        yield _NO_DERIVATIVE[request.derivative]


def _sample_op(request: Request, spec: Spec) -> APIBase:
    """The op of such calls, for one token each: extents are no limit of the kernels."""
    dtype = request.dtype
    queries, keys = (1, 1, request.num_heads), (1, 1, request.num_kv_heads)
    q, out = spec(*queries, request.head_dim, dtype=dtype), spec(*queries, request.v_dim, dtype=dtype)
    k, v = spec(*keys, request.head_dim, dtype=dtype), spec(*keys, request.v_dim, dtype=dtype)
    options = {"mask": spec(1, 1, dtype="bool") if request.has_mask else None, "causal": request.is_causal}
    samples = {"window": (0, 0), "softcap": 1.0, "sinks": spec(request.num_heads, dtype="float32")}
    samples["bias"] = spec(1, 1, 1, 1, dtype="float32")
    options |= {name: samples[name] for name in request.options}
    is_decode = request.fwd == DECODE
    if not request.is_cached:
        return (GQADecode if is_decode else GQAPrefill)(q, k, v, out, **options)
    table, one = spec(1, 1, dtype="int32"), spec(1, dtype="int32")
    lengths = {"seqlens_k": one, "page_table_rows": one}
    q, out = (spec(*queries[1:], dim, dtype=dtype) for dim in (request.head_dim, request.v_dim))
    if is_decode:
        new = {f"new_{name}": spec(1, x.shape[2], x.shape[3], dtype=dtype) for name, x in (("k", k), ("v", v))}
        return PagedGQADecode(q, k, v, table, out, **lengths, **new, **options)
    return PagedGQAPrefill(q, k, v, table, spec(2, dtype="int32"), out, **lengths, **options)
