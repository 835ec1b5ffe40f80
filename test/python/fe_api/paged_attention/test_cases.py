"""Public bug reports as cases, through the paged ops.

Layouts of pools are in test_layouts.py. Some are the dense ones again, over pages; of the run-time ones those are here
that a page table or a length can go wrong in.
"""

import itertools
import math

import pytest
import torch

from cuteforge import paged_gqa_decode_wrapper, paged_gqa_prefill_wrapper
from helpers import budget, gpu, paged
from helpers.paged import CAUSAL, FP16, MAIN, PREFILL_QUERIES, Batch, edges

OPS = {"decode": 0, "prefill": (1, 40, 200)}
both_ops = pytest.mark.parametrize("queries", OPS.values(), ids=OPS)
FAR_POOLS = {"past_signed_wrap": (140_000, 139_000, 12), "past_unsigned_wrap": (270_000, 262_200, 22)}


def far_copy(x, num_pages, first_page):
    """`x` with its pages moved to `first_page` and on of huge pools that hold NaN elsewhere."""
    shape = (num_pages, *x.k_cache.shape[1:])
    pools = [torch.full(shape, torch.nan, dtype=x.q.dtype, device=x.q.device) for _ in x.pools]
    for pool, cache in zip(pools, x.pools):
        pool[first_page : first_page + len(cache)] = cache
    in_use = (x.page_table >= 0) & (x.page_table < len(x.k_cache))
    table = torch.where(in_use, x.page_table + first_page, x.page_table)
    return x.with_(k_cache=pools[0], v_cache=pools[1], page_table=table)


@pytest.mark.parametrize("kind", ["decode", "append", "prefill"])
@pytest.mark.parametrize(("num_pages", "first_page", "gib"), FAR_POOLS.values(), ids=FAR_POOLS)
def test_page_numbers_times_page_stride_past_32_bits(num_pages, first_page, gib, kind, device):
    """16384 elements a page: (a) 4.6 GB a pool and (b) 8.8 GB; the same as with the same data in low pages."""
    gpu.require_free_memory(gib, device)
    queries = OPS["prefill"] if kind == "prefill" else 0
    near = paged.draw(MAIN, Batch((1, 40, 1000), 16, queries, kv_heads=8), device)
    near = paged.appending(near) if kind == "append" else near
    far = far_copy(near, num_pages, first_page)
    assert far.k_cache[0].numel() == 16384
    want, got = paged.call_wrapper(near), paged.call_wrapper(far)
    assert paged.same(got, want)
    paged.check(want, near)
    for cache, pool in zip(near.pools, far.pools):
        assert budget.same_bits(pool[first_page : first_page + len(cache)], cache)
        assert pool[:first_page].isnan().all() and pool[first_page + len(cache) :].isnan().all()
    del far, pool
    torch.cuda.empty_cache()


@pytest.mark.parametrize("page_size", paged.PAGE_SIZES)
@pytest.mark.parametrize("config", [paged.CONFIGS[6], paged.CONFIGS[6]._replace(causal=True)], ids=lambda c: c.label)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_every_page_size(kind, config, page_size, device):
    """Hq = 28, Hkv = 4, pages in random order, lengths around 128."""
    queries = (1, 1, 100, 129, 64) if kind == "prefill" else 3 if config.causal else 0
    x = paged.draw(config, Batch((1, 127, 128, 129, 1000), page_size, queries, kv_heads=4), device)
    paged.check(paged.call_wrapper(x), x)


