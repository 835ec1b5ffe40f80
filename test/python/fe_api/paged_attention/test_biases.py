"""Biases over keys and values in pages: decode, decode that appends, prefill."""

import pytest
import torch

from helpers import biases, paged
from helpers.paged import CAUSAL, MAIN, PREFILL_QUERIES, edges

CASES = {
    "one_token": (MAIN, edges(16)),
    "tokens_rows": (CAUSAL, edges(16, 4, rows=(3, 0, 6, 5, 1, 4, 2))),
    "flat": (CAUSAL, edges(1, 4, place="flat")),
    "prefill": (CAUSAL, edges(16, PREFILL_QUERIES)),
}


def tokens_of(x):
    if not x.is_decode:
        return int(x.cu_seqlens_q.diff().max())
    return x.q.shape[1] if x.q.dim() == 4 else 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_shape(case, dtype, device):
    """As wide as the longest request and wider, with NaN past the lengths, and narrower, where keys past it count as
    masked."""
    x = paged.draw(*CASES[case], device)
    batch, heads, tokens, keys = len(x.lens), x.q.shape[-2], tokens_of(x), int(x.lens.max())
    for shape in ((batch, heads, tokens, keys + 3), (1, heads, 1, keys), (batch, 1, tokens, max(keys // 2, 1))):
        bias = biases.draw(shape, dtype, device)
        if shape[-1] > keys:
            for b, n in enumerate(x.lens.tolist()):
                bias[b, ..., n:] = torch.nan
        given = x.with_(bias=bias)
        paged.check(paged.run(given), given)


@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_appended_tokens_have_the_last_column(num_splits, device):
    x = paged.appending(paged.draw(MAIN, edges(16, 2), device))
    bias = biases.draw((len(x.lens), x.q.shape[-2], tokens_of(x), int(x.lens.max())), torch.float16, device)
    given = x.with_(bias=bias)
    paged.check(paged.run(given, num_splits=num_splits), given)
