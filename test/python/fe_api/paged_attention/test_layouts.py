"""Pools of any layout give the bits of contiguous ones; operands that are views too.

The answer depends on values: none of the strides of pages, tokens and heads follows from the shape.
"""

import pytest
import torch

from helpers import paged
from helpers.canary import strided_copy
from helpers.paged import CAUSAL, MAIN, PREFILL_QUERIES, edges

KINDS = {"decode": (MAIN, 0), "prefill": (CAUSAL, PREFILL_QUERIES)}
both_ops = pytest.mark.parametrize(("config", "queries"), KINDS.values(), ids=KINDS)
views = [place for place in paged.PLACES if place not in ("contiguous", "flat")]


@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
@pytest.mark.parametrize("place", views)
@both_ops
def test_pool_layouts(config, queries, place, page_size, device):
    x, plain = (paged.draw(config, edges(page_size, queries, place=p), device) for p in (place, "contiguous"))
    assert page_size == 1 or not all(cache.is_contiguous() for cache in x.pools)
    got = paged.run(x)
    assert paged.same(got, paged.run(plain))
    paged.check(got, plain)


@both_ops
def test_a_flat_token_pool_is_page_size_1(config, queries, device):
    flat, pages = (paged.draw(config, edges(1, queries, place=place), device) for place in ("flat", "contiguous"))
    assert flat.k_cache.dim() == 3 and pages.k_cache.dim() == 4
    got = paged.run(flat)
    assert paged.same(got, paged.run(pages))
    paged.check(got, pages)


@both_ops
def test_a_flat_token_pool_with_other_strides_for_keys_and_values(config, queries, device):
    """One buffer of keys beside values, as token pools often are."""
    x = paged.draw(config, edges(1, queries, place="heads_interleaved"), device)
    flat = x.with_(k_cache=x.k_cache[:, 0], v_cache=x.v_cache[:, 0])
    assert paged.same(paged.run(flat), paged.run(paged.draw(config, edges(1, queries), device)))


@pytest.mark.parametrize("place", [*views, "flat"])
@both_ops
def test_wrapper_takes_every_layout(config, queries, place, device):
    page_size = 1 if place == "flat" else 16
    x, plain = (paged.draw(config, edges(page_size, queries, place=p), device) for p in (place, "contiguous"))
    assert paged.same(paged.call_wrapper(x), paged.run(plain))


@both_ops
def test_values_narrower_than_keys_share_a_pool(config, queries, device):
    """D = 192, Dv = 128 in rows of 320 elements."""
    wide = paged.CONFIGS[4]
    x, plain = (paged.draw(wide, edges(16, queries, place=p), device) for p in ("heads_interleaved", "contiguous"))
    assert paged.same(paged.run(x), paged.run(plain))


@both_ops
def test_query_is_a_slice_of_a_fused_projection(config, queries, device):
    x = paged.draw(config, edges(16, queries), device)
    heads = x.q.shape[-2]
    fused = torch.cat((x.q, torch.full_like(x.q, torch.nan)), -2)
    assert paged.same(paged.run(x.with_(q=fused[..., :heads, :])), paged.run(x))


@both_ops
def test_query_heads_before_tokens(config, queries, device):
    x = paged.draw(config, edges(16, queries), device)
    q = x.q.transpose(-3, -2).contiguous().transpose(-3, -2)
    assert not q.is_contiguous()
    assert paged.same(paged.run(x.with_(q=q)), paged.run(x))


@both_ops
def test_one_page_for_all_reads_one_memory(config, queries, device):
    """Pages expanded with stride 0, all the same: right as it is, or after a copy in the wrapper."""
    x = paged.draw(config, edges(16, queries), device)
    page = [cache[:1].nan_to_num(0.5) for cache in x.pools]
    table = torch.zeros_like(x.page_table)
    expanded = x.with_(k_cache=page[0].expand_as(x.k_cache), v_cache=page[1].expand_as(x.v_cache), page_table=table)
    paged.check(paged.call_wrapper(expanded), x.with_(k_cache=page[0], v_cache=page[1], page_table=table))


@both_ops
def test_one_head_for_all_reads_one_memory(config, queries, device):
    """KV heads expanded with stride 0."""
    x = paged.draw(config, edges(16, queries, kv_heads=1), device)
    many = paged.draw(config, edges(16, queries, kv_heads=3), device)
    expanded = many.with_(**{n: t.expand(-1, -1, 3, -1) for n, t in zip(("k_cache", "v_cache"), x.pools)})
    expanded = expanded.with_(page_table=x.page_table)
    copied = expanded.with_(k_cache=expanded.k_cache.clone(), v_cache=expanded.v_cache.clone())
    assert paged.same(paged.call_wrapper(expanded), paged.run(copied))


@both_ops
def test_the_table_may_be_a_part_of_a_wider_one(config, queries, device):
    """Rows further apart than they are long: read by stride, or copied in the wrapper."""
    x = paged.draw(config, edges(16, queries), device)
    table = strided_copy(x.page_table, (x.page_table.shape[1] + 12, 1))
    assert paged.same(paged.call_wrapper(x.with_(page_table=table)), paged.run(x))


@pytest.mark.parametrize("stride", [0, 1, 8])
@both_ops
def test_strides_of_size_1_dims_say_nothing(config, queries, stride, device):
    """One page, one KV head: whatever is recorded as the stride of a dim of one element."""
    lengths = (9,) * 7 if isinstance(queries, int) else (9, 0, 0, 16, 3, 4, 5)
    batch = edges(16, queries, kv_heads=1)._replace(lengths=lengths, rows=(0,) * 7)
    x = paged.draw(config, batch, device)

    def odd(tensor):
        strides = [stride if n == 1 else s for n, s in zip(tensor.shape, tensor.stride())]
        return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())

    moved = x.with_(q=odd(x.q), k_cache=odd(x.k_cache), v_cache=odd(x.v_cache))
    assert paged.same(paged.run(moved), paged.run(x))
