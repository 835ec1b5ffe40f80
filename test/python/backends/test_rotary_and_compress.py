"""The policy functions of rotary embedding and the compressor in eager torch: values, gradients, choice, refusals."""

from __future__ import annotations

import pytest
import torch

from cuteforge import ContractError, UnsupportedError, apply_rotary_emb, compress, explain, rotary_table
from cuteforge.families.csa.compressor import reference as csa_reference
from cuteforge.families.rotary import reference as rotary_reference
from helpers import budget
from helpers.packs import Pack
from helpers.packs import draw as draw_pack

TOKENS, HEADS, D = 6, 3, 16


@pytest.fixture
def table():
    cos, sin = rotary_table(32, D)
    return {"cos": cos, "sin": sin, "positions": torch.arange(3, 3 + TOKENS)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("inverse", [True, False])
def test_rotary_is_the_reference_and_its_op(table, dtype, interleaved, inverse):
    x = torch.randn(TOKENS, HEADS, D).to(dtype)
    options = {"interleaved": interleaved, "inverse": inverse}
    got = apply_rotary_emb(x, **table, **options)
    op = torch.ops.cuteforge.rotary.default(x, None, *table.values(), interleaved, inverse)
    assert budget.same_bits(got, op)


def test_rotary_takes_angles_as_models_have_them(table):
    """Real pairs, complex numbers, and one row of angles for all of a batch."""
    x = torch.randn(2, TOKENS, HEADS, D)
    rows = table["positions"]
    pairs = torch.stack((table["cos"][rows], table["sin"][rows]), -1)
    want = rotary_reference.rotate(x, pairs.expand(2, *pairs.shape))
    for freqs_cis in (pairs, pairs.expand(2, *pairs.shape), torch.view_as_complex(pairs)):
        assert torch.equal(apply_rotary_emb(x, freqs_cis), want)


def test_rotary_is_differentiable_for_x_and_the_table(table):
    x = torch.randn(TOKENS, HEADS, D, requires_grad=True)
    apply_rotary_emb(x, **table).sum().backward()
    back = apply_rotary_emb(torch.ones(TOKENS, HEADS, D), **table, inverse=True)
    torch.testing.assert_close(x.grad, back)
    table["cos"].requires_grad_()
    assert "gradient for the table" in explain("apply_rotary_emb", x, **table).verdicts[0].refusal
    apply_rotary_emb(x, **table).sum().backward()
    assert bool(table["cos"].grad[3 : 3 + TOKENS].any())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"cos": torch.zeros(32, 9), "sin": torch.zeros(32, 9)}, "cos: wanted rotary_dim of at most D = 16, got 18"),
        ({"sin": torch.zeros(31, 8)}, r"sin: wanted shape \(32, 8\)"),
        ({"positions": torch.zeros(1, dtype=torch.int64)}, r"positions: wanted shape \(6,\)"),
        ({"positions": torch.zeros(TOKENS)}, "positions: wanted dtype torch.int32 or torch.int64"),
        ({"cos": torch.zeros(32, 8, dtype=torch.bfloat16)}, "cos: wanted dtype torch.float32, got torch.bfloat16"),
        ({"positions": None}, "positions: wanted a tensor"),
    ],
)
def test_rotary_refuses_by_name_what_torch_would_broadcast(table, change, match):
    with pytest.raises(ContractError, match=match):
        apply_rotary_emb(torch.randn(TOKENS, HEADS, D), **{**table, **change})


