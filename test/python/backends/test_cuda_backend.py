"""What the kernels are called with, on the CPU, where their ops compute the reference: dense and over a cache."""

from __future__ import annotations

import pytest
import torch

from cuteforge import CudaBackend, KVCache, TorchNativeBackend
from helpers.policy import check, draw
from helpers.torch_ops import OpLog

HEADS, KV_HEADS, D, PAGE_SIZE = 6, 2, 16, 4
BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("cpu_as_gpu")


def logged(call) -> tuple[torch.Tensor, list[str]]:
    with OpLog() as log:
        out = call()
    return out, [op.name().partition("::")[2] for op in log.seen]


def pools_of(cache: KVCache) -> list[torch.Tensor]:
    return [pool(layer) for layer in range(2) for pool in (cache.k_pool, cache.v_pool)]


@pytest.mark.parametrize(
    ("length", "fwd", "op"), [(1, None, "gqa_decode"), (3, "prefill", "gqa_prefill"), (17, None, "gqa_prefill")]
)
def test_dense_calls(length, fwd, op):
    q, k, v = draw(length=length, num_keys=20, dtype=BF16)
    mask = torch.rand(2, 20) > 0.4
    out, ops = logged(lambda: CudaBackend().forward(q, k, v, attn_mask=mask, is_causal=True, fwd=fwd, scale=0.3))
    assert ops == [op]
    check(out, q, k, v, mask=mask, causal=True, softmax_scale=0.3)


def test_a_cache_ends_up_the_same_by_kernels_and_by_torch():
    """Prefill appends and attends; decode does both in one op. As ``(B, 1, H, D)`` and packed."""
    backends = (CudaBackend(), TorchNativeBackend())
    caches = [
        KVCache(
            2, KV_HEADS, D, num_pages=32, page_size=PAGE_SIZE, max_requests=4, max_seqlen=20, dtype=BF16, device="cpu"
        )
        for _ in backends
    ]
    requests = [[cache.add() for _ in range(3)] for cache in caches]
    for cache in caches:
        for pool in pools_of(cache):
            pool.fill_(torch.nan)
    wanted = {"prefill": ["paged_gqa_prefill"], "decode": ["paged_gqa_decode_append"]}
    for kind, shape in (("prefill", (9,)), ("decode", (3,)), ("decode", (3, 1)), ("decode", (3,))):
        operands = [torch.randn(*shape, heads, D, dtype=BF16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        results = []
        for backend, cache, own in zip(backends, caches, requests):
            if kind == "prefill":
                cache.bind_prefill(own, [5, 1, 3])
            else:
                cache.bind_decode(own)
            results.append(logged(lambda b=backend, c=cache: b.forward(*operands, c, 1, is_causal=True)))  # noqa: B023
        (by_kernel, ops), (by_torch, none) = results
        assert ops == wanted[kind] and none == []
        assert by_kernel.shape == operands[0].shape
        torch.testing.assert_close(by_kernel, by_torch, atol=2e-2, rtol=2e-2)
    for a, b in zip(*map(pools_of, caches)):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)
