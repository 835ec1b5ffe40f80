"""Windows, softcaps and sinks over keys and values in pages: decode, decode that appends, prefill."""

import pytest
import torch

from helpers import paged
from helpers.paged import CAUSAL, MAIN, PREFILL_QUERIES, edges

CONFIGS = (MAIN, CAUSAL, *paged.CONFIGS[2:6])
CASES = {
    "one_token": (MAIN, edges(16)),
    "pages_of_one": (MAIN, edges(1, 3)),
    "wide_pages": (CAUSAL, edges(256, 5)),
    "offsets": (CAUSAL, edges(7, 2, by_indptr=True)),
    "rows": (MAIN, edges(16, 2, rows=(3, 0, 6, 5, 1, 4, 2))),
    "flat": (CAUSAL, edges(1, 4, place="flat")),
    "prefill": (CAUSAL, edges(16, PREFILL_QUERIES)),
    "prefill_full": (MAIN, edges(64, PREFILL_QUERIES)),
}
cases = pytest.mark.parametrize("case", CASES)
OPTIONS = {
    "left": {"window": (50, None)},
    "own_key": {"window": (0, 0)},
    "right": {"window": (None, 6)},
    "both": {"window": (300, 2)},
    "softcap": {"softcap": 8.0, "softmax_scale": 0.5},
    "all": {"window": (100, None), "softcap": 20.0},
}
# Keys of the largest tile, which may be read before a window.
SLACK = 128


def sinks_of(x):
    return torch.linspace(-3, 3, x.q.shape[-2], device=x.q.device)


@cases
@pytest.mark.parametrize("option", OPTIONS)
def test_option(option, case, device):
    x = paged.draw(*CASES[case], device).with_(**OPTIONS[option])
    paged.check(paged.run(x), x)


@cases
def test_sinks(case, device):
    x = paged.draw(*CASES[case], device)
    x = x.with_(sinks=sinks_of(x))
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label)
@pytest.mark.parametrize("queries", [0, PREFILL_QUERIES], ids=["decode", "prefill"])
def test_all_of_each_width(queries, config, device):
    x = paged.draw(config, edges(16, queries), device).with_(**OPTIONS["all"])
    x = x.with_(sinks=sinks_of(x))
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("queries", [0, 4])
def test_splits(queries, num_splits, device):
    x = paged.draw(CAUSAL, edges(16, queries), device).with_(**OPTIONS["all"])
    x = x.with_(sinks=sinks_of(x))
    paged.check(paged.run(x, num_splits=num_splits), x)


@pytest.mark.parametrize("num_splits", [1, 3, None])
@pytest.mark.parametrize("left", [0, 10, 400])
def test_appended_tokens_are_stored_and_seen(left, num_splits, device):
    """Whichever CTA starts at the first key of the window."""
    x = paged.appending(paged.draw(MAIN, edges(16, 2), device))
    x = x.with_(window=(left, None), sinks=sinks_of(x))
    paged.check(paged.run(x, num_splits=num_splits), x)


@pytest.mark.parametrize("queries", [0, 4, (3, 1, 17)], ids=["one_token", "decode", "prefill"])
@pytest.mark.parametrize("left", [0, 100])
def test_pages_far_before_a_window_need_not_exist(left, queries, device):
    """Their numbers may be negative, or stale."""
    batch = paged.Batch((3000, 1500, 2999), 16, queries)
    x = paged.draw(CAUSAL, batch, device).with_(window=(left, None))
    table = x.page_table.clone()
    for row, keys in enumerate(batch.lengths):
        unseen = (keys - 17 - left - SLACK) // 16
        table[row, : max(unseen, 0)] = torch.tensor([-1, 2**31 - 1], dtype=torch.int32, device=device)[row % 2]
    paged.check(paged.run(x.with_(page_table=table)), x)


def test_wrapper(device):
    for case in ("rows", "prefill"):
        x = paged.draw(*CASES[case], device).with_(**OPTIONS["all"])
        x = x.with_(sinks=sinks_of(x))
        paged.check(paged.call_wrapper(x), x)
