"""Ragged prefill over paged keys and values against fp64, for every page size, width, group and kind of length."""

import math

import pytest
import torch

from cuteforge import attn_paged_prefill
from helpers import budget, paged
from helpers.paged import CAUSAL, MAIN, PREFILL_QUERIES, Batch, edges

page_sizes = pytest.mark.parametrize("page_size", paged.PAGE_SIZES)
both_corners = pytest.mark.parametrize("config", [MAIN, CAUSAL], ids=lambda c: c.label)


@page_sizes
@both_corners
def test_lengths_around_a_page_and_up_to_the_table_width(config, page_size, device):
    """Requests without keys, without queries, with more queries than keys and with fewer."""
    x = paged.draw(config, edges(page_size, PREFILL_QUERIES), device)
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("page_size", [1, 7, 64, 256])
@pytest.mark.parametrize("config", paged.CONFIGS[2:], ids=lambda c: c.label)
def test_width_group_and_dtype(config, page_size, device):
    x = paged.draw(config, edges(page_size, PREFILL_QUERIES), device)
    paged.check(paged.run(x), x)


QUERIES = {
    "one_token_each": (1, 1, 1, 1, 1, 1, 1),
    "empties_around": (0, 0, 70, 0, 0, 5, 0),
    "all_of_one_request": (0, 0, 0, 0, 0, 700, 0),
    "many_tiles": (257, 65, 130, 1, 64, 500, 128),
}


@both_corners
@pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES)
def test_query_tokens(queries, config, device):
    x = paged.draw(config, edges(16, queries), device)
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_number_of_requests(count, device):
    """The schedule is found on the device, by a search over the requests."""
    lengths = tuple(37 * i % 90 for i in range(count))
    x = paged.draw(CAUSAL, Batch(lengths, 16, tuple(11 * i % 23 for i in range(count))), device)
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_kv_heads(kv_heads, device):
    x = paged.draw(CAUSAL, edges(16, PREFILL_QUERIES, kv_heads=kv_heads), device)
    paged.check(paged.run(x), x)


ROWS = {
    "reordered": (3, 0, 6, 5, 1, 4, 2),
    "repeated": (2, 2, 0, 4, 4, 4, 1),
    "of_a_higher_table": (20, 1, 17, 8, 20, 0, 2),
}