@pytest.mark.parametrize("function", ["apply_rotary_emb", "compress"])
def test_choice_is_strict_by_argument_and_falls_through_from_the_environment(table, function, monkeypatch):
    x = draw_pack(Pack.named("ragged", 4), 2, 8, dtype=torch.float32)
    calls = {
        "apply_rotary_emb": (apply_rotary_emb, (torch.randn(TOKENS, HEADS, D),), table),
        "compress": (compress, x.tensors[:4], {}),
    }
    call, args, options = calls[function]
    with pytest.raises(
        UnsupportedError, match=f"{function}: no backend serves this call, asked for by argument: cuda: "
    ):
        call(*args, **options, backend="cuda")
    with pytest.raises(ContractError, match="backend: wanted one of cuda, torch_native, got 'flash'"):
        call(*args, **options, backend="flash")
    for name, source in (("cuda", "environment"), ("torch_native", "environment"), ("flash", "priority")):
        monkeypatch.setenv("CUTEFORGE_BACKEND", name)
        decision = explain(call, *args, **options)
        assert (decision.function, decision.chosen, decision.source) == (function, "torch_native", source)
        call(*args, **options)
    monkeypatch.setenv("CUTEFORGE_BACKEND", "nobody")
    with pytest.raises(ContractError, match="CUTEFORGE_BACKEND: wanted"):
        call(*args, **options)


@pytest.mark.parametrize("coff", [1, 2])
@pytest.mark.parametrize("given", ["nothing", "total", "both"])
def test_compress_builds_what_is_missing(coff, given):
    x = draw_pack(Pack.named("ragged", 4), coff, 8, dtype=torch.float32)
    optional = {
        "nothing": {},
        "total": {"total_comp": x.total_comp},
        "both": {"total_comp": x.total_comp, "cu_seqlens_comp": x.cu_seqlens_comp},
    }
    got = compress(*x.tensors[:4], ratio=4, coff=coff, **optional[given])
    assert budget.same_values(got, csa_reference.compress_forward(*x.tensors, x.total_comp, 4, coff))


@pytest.mark.parametrize("coff", [1, 2])
def test_compress_gradients_ignore_capacity_padding(coff):
    """The gradients of rows past the last block may be NaN; those of the rest are the formula's to the bit."""
    x = draw_pack(Pack.named("shorter_than_ratio", 4, extra_rows=3), coff, 8, dtype=torch.float32)
    leaves = [t.clone().requires_grad_() for t in x.tensors[:3]]
    out = compress(*leaves, x.cu_seqlens, ratio=4, coff=coff, total_comp=x.total_comp)
    grad_out = torch.randn(out.shape)
    grad_out[x.pack.real_rows :] = torch.nan
    out.backward(grad_out)
    want = csa_reference.compress_backward(*x.tensors, grad_out, 4, coff)
    for leaf, grad in zip(leaves, want):
        assert budget.same_values(leaf.grad, grad)


def test_compress_serves_ratios_that_no_kernel_does():
    kv = torch.randn(700, 4)
    got = compress(kv, torch.zeros(700, 4), torch.zeros(300, 4), torch.tensor([0, 700]), ratio=300, coff=1)
    torch.testing.assert_close(got, torch.stack((kv[:300].mean(0), kv[300:600].mean(0))))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"score": torch.zeros(3, 16)}, "score: wanted"),
        ({"ape": torch.zeros(4, 16, dtype=torch.bfloat16)}, "ape: wanted dtype float32"),
        ({"ape": None}, "ape: wanted a torch.Tensor"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, r"cu_seqlens: wanted a tensor of shape \(B\+1\)"),
        ({"cu_seqlens": None}, r"cu_seqlens: wanted a tensor of shape \(B\+1\)"),
    ],
)
def test_compress_refuses_by_name(change, match):
    x = draw_pack(Pack.named("ragged", 4), 2, 8, dtype=torch.float32)
    named = dict(zip(("kv", "score", "ape", "cu_seqlens"), x.tensors[:4]))
    with pytest.raises(ContractError, match=match):
        compress(**{**named, **change})


def test_compress_op_passes_the_checks_of_torch():
    x = draw_pack(Pack.named("ragged", 4), 2, 4, dtype=torch.float32, poison=False)
    leaves = [t.requires_grad_() for t in x.tensors[:3]]
    arguments = (*leaves, x.cu_seqlens, x.cu_seqlens_comp, x.total_comp, 4, 2)
    torch.library.opcheck(torch.ops.cuteforge.csa_compressor_eager.default, arguments)
