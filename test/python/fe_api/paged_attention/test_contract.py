"""Refusals: the argument is named, nothing is launched, and the next call works.

Every operand is violated once in the constructor or check_support, in `execute` and in `bind`.
"""

import math

import pytest
import torch

from cuteforge import (
    ContractError,
    PagedGQADecode,
    PagedGQAPrefill,
    TensorSpec,
    UnsupportedError,
)
from helpers import paged
from helpers.paged import MAIN, Batch, columns_apart, edges, misaligned, rows_misaligned, small

REFUSALS = (ContractError, UnsupportedError)
all_kinds = pytest.mark.parametrize("kind", paged.KINDS)


class Call:
    """One compiled op with its operands by name; outputs are canaries, the pools guarded."""

    def __init__(self, kind, device):
        self.x = small(kind, device)
        self.outputs = paged.Outputs.of(self.x)
        results = self.outputs.tensors
        self.flags = {"causal": self.x.causal}
        self.op = self.make(**self.operands(self.x, results)).compile()
        self.given = self.operands(self.x, results)
        self.scratch = paged.workspace_of(self.op, device)
        self.workspace = None if self.scratch is None else self.scratch.tensor
        self.guard = paged.PoolGuard(self.x.with_(new_k=None, new_v=None))

    @staticmethod
    def operands(x, results):
        queries = {} if x.is_decode else {"cu_seqlens_q": x.cu_seqlens_q}
        first = {"q": x.q, "k_cache": x.k_cache, "v_cache": x.v_cache, "page_table": x.page_table}
        return {**first, **queries, **x.optional, **results}

    def make(self, **operands):
        return (PagedGQADecode if self.x.is_decode else PagedGQAPrefill)(**operands, **self.flags)

    def execute(self, **replaced):
        self.op.execute(**{**self.given, "workspace": self.workspace, **replaced})
        torch.cuda.synchronize()

    def bind(self, **replaced):
        return self.op.bind(**{**self.given, "workspace": self.workspace, **replaced})

    def check_untouched(self):
        torch.cuda.synchronize()
        self.outputs.check_untouched()
        self.guard.check()

    def refuses(self, name, error=ContractError, **replaced):
        """`execute` and `bind` raise, `name` comes first in the text, nothing is written, then the op still works."""
        for attempt in (self.execute, self.bind):
            with pytest.raises(error, match=rf"^{name}\b"):
                attempt(**replaced)
        self.check_untouched()
        self.execute()
        self.outputs.check()
        paged.check(self.outputs.tensors, self.x)

    def sample_refused(self, name, **replaced):
        with pytest.raises(REFUSALS, match=rf"^{name}\b"):
            self.make(**{**self.given, **replaced}).check_support()


