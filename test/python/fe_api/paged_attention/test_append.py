"""new_k and new_v: read as the last position, stored in the pool, and nothing else of it changes.

`paged.run` compares every bit of the pools' memory with what they should hold afterwards; the slots to be filled hold
NaN before.
"""

import pytest
import torch

from cuteforge import ContractError
from helpers import budget, paged
from helpers.paged import CAUSAL, CAUSAL_FP16, MAIN, Batch, edges

CONFIGS = (MAIN, CAUSAL_FP16, paged.CONFIGS[4])


@pytest.mark.parametrize("page_size", paged.PAGE_SIZES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label)
def test_last_position_is_read_and_stored(config, page_size, device):
    """Lengths 1, at the end and at the start of a page, at the end of the table; empty requests store nothing."""
    x = paged.appending(paged.draw(config, edges(page_size), device))
    results = paged.run(x)
    paged.check(results, x)
    assert budget.same_bits(paged.dense_kv(x)[0], paged.dense_kv(x.with_(new_k=None, new_v=None))[0])


def test_appended_call_equals_a_call_after_the_append(device):
    """The same bits whether the last position comes from new_k or from the pool, where it is now."""
    x = paged.appending(paged.draw(MAIN, edges(16), device))
    got = paged.run(x)
    stored = x.with_(new_k=None, new_v=None)
    assert paged.same(paged.run(stored), got)


def test_length_one_sees_only_the_new_value(device):
    x = paged.appending(paged.draw(MAIN, Batch((1, 1, 1)), device))
    got = paged.run(x)
    assert budget.same_bits(got["out"], x.new_v.repeat_interleave(MAIN.group, 1))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_negative_slot_stores_nothing(page_size, device):
    """The request still reads its new position; its neighbours store theirs."""
    x = paged.appending(paged.draw(MAIN, edges(page_size), device))
    last = (x.lens - 1).div(page_size, rounding_mode="floor")
    for request, number in ((1, -1), (4, -(2**31)), (6, -7)):
        x.page_table[request, last[request]] = number
    # What else was in a page that is taken away is gone: a slot is negative only where a page would start.
    starts = [b for b in (1, 4, 6) if (x.lens[b] - 1) % page_size]
    for request in starts:
        x.seqlens_k[request] = last[request] * page_size + 1
    paged.check(paged.run(x), x)


def test_nothing_stored_by_requests_without_tokens(device):
    x = paged.appending(paged.draw(MAIN, Batch((0, 0, 5)), device))
    x = x.with_(seqlens_k=torch.tensor([0, -3, 5], dtype=torch.int32, device=device))
    got = paged.run(x)
    assert not got["out"][:2].any() and got["lse"][:2].isneginf().all()


@pytest.mark.parametrize("entry", ["execute", "bind"])
@pytest.mark.parametrize("place", [place for place in paged.PLACES if place != "flat"])
def test_stores_into_pools_of_any_layout(place, entry, device):
    """Interleaved pools: the neighbour's slots keep their bits, and `bind` sees that the two do not overlap."""
    batch = edges(16, place=place)
    x, want = (paged.appending(paged.draw(MAIN, b, device)) for b in (batch, edges(16)))
    assert paged.same(paged.run(x, entry=entry), paged.run(want))


def test_stores_into_a_flat_token_pool(device):
    x = paged.appending(paged.draw(MAIN, edges(1, place="flat"), device))
    paged.check(paged.run(x), x)


def test_rows_of_the_table_say_where_to_store(device):
    batch = edges(16, queries=2, rows=(3, 0, 6, 5, 9, 4, 2))
    x = paged.appending(paged.draw(MAIN, batch, device))
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7])
def test_stored_once_at_any_split(num_splits, device):
    """The split that holds the last position stores it, also where it holds nothing else."""
    x = paged.appending(paged.draw(MAIN, Batch((4096, 4097, 1, 2000), 16), device))
    paged.check(paged.run(x, num_splits=num_splits), x)


