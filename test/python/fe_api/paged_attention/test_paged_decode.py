"""Decode over paged keys and values against fp64, for every page size, width, group and kind of length."""

import math

import pytest
import torch

from cuteforge import attn_paged_decode
from helpers import budget, paged
from helpers.paged import CAUSAL, MAIN, Batch, edges

page_sizes = pytest.mark.parametrize("page_size", paged.PAGE_SIZES)


@page_sizes
@pytest.mark.parametrize("config", [MAIN, CAUSAL], ids=lambda c: c.label)
def test_lengths_around_a_page_and_up_to_the_table_width(config, page_size, device):
    """One query token; five with causal, so that requests shorter than that have rows that see nothing."""
    x = paged.draw(config, edges(page_size, 5 if config.causal else 0), device)
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("page_size", [1, 7, 64, 256])
@pytest.mark.parametrize("config", paged.CONFIGS[2:], ids=lambda c: c.label)
def test_width_group_and_dtype(config, page_size, device):
    x = paged.draw(config, edges(page_size, 2 if config.causal else 0), device)
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("queries", range(1, 17))
def test_query_tokens_with_causal(queries, device):
    """The corner is at the bottom right: request b's last query sees all of its keys."""
    x = paged.draw(CAUSAL, Batch((0, 1, queries - 1, queries, queries + 1, 40, 333), 16, queries), device)
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_kv_heads(kv_heads, device):
    x = paged.draw(MAIN, edges(16, kv_heads=kv_heads), device)
    paged.check(paged.run(x), x)


def test_q_of_three_dims_is_one_query_token(device):
    """The same bits; lse has its dim of one either way."""
    x = paged.draw(MAIN, edges(16), device)
    flat, dense = paged.run(x), paged.run(x.with_(q=x.q[:, None]))
    assert budget.same_bits(flat["out"], dense["out"][:, 0])
    assert flat["lse"].shape == (len(x.lens), x.q.shape[1], 1)
    assert budget.same_bits(flat["lse"], dense["lse"])


ROWS = {
    "reordered": (3, 0, 6, 5, 1, 4, 2),
    "repeated": (2, 2, 0, 4, 4, 4, 1),
    "one_for_all": (3, 3, 3, 3, 3, 3, 3),
    "of_a_higher_table": (20, 1, 17, 8, 20, 0, 2),
}


@pytest.mark.parametrize("by_indptr", [False, True], ids=["seqlens_k", "kv_indptr"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_page_table_rows(rows, by_indptr, device):
    """Requests that share a row may see less or more of it; rows that nobody names hold stale numbers only."""
    x = paged.draw(MAIN, edges(16, queries=2, rows=rows, by_indptr=by_indptr), device)
    paged.check(paged.run(x), x)


@page_sizes
def test_lengths_by_offsets(page_size, device):
    """kv_indptr counts tokens, wherever it starts: the same bits as with seqlens_k."""
    batch = edges(page_size, queries=2)
    x, y = (paged.draw(MAIN, batch._replace(by_indptr=by_indptr), device) for by_indptr in (False, True))
    assert paged.same(paged.run(y), paged.run(x))


def test_lengths_below_zero_are_empty_requests(device):
    x = paged.draw(MAIN, Batch((0, 40, 0, 3)), device)
    below = x.with_(seqlens_k=torch.tensor([-1, 40, -(2**31), 3], dtype=torch.int32, device=device))
    got = paged.run(below)
    assert paged.same(got, paged.run(x))
    assert not got["out"][[0, 2]].any() and got["lse"][[0, 2]].isneginf().all()


def test_all_requests_empty(device):
    x = paged.draw(MAIN, Batch((0, 0, 0)), device)
    got = paged.run(x)
    assert not got["out"].any() and got["lse"].isneginf().all()


def test_pages_shared_by_requests(device):
    """A common prefix: the first pages of all rows are the same pages."""
    x = paged.draw(MAIN, Batch((100, 80, 130, 96)), device)
    x.page_table[:, :4] = x.page_table[0, :4].clone()
    paged.check(paged.run(x), x)


@page_sizes
def test_page_order_changes_no_bit(page_size, device):
    want = paged.run(paged.draw(MAIN, edges(page_size), device))
    for page_seed in (1, 2, 3):
        x = paged.draw(MAIN, edges(page_size), device, page_seed=page_seed)
        assert paged.same(paged.run(x), want), page_seed


def test_page_size_changes_no_answer(device):
    """The same keys and values in pages of every size, all against the oracle of the first."""
    lengths = (1, 127, 128, 129, 1000, 0)
    first = paged.draw(MAIN, Batch(lengths, 1), device)
    for page_size in paged.PAGE_SIZES:
        x = paged.draw(MAIN, Batch(lengths, page_size), device)
        assert budget.same_bits(x.q, first.q)
        paged.check(paged.run(x), first)


def test_same_bits_at_every_run(device):
    x = paged.draw(MAIN, edges(64), device)
    want = paged.run(x)
    assert all(paged.same(paged.run(x), want) for _ in range(5))


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7])
@pytest.mark.parametrize("page_size", [1, 48, 128])
def test_long_requests_beside_short_ones_at_any_split(page_size, num_splits, device):
    """Some splits of a request hold nothing."""
    x = paged.draw(MAIN, Batch((4096, 0, 1, 129, 3000), page_size), device)
    paged.check(paged.run(x, num_splits=num_splits), x)