SEEN_IN_SAMPLES, ON_MEMORY_ONLY = True, False
POOLS, HEADS = ("k_cache", "v_cache"), ("q", "k_cache", "v_cache", "out", "new_k", "new_v")
INDICES = ("page_table", "seqlens_k", "kv_indptr", "page_table_rows", "cu_seqlens_q")
EVERYTHING = (*HEADS, *INDICES, "mask", "lse")
# (case, operands, names allowed in the error or None for the operand's own, what replaces it, whether samples show it).
VIOLATIONS = (
    ("other_dtype", HEADS, "(q|k_cache|{name})", lambda t: torch.empty_like(t, dtype=torch.float16), SEEN_IN_SAMPLES),
    ("fp32", HEADS, "(q|k_cache|{name})", lambda t: torch.empty_like(t, dtype=torch.float32), SEEN_IN_SAMPLES),
    ("one_dim_too_many", (*HEADS, *INDICES), "(q|{name})", lambda t: t[None, None], SEEN_IN_SAMPLES),
    ("one_dim_too_few", ("page_table", "new_k", "new_v", "lse"), None, lambda t: t[0], SEEN_IN_SAMPLES),
    ("columns_apart", HEADS, None, columns_apart, SEEN_IN_SAMPLES),
    ("rows_misaligned", HEADS, None, rows_misaligned, SEEN_IN_SAMPLES),
    ("base_misaligned", HEADS, None, misaligned, ON_MEMORY_ONLY),
    ("narrower", HEADS, "(q|k_cache|v_cache|out|{name})", lambda t: t[..., :-8], SEEN_IN_SAMPLES),
    ("a_head_short", (*HEADS, "lse"), "(q|k_cache|v_cache|out|{name})",
     lambda t: t.narrow(t.dim() - 2, 0, t.shape[-2] - 1), SEEN_IN_SAMPLES),
    ("a_page_short", ("v_cache",), None, lambda t: t[:-1], SEEN_IN_SAMPLES),
    ("another_page_size", ("v_cache",), None, lambda t: t[:, :-1], SEEN_IN_SAMPLES),
    ("a_request_short", ("seqlens_k", "kv_indptr", "page_table_rows", "cu_seqlens_q", "new_k", "new_v"),
     "(q|page_table|cu_seqlens_q|seqlens_k|kv_indptr|page_table_rows|{name})", lambda t: t[:-1], SEEN_IN_SAMPLES),
    ("a_row_short", ("out",), "(q|out)", lambda t: t[:-1], SEEN_IN_SAMPLES),
    ("int64", INDICES, None, lambda t: t.long(), SEEN_IN_SAMPLES),
    ("floats", INDICES, None, lambda t: t.float(), SEEN_IN_SAMPLES),
    ("entries_apart", INDICES, None, lambda t: t.repeat_interleave(2, -1)[..., ::2], SEEN_IN_SAMPLES),
    ("other_dtype", ("lse",), None, lambda t: torch.empty_like(t, dtype=torch.float64), SEEN_IN_SAMPLES),
    ("half_precision", ("lse",), None, lambda t: torch.empty_like(t, dtype=torch.bfloat16), SEEN_IN_SAMPLES),
    ("a_row_short", ("lse",), "(q|out|lse)", lambda t: t[:-1], SEEN_IN_SAMPLES),
    ("a_token_short", ("lse",), "(q|out|lse)", lambda t: t[..., :-1], SEEN_IN_SAMPLES),
    ("overlaps_itself", ("out", "lse"), None, lambda t: t[:1].expand(t.shape), SEEN_IN_SAMPLES),
    ("bytes", ("mask",), None, lambda t: t.to(torch.uint8), SEEN_IN_SAMPLES),
    ("floats", ("mask",), None, lambda t: t.float(), SEEN_IN_SAMPLES),
    ("one_dim", ("mask",), None, lambda t: t[0, 0], SEEN_IN_SAMPLES),
    ("five_dims", ("mask",), None, lambda t: t[None, None], SEEN_IN_SAMPLES),
    ("other_batch", ("mask",), "(q|page_table|seqlens_k|kv_indptr|mask)", lambda t: t[:3], SEEN_IN_SAMPLES),
    ("columns_apart", ("mask",), None, columns_apart, SEEN_IN_SAMPLES),
    ("on_cpu", EVERYTHING, "(q|{name})", lambda t: t.cpu(), SEEN_IN_SAMPLES),
    ("on_meta", (*HEADS, "page_table", "seqlens_k", "lse"), None, lambda t: t.to("meta"), ON_MEMORY_ONLY),
    ("none", ("q", *POOLS, "page_table", "cu_seqlens_q", "out"), None, lambda t: None, SEEN_IN_SAMPLES),
    ("a_list", EVERYTHING, None, lambda t: [1, 2], SEEN_IN_SAMPLES),
    ("requires_grad", ("q", *POOLS, "new_k", "new_v"), None, lambda t: t.clone().requires_grad_(), ON_MEMORY_ONLY),
)  # fmt: skip
# The kind of call in which an operand occurs.
KIND_OF = {"new_k": "append", "new_v": "append", "cu_seqlens_q": "prefill", "kv_indptr": "indptr", "mask": "indptr"}
CASES = [
    (name, (allowed or "{name}").format(name=name), replace, in_samples, case)
    for case, names, allowed, replace, in_samples in VIOLATIONS
    for name in names
]
violations = pytest.mark.parametrize(
    ("name", "named", "replace", "in_samples", "case"), CASES, ids=[f"{case[0]}-{case[-1]}" for case in CASES]
)


@violations
def test_bad_operand_is_refused_by_name(name, named, replace, in_samples, case, device):
    call = Call(KIND_OF.get(name, "decode"), device)
    bad = {name: replace(call.given[name])}
    call.refuses(named, **bad)
    if in_samples:
        call.sample_refused(named, **bad)