RATIOS = ((28, 4), (40, 8), (24, 4), (14, 2), (33, 3), (32, 2), (64, 1))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS, ids=str)
@both_ops
def test_any_number_of_query_heads_for_a_kv_head(queries, heads, kv_heads, page_size, device):
    """V of KV head j is j everywhere: out is exactly h // G, whatever Q and K are."""
    group = heads // kv_heads
    x = paged.draw(MAIN._replace(group=group), Batch((1, 17, 513), page_size, queries, kv_heads=kv_heads), device)
    head = torch.arange(kv_heads, device=device).to(x.q.dtype)
    x.v_cache.copy_(torch.where(x.v_cache.isnan(), torch.nan, head[:, None].expand_as(x.v_cache)))
    want = head.repeat_interleave(group)[:, None].expand(heads, MAIN.dv)
    out = paged.run(x)["out"]
    assert torch.equal(out, want.expand_as(out))


@pytest.mark.parametrize("lengths", [(1, 3), (1, 4095)], ids=["capacity_3", "capacity_4096"])
@pytest.mark.parametrize("beyond", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("page_size", [3, 4096])
@both_ops
def test_nothing_past_the_length_gets_through(queries, page_size, beyond, lengths, device):
    """fp16, D = 64, q = 0.5, K = 0, V = 1: out 1 and lse ln(length)."""
    config = paged.CAUSAL_FP16._replace(causal=False)
    batch = Batch(lengths, page_size, queries[:2] if queries else 0, kv_heads=1)
    x = paged.draw(config, batch, device)
    x.q.fill_(0.5)
    for cache, value in zip(x.pools, (0, 1)):
        cache.copy_(torch.where(cache.isnan(), beyond, value))
    got = paged.run(x)
    assert (got["out"] == 1).all()
    truth = x.lens.double().log()
    lse = got["lse"] if queries == 0 else got["lse"].t().split(list(batch.queries))
    for one, want in zip(lse, truth):
        torch.testing.assert_close(one.double(), want.expand_as(one), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_causal_corner_is_at_the_bottom_right(kind, page_size, device):
    """Two queries, five keys, Q = K = 0, V[j] = j: 1.5 and 2, where the other corner gives 0 and 0.5."""
    queries = (2,) if kind == "prefill" else 2
    x = paged.draw(CAUSAL, Batch((5,), page_size, queries, kv_heads=1), device)
    x.q.zero_()
    position = torch.arange(5, device=device)
    x.k_cache.zero_()
    values = position.to(x.q.dtype)[:, None, None].expand(5, 1, CAUSAL.dv)
    paged.put(x.v_cache, x.page_table, torch.zeros_like(position), position, values)
    want = torch.tensor([1.5, 2.0], dtype=x.q.dtype, device=device)[:, None, None]
    out = paged.run(x)["out"].view(2, CAUSAL.group, CAUSAL.dv)
    assert torch.equal(out, want.expand_as(out))


def variants(queries, device):
    """Same shape, other things that a launch cache may forget: scale, strides, dtype, corner, kind of lengths."""
    batch = edges(16, queries)
    x = paged.draw(MAIN, batch, device)
    yield x
    yield x.with_(softmax_scale=3 / math.sqrt(MAIN.d))
    yield paged.draw(MAIN, batch._replace(place="head_major"), device, seed=1)
    yield paged.draw(MAIN._replace(dtype=FP16), batch, device, seed=2)
    yield paged.draw(CAUSAL, batch, device, seed=3)
    yield paged.draw(MAIN, batch._replace(by_indptr=True), device, seed=4)


@pytest.mark.parametrize("queries", [2, PREFILL_QUERIES], ids=["decode", "prefill"])
def test_results_do_not_depend_on_call_order(queries, device):
    calls = list(variants(queries, device))
    want = [paged.run(x) for x in calls]
    for x, results in zip(calls, want):
        paged.check(results, x)
    for order in itertools.islice(itertools.permutations(range(len(calls))), 0, None, 7):
        for i in order:
            assert paged.same(paged.call_wrapper(calls[i]), want[i]), (order, i)


def empty_calls(kind, device):
    """(what, inputs): no requests, no query tokens, no columns in the table, no pages in the pool, no rows."""
    queries = (lambda *tokens: tokens) if kind == "prefill" else lambda *tokens: 2
    normal = paged.draw(MAIN, Batch((0, 0), 16, queries(3, 4)), device)
    yield "no_requests", paged.draw(MAIN, Batch((), 16, queries()), device)
    yield "no_columns", normal.with_(page_table=normal.page_table[:, :0].contiguous())
    yield "no_pages", normal.with_(k_cache=normal.k_cache[:0], v_cache=normal.v_cache[:0])
    if kind == "prefill":
        yield "no_tokens", paged.draw(MAIN, Batch((30, 5), 16, (0, 0)), device)
        none = paged.draw(MAIN, Batch((), 16, ()), device)
        yield "no_requests_no_pages", none.with_(k_cache=none.k_cache[:0], v_cache=none.v_cache[:0])
    else:
        yield "all_empty", normal


def check_empty(results, x, what):
    assert results["out"].shape == (*x.q.shape[:-1], MAIN.dv), what
    assert not results["out"].any(), what
    assert results["lse"].isneginf().all(), what


@pytest.mark.parametrize("how", ["class", "bind", "wrapper", "stream", "capture"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_nothing_to_do(kind, how, device):
    """Zeros of the right shape, and the next call is right."""
    normal = paged.draw(MAIN, edges(16, PREFILL_QUERIES if kind == "prefill" else 2), device)
    paged.run(normal)
    for what, x in empty_calls(kind, device):
        if how in ("class", "bind"):
            results = paged.run(x, entry="execute" if how == "class" else "bind")
        else:
            options = {"stream": torch.cuda.Stream()} if how == "stream" else {}

            def call(x=x, options=options):
                return paged.call_wrapper(x, **options)

            call()
            results = gpu.captured(call, device) if how == "capture" else call()
            torch.cuda.synchronize()
        check_empty(results, x, what)
        paged.check(paged.run(normal), normal)


def test_an_append_to_no_requests_stores_nothing(device):
    x = paged.appending(paged.draw(MAIN, Batch(()), device))
    check_empty(paged.run(x), x, "no requests")


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_parameters_work_under_no_grad(kind, device):
    x = paged.draw(MAIN, edges(16, PREFILL_QUERIES if kind == "prefill" else 2), device)
    want = paged.run(x)
    learned = x.with_(**{name: torch.nn.Parameter(getattr(x, name)) for name in ("q", "k_cache", "v_cache")})
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert paged.same(paged.call_wrapper(learned), want)
            assert paged.same(paged.run(learned), want)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_operands_of_a_gpu_that_is_not_current(kind, device):
    """Right on each device, and the current device stays what it was."""
    for index in (1, 0):
        there = torch.device("cuda", index)
        x = paged.draw(MAIN, edges(16, PREFILL_QUERIES if kind == "prefill" else 2), there)
        with torch.cuda.device(0):
            paged.check(paged.run(x), x)
            got = paged.call_wrapper(x)
            assert all(t.device == there for t in got)
            assert torch.cuda.current_device() == 0


def test_wrappers_by_keyword(device):
    """Every argument by the name that the signature has."""
    x = paged.appending(paged.draw(MAIN, edges(16, queries=2, rows=(3, 0, 6, 5, 1, 4, 2)), device))
    named = {"q": x.q, "k_cache": x.k_cache, "v_cache": x.v_cache, "page_table": x.page_table, **x.optional}
    out, lse = paged_gqa_decode_wrapper(**named, causal=False, softmax_scale=0.1, num_splits=2, return_lse=True)
    paged.check({"out": out, "lse": lse}, x.with_(softmax_scale=0.1))
    y = paged.draw(CAUSAL, edges(16, PREFILL_QUERIES), device)
    named = {"q": y.q, "k_cache": y.k_cache, "v_cache": y.v_cache, "page_table": y.page_table, **y.optional}
    (out,) = paged_gqa_prefill_wrapper(**named, cu_seqlens_q=y.cu_seqlens_q, causal=True, stream=None)
    paged.check({"out": out}, y)