def test_one_long_request(device):
    """Few requests and heads: keys are split over the whole GPU."""
    x = paged.draw(CAUSAL, Batch((16384,), 64, queries=2, kv_heads=1), device)
    paged.check(paged.run(x), x)


def test_one_split_makes_results_independent_of_the_batch(device):
    """A request alone has the bits it has in company."""
    lengths = (1000, 0, 17, 2048, 64)
    x = paged.draw(MAIN, Batch(lengths), device)
    together = paged.run(x, num_splits=1)
    for b, length in enumerate(lengths):
        one = paged.with_lengths(x.with_(q=x.q[b : b + 1], page_table=x.page_table[b : b + 1]), (length,))
        alone = paged.run(one, num_splits=1)
        assert budget.same_bits(alone["out"], together["out"][b : b + 1])
        assert budget.same_bits(alone["lse"], together["lse"][b : b + 1])


@pytest.mark.parametrize("scale", [0.0, -0.3, 3 / math.sqrt(128), 1e-6], ids=str)
def test_softmax_scale(scale, device):
    """Of the call; lse includes it."""
    x = paged.draw(MAIN, edges(16), device).with_(softmax_scale=scale)
    paged.check(paged.run(x), x)


def test_softmax_scale_of_the_constructor_is_the_default(device):
    x = paged.draw(MAIN, edges(16), device)
    outputs = paged.Outputs.of(x)
    op = paged.make_op(x, outputs.tensors, softmax_scale=0.25).compile()
    scratch = paged.workspace_of(op, device)
    positional, named = paged.arguments(x, outputs.tensors)
    for given, used in ((None, 0.25), (0.5, 0.5), (None, 0.25)):
        named |= {"softmax_scale": given, "workspace": None if scratch is None else scratch.tensor}
        op.execute(*positional, **named)
        torch.cuda.synchronize()
        paged.check(outputs.tensors, x.with_(softmax_scale=used))


@pytest.mark.parametrize("kind", paged.MASKS)
def test_masks_by_cache_position(kind, device):
    """Columns are absolute positions, whatever page they are in."""
    x = paged.with_mask(paged.draw(MAIN, edges(16, queries=2), device), kind)
    paged.check(paged.run(x), x)


def test_mask_is_joined_with_causal_by_and(device):
    x = paged.with_mask(paged.draw(CAUSAL, edges(16, queries=3, rows=(1, 0, 3, 2, 5, 4, 6)), device), "rows")
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("cols", [0, 1, 100, 1500], ids=["none", "one", "fewer", "more"])
def test_columns_that_the_mask_lacks_are_masked(cols, device):
    x = paged.with_mask(paged.draw(MAIN, edges(16, queries=2), device), "columns", cols=cols)
    paged.check(paged.run(x), x)