@pytest.mark.parametrize(
    ("name", "named", "replace", "in_samples", "case"),
    [case for case in CASES if case[0] not in KIND_OF],
    ids=[f"{case[0]}-{case[-1]}" for case in CASES if case[0] not in KIND_OF],
)
def test_bad_operand_of_prefill_is_refused_by_name(name, named, replace, in_samples, case, device):
    """With packed tokens: what is a row short of tokens may be named by the operand that it disagrees with."""
    call = Call("prefill", device)
    bad = {name: replace(call.given[name])}
    named = "(q|out|lse|k_cache|v_cache)" if case in ("a_head_short", "a_row_short") else named
    call.refuses(named, **bad)
    if in_samples:
        call.sample_refused(named, **bad)


# (case, kind of call, operands dropped or added, names allowed).
COMBINATIONS = (
    ("no_lengths", "decode", {"seqlens_k": None}, "(seqlens_k|kv_indptr)"),
    ("two_kinds_of_lengths", "decode", {"kv_indptr": (6, torch.int32)}, "(seqlens_k|kv_indptr)"),
    ("no_lengths", "prefill", {"seqlens_k": None}, "(seqlens_k|kv_indptr)"),
    ("two_kinds_of_lengths", "indptr", {"seqlens_k": (5, torch.int32)}, "(seqlens_k|kv_indptr)"),
    ("new_k_alone", "append", {"new_v": None}, "new_[kv]"),
    ("new_v_alone", "append", {"new_k": None}, "new_[kv]"),
    ("more_rows_than_requests", "decode", {"page_table_rows": None}, "(q|page_table|page_table_rows|seqlens_k)"),
)


@pytest.mark.parametrize(
    ("case", "kind", "changes", "named"), COMBINATIONS, ids=[f"{k}-{c}" for c, k, *_ in COMBINATIONS]
)
def test_operands_that_go_together(case, kind, changes, named, device):
    """Exactly one kind of lengths, new_k with new_v, a row for each request unless rows are named."""
    call = Call(kind, device)
    changes = {n: c and torch.zeros(c[0], dtype=c[1], device=device) for n, c in changes.items()}
    call.refuses(rf"({named}|operands)", **changes)
    with pytest.raises(ContractError, match=rf"^{named}\b"):
        call.make(**{**call.given, **changes}).check_support()
    with pytest.raises(ContractError, match=rf"^{named}\b"):
        paged.call_wrapper(call.x.with_(**changes))


OTHER_CALLS = {
    "without_rows": ("decode", lambda x: x.with_(page_table=x.page_table[:5], page_table_rows=None)),
    "with_a_mask": ("decode", lambda x: paged.with_mask(x, "columns")),
    "with_a_mask_of_another_rank": ("indptr", lambda x: paged.with_mask(x, "columns")),
    "without_a_mask": ("indptr", lambda x: x.with_(mask=None)),
    "without_new_values": ("append", lambda x: x.with_(new_k=None, new_v=None)),
    "with_new_values": ("decode", lambda x: paged.appending(x)),
    "lengths_of_the_other_kind": ("decode", lambda x: paged.with_lengths(x, (1, 1, 1, 1, 1), by_indptr=True)),
    "a_flat_pool": ("decode", lambda x: x.with_(k_cache=x.k_cache[:, 0], v_cache=x.v_cache[:, 0])),
    "one_query_token": ("decode", lambda x: x.with_(q=x.q[:, 0])),
}


