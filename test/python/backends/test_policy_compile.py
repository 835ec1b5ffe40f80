"""torch.compile of the policy functions: one graph, the results of the eager call, on the CPU by torch and by the
ops."""

from __future__ import annotations

import pytest
import torch

from cuteforge import (
    CudaBackend,
    TupleDict,
    UnsupportedError,
    apply_rotary_emb,
    attention,
    attn_backend,
    compress,
    rotary_table,
)
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


SQUARE, ONE_LENGTH_OF_KEYS = ((24, 24), (31, 31)), ((18, 24), (20, 24), (24, 24))
CAUSAL, WINDOW = {"is_causal": True}, {"is_causal": True, "window": (5, None)}


@pytest.mark.parametrize(
    ("sizes", "options", "with_gradient"),
    [
        pytest.param(SQUARE, {}, True, id="square, all keys"),
        pytest.param(SQUARE, WINDOW, True, id="square, window"),
        pytest.param(ONE_LENGTH_OF_KEYS, CAUSAL, True, id="S = 24, causal"),
        pytest.param(ONE_LENGTH_OF_KEYS, WINDOW, True, id="S = 24, window"),
        pytest.param(ONE_LENGTH_OF_KEYS, WINDOW, False, id="S = 24, window, no gradient"),
    ],
)
def test_one_graph_serves_all_sizes(fresh_compiler, sizes, options, with_gradient):
    """Comparisons of sizes are no plain bools while torch.compile traces, and none of them may cut the graph in two."""

    def call(q, k, v):
        return attention(q, k, v, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=fresh_compiler)
    for length, num_keys in sizes:
        q, k, v = draw(1, length, num_keys, heads=4)
        q.requires_grad_(with_gradient)
        got, want = compiled(q, k, v), call(q, k, v)
        torch.testing.assert_close(got, want)
        if with_gradient:
            grads = (torch.autograd.grad(out.square().sum(), q) for out in (got, want))
            torch.testing.assert_close(*grads)
    assert fresh_compiler.frame_count == 1


def test_flags_formed_from_sizes_are_plain(fresh_compiler):
    def call(q, k, v, x):
        turned = apply_rotary_emb(x, torch.ones(x.shape[0], 8, 2), interleaved=x.shape[0] > 1, inverse=x.shape[0] < 3)
        return attention(q, k, v, is_causal=q.shape[1] > 1), turned

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=fresh_compiler)
    for length in (18, 20):
        inputs = *draw(1, length, 24, heads=4), torch.randn(length, 2, 16)
        torch.testing.assert_close(compiled(*inputs), call(*inputs))
    assert fresh_compiler.frame_count == 1


def test_a_nan_comes_out_of_a_compiled_function(fresh_compiler):
    q, k, v = draw(1, 1, 4)
    compiled = torch.compile(attention, fullgraph=True, backend=fresh_compiler)
    assert bool(compiled(torch.full_like(q, torch.nan), k, v).isnan().all())


def test_autocast_changes_nothing_in_a_compiled_function(fresh_compiler):
    q, k, v = draw()
    compiled = torch.compile(attention, fullgraph=True, backend=fresh_compiler)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, is_causal=True)

    length, keys = torch.export.Dim("length", min=17, max=512), torch.export.Dim("keys", min=2, max=512)
    shapes = ({1: length}, {1: keys}, {1: keys})
    exported = torch.export.export(Model(), draw(length=20, num_keys=24), dynamic_shapes=shapes, strict=strict)
    for sizes in ((20, 24), (31, 31), (40, 18)):
        inputs = draw(length=sizes[0], num_keys=sizes[1])
        torch.testing.assert_close(exported.module()(*inputs), attention(*inputs, is_causal=True))


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


def test_compress_reads_its_rows_in_the_graph(fresh_compiler):
    x = draw_pack(Pack.named("ragged", 4), 2, 8, dtype=torch.float32)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(compress, fullgraph=True, backend=fresh_compiler)
        torch.testing.assert_close(compiled(*x.tensors[:4]), compress(*x.tensors[:4]))


# What wrappers return.


def results(x):
    return TupleDict(out=x + 1, lse=x * 2)


def unpacked(x):
    out, lse = results(x)
    return out - lse


def with_star(x):
    out, *rest = results(x)
    return torch.add(*results(x)) + out - rest[0]


USES = {
    "unpacked": unpacked,
    "with a star": with_star,
    "by name": lambda x: results(x)["out"] - results(x)["lse"],
    "by number": lambda x: results(x)[0] - results(x)[-1],
    "slice": lambda x: results(x)[:2][1],
    "loop": lambda x: sum([2 * value for value in results(x)]),
    "tuple": lambda x: torch.add(*tuple(results(x))),
    "keywords": lambda x: (lambda out, lse: out - lse)(**results(x)),
    "values": lambda x: torch.add(*results(x).values()),
    "names": lambda x: x * len(results(x)) + ("out" in results(x)),
    "returned": results,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_results_of_wrappers_in_a_compiled_function(fresh_compiler, use):
    x = torch.arange(3.0)
    got, want = torch.compile(use, fullgraph=True, backend=fresh_compiler)(x), use(x)
    assert type(got) is type(want)
    torch.testing.assert_close(got, want)
