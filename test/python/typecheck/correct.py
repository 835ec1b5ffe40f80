# pyright: strict
"""Correct uses of every public name. Never run: mypy and pyright must find nothing wrong here (`unit/test_types.py`).

`assert_type` fails where a result is Any, so a name that lost its type is found too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import assert_type

import cuteforge
from cuteforge import (
    ATTN_BACKEND,
    KERNEL_NAMES,
    AttentionBackend,
    CacheFull,
    ContractError,
    CSACompressorBackward,
    CSACompressorForward,
    CudaBackend,
    DecodeGraph,
    FlashAttnBackend,
    GQADecode,
    GQAPrefill,
    KVCache,
    MergeState,
    PagedGQADecode,
    PagedGQAPrefill,
    RotaryEmbedding,
    TensorSpec,
    TorchNativeBackend,
    TupleDict,
    UnsupportedError,
    apply_rotary_emb,
    attention,
    attn_backend,
    attn_decode,
    attn_paged_decode,
    attn_paged_prefill,
    attn_prefill,
    compress,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
    explain,
    gqa_decode_wrapper,
    gqa_prefill_wrapper,
    is_available,
    merge_state,
    paged_gqa_decode_wrapper,
    paged_gqa_prefill_wrapper,
    register_backend,
    rotary_emb,
    rotary_qk_wrapper,
    rotary_table,
    rotary_wrapper,
)
from cuteforge.backends.interface import Request
from cuteforge.backends.selection import Decision, Verdict
from cuteforge.integrations.transformers import register
from cuteforge.serving.kv_cache import Batch

q, k, v, mask, ints = (torch.empty(1) for _ in range(5))
stream = torch.cuda.current_stream()
spec = TensorSpec((1, 1, 1, 64), "bfloat16")

# the package
assert_type(cuteforge.__version__, str)
assert_type(KERNEL_NAMES, tuple[str, ...])
assert_type(is_available("rotary"), bool)

# policy
assert_type(attention(q, k, v), torch.Tensor)
assert_type(attention(q, k, v, None, 0, mask, True, "decode", "cuda", scale=0.1), torch.Tensor)
attention(q, k, v, window=(128, None), softcap=30.0, sinks=q, backend=ATTN_BACKEND.FLASH)
attention(q, k, v, backend=CudaBackend)
attention(q, k, v, backend=CudaBackend())
assert_type(apply_rotary_emb(q, k), torch.Tensor)
apply_rotary_emb(q, cos=k, sin=v, positions=ints, interleaved=False, inverse=True, backend="torch_native")
assert_type(compress(k, v, q, ints, ratio=128, coff=1, cu_seqlens_comp=ints, total_comp=8), torch.Tensor)
decision = explain(attention, q, k, v, is_causal=True)
assert_type(decision, Decision)
assert_type(explain(q, k, v).chosen, str | None)
assert_type(explain("compress", k, v, q, ints).verdicts, tuple[Verdict, ...])

# backends
with attn_backend("torch_native") as chosen:
    assert_type(chosen, AttentionBackend)
with attn_backend(ATTN_BACKEND.CUDA), attn_backend(TorchNativeBackend), attn_backend(FlashAttnBackend()):
    pass


@register_backend
class Mine(AttentionBackend):
    name = "mine"
    priority = 10
    options = ("window",)

    def refuse(self, request: Request) -> str | None:
        assert_type(request.options, tuple[str, ...])
        return "no masks" if request.has_mask else None

    def fwd_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache | None,
        layer_id: int,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        **options: Any,
    ) -> torch.Tensor:
        return v

    fwd_prefill = fwd_decode


assert_type(Mine(), Mine)

# the cache
cache = KVCache(2, 8, 128, num_pages=64, max_seqlen=512, dtype=torch.float16, device="cpu")
dense = KVCache.contiguous(2, 8, 128, batch=4, max_seqlen=512, dtype="float16", device=torch.device("cpu"))
assert_type(dense, KVCache)
request = cache.add([1, 2, 3])
assert_type(request, int)
try:
    cache.bind_prefill([request], [3])
except CacheFull as full:
    assert_type(full.needed, int)
cache.append(0, k, v)
cache.bind_decode([request], pad_to=4)
assert_type(cache.batch, Batch | None)
assert_type(cache.k_pool(0), torch.Tensor)
assert_type(cache.num_free_pages, int)
assert_type(cache.device, torch.device)
attention(q, k, v, cache, 0)


def step(tokens: torch.Tensor) -> torch.Tensor:
    return tokens


graph = DecodeGraph(step, cache, [1, 2, 4], use_graphs=False)
graph.capture(ints)
assert_type(graph.batch_sizes, tuple[int, ...])
graph([request], ints)

# wrappers
decoded = gqa_decode_wrapper(q, k, v, seqlens_k=ints, causal=True, num_splits=1, return_lse=True, stream=stream)
assert_type(decoded, TupleDict)
assert_type(decoded["out"], torch.Tensor)
assert_type(decoded[0], torch.Tensor)
assert_type(decoded[:1], tuple[torch.Tensor, ...])
out, lse = decoded
assert_type(lse, torch.Tensor)
gqa_prefill_wrapper(q, k, v, cu_seqlens_q=ints, cu_seqlens_k=ints, window=(None, 0), stream=0)
paged_gqa_decode_wrapper(q, k, v, ints, seqlens_k=ints, new_k=k, new_v=v, out=out)
paged_gqa_prefill_wrapper(q, k, v, ints, ints, kv_indptr=ints, softmax_scale=1)
assert_type(merge_state(out, lse, out, lse, stream=stream), TupleDict)
assert_type(rotary_wrapper(q, k, stream=stream), TupleDict)
turned_q, turned_k = rotary_qk_wrapper(q, k, cos=v, sin=v, positions=ints, q_out=q, k_out=k)
assert_type(turned_q, torch.Tensor)
rows = csa_compressor_forward_wrapper(k, v, q, ints, ints, 4, coff=2, total_comp=8)["out"]
grad_kv, grad_score, grad_ape = csa_compressor_backward_wrapper(k, v, q, ints, ints, rows, ratio=4, deterministic=False)

# thin functions
assert_type(attn_decode(q, k, v, mask, True, scale=0.1), torch.Tensor)
assert_type(attn_prefill(q, k, v, is_causal=True), torch.Tensor)
assert_type(attn_paged_decode(q, k, v, ints, ints), torch.Tensor)
assert_type(attn_paged_prefill(q, k, v, ints, ints, ints), torch.Tensor)
assert_type(rotary_emb(q, k), torch.Tensor)
assert_type(rotary_table(4096, 64), tuple[torch.Tensor, torch.Tensor])
rotary_table(4096, 64, base=5e5, scaling={"rope_type": "linear", "factor": 2.0}, device="cpu")

# classes
TensorSpec([2, 3], torch.float32, [3, 1], torch.device("cuda", 1))
assert_type(spec.shape, tuple[int, ...])
assert_type(spec.stride, tuple[int, ...])
assert_type(spec.dtype, str)
decode = GQADecode(spec, spec, spec, spec, lse=spec, num_splits=1).compile("sm_90a")
assert_type(decode, GQADecode)
assert_type(decode.check_support(), bool)
assert_type(decode.workspace_bytes(), int)
decode.execute(q, k, v, q, lse=q, workspace=ints, softmax_scale=0.5, stream=stream)
assert_type(decode.bind(q, k, v, q, lse=q), Callable[[], None])
GQAPrefill(q, k, v, q, cu_seqlens_q=spec, cu_seqlens_k=spec, causal=True).compile().execute(q, k, v, q)
PagedGQADecode(q, k, v, ints, q, seqlens_k=ints).compile()
PagedGQAPrefill(q, k, v, ints, ints, q, seqlens_k=spec).compile()
MergeState(q, lse, q, lse, q, lse).compile().execute(q, lse, q, lse, q, lse)
rotary = RotaryEmbedding(spec, (spec, spec), spec, spec, k=spec, k_out=spec, interleaved=False).compile()
rotary.execute(q, (k, k), q, ints, k=k, k_out=k, inverse=True, stream=stream)
forward = CSACompressorForward(spec, spec, spec, spec, spec, spec, ratio=4, coff=2).compile()
assert_type(forward, CSACompressorForward)
forward.execute(k, v, q, ints, ints, rows)
backward = CSACompressorBackward(spec, spec, spec, spec, spec, spec, spec, spec, spec, deterministic=False).compile()
backward.execute(k, v, q, ints, ints, rows, k, v, q, workspace=ints, stream=0)
assert_type(backward.bind(k, v, q, ints, ints, rows, k, v, q), Callable[[], None])

# errors
try:
    decode.check_support()
except ContractError as error:
    value_error: ValueError = error
except UnsupportedError as error:
    runtime_error: RuntimeError = error

register("cuteforge")