@pytest.mark.parametrize(("kind", "other"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_another_kind_of_call_than_the_sample_is_refused(kind, other, device):
    """Nothing is taken for something else, and nothing given is ignored."""
    call = Call(kind, device)
    given = call.operands(other(call.x), call.outputs.tensors)
    replaced = {name: None for name in call.given if name not in given} | given
    for attempt in (call.execute, call.bind):
        with pytest.raises(ContractError, match="wanted .*got"):
            attempt(**replaced)
    call.outputs.check_untouched()


def test_lse_given_without_a_sample_or_missing_is_refused(device):
    call = Call("decode", device)
    call.refuses("(lse|operands)", lse=None)
    lse = call.given.pop("lse")
    bare = call.make(**call.given).compile()
    for attempt in (bare.execute, bare.bind):
        with pytest.raises(ContractError, match="lse"):
            attempt(**call.given, lse=lse, workspace=call.workspace)


def meta(x, **replaced):
    """Samples without memory, some of other shapes."""
    given = Call.operands(x, paged.Outputs.of(x).tensors)
    specs = {name: TensorSpec.of(t, name) for name, t in given.items()}
    for name, shape in replaced.items():
        specs[name] = TensorSpec(shape, specs[name].dtype)
    return specs


def of_width(d):
    return {"q": (5, 2, 8, d), "out": (5, 2, 8, d), "k_cache": (17, 16, 2, d), "v_cache": (17, 16, 2, d)}


# (case, shapes, names allowed). B 5, L 2, P 17, ps 16.
HEAD_SHAPES = (
    ("query_heads_no_multiple", {"q": (5, 2, 7, 128), "out": (5, 2, 7, 128), "lse": (5, 7, 2)}, "(q|k_cache)"),
    ("head_dim_no_multiple_of_8", of_width(60), "(q|k_cache)"),
    ("head_dim_over_256", of_width(264), "(q|k_cache)"),
    ("head_dim_0", of_width(0), "(q|k_cache)"),
    ("narrower_values", {"out": (5, 2, 8, 64), "v_cache": (17, 16, 2, 64)}, "(v_cache|out)"),
    ("wider_values", {"out": (5, 2, 8, 192), "v_cache": (17, 16, 2, 192)}, "(v_cache|out)"),
    ("no_query_heads", {"q": (5, 2, 0, 128), "out": (5, 2, 0, 128), "lse": (5, 0, 2)}, "(q|k_cache)"),
    ("no_kv_heads", {"k_cache": (17, 16, 0, 128), "v_cache": (17, 16, 0, 128)}, "(q|k_cache)"),
    ("page_size_0", {"k_cache": (17, 0, 2, 128), "v_cache": (17, 0, 2, 128)}, "k_cache"),
    ("out_of_the_width_of_q_not_v", {"v_cache": (17, 16, 2, 64)}, "(v_cache|out)"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "shapes", "named"), HEAD_SHAPES, ids=[case for case, *_ in HEAD_SHAPES])
def test_heads_that_are_not_served_are_refused_by_name(case, shapes, named, device):
    specs = meta(small("decode", device), **shapes)
    with pytest.raises(REFUSALS, match=rf"^{named}\b"):
        PagedGQADecode(**specs).check_support()


@all_kinds
def test_support_can_be_asked_without_memory(kind, device):
    x = small(kind, device)
    op = PagedGQADecode if x.is_decode else PagedGQAPrefill
    assert op(**meta(x), causal=True).check_support() is True


@pytest.mark.parametrize("num_splits", [0, -1, 1.5, "two"])
def test_num_splits_is_refused_by_name(num_splits, device):
    call = Call("decode", device)
    with pytest.raises(ContractError, match=r"^num_splits\b"):
        PagedGQADecode(**call.given, num_splits=num_splits).check_support()
    with pytest.raises(ContractError, match=r"^num_splits\b"):
        paged.call_wrapper(call.x, num_splits=num_splits)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_softmax_scale_that_is_no_finite_number_is_refused_by_name(kind, scale, device):
    call = Call(kind, device)
    call.refuses("softmax_scale", softmax_scale=scale)
    with pytest.raises(ContractError, match=r"^softmax_scale\b"):
        call.make(**call.given, softmax_scale=scale).check_support()
    with pytest.raises(ContractError, match=r"^softmax_scale\b"):
        paged.call_wrapper(call.x, softmax_scale=scale)


@pytest.fixture
def split_call(device):
    """A decode call with scratch memory: one long request."""
    x = paged.draw(MAIN, Batch((8192,), 16), device)
    outputs = paged.Outputs.of(x)
    op = paged.make_op(x, outputs.tensors).compile()
    if not op.workspace_bytes():
        pytest.skip("this GPU needs no workspace for the call")
    positional, named = paged.arguments(x, outputs.tensors)
    return op, positional, named, outputs, paged.workspace_of(op, device).tensor


WORKSPACES = {
    "none": lambda w: None,
    "a_byte_short": lambda w: w[:-1],
    "int8": lambda w: w.view(torch.int8),
    "fp32": lambda w: w[: w.numel() // 4 * 4].view(torch.float32),
    "on_cpu": lambda w: w.cpu(),
    "misaligned": lambda w: torch.empty(w.numel() + 16, dtype=w.dtype, device=w.device)[8:-8],
    "a_list": lambda w: [0] * w.numel(),
    "bytes_apart": lambda w: torch.empty(2 * w.numel(), dtype=w.dtype, device=w.device)[::2],
    "on_meta": lambda w: w.to("meta"),
}


@pytest.mark.parametrize("bad", WORKSPACES.values(), ids=WORKSPACES)
def test_workspace_is_refused_by_name(bad, split_call):
    op, positional, named, outputs, good = split_call
    for attempt in (op.execute, op.bind):
        with pytest.raises(ContractError, match=r"^workspace\b"):
            attempt(*positional, **named, workspace=bad(good))
    torch.cuda.synchronize()
    outputs.check_untouched()
    op.execute(*positional, **named, workspace=torch.cat((good, good)))
    torch.cuda.synchronize()
    outputs.check()


def test_workspace_bytes_is_asked_without_compiling(split_call):
    op, positional, named, outputs, _ = split_call
    named.pop("softmax_scale")
    fresh = PagedGQADecode(*positional, **named)
    fresh.check_support()
    assert fresh.workspace_bytes() == op.workspace_bytes()


def test_one_split_and_prefill_need_no_workspace(split_call, device):
    _, positional, named, _, _ = split_call
    named.pop("softmax_scale")
    one = PagedGQADecode(*positional, **named, num_splits=1)
    one.check_support()
    prefill = paged.make_op(x := small("prefill", device), paged.Outputs.of(x).tensors)
    prefill.check_support()
    assert one.workspace_bytes() == prefill.workspace_bytes() == 0


@all_kinds
def test_outputs_share_memory_with_nothing(kind, device):
    """Refused when bound, by either name."""
    call = Call(kind, device)
    for name in ("q", "k_cache", "v_cache"):
        memory = call.given[name].view(-1)
        count = call.given["out"].numel()
        if memory.numel() >= count:
            with pytest.raises(ContractError, match=rf"^(out|{name})\b"):
                call.bind(out=memory[:count].view(call.given["out"].shape))
    with pytest.raises(ContractError, match=r"^(out|lse)\b"):
        call.bind(
            lse=call.given["out"]
            .view(-1)
            .view(torch.float32)[: call.given["lse"].numel()]
            .view(call.given["lse"].shape)
        )


def test_new_values_inside_the_pool_are_refused_when_bound(device):
    """The op writes there."""
    call = Call("append", device)
    inside = call.given["k_cache"][:1, : len(call.x.lens)].squeeze(0)
    with pytest.raises(ContractError, match=r"^(new_k|k_cache)\b"):
        call.bind(new_k=inside)


def test_pools_of_one_memory_are_refused_only_when_written(device):
    """K and V the same pool, as in latent attention: right to read, wrong to append to."""
    call = Call("decode", device)
    call.bind(v_cache=call.given["k_cache"])
    call.execute(v_cache=call.given["k_cache"])
    paged.check(call.outputs.tensors, call.x.with_(v_cache=call.x.k_cache))
    with pytest.raises(ContractError, match=r"^[kv]_cache\b"):
        (append := Call("append", device)).bind(v_cache=append.given["k_cache"])


@all_kinds
def test_checked_launch_names_the_same_argument(kind, device, monkeypatch):
    """CUTEFORGE_FAST_LAUNCH=0 can be switched at any time."""
    call = Call(kind, device)
    monkeypatch.setenv("CUTEFORGE_FAST_LAUNCH", "0")
    call.refuses("v_cache", v_cache=call.given["v_cache"][:-1])


@all_kinds
def test_missing_and_unknown_operands(kind, device):
    call = Call(kind, device)
    with pytest.raises((TypeError, ContractError), match="kv_lens"):
        call.execute(kv_lens=call.given["q"])
    given = {name: t for name, t in call.given.items() if name != "page_table"}
    with pytest.raises((TypeError, ContractError), match="page_table"):
        call.op.execute(**given)
    call.check_untouched()


def test_extents_may_differ_from_the_samples(device):
    """Batch, table, pool, page size and tokens are run-time facts of a compiled op."""
    small, large = paged.draw(MAIN, edges(16), device), paged.draw(MAIN, edges(64, kv_heads=3), device, seed=1)
    small = small.with_(q=small.q[:3], page_table=small.page_table[:3], seqlens_k=small.seqlens_k[:3])
    op = paged.make_op(large, paged.Outputs.of(large).tensors, num_splits=1).compile()
    for x in (small, large):
        outputs = paged.Outputs.of(x)
        positional, named = paged.arguments(x, outputs.tensors)
        op.execute(*positional, **named)
        torch.cuda.synchronize()
        outputs.check()
        paged.check(outputs.tensors, x)
