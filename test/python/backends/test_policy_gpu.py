"""The policy functions on a GPU: the kernels serve what they can, torch the rest, with the same results."""

from __future__ import annotations

import pytest
import torch

from cuteforge import (
    KERNEL_NAMES,
    KVCache,
    UnsupportedError,
    apply_rotary_emb,
    attention,
    attn_decode,
    compress,
    explain,
    is_available,
    rotary_table,
)
from helpers.packs import Pack
from helpers.packs import draw as draw_pack
from helpers.policy import check, draw
from helpers.torch_ops import OpLog

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS, KV_HEADS, D = 8, 2, 64


def big(device, dtype=BF16, **sizes):
    return draw(**{"heads": HEADS, "kv_heads": KV_HEADS, "d": D, "num_keys": 300, **sizes}, dtype=dtype, device=device)


@pytest.mark.parametrize("backend", ["cuda", "torch_native"])
@pytest.mark.parametrize(
    ("length", "causal"), [(1, True), (3, False), (3, True), (300, True), (130, False), (310, True)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_dense_by_either_backend(device, backend, length, causal, masked):
    q, k, v = big(device, length=length)
    mask = torch.rand(2, 300, device=device) > 0.4 if masked else None
    got = attention(q, k, v, attn_mask=mask, is_causal=causal, backend=backend)
    check(got, q, k, v, mask=mask, causal=causal)


OPTIONS = {"window": (100, None)}, {"softcap": 3.0}, {"sinks": True}, {"window": (20, 5), "softcap": 8.0, "sinks": True}


def options_on(device, options, dtype=BF16):
    sinks = torch.linspace(-2, 2, HEADS, device=device, dtype=dtype)
    return options | ({"sinks": sinks} if "sinks" in options else {})


@pytest.mark.parametrize("backend", ["cuda", "torch_native"])
@pytest.mark.parametrize("options", OPTIONS, ids=["window", "softcap", "sinks", "all"])
@pytest.mark.parametrize(("length", "causal"), [(1, True), (3, False), (300, True), (130, False)])
def test_options_by_either_backend(device, backend, options, length, causal):
    """Sinks in the dtype of a model's weights too."""
    q, k, v = big(device, length=length)
    options = options_on(device, options)
    check(attention(q, k, v, is_causal=causal, backend=backend, **options), q, k, v, causal=causal, **options)


def test_kernels_come_first_and_torch_takes_the_rest(device):
    assert explain(*big(device)).chosen == "cuda"
    for dtype, sizes in ((FP32, {}), (BF16, {"d": 20}), (BF16, {"d": 320})):
        q, k, v = big(device, dtype, **sizes)
        decision = explain(q, k, v)
        assert decision.chosen == "torch_native", decision
        check(attention(q, k, v), q, k, v)


def test_a_gradient_is_torchs(device):
    q, k, v = (x.requires_grad_() for x in big(device, length=5))
    assert explain(q, k, v).chosen != "cuda"
    attention(q, k, v, backend="torch_native", is_causal=True).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
    with pytest.raises(UnsupportedError, match="no derivative"):
        attention(q, k, v, backend="cuda")
    with torch.no_grad():
        assert explain(q, k, v).chosen == "cuda"


def test_kernels_off_is_another_backend_and_refuses_compiled_kernels_too(device, monkeypatch):
    q, k, v = big(device)
    want = attn_decode(q, k, v)
    monkeypatch.setenv("CUTEFORGE_KERNELS", "0")
    with pytest.raises(UnsupportedError, match="CUTEFORGE_KERNELS=0"):
        attn_decode(q, k, v)
    assert explain(q, k, v).chosen != "cuda"
    check(attention(q, k, v), q, k, v)
    assert not any(map(is_available, KERNEL_NAMES))
    monkeypatch.delenv("CUTEFORGE_KERNELS")
    assert torch.equal(attn_decode(q, k, v), want)


def test_every_kernel_is_available(device):
    assert all(map(is_available, KERNEL_NAMES))


def steps(backend, device, **options):
    """Results of a prefill in two parts and of three decodes over a poisoned cache, in order."""
    cache = KVCache(1, KV_HEADS, D, num_pages=64, page_size=16, max_requests=4, max_seqlen=300, device=device)
    cache.k_pool(0).fill_(torch.nan)
    cache.v_pool(0).fill_(torch.nan)
    requests = [cache.add() for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    results = []
    for lengths in ([33, 1, 200], [3, 64, 1], None, None, None):
        if lengths is None:
            cache.bind_decode(requests)
        else:
            cache.bind_prefill(requests, lengths)
        total = sum(lengths or [1] * 3)
        shapes = ((total, HEADS, D), *[(total, KV_HEADS, D)] * 2)
        q, k, v = (torch.randn(shape, generator=generator).to(device, BF16) for shape in shapes)
        results.append(attention(q, k, v, cache, is_causal=True, backend=backend, **options))
    return results, cache


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=["plain", "window", "softcap", "sinks", "all"])
def test_kernels_and_torch_agree_over_a_cache(options, device):
    options = options_on(device, options)
    (by_kernel, cache), (by_torch, other) = (steps(name, device, **options) for name in ("cuda", "torch_native"))
    for a, b in zip(by_kernel, by_torch):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    # What both stored is the same to the bit, and where it is not stored it is NaN.
    torch.testing.assert_close(cache.k_pool(0), other.k_pool(0), atol=0, rtol=0, equal_nan=True)
    assert cache.is_stored
    assert other.is_stored


def test_a_gradient_over_a_cache_is_torchs(device):
    """The results are those of the kernels, to which the same call goes without a gradient."""
    results, by_kernel = [], steps("cuda", device)[1]
    by_torch = steps("torch_native", device)[1]
    for cache in (by_kernel, by_torch):
        cache.bind_decode([0, 1, 2])
    q, k, v = (torch.randn(3, heads, D, device=device, dtype=BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with torch.no_grad():
        results.append(attention(q, k, v, by_kernel))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    assert explain(*leaves, by_torch).chosen == "torch_native"
    results.append(attention(*leaves, by_torch))
    torch.testing.assert_close(*(x.detach() for x in results), atol=2e-2, rtol=2e-2)
    grads = torch.autograd.grad(results[1].float().sum(), leaves)
    assert all(bool(x.isfinite().all()) and bool((x != 0).any()) for x in grads)


@pytest.mark.parametrize("function", ["rotary", "compress"])
def test_rotary_and_compress_by_the_kernels(device, function):
    if function == "rotary":
        cos, sin = rotary_table(64, D, device=device)
        args = (torch.randn(9, HEADS, D, device=device, dtype=BF16),)
        call, options = apply_rotary_emb, {"cos": cos, "sin": sin, "positions": torch.arange(9, device=device)}
    else:
        x = draw_pack(Pack.named("ragged", 4), 2, 128, dtype=BF16, device=device)
        call, args, options = compress, x.tensors[:4], {"total_comp": x.total_comp}
    assert explain(call, *args, **options).chosen == "cuda"
    got, want = call(*args, **options), call(*args, **options, backend="torch_native")
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, equal_nan=True)


def test_gradients_of_compress_by_kernel_and_by_torch(device):
    x = draw_pack(Pack.named("ragged", 4), 2, 128, dtype=FP32, device=device)
    grads = []
    for backend in ("cuda", "torch_native"):
        leaves = [t.clone().requires_grad_() for t in x.tensors[:3]]
        out = compress(*leaves, x.cu_seqlens, total_comp=x.total_comp, backend=backend)
        grads.append(torch.autograd.grad(out.sum(), leaves))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_a_dispatch_mode_sees_the_op_of_the_kernel(device):
    q, k, v = big(device)
    with OpLog() as log:
        attention(q, k, v)
    assert [op.name() for op in log.seen] == ["cuteforge::gqa_decode"]


def test_a_policy_call_is_captured_after_one_warm_call(device):
    q, k, v = big(device)
    want = attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)
