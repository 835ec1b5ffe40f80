"""An `attn_mask` of numbers: added to the scores, by every backend that takes one, with gradients and over a cache."""

import pytest
import torch

from cuteforge import ContractError, UnsupportedError, attention, explain
from cuteforge.families.attention import reference
from helpers import definitions
from helpers.policy import StubBackend

SHAPES = ((2, 7), (1, 7), (2, 3, 7), (2, 6, 3, 7), (1, 6, 1, 7), (2, 1, 1, 7), (1, 1, 3, 7))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def draw(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 3, 6, 16), (2, 7, 2, 16), (2, 7, 2, 16)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def draw_bias(shape, dtype):
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(shape, generator=generator)
    bias[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
    bias.view(-1, shape[-1])[-1] = -torch.inf  # a row that sees nothing
    return bias.to(dtype)


def with_four_dims(bias):
    return bias if bias.dim() == 4 else bias[:, None] if bias.dim() == 3 else bias[:, None, None]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 1.0, "is_causal": True}, {"window": (2, 1)}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, dtype, options):
    """Of any floating dtype: one of its own is not rounded to that of q."""
    q, k, v = draw()
    bias = draw_bias(shape, dtype)
    renamed = {{"is_causal": "causal"}.get(name, name): value for name, value in options.items()}
    want, _ = reference.attend(q, k, v, bias=with_four_dims(bias), **renamed)
    torch.testing.assert_close(attention(q, k, v, attn_mask=bias, **options), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_comes_out_of_the_rows_that_see_it(dtype):
    q, k, v = draw()
    bias = torch.zeros(1, 1, 3, 7, dtype=dtype)
    bias[0, 0, 1, 4] = bias[0, 0, 0, 6] = torch.nan  # the second one is past the corner
    out = attention(q, k, v, attn_mask=bias, is_causal=True)
    assert out.isnan().all(-1).all(-1).tolist() == [[False, True, False]] * 2
    assert out.isnan().any(-1).any(-1).tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_reaches_a_bias(dtype):
    """Beside those of q, k and v; rows that see nothing get none, and no NaN."""
    q, k, v = (x.double() for x in draw())
    bias = draw_bias((2, 6, 3, 7), torch.float64)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, bias)]
    attention(*leaves[:3], attn_mask=leaves[3], is_causal=True).square().sum().backward()
    plain = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    wanted = torch.autograd.grad(definitions.attention(*plain, is_causal=True).square().sum(), plain)
    assert leaves[3].grad.isfinite().all() and leaves[3].grad.any()
    for leaf, want in zip(leaves, wanted):
        torch.testing.assert_close(leaf.grad.double(), want, atol=1e-4, rtol=1e-4)


def test_a_bias_that_requires_grad_is_not_for_kernels():
    q, k, v = draw(torch.bfloat16)
    bias = torch.zeros(1, 1, 3, 7)
    assert explain(attention, q, k, v, attn_mask=bias, arch="sm_90a").chosen == "cuda"
    decision = explain(attention, q, k, v, attn_mask=bias.requires_grad_(), arch="sm_90a")
    assert decision.chosen == "torch_native"


def test_backends_that_do_not_know_of_it_are_not_asked():
    """One that takes a bool mask would take the numbers for such."""
    q, k, v = draw()
    with pytest.raises(UnsupportedError, match="takes no bias"):
        attention(q, k, v, attn_mask=torch.zeros(2, 7), backend=StubBackend())


@pytest.mark.parametrize(("shape", "match"), [((2, 8), "S = 7, got 8"), ((3, 1, 1, 7), "B = 2 or 1, got 3")])
def test_explain_checks_it(shape, match):
    q, k, v = draw(torch.bfloat16)
    with pytest.raises(ContractError, match=f"^attn_mask: wanted {match}"):
        explain(attention, q, k, v, attn_mask=torch.zeros(shape), arch="sm_90a")
