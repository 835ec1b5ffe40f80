"""What flash-attn is called with, on a stand-in that computes the oracle: its kernels need a GPU."""

from __future__ import annotations

import pytest
import torch

from cuteforge import FlashAttnBackend, KVCache
from cuteforge.backends import flash
from cuteforge.families.attention import reference
from helpers.policy import check, check_packed, draw

HEADS, KV_HEADS, D = 6, 2, 16


def dense(q, k, v, *, softmax_scale, causal):
    assert softmax_scale is None or softmax_scale >= 0
    return reference.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)


def varlen(
    q, k, v, *, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, page_table, softmax_scale, causal
) -> tuple[torch.Tensor, None]:
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(seqused_k.max())
    padded, lens_q = reference.unpack(q, cu_seqlens_q)
    k, v = (reference.gather_pages(pool, page_table, seqused_k) for pool in (k, v))
    options = {"lens_q": lens_q, "lens_k": seqused_k, "causal": causal, "softmax_scale": softmax_scale}
    return reference.pack(reference.attend(padded, k, v, **options)[0], cu_seqlens_q), None


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(flash, "find_library", lambda: (flash._Library(4, dense, varlen), ""))
    return FlashAttnBackend()


@pytest.mark.parametrize("scale", [None, 0.3, -0.3])
def test_dense_calls(backend, scale):
    q, k, v = draw()
    check(backend.forward(q, k, v, is_causal=True, scale=scale), q, k, v, causal=True, softmax_scale=scale)


def test_calls_over_a_cache(backend):
    """The rows of the table are those of the batch, in its order."""
    cache = KVCache(
        1, KV_HEADS, D, num_pages=16, page_size=4, max_requests=4, max_seqlen=20, dtype=torch.float32, device="cpu"
    )
    first, second = cache.add(), cache.add()
    lengths = [6, 3]
    keys, values = torch.randn(2, sum(lengths), KV_HEADS, D)
    cache.bind_prefill([second, first], lengths)
    q = torch.randn(sum(lengths), HEADS, D)
    out = backend.forward(q, keys, values, cache, 0, is_causal=True)
    padded = [reference.unpack(x, cache.batch.cu_seqlens_q)[0] for x in (keys, values)]
    check_packed(out, q, lengths, *padded, lengths, causal=True)
    cache.bind_decode([second, first])
    token = [torch.randn(2, 1, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    assert backend.forward(*token, cache, 0).shape == (2, 1, HEADS, D)