@pytest.mark.parametrize("by_indptr", [False, True], ids=["seqlens_k", "kv_indptr"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_page_table_rows(rows, by_indptr, device):
    x = paged.draw(CAUSAL, edges(16, PREFILL_QUERIES, rows=rows, by_indptr=by_indptr), device)
    paged.check(paged.run(x), x)


def test_lengths_by_offsets(device):
    batch = edges(48, PREFILL_QUERIES)
    x, y = (paged.draw(CAUSAL, batch._replace(by_indptr=by_indptr), device) for by_indptr in (False, True))
    assert paged.same(paged.run(y), paged.run(x))


def test_lengths_below_zero_are_empty_requests(device):
    x = paged.draw(CAUSAL, Batch((0, 40, 0, 3), 16, (5, 6, 7, 8)), device)
    below = x.with_(seqlens_k=torch.tensor([-1, 40, -(2**31), 3], dtype=torch.int32, device=device))
    got = paged.run(below)
    assert paged.same(got, paged.run(x))
    assert not got["out"][:5].any() and got["lse"][:, 11:18].isneginf().all()


@page_sizes
def test_page_order_changes_no_bit(page_size, device):
    batch = edges(page_size, PREFILL_QUERIES)
    want = paged.run(paged.draw(CAUSAL, batch, device))
    for page_seed in (1, 2, 3):
        x = paged.draw(CAUSAL, batch, device, page_seed=page_seed)
        assert paged.same(paged.run(x), want), page_seed


def test_page_size_changes_no_answer(device):
    """The same keys and values in pages of every size, all against the oracle of the first."""
    batch = Batch((1, 127, 128, 129, 1000, 0), 1, (1, 100, 128, 129, 65, 4))
    first = paged.draw(CAUSAL, batch, device)
    for page_size in paged.PAGE_SIZES:
        x = paged.draw(CAUSAL, batch._replace(page_size=page_size), device)
        assert budget.same_bits(x.q, first.q)
        paged.check(paged.run(x), first)


def test_same_bits_at_every_run(device):
    x = paged.draw(CAUSAL, edges(64, PREFILL_QUERIES), device)
    want = paged.run(x)
    assert all(paged.same(paged.run(x), want) for _ in range(5))


def test_a_request_alone_has_the_bits_it_has_in_company(device):
    lengths, queries = (1000, 20, 300, 64), (130, 20, 7, 64)
    x = paged.draw(CAUSAL, Batch(lengths, 16, queries), device)
    together, start = paged.run(x), 0
    for b, (length, count) in enumerate(zip(lengths, queries)):
        tokens = slice(start, start + count)
        one = x.with_(q=x.q[tokens], page_table=x.page_table[b : b + 1], cu_seqlens_q=paged.offsets([count]).to(device))
        alone = paged.run(paged.with_lengths(one, (length,)))
        assert budget.same_bits(alone["out"], together["out"][tokens])
        assert budget.same_bits(alone["lse"], together["lse"][:, tokens])
        start += count


def test_chunks_of_a_prompt_add_up_to_the_whole(device):
    """Causal chunked prefill: each chunk sees all before it, against the oracle of the prompt in one go."""
    whole = paged.draw(CAUSAL, Batch((500,), 16, (500,)), device)
    truth, eager = paged.expected(whole)[0], paged.expected(whole, whole.q.dtype)[0]
    done = 0
    for count in (1, 127, 200, 172):
        tokens = slice(done, done + count)
        done += count
        chunk = whole.with_(q=whole.q[tokens], cu_seqlens_q=paged.offsets([count]).to(device))
        got = paged.run(paged.with_lengths(chunk, (done,)))
        budget.assert_within_budget(got["out"], truth[tokens], eager[tokens], "out")


@pytest.mark.parametrize("scale", [0.0, -0.3, 3 / math.sqrt(128), 1e-6], ids=str)
def test_softmax_scale(scale, device):
    x = paged.draw(CAUSAL, edges(16, PREFILL_QUERIES), device).with_(softmax_scale=scale)
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("kind", paged.MASKS)
def test_masks_by_cache_position(kind, device):
    """Columns are absolute positions, rows count from each request's first query."""
    x = paged.with_mask(paged.draw(MAIN, edges(16, PREFILL_QUERIES), device), kind)
    paged.check(paged.run(x), x)


def test_mask_is_joined_with_causal_by_and(device):
    x = paged.with_mask(paged.draw(CAUSAL, edges(16, PREFILL_QUERIES, rows=(1, 0, 3, 2, 5, 4, 6)), device), "rows")
    paged.check(paged.run(x), x)


@pytest.mark.parametrize(("rows", "cols"), [(64, None), (None, 100), (2, 1), (300, 1500), (65, 0)], ids=str)
def test_rows_and_columns_that_the_mask_lacks_are_masked(rows, cols, device):
    x = paged.draw(MAIN, edges(16, PREFILL_QUERIES), device)
    x = paged.with_mask(x, "rows", rows=rows, cols=cols)
    got = paged.run(x)
    paged.check(got, x)
    if rows is not None and rows < 200:
        last = got["out"][-200 + rows :]
        assert not last.any() and got["lse"][:, -200 + rows :].isneginf().all()


def test_without_lse(device):
    x = paged.draw(CAUSAL, edges(16, PREFILL_QUERIES), device)
    assert budget.same_bits(paged.run(x, lse=False)["out"], paged.run(x)["out"])


@both_corners
def test_every_entry_gives_the_same_bits(config, device):
    """`execute`, `bind`, the wrapper and the function with the names of model code."""
    x = paged.draw(config, edges(16, PREFILL_QUERIES), device)
    want = paged.run(x)
    assert paged.same(paged.run(x, entry="bind"), want)
    got = paged.call_wrapper(x)
    assert list(got.keys()) == ["out", "lse"] and paged.same(got, want)
    assert list(paged.call_wrapper(x, return_lse=False).keys()) == ["out"]
    plain = attn_paged_prefill(*x.positional, x.seqlens_k, None, config.causal)
    assert budget.same_bits(plain, want["out"])
    scaled = attn_paged_prefill(*x.positional, x.seqlens_k, is_causal=config.causal, scale=0.5)
    paged.check({"out": scaled}, x.with_(softmax_scale=0.5))


@both_corners
def test_decode_is_prefill_of_few_tokens(config, device):
    """Two paths to one answer: each against the oracle of the other."""
    lengths, tokens = (0, 2, 17, 1000), 3
    x = paged.draw(config, Batch(lengths, 16, tokens), device)
    packed = x.with_(q=x.q.flatten(0, 1), cu_seqlens_q=paged.offsets([tokens] * len(lengths)).to(device))
    got = paged.run(packed)
    lse = got["lse"].unflatten(1, (-1, tokens)).transpose(0, 1)
    paged.check({"out": got["out"].unflatten(0, (-1, tokens)), "lse": lse}, x)
    paged.check(paged.run(x), x)


def test_a_call_with_other_extents_compiles_nothing(device):
    """Requests, tokens, table width, page size, KV heads: 40 batches, one binary."""
    from cuteforge.runtime import compile_cache

    def compiles():
        stats = compile_cache.stats()
        return stats.compiles + stats.disk_hits

    paged.call_wrapper(paged.draw(CAUSAL, Batch((5, 1), 16, (2, 2)), device))
    before = compiles()
    for i in range(40):
        page_size = paged.PAGE_SIZES[i % len(paged.PAGE_SIZES)]
        repeat = 1 + i % 5
        batch = Batch((7 * i, 1, i) * repeat, page_size, (i, 3, 0) * repeat, kv_heads=1 + i % 3)
        x = paged.draw(CAUSAL, batch, device, seed=i)
        paged.check(paged.call_wrapper(x), x)
    assert compiles() == before
