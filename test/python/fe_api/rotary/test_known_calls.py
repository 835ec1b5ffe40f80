"""Calls of rotary like an earlier one. Whatever differs from it, the result is that of a first call, and errors are the
same."""

import pytest
import torch

from cuteforge import ContractError, apply_rotary_emb, rotary_qk_wrapper, rotary_table, rotary_wrapper
from helpers.calls import check_equal, copied, fresh
from helpers.torch_ops import OpLog

BF16, D, MAX_POS = torch.bfloat16, 64, 512


def heads(device, *shape):
    return torch.randn(*shape, D, dtype=BF16, device=device)


def lookup(device, *tokens):
    cos, sin = rotary_table(MAX_POS, D, device=device)
    return {"cos": cos, "sin": sin, "positions": torch.randint(MAX_POS, tokens, device=device)}


def by_token(device, *tokens):
    return {"freqs_cis": torch.randn(*tokens, D // 2, 2, device=device)}


TABLES = {"positions": lookup, "freqs_cis": by_token}
tables = pytest.mark.parametrize("table", TABLES)
SHAPES = [(5,), (6,), (300,)], [(2, 3), (5, 3), (70, 3)]
shapes = pytest.mark.parametrize("shapes", SHAPES, ids=["packed", "dense"])


@tables
@shapes
@pytest.mark.parametrize("options", [{}, {"interleaved": False}, {"inverse": True}], ids=str)
def test_new_data_and_more_tokens(table, shapes, options, device, served):
    calls = [(heads(device, *t, 4), heads(device, *t, 2), TABLES[table](device, *t) | options) for t in shapes]
    got = [copied(rotary_qk_wrapper(q, k, **rest)) for q, k, rest in calls]
    assert len(served) == 2
    for (q, k, rest), result in zip(calls, got):
        check_equal(result, fresh(rotary_qk_wrapper, q, k, **rest))


@tables
@shapes
def test_one_tensor(table, shapes, device, served):
    for tokens in shapes:
        x, rest = heads(device, *tokens, 4), TABLES[table](device, *tokens)
        got = copied(rotary_wrapper(x, **rest))
        want = copied(rotary_qk_wrapper(x, x[..., :1, :], **rest))
        assert torch.equal(got["out"], want["q"])
    assert len(served) == 4


@shapes
def test_in_place_and_into_other_tensors(shapes, device, served):
    """Three places of the results, three calls; each write counts for torch."""
    for tokens in shapes:
        fused, rest = heads(device, *tokens, 7), lookup(device, *tokens)
        q, k = fused[..., :4, :], fused[..., 4:6, :]
        want, untouched = rotary_qk_wrapper(q, k, **rest), fused[..., 6:, :].clone()
        q_out, k_out = torch.full_like(q, 7.0), torch.full_like(k, 7.0)
        result = rotary_qk_wrapper(q, k, **rest, q_out=q_out, k_out=k_out)
        assert result["q"] is q_out and result["k"] is k_out and q_out._version == 1
        check_equal(result, want)
        version = fused._version
        result = rotary_qk_wrapper(q, k, **rest, q_out=q, k_out=k)
        assert result["q"] is q and result["k"] is k and fused._version == version + 2
        check_equal(result, want)
        assert torch.equal(fused[..., 6:, :], untouched)
    assert len(served) == 6


def test_one_tensor_in_place(device, served):
    for tokens in (5, 6):
        x, rest = heads(device, tokens, 4), lookup(device, tokens)
        want, version = rotary_wrapper(x, **rest)["out"], x._version
        assert rotary_wrapper(x, **rest, out=x)["out"] is x and x._version == version + 1
        assert torch.equal(x, want)
    assert len(served) == 2


def test_one_result_given_and_one_not(device, served):
    """Each is its own call: what is given is written, what is not is allocated."""
    for tokens in (5, 6):
        q, k, rest = heads(device, tokens, 4), heads(device, tokens, 2), lookup(device, tokens)
        want = copied(rotary_qk_wrapper(q, k, **rest))
        for name, other in (("q", "k"), ("k", "q")):
            given = torch.full_like(want[name], float("nan"))
            got = rotary_qk_wrapper(q, k, **rest, **{f"{name}_out": given})
            assert got[name] is given and got[other] is not (q if other == "q" else k)
            check_equal(got, want)
    assert len(served) == 3


@tables
def test_a_bad_call_after_a_good_one_is_refused_by_name(table, device, served):
    q, k, rest = heads(device, 5, 4), heads(device, 5, 2), TABLES[table](device, 5)
    for _ in range(2):
        rotary_qk_wrapper(q, k, **rest), rotary_qk_wrapper(q, k, **rest, q_out=q, k_out=k)
    with pytest.raises(ContractError, match="^k: "):
        rotary_qk_wrapper(q, k[:4], **rest)
    with pytest.raises(ContractError, match="^k: "):
        rotary_qk_wrapper(q, k.half(), **rest)
    with pytest.raises(ContractError, match="^q_out: .*overlap"):
        rotary_qk_wrapper(q, k, **rest, q_out=q[:1].expand(5, 4, D), k_out=k)
    one_row = q[:1].expand(5, 4, D)
    with pytest.raises(ContractError, match="overlap"):
        rotary_qk_wrapper(one_row, k, **rest, q_out=one_row, k_out=k)
    both = {**lookup(device, 5), **by_token(device, 5)}
    with pytest.raises(ContractError, match="^freqs_cis: wanted either"):
        rotary_qk_wrapper(q, k, **both)
    name, x = next((name, x) for name, x in rest.items() if name in ("positions", "freqs_cis"))
    with pytest.raises(ContractError, match=f"^{name}: "):
        rotary_qk_wrapper(q, k, **{**rest, name: x[:4]})
    check_equal(rotary_qk_wrapper(q, k, **rest), fresh(rotary_qk_wrapper, q, k, **rest))


def test_other_strides_and_addresses(device, served):
    q, k, rest = heads(device, 5, 4), heads(device, 5, 2), lookup(device, 5)
    want = copied(rotary_qk_wrapper(q, k, **rest))
    shifted = torch.empty(q.numel() + 1, dtype=BF16, device=device)[1:].view_as(q).copy_(q)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (shifted, by_head, q):
        for _ in range(2):
            check_equal(rotary_qk_wrapper(other, k, **rest), want)


def test_a_graph_is_recorded_after_calls_without_one(device, served):
    q, k, rest = heads(device, 5, 4), heads(device, 5, 2), lookup(device, 5)
    for _ in range(2):
        want = copied(rotary_qk_wrapper(q, k, **rest))
    leaf, before = q.clone().requires_grad_(), len(served)
    result = rotary_qk_wrapper(leaf, k, **rest)
    assert result["q"].requires_grad and len(served) == before
    check_equal({name: x.detach() for name, x in result.items()}, want)
    with torch.no_grad():
        for _ in range(2):
            assert not rotary_qk_wrapper(leaf, k, **rest)["q"].requires_grad
    assert len(served) == before + 1
    assert rotary_qk_wrapper(leaf, k, **rest)["q"].requires_grad


def test_who_follows_ops_sees_them_after_calls_that_were_known(device, served):
    """Dispatch modes, transforms of torch.func, forward-mode derivatives, torch.compile."""
    q, k, rest = heads(device, 5, 4), heads(device, 5, 2), lookup(device, 5)
    for _ in range(2):
        want = copied(rotary_qk_wrapper(q, k, **rest))
    before = len(served)
    for _ in range(2):
        with OpLog() as log:
            rotary_qk_wrapper(q, k, **rest)
        assert [op.name() for op in log.seen] == ["cuteforge::rotary_qk"]
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda x: rotary_qk_wrapper(x, k, **rest)["q"])(q[None])
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(RuntimeError):
            rotary_qk_wrapper(tangent, k, **rest)
    compiled = torch.compile(lambda x: rotary_qk_wrapper(x, k, **rest)["q"] * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q), want["q"] * 2)
    assert len(served) == before


