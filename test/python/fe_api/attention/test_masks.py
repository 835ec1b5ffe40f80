"""Masks of every rank and broadcast, alone and with causal and lengths, in decode and prefill."""

import pytest
import torch

from cuteforge import ContractError
from helpers import attention as attn

BATCH, SIZE, KV_HEADS = 3, 200, 2
HEADS = KV_HEADS * attn.MAIN.group
LENGTHS = {"decode": 4, "prefill": 70}

# By name: the shape for L query tokens. A kernel may be compiled for each rank, and for whether causal comes with it.
SHAPES = {
    "keys": lambda length: (BATCH, SIZE),
    "keys_one_batch": lambda length: (1, SIZE),
    "queries": lambda length: (BATCH, length, SIZE),
    "queries_one_batch": lambda length: (1, length, SIZE),
    "one_query": lambda length: (BATCH, 1, SIZE),
    "all_heads": lambda length: (BATCH, 1, length, SIZE),
    "all_heads_one_query": lambda length: (BATCH, 1, 1, SIZE),
    "by_head": lambda length: (BATCH, HEADS, length, SIZE),
    "by_head_one_query": lambda length: (BATCH, HEADS, 1, SIZE),
    "by_head_one_batch": lambda length: (1, HEADS, length, SIZE),
    "one_of_each": lambda length: (1, 1, 1, SIZE),
}
shapes = pytest.mark.parametrize("shape", SHAPES)
kinds = pytest.mark.parametrize("kind", **attn.both_ops)


def draw(kind, device, causal=True, **given):
    flags = attn.BASE._replace(causal=causal)
    return attn.draw(attn.MAIN, BATCH, LENGTHS[kind], SIZE, KV_HEADS, device=device, flags=flags, **given)


def random_mask(shape, kind, device, keep=0.5, seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.rand(SHAPES[shape](LENGTHS[kind]), generator=generator, device=device) < keep


@kinds
@shapes
def test_shape_with_causal_and_lengths(shape, kind, device):
    """All three by AND; one in twelve keys is kept, so that some queries see nothing."""
    x = draw(kind, device)
    for keep in (0.5, 0.08):
        given = x.with_(mask=random_mask(shape, kind, device, keep))
        attn.check(attn.run(kind, given), given)


@kinds
@pytest.mark.parametrize("shape", ["by_head", "all_heads_one_query"])
def test_without_causal(shape, kind, device):
    x = draw(kind, device, causal=False)
    x = x.with_(mask=random_mask(shape, kind, device))
    attn.check(attn.run(kind, x), x)


def stripes(kept):
    """Whole tiles of keys off, and others on."""

    def fill(mask):
        mask[..., :] = (torch.arange(SIZE, device=mask.device) // 64 % 2 == 0) == kept
        return mask

    return fill


def only(column):
    def fill(mask):
        mask.zero_()
        mask[..., column] = True
        return mask

    return fill


PATTERNS = {
    "none_kept": torch.Tensor.zero_,
    "first_key": only(0),
    "last_key": only(-1),
    "last_key_of_a_tile": only(63),
    "even_tiles": stripes(True),
    "odd_tiles": stripes(False),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("kind", "num_splits"), [("decode", 1), ("decode", 7), ("prefill", None)])
def test_pattern(kind, num_splits, pattern, device):
    """Tiles and splits in which no query sees a key come first, last and in between."""
    x = draw(kind, device, causal=False, lengths=[SIZE, 64, 0])
    x = x.with_(mask=PATTERNS[pattern](random_mask("by_head", kind, device)))
    attn.check(attn.run(kind, x, num_splits=num_splits), x)


@kinds
@pytest.mark.parametrize("shape", ["keys", "queries", "by_head"])
def test_all_kept_equals_no_mask(shape, kind, device):
    x = draw(kind, device)
    got = attn.run(kind, x.with_(mask=random_mask(shape, kind, device, keep=2)))
    attn.check(got, x)
    assert attn.same(got, attn.run(kind, x))


@kinds
def test_nothing_kept_is_the_neutral_element(kind, device):
    x = draw(kind, device)
    out, lse = attn.run(kind, x.with_(mask=random_mask("keys", kind, device, keep=0)))
    assert not out.any() and lse.isneginf().all()


@kinds
def test_mask_equals_lengths(kind, device):
    """A mask that keeps what seqlens_k does."""
    x = draw(kind, device, causal=False)
    keep = torch.arange(SIZE, device=device) < x.seqlens_k[:, None]
    k, v = x.k.nan_to_num(0), x.v.nan_to_num(0)
    full = torch.full_like(x.seqlens_k, SIZE)
    got = attn.run(kind, x.with_(mask=keep[:, None, None], k=k, v=v, seqlens_k=full))
    attn.check(got, x)


@kinds
@shapes
def test_layout_changes_no_bit(shape, kind, device):
    """Slices at odd addresses, rows with gaps, expanded dims: read as they are, or refused by name."""
    x, mask = draw(kind, device), random_mask(shape, kind, device)
    want = attn.run(kind, x.with_(mask=mask))
    wide = torch.ones(*mask.shape[:-1], SIZE + 3, dtype=torch.bool, device=device)
    wide[..., 1:-2] = mask
    assert attn.same(attn.Results(*attn.wrapped(kind, x.with_(mask=wide[..., 1:-2]))), want)
    try:
        assert attn.same(attn.run(kind, x.with_(mask=wide[..., 1:-2])), want)
    except ContractError as refusal:
        assert str(refusal).startswith("mask")
    expanded = mask[:1].expand_as(mask)
    assert attn.same(attn.run(kind, x.with_(mask=expanded)), attn.run(kind, x.with_(mask=expanded.contiguous())))


@kinds
def test_equal_masks_of_other_ranks_agree(kind, device):
    x, mask = draw(kind, device), random_mask("keys", kind, device)
    for same in (mask[:, None], mask[:, None, None]):
        attn.check(attn.run(kind, x.with_(mask=same)), x.with_(mask=mask))


@kinds
def test_wrapper_takes_a_mask_of_any_strides(kind, device):
    x, mask = draw(kind, device), random_mask("by_head", kind, device)
    strided = mask.transpose(-1, -2).contiguous().transpose(-1, -2)
    got = attn.wrapped(kind, x.with_(mask=strided))
    assert attn.same(attn.Results(*got), attn.run(kind, x.with_(mask=mask)))


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_with_a_mask(causal, device):
    """Rows and columns are those of the request."""
    lens_q, lens_k = [5, 0, 70, 1], [7, 3, 130, 200]
    generator = torch.Generator(device=device).manual_seed(0)
    mask = torch.rand(4, 8, 70, 200, generator=generator, device=device) < 0.5
    x = attn.draw_ragged(attn.MAIN, lens_q, lens_k, device=device, causal=causal, mask=mask)
    attn.check(attn.run("prefill", x), x)
