"""torch.compile of the policy functions: one graph, the results of the eager call, on the CPU by torch and by the ops."""

from __future__ import annotations

import pytest
import torch

from cuteforge import CudaBackend, UnsupportedError, apply_rotary_emb, attention, attn_backend, compress, rotary_table
from helpers.packs import Pack
from helpers.packs import draw as draw_pack
from helpers.policy import StubBackend, check, draw


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_is_one_graph(fresh_compiler, dynamic):
    def call(q, k, v, mask):
        return attention(q, k, v, attn_mask=mask, is_causal=True) * 2

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=fresh_compiler)
    for num_keys in (9, 12):
        q, k, v = draw(length=4, num_keys=num_keys)
        mask = torch.rand(2, num_keys) > 0.3
        torch.testing.assert_close(compiled(q, k, v, mask), call(q, k, v, mask))


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_of_options_may_vary(fresh_compiler, dynamic):
    """A cap and a scale that the compiler lets vary are checked by what it can trace."""

    def call(q, k, v, number):
        return attention(q, k, v, softcap=number, scale=number, window=(3, None))

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=fresh_compiler)
    for number in (1.0, 2.0, 3.0):
        torch.testing.assert_close(compiled(*draw(), number), call(*draw(), number))


def test_an_instance_gets_no_options_that_it_does_not_take(fresh_compiler):
    compiled = torch.compile(attention, backend=fresh_compiler)
    with pytest.raises(UnsupportedError, match="stub: takes no window"):
        compiled(*draw(), backend=StubBackend(), window=(3, None))


def test_attention_has_a_gradient_under_compile(fresh_compiler):
    compiled = torch.compile(attention, fullgraph=True, backend=fresh_compiler)
    q, k, v = (x.requires_grad_() for x in draw())
    got = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    want = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("length", "fwd"), [(2, None), (20, None), (2, "prefill")])
def test_the_kernels_are_one_op_in_the_graph(fresh_compiler, cpu_as_gpu, monkeypatch, length, fwd):
    monkeypatch.setattr(CudaBackend, "refuse", lambda self, request: None)

    def call(q, k, v):
        return attention(q, k, v, is_causal=True, fwd=fwd, backend="cuda")

    q, k, v = draw(length=length, num_keys=20, dtype=torch.bfloat16)
    got = torch.compile(call, fullgraph=True, backend=fresh_compiler)(q, k, v)
    check(got, q, k, v, causal=True)


def test_a_context_counts_while_tracing(fresh_compiler):
    q, k, v = draw()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend=fresh_compiler)
    with attn_backend("torch_native"):
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    torch._dynamo.reset()
    with attn_backend("cuda"), pytest.raises((UnsupportedError, torch._dynamo.exc.TorchDynamoException)) as caught:
        compiled(q, k, v)
    assert "cuda" in str(caught.value)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rotary_is_one_graph(fresh_compiler, dynamic):
    cos, sin = rotary_table(32, 16)
    compiled = torch.compile(apply_rotary_emb, fullgraph=True, dynamic=dynamic, backend=fresh_compiler)
    for tokens in (5, 7):
        x = torch.randn(tokens, 2, 16, requires_grad=True)
        table = {"cos": cos, "sin": sin, "positions": torch.arange(tokens)}
        got, want = compiled(x, **table), apply_rotary_emb(x, **table)
        torch.testing.assert_close(got, want)
        got.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compress_is_one_graph(fresh_compiler, dynamic):
    compiled = torch.compile(compress, fullgraph=True, dynamic=dynamic, backend=fresh_compiler)
    for name in ("ragged", "exact_multiples"):
        x = draw_pack(Pack.named(name, 4), 2, 8, dtype=torch.float32)
        leaves = [t.clone().requires_grad_() for t in x.tensors[:3]]
        got = compiled(*leaves, x.cu_seqlens, total_comp=x.total_comp)
        torch.testing.assert_close(got, compress(*leaves, x.cu_seqlens, total_comp=x.total_comp))
        got.sum().backward()
