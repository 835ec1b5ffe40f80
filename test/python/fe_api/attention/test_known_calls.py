"""Calls like an earlier one skip what that one found out. Whatever differs from it, the result is that of a first call,
and errors are the same."""

import pytest
import torch

from cuteforge import (
    ContractError,
    attention,
    gqa_decode_wrapper,
    gqa_prefill_wrapper,
    paged_gqa_decode_wrapper,
    paged_gqa_prefill_wrapper,
)
from helpers.calls import check_equal, fresh

BF16 = torch.bfloat16


def heads(device, *shape):
    return torch.randn(*shape, 128, dtype=BF16, device=device)


def dense(device, keys=40, queries=1):
    return heads(device, 2, queries, 8), heads(device, 2, keys, 2), heads(device, 2, keys, 2)


WRAPPERS = {"decode": (gqa_decode_wrapper, 1), "prefill": (gqa_prefill_wrapper, 70)}
both = pytest.mark.parametrize("kind", WRAPPERS)


@both
@pytest.mark.parametrize(
    "options", [{}, {"return_lse": True}, {"causal": True}, {"softmax_scale": 0.3}, {"softcap": 5.0}], ids=str
)
def test_new_data_and_more_keys(kind, options, device, served):
    wrapper, queries = WRAPPERS[kind]
    wrapper(*dense(device, queries=queries), **options)
    calls = [dense(device, keys, queries) for keys in (40, 41, 300)]
    got = [{name: x.clone() for name, x in wrapper(*x, **options).items()} for x in calls]
    assert len(served) == 3
    for x, result in zip(calls, got):
        check_equal(result, fresh(wrapper, *x, **options))


@both
def test_each_option_is_a_call_of_its_own(kind, device, served):
    wrapper, queries = WRAPPERS[kind]
    x = dense(device, queries=queries)
    choices = [
        {},
        {"causal": True},
        {"softmax_scale": 0.1},
        {"window": (9, None)},
        {"softcap": 2.0},
        {"return_lse": True},
    ]
    got = [[wrapper(*x, **options) for options in choices] for _ in range(2)][1]
    assert len(served) == len(choices)
    for options, result in zip(choices, got):
        check_equal(result, fresh(wrapper, *x, **options))


@both
def test_other_strides_and_addresses(kind, device, served):
    """Keys that lie head by head, a slice of a fused buffer, a view that is not aligned and is copied."""
    wrapper, queries = WRAPPERS[kind]
    q, k, v = dense(device, queries=queries)
    wrapper(q, k, v)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    fused = torch.cat((k, v), 2)
    shifted = torch.empty(k.numel() + 1, dtype=BF16, device=device)[1:].view_as(k).copy_(k)
    for keys, values in (by_head, (fused[:, :, :2], fused[:, :, 2:]), (shifted, v)):
        for _ in range(2):
            result = wrapper(q, keys, values)
        check_equal(result, fresh(wrapper, q, k, v))
        wrapper(q, k, v)


@both
def test_a_bad_call_after_a_good_one_is_refused_by_name(kind, device, served):
    wrapper, queries = WRAPPERS[kind]
    q, k, v = dense(device, queries=queries)
    mask = torch.ones(2, 40, dtype=torch.bool, device=device)
    for _ in range(2):
        wrapper(q, k, v), wrapper(q, k, v, mask=mask)
    bad = {
        "v": (q, k, v[:, :30]),
        "k": (q, k.half(), v),
        "q": (q[:1], k, v),
    }
    for operands in bad.values():
        with pytest.raises(ContractError):
            wrapper(*operands)
    with pytest.raises(ContractError, match="mask"):
        wrapper(q, k[:, :30], v[:, :30], mask=mask)
    with pytest.raises(ContractError, match="requires_grad|require grad"):
        wrapper(q.clone().requires_grad_(), k, v)
    check_equal(wrapper(q, k, v), fresh(wrapper, q, k, v))