@tables
def test_the_policy_serves_known_calls(table, device, served, monkeypatch):
    calls = [(heads(device, tokens, 4), TABLES[table](device, tokens)) for tokens in (5, 6, 300)]
    got = [apply_rotary_emb(x, **rest).clone() for x, rest in calls]
    assert len(served) == 2
    for (x, rest), result in zip(calls, got):
        assert torch.equal(result, fresh(rotary_wrapper, x, **rest)["out"])
        for _ in range(3):
            assert torch.equal(apply_rotary_emb(x, **rest), result)
    before, eager = len(served), apply_rotary_emb(x, **rest, backend="torch_native")
    monkeypatch.setenv("CUTEFORGE_BACKEND", "torch_native")
    assert torch.equal(apply_rotary_emb(x, **rest), eager) and len(served) == before


def test_the_policy_with_angles_of_another_form(device, served):
    """Complex numbers, and one row of angles for all of a batch: the tensors of the launch are new at each call."""
    x, rest = heads(device, 2, 5, 4), by_token(device, 5)
    want = fresh(rotary_wrapper, x, rest["freqs_cis"].expand(2, 5, D // 2, 2).contiguous())["out"]
    for freqs_cis in (rest["freqs_cis"], torch.view_as_complex(rest["freqs_cis"])):
        for _ in range(3):
            assert torch.equal(apply_rotary_emb(x, freqs_cis), want)
    with pytest.raises(ContractError, match="^freqs_cis: wanted either"):
        apply_rotary_emb(x, **rest, **lookup(device, 2, 5))


def test_the_policy_records_a_graph_after_calls_without_one(device, served):
    x, rest = heads(device, 5, 4), lookup(device, 5)
    for _ in range(3):
        want = apply_rotary_emb(x, **rest).clone()
    assert len(served) == 2
    out = apply_rotary_emb(x.clone().requires_grad_(), **rest)
    assert out.requires_grad and torch.equal(out.detach(), want)
    with OpLog() as log:
        apply_rotary_emb(x, **rest)
    assert [op.name() for op in log.seen] == ["cuteforge::rotary"] and len(served) == 2