def test_a_mask_that_keeps_nothing_or_one_key(device):
    x = paged.with_mask(paged.draw(MAIN, Batch((40, 300, 300, 1000), queries=2), device), "columns")
    x.mask[:] = False
    x.mask[2, 299] = x.mask[3, 513] = True
    got = paged.run(x)
    paged.check(got, x)
    assert not got["out"][:2].any() and got["lse"][:2].isneginf().all()
    values = paged.dense_kv(x)[1]
    for request, key in ((2, 299), (3, 513)):
        want = values[request, key].repeat_interleave(MAIN.group, 0)
        assert all(budget.same_bits(token, want) for token in got["out"][request])


def test_without_lse(device):
    x = paged.draw(MAIN, edges(16), device)
    assert budget.same_bits(paged.run(x, lse=False)["out"], paged.run(x)["out"])


@pytest.mark.parametrize("config", [MAIN, CAUSAL], ids=lambda c: c.label)
def test_every_entry_gives_the_same_bits(config, device):
    """`execute`, `bind`, the wrapper and the function with the names of model code."""
    x = paged.draw(config, edges(16, 3 if config.causal else 0), device)
    want = paged.run(x)
    assert paged.same(paged.run(x, entry="bind"), want)
    got = paged.call_wrapper(x)
    assert list(got.keys()) == ["out", "lse"] and paged.same(got, want)
    assert list(paged.call_wrapper(x, return_lse=False).keys()) == ["out"]
    plain = attn_paged_decode(*x.positional, x.seqlens_k, None, config.causal)
    assert budget.same_bits(plain, want["out"])
    scaled = attn_paged_decode(*x.positional, x.seqlens_k, is_causal=config.causal, scale=0.5)
    paged.check({"out": scaled}, x.with_(softmax_scale=0.5))


def test_thin_function_takes_a_mask(device):
    x = paged.with_mask(paged.draw(MAIN, edges(16), device), "columns")
    got = attn_paged_decode(*x.positional, x.seqlens_k, x.mask)
    assert budget.same_bits(got, paged.run(x, lse=False)["out"])


def test_a_call_with_other_extents_compiles_nothing(device):
    """Batch, table width, page size, KV heads, rows of the table: 40 batches, a binary for few requests and one for
    many."""
    from cuteforge.runtime import compile_cache

    def compiles():
        stats = compile_cache.stats()
        return stats.compiles + stats.disk_hits

    for lengths in ((5, 1), (4096,), (5,) * 60):  # in one piece, split and merged, and many
        paged.call_wrapper(paged.draw(MAIN, Batch(lengths), device))
    before = compiles()
    for i in range(40):
        page_size = paged.PAGE_SIZES[i % len(paged.PAGE_SIZES)]
        x = paged.draw(MAIN, Batch((7 * i, 1, i) * (1 + i % 5), page_size, kv_heads=1 + i % 3), device, seed=i)
        paged.check(paged.call_wrapper(x), x)
    assert compiles() == before


# So many requests that CTAs take shares of all keys, in tables with room for far longer ones: shares of
# whole requests where these are alike, one each or several, and equally long shares elsewhere.
ALIKE = {
    "equal": [420] * 250,
    "nearly_equal": [400 + i % 30 for i in range(250)],
    "several_each": [300] * 700,
    "several_each_and_a_rest": [300] * 529,
    "one_longer": [420] * 249 + [900],
    "one_without_keys": [420] * 249 + [0],
    "none_has_keys": [0] * 250,
}


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("queries", [0, 5])
def test_many_requests_of_like_lengths(queries, case, device):
    batch = Batch(tuple(ALIKE[case]), 16, queries, spare_columns=300, kv_heads=1)
    x = paged.draw(CAUSAL if queries else MAIN, batch, device)
    paged.check(paged.run(x), x)
