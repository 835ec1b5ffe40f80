"""The eager reference against a plain loop over the contract, and its formulas against autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuteforge import errors
from cuteforge.families.csa.compressor import reference
from helpers.packs import PACKS, Pack, draw, offsets


def naive_window(x, row, ratio, coff, column):
    """(token, kv column, ape row) of each window position of output row ``row`` that is there."""
    cu, cuc = x.cu_seqlens.tolist(), x.cu_seqlens_comp.tolist()
    d = x.head_dim
    segment = next((s for s in range(len(cu) - 1) if cuc[s] <= row < cuc[s + 1]), None)
    block = 0 if segment is None else row - cuc[segment]
    start = 0 if segment is None else cu[segment] + block * ratio
    current = [(start + k, (coff - 1) * d + column, k) for k in range(ratio)]
    previous = [(start - ratio + k, column, k) for k in range(ratio)] if coff == 2 and block > 0 else []
    return previous + current


def naive(x):
    """Forward and backward of the contract, one element at a time in Python floats."""
    ratio, coff, d = x.ratio, x.coff, x.head_dim
    kv, score, ape, grad_out = (t.double().tolist() for t in (x.kv, x.score, x.ape, x.grad_out))
    out = torch.zeros(x.total_comp, d, dtype=torch.float64)
    grads = [torch.zeros(t.shape, dtype=torch.float64) for t in (x.kv, x.score, x.ape)]
    for row in range(x.total_comp):
        for column in range(d):
            window = naive_window(x, row, ratio, coff, column)
            z = [score[t][c] + ape[a][c] for t, c, a in window]
            e = [math.exp(v - max(z)) for v in z]
            p = [v / sum(e) for v in e]
            v = [kv[t][c] for t, c, _ in window]
            out[row, column] = sum(a * b for a, b in zip(v, p, strict=True))
            if row >= x.pack.real_rows:
                continue
            g = grad_out[row][column]
            total = sum(g * a * b for a, b in zip(v, p, strict=True))
            for (t, c, a), value, prob in zip(window, v, p, strict=True):
                grads[0][t, c] += g * prob
                grads[1][t, c] += prob * (g * value - total)
                grads[2][a, c] += prob * (g * value - total)
    return out, grads


small_packs = st.builds(
    Pack,
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=5).map(tuple),
    ratio=st.integers(1, 5),
    extra_tokens=st.integers(0, 3),
    extra_rows=st.just(0),
)


@settings(max_examples=40, deadline=None)
@given(pack=small_packs, coff=st.sampled_from([1, 2]), d=st.integers(1, 3), seed=st.integers(0, 99))
def test_equals_a_plain_loop_and_ignores_poison(pack, coff, d, seed):
    """Poison sits in every element no block pools; the loop never reads one, so neither may the reference."""
    x = draw(pack, coff, d, torch.float64, seed=seed)
    out, grads = naive(x)
    got = reference.compress_forward(*x.tensors, x.total_comp, **x.config, compute_dtype=torch.float64)
    torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
    got = reference.compress_backward(*x.tensors, x.grad_out, **x.config, compute_dtype=None, grad_dtype=torch.float64)
    for a, b in zip(got, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(pack=small_packs, coff=st.sampled_from([1, 2]), d=st.integers(1, 3), seed=st.integers(0, 99))
def test_formulas_equal_autograd(pack, coff, d, seed):
    x = draw(pack, coff, d, torch.float64, seed=seed)
    explicit = reference.compress_backward(*x.tensors, x.grad_out, **x.config, compute_dtype=None)
    auto = reference.compress_backward_autograd(*x.tensors, x.grad_out, **x.config, compute_dtype=None)
    for name, a, b in zip(explicit._fields, explicit, auto, strict=True):
        assert a.dtype == b.dtype, name
        torch.testing.assert_close(a, b, rtol=1e-6 if name == "grad_ape" else 1e-12, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("ratio", "coff"), [(4, 2), (16, 1)])
def test_fp32_formulas_are_the_autograd_bits(dtype, ratio, coff):
    """The kernels are compared bitwise with these formulas, so the formulas have to be eager autograd's own bits."""
    x = draw(Pack.named("ragged", ratio), coff, 33, dtype)
    explicit = reference.compress_backward(*x.tensors, x.grad_out, **x.config)
    auto = reference.compress_backward_autograd(*x.tensors, x.grad_out, **x.config)
    assert torch.equal(explicit.grad_kv, auto.grad_kv)
    assert torch.equal(explicit.grad_score, auto.grad_score)


