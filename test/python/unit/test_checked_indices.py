"""Checked mode looks at indices as they are given: what int32 does not hold is refused. No GPU: entries are stubs."""

from __future__ import annotations

import pytest
import torch

import cuteforge as cf
from helpers.stub_gpu import refuse_what_wrappers_copy, stub_wrappers

BF16, D = torch.bfloat16, 64
FAR = 2**32


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    yield from stub_wrappers(monkeypatch, refuse_what_wrappers_copy)


def floats(*shape):
    return torch.zeros(*shape, dtype=BF16)


def ints(*values):
    return torch.tensor(values)


def dense():
    return {"q": floats(2, 3, 8, D), "k": floats(2, 9, 2, D), "v": floats(2, 9, 2, D), "seqlens_k": ints(9, 4)}


def packed():
    offsets = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 9)}
    return {"q": floats(5, 8, D), "k": floats(9, 2, D), "v": floats(9, 2, D), **offsets}


def pages(*tokens, lengths):
    tables = {"page_table": torch.arange(6).view(3, 2), "page_table_rows": ints(2, 0)}
    pools = {"k_cache": floats(9, 16, 2, D), "v_cache": floats(9, 16, 2, D)}
    return {"q": floats(*tokens, 8, D), **pools, **tables, **lengths}


def by_length():
    return pages(2, lengths={"seqlens_k": ints(20, 3)})


def by_indptr():
    return pages(2, lengths={"kv_indptr": ints(5, 25, 28)})


def appending():
    """Request 0 appends to the second page of its row, where no key is yet."""
    lengths = {"seqlens_k": ints(17, 3)}
    return pages(2, lengths=lengths) | {"new_k": floats(2, 2, D), "new_v": floats(2, 2, D)}


def paged_prefill():
    return pages(5, lengths={"seqlens_k": ints(20, 3)}) | {"cu_seqlens_q": ints(0, 2, 5)}


def turned():
    tables = {name: torch.zeros(128, D // 2) for name in ("cos", "sin")}
    return {"x": floats(5, 4, D), **tables, "positions": ints(0, 3, 127, 5, 5)}


def pooled(**more):
    rows = {"kv": floats(24, 2 * D), "score": floats(24, 2 * D), "ape": torch.zeros(4, 2 * D)}
    return {**rows, "cu_seqlens": ints(0, 11, 24), "cu_seqlens_comp": ints(0, 2, 5), **more}


def compress(**tensors):
    return cf.csa_compressor_forward_wrapper(**tensors, total_comp=5)


CALLS = {
    "decode": (cf.gqa_decode_wrapper, dense),
    "prefill": (cf.gqa_prefill_wrapper, dense),
    "packed prefill": (cf.gqa_prefill_wrapper, packed),
    "paged decode": (cf.paged_gqa_decode_wrapper, by_length),
    "paged decode, offsets": (cf.paged_gqa_decode_wrapper, by_indptr),
    "paged decode, appending": (cf.paged_gqa_decode_wrapper, appending),
    "paged prefill": (cf.paged_gqa_prefill_wrapper, paged_prefill),
    "rotary": (cf.rotary_wrapper, turned),
    "compressor": (compress, pooled),
    "compressor backward": (cf.csa_compressor_backward_wrapper, lambda: pooled(grad_out=floats(5, D))),
}
# A call, one of its operands, a place in it, and what is added there.
FAR_OUT = [
    ("decode", "seqlens_k", (1,), FAR),
    ("decode", "seqlens_k", (1,), -FAR),
    ("prefill", "seqlens_k", (0,), FAR),
    ("packed prefill", "cu_seqlens_q", (1,), FAR),
    ("packed prefill", "cu_seqlens_k", (2,), FAR),
    ("paged decode", "seqlens_k", (0,), FAR),
    ("paged decode", "seqlens_k", (0,), -FAR),
    ("paged decode", "page_table", (2, 1), FAR),
    ("paged decode", "page_table", (0, 0), -FAR),
    ("paged decode", "page_table_rows", (1,), FAR),
    ("paged decode, offsets", "kv_indptr", (2,), FAR),
    ("paged decode, offsets", "kv_indptr", (slice(None),), FAR),
    ("paged decode, appending", "page_table", (2, 1), FAR),
    ("paged decode, appending", "page_table", (2, 1), -FAR),
    ("paged prefill", "cu_seqlens_q", (2,), FAR),
    ("paged prefill", "seqlens_k", (1,), FAR),
    ("paged prefill", "page_table", (2, 0), FAR),
    ("rotary", "positions", (3,), FAR),
    ("compressor", "cu_seqlens", (1,), FAR),
    ("compressor", "cu_seqlens_comp", (2,), FAR),
    ("compressor backward", "cu_seqlens", (2,), FAR),
    ("compressor backward", "cu_seqlens_comp", (1,), -FAR),
]


@pytest.mark.parametrize("served", [False, True], ids=["first call", "another call"])
@pytest.mark.parametrize(("call", "name", "place", "far"), FAR_OUT)
def test_an_index_past_int32_is_refused_by_name_and_place(call, name, place, far, served, launches):
    wrapper, draw = CALLS[call]
    if served:
        wrapper(**draw())
        launches.clear()
    tensors = draw()
    tensors[name][place] += far
    index = ", ".join("0" if x == slice(None) else str(x) for x in place)
    value = int(tensors[name][place].flatten()[0])
    with pytest.raises(cf.ContractError, match=rf"^{name}: wanted .*, got {value} at index {index}$"):
        wrapper(**tensors)
    assert not launches


@pytest.mark.parametrize("call", CALLS)
def test_int64_indices_in_range_are_served(call, launches):
    wrapper, draw = CALLS[call]
    wrapper(**draw())
    assert len(launches) == 1


def test_pages_past_a_length_may_hold_anything(launches):
    tensors = by_length()
    tensors["page_table"][0, 1] = 2**40
    tensors["page_table"][1] = -(2**40)
    cf.paged_gqa_decode_wrapper(**tensors)
    assert len(launches) == 1


def test_checked_mode_names_a_wrong_shape_before_it_looks_at_contents(launches):
    tensors = by_length()
    tensors["page_table"] = tensors["page_table"][:, 0].contiguous()
    with pytest.raises(cf.ContractError, match="^page_table: wanted shape"):
        cf.paged_gqa_decode_wrapper(**tensors)
    assert not launches
