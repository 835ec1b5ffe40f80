"""The eager reference against a plain loop over the contract, published numbers, and autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuteforge.families.rotary import reference
from cuteforge.families.rotary.table import rotary_table

FP64 = torch.float64


def naive(x, cos, sin, positions, interleaved, inverse):
    """The contract, one pair at a time in Python floats, for x (T, H, D) and one row of cos and sin for each
    position."""
    out = x.double().clone()
    half = cos.shape[1]
    for t, position in enumerate(positions.tolist()):
        if not 0 <= position < cos.shape[0]:
            out[t] = math.nan
            continue
        for h in range(x.shape[1]):
            for i in range(half):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                a, b = x[t, h, first].item(), x[t, h, second].item()
                c, s = cos[position, i].item(), sin[position, i].item()
                s = -s if inverse else s
                out[t, h, first], out[t, h, second] = a * c - b * s, b * c + a * s
    return out


def draw(tokens, heads, d, rotary_dim, seed, dtype=FP64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, d, generator=generator, dtype=FP64).to(dtype)
    return x, rotary_table(11, rotary_dim)


def freqs_cis(cos, sin, positions):
    return torch.stack((cos[positions], sin[positions]), -1)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 4),
    heads=st.integers(1, 3),
    half=st.integers(1, 4),
    rest=st.integers(0, 3),
    interleaved=st.booleans(),
    inverse=st.booleans(),
    position_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
def test_equals_a_plain_loop(tokens, heads, half, rest, interleaved, inverse, position_dtype, seed):
    """Both pairings and directions, partial widths, positions in and out of the table; then the same by token."""
    x, (cos, sin) = draw(tokens, heads, 2 * half + rest, 2 * half, seed)
    positions = torch.randint(-2, 13, (tokens,), generator=torch.Generator().manual_seed(seed), dtype=position_dtype)
    options = {"interleaved": interleaved, "inverse": inverse, "compute_dtype": FP64}
    want = naive(x, cos, sin, positions, interleaved, inverse)
    got = reference.rotate(x, (cos, sin), positions, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    inside = positions.clamp(0, 10)
    by_token = reference.rotate(x, freqs_cis(cos, sin, inside), **options)
    looked_up = reference.rotate(x, (cos, sin), inside, **options)
    assert torch.equal(by_token, looked_up)


def test_numbers_of_the_report():
    x, table = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), rotary_table(2, 4)
    one = torch.tensor([1])
    for interleaved, want in (
        (False, [-1.9841, 1.9599, 2.4624, 4.0198]),
        (True, [-1.1426, 1.9221, 2.9599, 4.0298]),
    ):
        got = reference.rotate(x, table, one, interleaved=interleaved)
        torch.testing.assert_close(got.flatten(), torch.tensor(want), rtol=0, atol=1e-4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_complex_product_is_the_interleaved_pairing(interleaved):
    """The form of model code: pairs as complex numbers times e^{i angle}."""
    x, (cos, sin) = draw(5, 2, 8, 8, 0)
    positions = torch.arange(5)
    angles = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    # Half-split pairing is the interleaved one on reordered columns.
    order = torch.arange(8) if interleaved else torch.arange(8).view(2, 4).t().flatten()
    turned = torch.view_as_real(torch.view_as_complex(x[..., order].unflatten(-1, (4, 2)).contiguous()) * angles)
    want = torch.empty_like(x)
    want[..., order] = turned.flatten(-2)
    got = reference.rotate(x, (cos, sin), positions, interleaved=interleaved, compute_dtype=FP64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
def test_dense_equals_packed(interleaved):
    x, table = draw(6, 2, 10, 4, 1)
    positions = torch.tensor([3, 0, 12, 10, -1, 3])
    packed = reference.rotate(x, table, positions, interleaved=interleaved)
    dense = reference.rotate(x.view(2, 3, 2, 10), table, positions.view(2, 3), interleaved=interleaved)
    assert torch.equal(dense.view_as(packed).nan_to_num(7), packed.nan_to_num(7))


@pytest.mark.parametrize("interleaved", [True, False])
def test_inverse_undoes_the_rotation(interleaved):
    x, table = draw(11, 2, 12, 8, 2)
    positions = torch.arange(11)
    options = {"interleaved": interleaved, "compute_dtype": FP64}
    there = reference.rotate(x, table, positions, **options)
    back = reference.rotate(there, table, positions, inverse=True, **options)
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_is_fp32_with_one_rounding(dtype):
    x, table = draw(9, 2, 8, 8, 3, dtype)
    positions = torch.arange(9)
    got = reference.rotate(x, table, positions)
    assert got.dtype == dtype
    assert torch.equal(got, reference.rotate(x, table, positions, out_dtype=torch.float32).to(dtype))
    wide = reference.rotate(x.float(), table, positions)
    assert torch.equal(got, wide.to(dtype))


def test_passed_columns_are_untouched_and_the_input_too():
    x, table = draw(4, 2, 10, 6, 4, torch.bfloat16)
    before = x.clone()
    out = reference.rotate(x, table, torch.arange(4))
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert torch.equal(x, before)


def test_positions_outside_give_nan_rows_in_every_column():
    x, table = draw(6, 2, 10, 6, 5)
    positions = torch.tensor([-1, 0, 10, 11, -(2**31), 2**62])
    out = reference.rotate(x, table, positions)
    assert out.isnan().all((1, 2)).tolist() == [True, False, False, True, True, True]
    assert out[1:3].isfinite().all()


def test_empty_table_and_no_tokens():
    x, _ = draw(3, 2, 8, 4, 6)
    empty = rotary_table(0, 4)
    assert reference.rotate(x, empty, torch.zeros(3, dtype=torch.int64)).isnan().all()
    assert reference.rotate(x[:0], empty, torch.zeros(0, dtype=torch.int32)).shape == (0, 2, 8)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("inverse", [True, False])
def test_gradcheck(interleaved, inverse):
    x, (cos, sin) = draw(3, 2, 6, 4, 7)
    cos, sin, positions = cos.double(), sin.double(), torch.tensor([0, 10, 4])

    def call(x, cos, sin):
        options = {"interleaved": interleaved, "inverse": inverse, "compute_dtype": None}
        return reference.rotate(x, (cos, sin), positions, **options)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in (x, cos, sin)])


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradient_is_the_inverse_rotation(interleaved):
    """NaN where the token lies outside the table, as the inverse rotation gives."""
    x, table = draw(5, 2, 6, 4, 8)
    grad_out, positions = torch.randn_like(x), torch.tensor([0, 10, 4, 11, -1])
    options = {"interleaved": interleaved, "compute_dtype": FP64}
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(reference.rotate(leaf, table, positions, **options), leaf, grad_out)
    want = reference.rotate(grad_out, table, positions, inverse=True, **options)
    torch.testing.assert_close(grad, want, equal_nan=True)