@pytest.mark.parametrize("name", PACKS)
def test_forward_is_differentiable_on_every_pack(name):
    x = draw(Pack.named(name, 4), 2, 2, torch.float32)
    leaves = [t.clone().requires_grad_() for t in (x.kv, x.score, x.ape)]
    out = reference.compress_forward(*leaves, x.cu_seqlens, x.cu_seqlens_comp, None, **x.config)
    assert out.shape == x.grad_out.shape
    grads = torch.autograd.grad(out, leaves, x.grad_out, allow_unused=True)
    explicit = reference.compress_backward(*x.tensors, x.grad_out, **x.config)
    for got, want in zip(grads, explicit, strict=True):
        torch.testing.assert_close(got, want)


def test_chunking_changes_nothing(monkeypatch):
    """Close, not equal: the CPU's vector loops round their last few columns otherwise."""
    x = draw(Pack.named("ragged", 4, extra_tokens=3, extra_rows=5), 2, 3, torch.float32)

    def run():
        out = reference.compress_forward(*x.tensors, x.total_comp, **x.config)
        return out, *reference.compress_backward(*x.tensors, x.grad_out, **x.config)

    whole = run()
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 7 * x.ape.numel())
    for got, want in zip(run(), whole, strict=True):
        torch.testing.assert_close(got, want)


def test_capacity_rows_pool_the_first_tokens_and_have_no_gradient():
    x = draw(Pack((6, 9), 4, extra_tokens=2, extra_rows=3), 2, 2, torch.float32)
    out = reference.compress_forward(*x.tensors, x.total_comp, **x.config)
    torch.testing.assert_close(out[x.pack.real_rows :], out[:1].expand(3, -1))
    grads = reference.compress_backward(*x.tensors, x.grad_out, **x.config)
    assert all(g.isfinite().all() for g in grads)
    assert not grads.grad_kv[x.unconsumed].any()


def test_truncated_total_comp_is_a_prefix():
    x = draw(Pack.named("ragged", 4), 2, 3, torch.float32)
    whole = reference.compress_forward(*x.tensors, x.total_comp, **x.config)
    torch.testing.assert_close(reference.compress_forward(*x.tensors, 5, **x.config), whole[:5])


def test_non_finite_ape_of_an_absent_block_never_shows():
    x = draw(Pack((4, 4), 4), 2, 3, torch.float32)
    ape = x.ape.clone()
    ape[:, :3] = torch.nan
    assert reference.compress_forward(x.kv, x.score, ape, *x.tensors[3:], None, **x.config).isfinite().all()
    grads = reference.compress_backward(x.kv, x.score, ape, *x.tensors[3:], x.grad_out, **x.config)
    assert all(g.isfinite().all() for g in grads)
    assert not grads.grad_ape[:, :3].any()


@pytest.mark.parametrize("cu", [[0, -5, 12], [0, 2**30, 12], [7, 3, 1], [-8, 4, 8], [0, 12, 2**31 - 1]])
def test_damaged_offsets_stay_inside_the_tokens(cu):
    """Offsets that lie give padding rows; an index outside the tensors would raise here."""
    x = draw(Pack((12,), 4), 2, 2, torch.float32, poison=False)
    cuc = torch.tensor([0, 1, 6], dtype=torch.int32)
    damaged = (x.kv, x.score, x.ape, torch.tensor(cu, dtype=torch.int32), cuc)
    assert reference.compress_forward(*damaged, 8, **x.config).isfinite().all()
    reference.compress_backward(*damaged, torch.ones(8, 2), **x.config)


def test_no_segments_no_rows_no_tokens():
    cu = torch.zeros(1, dtype=torch.int32)
    kv, ape = torch.zeros(0, 6), torch.zeros(4, 6)
    assert reference.compress_forward(kv, kv, ape, cu, cu, 0, 4, 2).shape == (0, 3)
    grads = reference.compress_backward(kv, kv, ape, cu, cu, torch.zeros(0, 3), 4, 2)
    assert grads.grad_kv.shape == (0, 6) and not grads.grad_ape.any()


def test_rows_without_tokens_are_refused():
    cu = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(errors.ContractError, match="kv: wanted at least ratio = 4"):
        reference.compress_forward(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(4, 2), cu, cu, 1, 4, 1)


def test_build_cu_seqlens_comp():
    lengths = [3, 4, 5, 0, 8]
    got = reference.build_cu_seqlens_comp(offsets(lengths), 4)
    assert got.tolist() == [0, 0, 1, 2, 2, 4] and got.dtype == torch.int32
    assert reference.build_cu_seqlens_comp(torch.zeros(1, dtype=torch.int64), 4).tolist() == [0]