@both
def test_masks_of_growing_length(kind, device, served):
    wrapper, queries = WRAPPERS[kind]
    for keys in (40, 41, 60):
        x = dense(device, keys, queries)
        mask = torch.rand(2, keys, device=device) > 0.3
        got = {name: t.clone() for name, t in wrapper(*x, mask=mask).items()}
        served.append(0)
        check_equal(got, fresh(wrapper, *x, mask=mask))
        wrapper(*x, mask=mask)


def test_prefill_of_other_lengths_and_of_none(device, served):
    for queries in (70, 3, 200, 0):
        x = dense(device, 250, queries)
        result = gqa_prefill_wrapper(*x, causal=True, return_lse=True)
        assert result["out"].shape == x[0].shape and result["lse"].shape == (2, 8, queries)
    assert len(served) == 2


def test_packed_requests_of_other_lengths(device, served):
    for tokens in (50, 64, 31):
        q, k, v = heads(device, tokens, 8), heads(device, tokens, 2), heads(device, tokens, 2)
        cu = torch.tensor([0, 20, tokens], dtype=torch.int32, device=device)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True, "return_lse": True}
        got = {name: t.clone() for name, t in gqa_prefill_wrapper(q, k, v, **options).items()}
        want = [
            gqa_prefill_wrapper(*(x[None, a:b] for x in (q, k, v)), causal=True)["out"][0]
            for a, b in ((0, 20), (20, tokens))
        ]
        assert torch.equal(got["out"], torch.cat(want))
    assert len(served) >= 2


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_pages(kind, device, served):
    pools = [heads(device, 12, 16, 2) for _ in range(2)]
    table = torch.arange(12, dtype=torch.int32, device=device).view(2, 6)
    cu = torch.tensor([0, 5, 9], dtype=torch.int32, device=device)
    for lengths in ([90, 40], [96, 9], [1, 77]):
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        if kind == "decode":
            wrapper, operands = paged_gqa_decode_wrapper, (heads(device, 2, 8), *pools, table)
        else:
            wrapper, operands = paged_gqa_prefill_wrapper, (heads(device, 9, 8), *pools, table, cu)
        got = {name: t.clone() for name, t in wrapper(*operands, seqlens_k=seqlens, return_lse=True).items()}
        again = wrapper(*operands, seqlens_k=seqlens, return_lse=True)
        check_equal(again, got)
        check_equal(again, fresh(wrapper, *operands, seqlens_k=seqlens, return_lse=True))
        wrapper(*operands, seqlens_k=seqlens, return_lse=True)
    assert len(served) >= 3


def test_appended_tokens_are_stored_and_count_as_writes(device, served):
    pools = [torch.zeros(12, 16, 2, 128, dtype=BF16, device=device) for _ in range(2)]
    table = torch.arange(12, dtype=torch.int32, device=device).view(2, 6)
    for length in range(1, 5):
        new = [heads(device, 2, 2) for _ in range(2)]
        versions = [pool._version for pool in pools]
        seqlens = torch.full((2,), length, dtype=torch.int32, device=device)
        paged_gqa_decode_wrapper(heads(device, 2, 8), *pools, table, seqlens_k=seqlens, new_k=new[0], new_v=new[1])
        for pool, x, version in zip(pools, new, versions):
            assert torch.equal(pool.view(2, 96, 2, 128)[:, length - 1], x) and pool._version == version + 1
    assert len(served) == 3


def test_the_policy_serves_known_calls_and_forgets_them_when_backends_change(device, served):
    q, k, v = dense(device)
    want = attention(q, k, v).clone()
    for keys in (40, 41):
        q, k, v = dense(device, keys)
        got = attention(q, k, v).clone()
        check_equal({"out": got}, fresh(gqa_decode_wrapper, q, k, v))
        attention(q, k, v)
    assert want.shape == got.shape and len(served) >= 1
    long = heads(device, 2, 70, 8)
    for _ in range(3):
        torch.testing.assert_close(
            attention(long, k, v), attention(long, k, v, backend="torch_native"), atol=2e-2, rtol=2e-2
        )
    # three tokens are decode again, whatever was known of seventy
    short = long[:, :3]
    assert torch.equal(attention(short, k, v), fresh(gqa_decode_wrapper, short, k, v)["out"])