def test_several_query_tokens(device):
    """Only the last of them sees the new position under causal."""
    x = paged.appending(paged.draw(CAUSAL, Batch((1, 4, 17, 300), 16, queries=4), device))
    paged.check(paged.run(x), x)


def test_masked_new_position_is_stored_all_the_same(device):
    x = paged.appending(paged.draw(MAIN, Batch((1, 16, 17, 300)), device))
    x = paged.with_mask(x, "columns")
    x.mask[torch.arange(4), x.lens.long() - 1] = False
    got = paged.run(x)
    paged.check(got, x)
    assert not got["out"][0].any()


def test_new_values_may_be_slices_of_a_fused_projection(device):
    x = paged.appending(paged.draw(MAIN, edges(16), device))
    want = paged.draw(MAIN, edges(16), device)
    fused = torch.cat((x.q, x.new_k, x.new_v), 1)
    heads = x.q.shape[1]
    q, new_k, new_v = fused.split((heads, 2, 2), 1)
    assert not new_k.is_contiguous()
    got = paged.run(x.with_(q=q, new_k=new_k, new_v=new_v))
    assert paged.same(got, paged.run(want.with_(new_k=x.new_k, new_v=x.new_v)))


def test_wrapper_stores_into_the_pool_given(device):
    """Never into a copy of it."""
    x = paged.appending(paged.draw(MAIN, edges(16), device))
    guard = paged.PoolGuard(x)
    got = paged.call_wrapper(x)
    torch.cuda.synchronize()
    guard.check()
    paged.check(got, x)


def test_wrapper_refuses_a_pool_it_would_have_to_copy_or_stores_into_it(device):
    """Columns apart: a copy would take the stored position away from the caller."""
    x = paged.appending(paged.draw(MAIN, edges(16), device))
    odd = x.k_cache.transpose(2, 3).contiguous().transpose(2, 3)
    x = x.with_(k_cache=odd)
    guard = paged.PoolGuard(x)
    try:
        got = paged.call_wrapper(x)
    except ContractError as refusal:
        assert str(refusal).startswith("k_cache")
        return
    torch.cuda.synchronize()
    guard.check()
    paged.check(got, x)


def test_a_hundred_steps_of_a_decode_loop(device):
    """One bound launch; every step appends a token to each request, over page borders, until the pool is as drawn."""
    full = paged.draw(MAIN, Batch((101, 130, 164)), device)
    values, before = paged.dense_kv(full), [cache.clone() for cache in full.pools]
    x = paged.with_lengths(full, (1, 30, 64))
    for cache in x.pools:
        for b, (start, end) in enumerate(zip(x.lens.tolist(), full.lens.tolist())):
            position = torch.arange(start, end, device=device)
            paged.put(
                cache,
                x.page_table,
                torch.full_like(position, b),
                position,
                torch.full_like(values[0][b, start:end], torch.nan),
            )
    x = x.with_(new_k=torch.empty_like(values[0][:, 0]), new_v=torch.empty_like(values[1][:, 0]))
    outputs = paged.Outputs.of(x)
    op = paged.make_op(x, outputs.tensors).compile()
    scratch = paged.workspace_of(op, device)
    positional, named = paged.arguments(x, outputs.tensors)
    step = op.bind(*positional, **named, workspace=None if scratch is None else scratch.tensor)
    batch = torch.arange(len(x.lens), device=device)
    for i in range(100):
        for new, all_values in zip((x.new_k, x.new_v), values):
            new.copy_(all_values[batch, x.lens.long()])
        x.seqlens_k.add_(1)
        step()
        if i in (0, 17, 99):
            torch.cuda.synchronize()
            outputs.check()
            paged.check(outputs.tensors, x)
    assert all(budget.same_bits(cache, want) for cache, want in zip(x.pools, before))
