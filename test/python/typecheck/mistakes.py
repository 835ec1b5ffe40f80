"""Wrong uses of the public names. Never run: mypy and pyright must both report every line marked `# wrong`, and no
other (`unit/test_types.py`)."""

from __future__ import annotations

import torch

import cuteforge
from cuteforge import (
    ATTN_BACKEND,
    AttentionBackend,
    CSACompressorBackward,
    CSACompressorForward,
    DecodeGraph,
    GQADecode,
    GQAPrefill,
    KVCache,
    MergeState,
    PagedGQADecode,
    PagedGQAPrefill,
    RotaryEmbedding,
    TensorSpec,
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

q, k, v, mask, ints = (torch.empty(1) for _ in range(5))
spec = TensorSpec((1, 1, 1, 64), "bfloat16")
cache = KVCache(2, 8, 128, num_pages=64, max_seqlen=512)

# the package
cuteforge.CSACompresor()  # wrong
cuteforge.attention(q, k)  # wrong
is_available(["rotary"])  # wrong

# policy: torch's order puts the mask fourth, here it is the cache
attention(q, k, v, mask)  # wrong
attention(q, k, v, causal=True)  # wrong
attention(q, k, v, attn_mask=3)  # wrong
attention(q, k, v, scale="0.1")  # wrong
attention(q, k, v, window=128)  # wrong
attention(q, k, v, backend=7)  # wrong
attention([1.0], k, v)  # wrong
_ = attention(q, k, v).out  # wrong
attention(q, k, v, layer_id=None)  # wrong
attention(q, k, v, is_causal=None)  # wrong
apply_rotary_emb(q, (k, v))  # wrong
apply_rotary_emb(q, k, cosine=v)  # wrong
compress(k, v, q, ints, 4)  # wrong
compress(k, v, q, ints, cu_seqlens_comp=[0, 1])  # wrong
explain(3, k, v)  # wrong
_ = explain(q, k, v).backend  # wrong

# backends
attn_backend(3)  # wrong
_ = ATTN_BACKEND.CPU  # wrong
register_backend(3)  # wrong
AttentionBackend()  # wrong

# the cache
KVCache(2, 8, 128, num_pages=64)  # wrong
KVCache(2, 8, 128, num_pages=64, max_seqlen=512, dtype=16)  # wrong
KVCache.contiguous(2, 8, 128, batch=None, max_seqlen=512)  # wrong
cache.add("prompt")  # wrong
cache.bind_prefill(None, [3])  # wrong
cache.bind_decode(5)  # wrong
_ = cache.batch.page_table  # wrong
cache.append(0, k)  # wrong
DecodeGraph(None, cache)  # wrong
DecodeGraph(len, None)  # wrong

# wrappers
gqa_decode_wrapper(q, k, v, mask)  # wrong
gqa_decode_wrapper(q, k, v, is_causal=True)  # wrong
_ = gqa_decode_wrapper(q, k, v)["out"].lse  # wrong
gqa_prefill_wrapper(q, k, v, num_splits=1)  # wrong
paged_gqa_decode_wrapper(q, k, v, seqlens_k=ints)  # wrong
paged_gqa_prefill_wrapper(q, k, v, ints, seqlens_k=ints)  # wrong
merge_state(q, k, v)  # wrong
merge_state(q, k, q, k, stream="default")  # wrong
rotary_wrapper(q, (k, v))  # wrong
rotary_qk_wrapper(q, k, out=q)  # wrong
csa_compressor_forward_wrapper(k, v, q, ints, ints, ratio="4")  # wrong
csa_compressor_backward_wrapper(k, v, q, ints, ints)  # wrong
rotary_wrapper(q, k, stream="default")  # wrong

# thin functions
attn_decode(q, k, v, causal=True)  # wrong
attn_prefill(q, k)  # wrong
attn_paged_decode(q, k, v, ints)  # wrong
attn_paged_prefill(q, k, v, ints, ints)  # wrong
rotary_emb(q)  # wrong
rotary_table("4096", 64)  # wrong
rotary_table(4096, 64, scaling="yarn")  # wrong

# classes
TensorSpec(None, "bfloat16")  # wrong
TensorSpec((1,), 16)  # wrong
GQADecode(spec, spec, spec)  # wrong
GQADecode(spec, spec, spec, (1, 64))  # wrong
GQADecode(spec, spec, spec, spec).compile(90)  # wrong
GQADecode(spec, spec, spec, spec).execute(spec, k, v, q)  # wrong
GQAPrefill(spec, spec, spec, spec, num_splits=1)  # wrong
PagedGQADecode(spec, spec, spec, spec)  # wrong
PagedGQAPrefill(spec, spec, spec, spec, spec)  # wrong
MergeState(q, q, q, q)  # wrong
RotaryEmbedding(spec, (spec, spec, spec), spec)  # wrong
RotaryEmbedding(spec, spec, spec).execute(q, k)  # wrong
CSACompressorForward(spec, spec, spec, spec, spec)  # wrong
CSACompressorForward(spec, spec, spec, spec, spec, spec).execute(k, v, q, ints, ints, 3)  # wrong
CSACompressorBackward(spec, spec, spec, spec, spec, spec)  # wrong
