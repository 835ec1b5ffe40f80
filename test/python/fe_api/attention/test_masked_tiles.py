"""Masks over many tiles of keys in prefill: whole tiles that a mask leaves nothing of, first, last and in between, for
some rows or all."""

import pytest
import torch

from helpers import attention as attn

BATCH, LENGTH, SIZE, KV_HEADS = 2, 330, 1040, 2
WIDTHS = {"d64": (64, 64), "d128": (128, 128), "d256": (256, 256)}
widths = pytest.mark.parametrize("width", WIDTHS)


def draw(width, device, size=SIZE, **given):
    config = attn.MAIN._replace(d=WIDTHS[width][0], dv=WIDTHS[width][1])
    flags = attn.BASE._replace(causal=False, lengths=False)
    return attn.draw(config, BATCH, LENGTH, size, KV_HEADS, device=device, flags=flags, **given)


def positions(size, device):
    """Of queries, at the end of the keys, and of keys."""
    return torch.arange(size - LENGTH, size, device=device)[:, None], torch.arange(size, device=device)


def causal(size, device):
    row, col = positions(size, device)
    return col <= row


def window(size, device):
    row, col = positions(size, device)
    return (col <= row) & (col > row - 200)


def documents(size, device):
    row, col = positions(size, device)
    return row // 170 == col // 170


def first_and_own(size, device):
    """The first keys and those nearby, and nothing for many tiles between."""
    row, col = positions(size, device)
    return (col < 5) | ((col <= row) & (col > row - 30))


def some_rows_see_nothing(size, device):
    row, col = positions(size, device)
    return (col <= row) & (row % 3 != 0) & (row > size - 100)


PATTERNS = {f.__name__: f for f in (causal, window, documents, first_and_own, some_rows_see_nothing)}


@widths
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [SIZE, SIZE - 3], ids=["whole_words", "odd_rows"])
def test_pattern_of_all_heads(pattern, width, size, device):
    x = draw(width, device, size)
    x = x.with_(mask=PATTERNS[pattern](size, device).expand(BATCH, 1, LENGTH, size).contiguous())
    attn.check(attn.run("prefill", x), x)


@widths
def test_heads_with_masks_of_their_own(width, device):
    """Tiles count if any head of the group keeps them: queries of all its heads share a tile of rows."""
    x = draw(width, device)
    kinds = list(PATTERNS.values())
    heads = KV_HEADS * attn.MAIN.group
    mask = torch.stack([kinds[h % len(kinds)](SIZE, device) for h in range(heads)])
    x = x.with_(mask=mask.expand(BATCH, heads, LENGTH, SIZE).contiguous())
    attn.check(attn.run("prefill", x), x)


@widths
@pytest.mark.parametrize(("begin", "end"), [(0, 700), (401, SIZE), (333, 650), (SIZE - 1, SIZE), (5, 5)])
def test_padding(begin, end, width, device):
    x, col = draw(width, device), torch.arange(SIZE, device=device)
    kept = (col >= torch.tensor([[begin], [0]], device=device)) & (col < torch.tensor([[end], [SIZE]], device=device))
    x = x.with_(mask=kept)
    attn.check(attn.run("prefill", x), x)


@widths
def test_long_padding_before_one_key(width, device):
    """More tiles than a warp looks at together."""
    size = 64 * 128
    x = draw(width, device, size)
    kept = torch.zeros(BATCH, size, dtype=torch.bool, device=device)
    kept[0, -1] = kept[1, 0] = True
    x = x.with_(mask=kept)
    attn.check(attn.run("prefill", x), x)


@widths
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_all_kept_gives_the_bits_of_no_mask(rank, width, device):
    x = draw(width, device)
    shape = {2: (BATCH, SIZE), 3: (BATCH, LENGTH, SIZE), 4: (1, KV_HEADS * attn.MAIN.group, LENGTH, SIZE)}[rank]
    masked = x.with_(mask=torch.ones(shape, dtype=torch.bool, device=device))
    assert attn.same(attn.run("prefill", masked), attn.run("prefill", x))


@widths
def test_causal_mask_gives_the_bits_of_causal(width, device):
    x = draw(width, device)
    masked = x.with_(mask=causal(SIZE, device)[None])
    assert attn.same(attn.run("prefill", masked), attn.run("prefill", x.with_(causal=True)))


@widths
def test_padding_gives_the_bits_of_lengths(width, device):
    x = draw(width, device)
    lengths = torch.tensor([700, 81], dtype=torch.int32, device=device)
    masked = x.with_(mask=torch.arange(SIZE, device=device) < lengths[:, None])
    assert attn.same(attn.run("prefill", masked), attn.run("prefill", x.with_(seqlens_k=lengths)))


@widths
@pytest.mark.parametrize("rank", [2, 4])
def test_tiles_that_a_mask_empties_are_not_read(rank, width, device):
    """Values there are NaN, which a weight of 0 does not remove."""
    x = draw(width, device)
    kept = torch.zeros(BATCH, SIZE, dtype=torch.bool, device=device)
    kept[:, 256:512] = True
    clean = x.with_(mask=kept if rank == 2 else kept[:, None, None])
    bad = x.v.clone()
    bad[:, :128], bad[:, 640:] = torch.nan, torch.nan
    assert attn.same(attn.run("prefill", clean.with_(v=bad)), attn.run("prefill", clean))


def test_any_byte_but_zero_is_true(device):
    """A view of bytes may hold any."""
    x, numbers = draw("d128", device), torch.arange(SIZE, device=device).to(torch.uint8)
    kept = numbers.expand(BATCH, SIZE).contiguous()
    want = attn.run("prefill", x.with_(mask=kept != 0))
    assert attn.same(attn.run("prefill", x.with_(mask=kept.view(torch.bool))), want)
