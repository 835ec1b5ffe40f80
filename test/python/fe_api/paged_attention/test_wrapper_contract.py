"""What the wrappers and thin functions convert, copy, write into and refuse, on real tensors."""

import pytest
import torch

from cuteforge import ContractError, attn_paged_decode, attn_paged_prefill
from helpers import paged
from helpers.paged import columns_apart, misaligned, rows_misaligned, small

all_kinds = pytest.mark.parametrize("kind", paged.KINDS)


@all_kinds
def test_wrapper_converts_int64_tables(kind, device):
    x = small(kind, device)
    names = ("page_table", "cu_seqlens_q", "seqlens_k", "kv_indptr", "page_table_rows")
    wide = {name: t.long() for name in names if (t := getattr(x, name)) is not None}
    want = paged.run(x)
    assert paged.same(paged.call_wrapper(x.with_(**wide)), want)
    for name, tensor in wide.items():
        assert paged.same(paged.call_wrapper(x.with_(**{name: tensor})), want), name


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool])
@pytest.mark.parametrize("name", ["page_table", "seqlens_k", "page_table_rows", "cu_seqlens_q"])
def test_wrapper_refuses_tables_of_other_types_by_name(name, dtype, device):
    x = small("prefill", device)
    with pytest.raises(ContractError, match=rf"^{name}\b"):
        paged.call_wrapper(x.with_(**{name: getattr(x, name).to(dtype)}))


CHANGES = {"base": misaligned, "rows": rows_misaligned, "columns": columns_apart}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", ["decode", "prefill", "indptr"])
def test_wrapper_copies_what_the_kernel_cannot_read(kind, change, device):
    x = small(kind, device)
    want = paged.run(x)
    assert paged.same(paged.call_wrapper(x.with_(q=change(x.q))), want)
    pools = {"k_cache": change(x.k_cache), "v_cache": change(x.v_cache)}
    assert paged.same(paged.call_wrapper(x.with_(**pools)), want)
    table = x.page_table.t().contiguous().t()
    apart = {name: t.repeat_interleave(2)[::2] for name, t in x.optional.items() if t.dim() == 1}
    assert paged.same(paged.call_wrapper(x.with_(page_table=table, **apart)), want)
    if x.mask is not None:
        assert paged.same(paged.call_wrapper(x.with_(mask=columns_apart(x.mask))), want)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_wrapper_copies_new_values_that_the_kernel_cannot_read(change, device):
    x = small("append", device)
    want, guard = paged.run(x), paged.PoolGuard(x)
    assert paged.same(paged.call_wrapper(x.with_(new_k=change(x.new_k), new_v=change(x.new_v))), want)
    guard.check()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_wrapper_writes_into_the_output_given(kind, device):
    x = small(kind, device)
    outputs = paged.Outputs.of(x, lse=False)
    got = paged.call_wrapper(x, out=outputs.tensors["out"])
    torch.cuda.synchronize()
    outputs.check()
    assert got["out"] is outputs.tensors["out"]
    paged.check(got, x)


BAD_RESULTS = {
    "a_row_short": lambda t: t[:-1],
    "narrower": lambda t: t[..., :-8],
    "other_dtype": lambda t: torch.empty_like(t, dtype=torch.float16),
    "on_cpu": lambda t: torch.empty_like(t, device="cpu"),
    "overlaps_itself": lambda t: t[:1].expand(t.shape),
    "a_list": lambda t: [1, 2],
}


@pytest.mark.parametrize("bad", BAD_RESULTS.values(), ids=BAD_RESULTS)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_wrapper_refuses_a_bad_output_by_name(kind, bad, device):
    x = small(kind, device)
    with pytest.raises(ContractError, match=r"^(out|q)\b"):
        paged.call_wrapper(x, out=bad(torch.empty_like(x.q)))


@pytest.mark.parametrize("junk", [None, [1.0, 2.0]], ids=["none", "list"])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "page_table", "cu_seqlens_q"])
def test_wrappers_refuse_what_is_no_tensor_by_name(name, junk, device):
    x = small("prefill", device)
    names = ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q")
    operands = [junk if n == name else t for n, t in zip(names, x.positional)]
    attempts = [paged.paged_gqa_prefill_wrapper] + ([paged.paged_gqa_decode_wrapper] if name != "cu_seqlens_q" else [])
    for wrapper in attempts:
        count = 5 if wrapper is paged.paged_gqa_prefill_wrapper else 4
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            wrapper(*operands[:count], seqlens_k=x.seqlens_k)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "new_k", "new_v"])
def test_wrapper_refuses_operands_that_require_grad_by_name(name, device):
    """There is no backward kernel: never an output that silently has no graph."""
    x = small("append" if name.startswith("new") else "decode", device)
    guard = paged.PoolGuard(x.with_(new_k=None, new_v=None))
    learned = x.with_(**{name: getattr(x, name).clone().requires_grad_()})
    with pytest.raises(ContractError, match=rf"^{name}\b"):
        paged.call_wrapper(learned)
    torch.cuda.synchronize()
    guard.check()
    with torch.no_grad():
        paged.check(paged.call_wrapper(learned), x)


@pytest.mark.parametrize("queries", [0, paged.PREFILL_QUERIES], ids=["decode", "prefill"])
def test_thin_functions_never_fall_back(queries, device):
    """They mean "run this kernel": operands on a CPU are refused, the first by name."""
    x = paged.draw(paged.MAIN, paged.edges(16, queries), device)
    function = attn_paged_prefill if queries else attn_paged_decode
    with pytest.raises(ContractError, match="(?i)^q.*cuda.*cpu"):
        function(*(t.cpu() for t in (*x.positional, x.seqlens_k)))
