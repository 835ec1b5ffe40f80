"""Biases of every dtype, shape and layout, alone and with all else that scores have, in decode and prefill."""

import pytest
import torch

from cuteforge import ContractError
from helpers import attention as attn
from helpers import biases

BATCH, SIZE, KV_HEADS = 3, 200, 2
LENGTHS = {"decode": 4, "prefill": 150}
D64, LATENT, D256 = attn.HEAD_DIMS[4], attn.LATENT, attn.HEAD_DIMS[10]
kinds = pytest.mark.parametrize("kind", **attn.both_ops)
dtypes = pytest.mark.parametrize("dtype", biases.DTYPES, ids=str)
WAYS = [("decode", 1), ("decode", 3), ("decode", 7), ("decode", None), ("prefill", None)]
ways = pytest.mark.parametrize(("kind", "num_splits"), WAYS, ids=[f"{kind}-n{n}" for kind, n in WAYS])


def draw(kind, device, config=attn.MAIN, size=SIZE, **given):
    return attn.draw(config, BATCH, LENGTHS[kind], size, KV_HEADS, device=device, **given)


def shapes(x):
    """For the queries and keys of a call: of each score, and the broadcasts."""
    batch, length, heads, _ = x.q.shape
    size = x.k.shape[1]
    return (batch, heads, length, size), (1, heads, 1, size), (batch, 1, length, size), (1, 1, 1, size)


@kinds
@dtypes
def test_dtype_and_shape(dtype, kind, device):
    """With a causal corner, lengths, and rows that are -inf whole; what it holds past the lengths does not matter."""
    x = draw(kind, device)
    for shape in shapes(x):
        bias = biases.draw(shape, dtype, device)
        given = x.with_(bias=bias)
        got = attn.run(kind, given)
        attn.check(got, given)
        if shape[0] > 1:
            bias = bias.clone()
            for b, n in enumerate(x.seqlens_k.tolist()):
                bias[b, ..., n:] = torch.nan
            assert attn.same(attn.run(kind, x.with_(bias=bias)), got)


@kinds
@dtypes
@pytest.mark.parametrize("size", [SIZE, SIZE - 1])
def test_layout_changes_no_bit(size, dtype, kind, device):
    """Rows at odd addresses and apart by odd and even pitches, columns apart, strides of 0, between NaN; a last column
    that is alone."""
    x = draw(kind, device, size=size)
    bias = biases.draw(shapes(x)[0], dtype, device)
    want = attn.run(kind, x.with_(bias=bias))
    for name, place in biases.LAYOUTS.items():
        placed = place(bias)
        assert torch.equal(placed, bias)
        assert attn.same(attn.run(kind, x.with_(bias=placed)), want), name
    expanded = x.with_(bias=bias[:1, :, :1].expand_as(bias))
    assert attn.same(attn.run(kind, expanded), attn.run(kind, x.with_(bias=bias[:1, :, :1])))
    of_heads = bias[:1, :, :1, :1].expand_as(bias)
    assert attn.same(attn.run(kind, x.with_(bias=of_heads)), attn.run(kind, x.with_(bias=of_heads.contiguous())))
    assert attn.same(attn.Results(*attn.wrapped(kind, x.with_(bias=biases.LAYOUTS["columns_apart"](bias)))), want)


@ways
def test_nan_comes_out_of_the_rows_that_see_it(kind, num_splits, device):
    """Whichever CTA or warp has its tile; a row of nothing but NaN too."""
    x = draw(kind, device)
    bias = biases.draw(shapes(x)[0], attn.BF16, device)
    bias[0, 1, 2, 150] = bias[0, 2, 0, 0] = torch.nan
    bias[1, 3] = torch.nan
    given = x.with_(bias=bias)
    attn.check(attn.run(kind, given, num_splits=num_splits), given)


@ways
def test_with_all_options(kind, num_splits, device):
    """Mask, window, cap and sinks; a negative scale."""
    x = draw(kind, device, softcap=8.0, window=(70, None), softmax_scale=-0.3)
    mask = torch.rand(BATCH, LENGTHS[kind], SIZE, generator=torch.Generator(device).manual_seed(1), device=device) < 0.7
    sinks = torch.linspace(-3, 3, x.q.shape[2], device=device)
    given = x.with_(bias=biases.draw(shapes(x)[0], attn.BF16, device), mask=mask, sinks=sinks)
    attn.check(attn.run(kind, given, num_splits=num_splits), given)


@ways
def test_splits(kind, num_splits, device):
    """Rows whose keys of one split, and of all but one, are -inf."""
    x = draw(kind, device, lengths=[SIZE, 64, 0])
    bias = biases.draw(shapes(x)[0], attn.BF16, device)
    bias[:, 0, :, :100] = bias[:, 1, :, 100:] = -torch.inf
    given = x.with_(bias=bias)
    attn.check(attn.run(kind, given, num_splits=num_splits), given)


@kinds
def test_scale_of_zero_leaves_the_bias(kind, device):
    x = draw(kind, device, softmax_scale=0.0)
    given = x.with_(bias=biases.draw(shapes(x)[1], attn.BF16, device))
    attn.check(attn.run(kind, given), given)


@kinds
def test_lowest_number_is_no_infinity(kind, device):
    """Models mask with it: a row of nothing else weighs all keys alike, as torch does. Parts that are joined
    by their log-sum-exps would not: beside such a number these have no digit left for how many keys there are."""
    x = draw(kind, device, lengths=[SIZE] * BATCH)
    bias = torch.full((1, 1, 1, SIZE), torch.finfo(torch.float32).min, device=device)
    out, _ = attn.run(kind, x.with_(bias=bias), num_splits=1 if kind == "decode" else None)
    last = x.v.float().mean(1).repeat_interleave(x.q.shape[2] // KV_HEADS, 1)
    torch.testing.assert_close(out[:, -1].float(), last, atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("kind", "config"), [("prefill", D64), ("decode", D256), ("prefill", D256), ("prefill", LATENT)]
)
def test_width(kind, config, device):
    x = draw(kind, device, config)
    given = x.with_(bias=biases.draw(shapes(x)[0], torch.float32, device))
    attn.check(attn.run(kind, given), given)


def test_packed_requests(device):
    """Rows are tokens of a request; rows and columns that the bias lacks count as masked."""
    x = attn.draw_ragged(attn.MAIN, [5, 0, 130, 33], [9, 12, 130, 99], device=device)
    heads = x.q.shape[1]
    for shape in ((4, heads, 130, 130), (4, 1, 20, 61), (1, heads, 1, 70), (1, 1, 130, 1)):
        given = x.with_(bias=biases.draw(shape, attn.BF16, device))
        attn.check(attn.run("prefill", given), given)


@kinds
def test_wrapper_serves_other_sizes_and_refuses_others(kind, device):
    """A remembered call is not taken for one of another extent, dtype or layout."""
    for size in (SIZE, SIZE, SIZE, SIZE + 1, SIZE):
        x = draw(kind, device, size=size)
        for place in (lambda x: x, *biases.LAYOUTS.values()):
            given = x.with_(bias=place(biases.draw(shapes(x)[0], attn.BF16, device)))
            attn.check(attn.Results(*attn.wrapped(kind, given)), given)
    with pytest.raises(ContractError, match=rf"^bias: wanted S = {SIZE}, got {SIZE - 1}"):
        attn.wrapped(kind, given.with_(bias=given.bias[..., 1:]))
    with pytest.raises(ContractError, match="^bias: wanted a tensor that does not require grad"):
        attn.wrapped(kind, given.with_(bias=given.bias.clone().requires_grad_()))
