"""Log-sum-exp of every op, and joining partial results by it."""

import math

import pytest
import torch

from cuteforge import ContractError, merge_state
from cuteforge.families.attention import reference
from helpers import attention as attn
from helpers import budget
from helpers.canary import strided_copy

kinds = pytest.mark.parametrize("kind", **attn.both_ops)


@kinds
def test_lse_is_the_natural_logarithm_with_the_scale(kind, device):
    """Keys of 0 give ln(length) whatever the scale; one key gives its scaled score."""
    x = attn.draw(attn.MAIN, 4, 1, 100, device=device, lengths=[100, 1, 37, 0], softmax_scale=0.5)
    zeros = attn.with_lengths(x.with_(k=torch.zeros_like(x.k), v=x.v.nan_to_num(0)), [100, 1, 37, 0])
    lse = attn.run(kind, zeros).lse
    want = torch.tensor([math.log(100), 0, math.log(37), -math.inf], device=device)
    torch.testing.assert_close(lse, want[:, None, None].expand_as(lse), rtol=1e-6, atol=1e-6)
    scores = torch.einsum("hd,hd->h", x.q[1, 0].float(), x.k[1, 0].float().repeat_interleave(4, 0))
    torch.testing.assert_close(attn.run(kind, x).lse[1, :, 0], 0.5 * scores, rtol=1e-5, atol=1e-5)


@kinds
def test_out_does_not_depend_on_whether_lse_is_asked_for(kind, device):
    x = attn.draw(attn.MAIN, 3, 4, 1000, device=device)
    options = {"num_splits": 2}
    assert budget.same_bits(attn.run(kind, x, lse=False, **options).out, attn.run(kind, x, **options).out)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_lse_of_splits(num_splits, device):
    """Splits past the end, and whole requests, are empty."""
    x = attn.draw(attn.MAIN, 6, 3, 600, device=device)
    attn.check(attn.run("decode", x, num_splits=num_splits), x)


@kinds
def test_parts_of_the_keys_merge_to_the_whole(kind, device):
    """What merges is what the op returns, rows without a key included."""
    x = attn.draw(attn.MAIN, 3, 4, 300, device=device, flags=attn.FLAGS[1], lengths=[300, 120, 50])
    parts = []
    for first, end in ((0, 100), (100, 300)):
        lengths = (x.seqlens_k - first).clamp(max=end - first)
        part = x.with_(k=x.k[:, first:end].contiguous(), v=x.v[:, first:end].contiguous(), seqlens_k=lengths)
        parts += attn.run(kind, part)
    got = attn.Results(*merge_state(*parts))
    assert got.out.dtype == x.q.dtype and got.lse.dtype == torch.float32
    # The parts were rounded once more than the whole: twice the ulp of the largest value.
    truth = attn.expected(x)
    slack = 2 * float(budget.ulp(truth.out.abs().max(), x.q.dtype))
    torch.testing.assert_close(got.out.double(), truth.out, rtol=0, atol=2 * slack)
    torch.testing.assert_close(got.lse.double(), truth.lse, rtol=1e-5, atol=1e-5)


SHAPES = {
    "dense": (3, 5, 8, 128),
    "one_token": (2, 1, 3, 64),
    "packed": (37, 8, 80),
    "narrow": (7, 3, 8),
    "wide": (5, 2, 256),
}


def draw(shape, dtype, device, seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    out = torch.randn(shape, generator=generator, device=device).to(dtype)
    return out, torch.randn(lse_shape, generator=generator, device=device) * 3


def nothing(out, lse):
    return torch.zeros_like(out), torch.full_like(lse, -math.inf)


def check_merged(got, parts):
    """Within the budget of the dtype against fp64."""
    oracle = reference.merge(*(t.double() for t in parts))
    eager = reference.merge(*parts)
    budget.assert_within_budget(got["out"], oracle[0], eager[0], "out")
    budget.assert_within_budget(got["lse"], oracle[1], eager[1], "lse")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_merge(shape, dtype, device):
    parts = (*draw(shape, dtype, device), *draw(shape, dtype, device, seed=1))
    got = merge_state(*parts)
    assert list(got.keys()) == ["out", "lse"]
    assert got["out"].shape == parts[0].shape and got["out"].dtype == dtype
    assert got["lse"].shape == parts[1].shape and got["lse"].dtype == torch.float32
    check_merged(got, parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nothing_is_the_neutral_element(shape, dtype, device):
    """On either side, and of itself; no bit of the other changes."""
    part = draw(shape, dtype, device)
    empty = nothing(*part)
    for got in (merge_state(*part, *empty), merge_state(*empty, *part)):
        assert torch.equal(got["out"], part[0]) and torch.equal(got["lse"], part[1])
    both = merge_state(*empty, *empty)
    assert not both["out"].any() and both["lse"].isneginf().all()


def test_some_rows_are_empty(device):
    parts = [draw(SHAPES["dense"], torch.bfloat16, device, seed) for seed in (0, 1)]
    for (out, lse), heads in zip(parts, ([0, 1, 2], [2, 3])):
        out[:, :, heads], lse[:, heads] = 0, -math.inf
    check_merged(merge_state(*parts[0], *parts[1]), (*parts[0], *parts[1]))


def test_order_of_the_parts_does_not_matter(device):
    a, b = (draw(SHAPES["dense"], torch.bfloat16, device, seed) for seed in (0, 1))
    for one, other in zip(merge_state(*a, *b), merge_state(*b, *a)):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("distance", [1.0, 80.0, 1e4, 1e30])
def test_parts_far_apart(distance, device):
    """The larger wins without an overflow, far above and far below 0."""
    (a, lse), (b, _) = (draw(SHAPES["packed"], torch.bfloat16, device, seed) for seed in (0, 1))
    for base in (0.0, -distance):
        parts = (a, torch.full_like(lse, base + distance), b, torch.full_like(lse, base))
        check_merged(merge_state(*parts), parts)


def test_strided_parts(device):
    """Slices of wider buffers: read as they are, or copied."""
    shape = SHAPES["packed"]
    parts = (*draw(shape, torch.bfloat16, device), *draw(shape, torch.bfloat16, device, seed=1))
    want = merge_state(*parts)
    strided = [strided_copy(t, attn.gap_stride(t.shape)) if t.dim() == 3 else t.t().contiguous().t() for t in parts]
    for got, expected in zip(merge_state(*strided), want, strict=True):
        assert budget.same_bits(got, expected)


BAD = {
    "lse_a": lambda parts: (parts[0], parts[1][:, :-1], *parts[2:]),
    "o_b": lambda parts: (*parts[:2], parts[2][..., :-8], parts[3]),
    "lse_b": lambda parts: (*parts[:3], parts[3].half()),
}


@pytest.mark.parametrize("name", BAD)
def test_merge_names_the_argument_that_disagrees(name, device):
    part = draw(SHAPES["packed"], torch.bfloat16, device)
    with pytest.raises(ContractError, match=rf"^{name}\b"):
        merge_state(*BAD[name]((*part, *part)))


def test_merge_of_nothing(device):
    for shape in ((0, 5, 8, 64), (2, 0, 8, 64), (0, 8, 64)):
        part = draw(shape, torch.bfloat16, device)
        got = merge_state(*part, *part)
        assert got["out"].shape == shape and got["lse"].shape == part[1].shape
