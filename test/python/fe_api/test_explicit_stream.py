"""Calls of every family on an explicit stream that is behind: operands that the caller frees at once are still read.

Most operands are such that a wrapper has to copy them first. The copy runs on that stream, so what it copies has to
live as long.
"""

import pytest
import torch

import cuteforge as cf
from helpers import attention as attn
from helpers import csa, paged, rotary
from helpers.explicit_stream import check_operands_freed_at_once
from helpers.paged_inputs import columns_apart, misaligned, rows_misaligned

CUDA = torch.device("cuda")


def as_int64(tensors):
    return {name: x.long() if x.dtype == torch.int32 else x for name, x in tensors.items()}


def elements_apart(tensor):
    """A copy with other elements between its own."""
    return torch.stack((tensor, tensor), -1)[..., 0]


# Attention.


def dense(kind, x):
    """Operands of one of the dense wrappers that it has to copy, and the call."""

    def draw():
        tensors = {"q": misaligned(x.q), "k": columns_apart(x.k), "v": rows_misaligned(x.v)}
        return tensors | as_int64(x.optional)

    options = {**x.options, "return_lse": True}
    return draw, lambda tensors, stream: attn.WRAPPERS[kind](**tensors, **options, stream=stream)


def decode():
    return dense("decode", attn.draw(attn.MAIN, 3, 2, 4096, device=CUDA))


def prefill():
    return dense("prefill", attn.draw(attn.MAIN, 2, 130, 300, device=CUDA))


def packed_prefill():
    return dense("prefill", attn.draw_ragged(attn.MAIN, [40, 0, 130, 1], [50, 3, 400, 7], device=CUDA))


def pages(x, *, copies_pools):
    """Operands of one of the wrappers over pages."""

    def draw():
        place = columns_apart if copies_pools else torch.clone
        tensors = {"q": misaligned(x.q), "k_cache": place(x.k_cache), "v_cache": place(x.v_cache)}
        tensors |= as_int64({"page_table": x.page_table, **x.optional})
        if x.new_k is not None:
            tensors |= {"new_k": misaligned(x.new_k), "new_v": misaligned(x.new_v)}
        return tensors if x.is_decode else tensors | {"cu_seqlens_q": x.cu_seqlens_q.long()}

    wrapper = cf.paged_gqa_decode_wrapper if x.is_decode else cf.paged_gqa_prefill_wrapper
    options = {**x.options, "return_lse": True}
    return draw, lambda tensors, stream: wrapper(**tensors, **options, stream=stream)


def paged_decode():
    return pages(paged.draw(paged.CAUSAL, paged.edges(16, 2), CUDA), copies_pools=True)


def paged_decode_appending():
    """The pools are written, and so not copied."""
    x = paged.appending(paged.draw(paged.CAUSAL, paged.edges(16, 2), CUDA))
    draw, call = pages(x, copies_pools=False)

    def call_and_return_pools(tensors, stream):
        pools = {name: tensors[name] for name in ("k_cache", "v_cache")}
        return {**dict(call(tensors, stream).items()), **pools}

    return draw, call_and_return_pools


def paged_prefill():
    return pages(paged.draw(paged.CAUSAL, paged.edges(16, paged.PREFILL_QUERIES), CUDA), copies_pools=True)


def parts():
    x = attn.draw(attn.MAIN, 2, 130, 300, device=CUDA)
    (o_a, lse_a), (o_b, lse_b) = (attn.run("prefill", y) for y in (x, x.with_(v=x.v.flip(-1))))
    return {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}


def merge():
    given = parts()
    places = {"o_a": misaligned, "lse_a": columns_apart, "o_b": columns_apart, "lse_b": columns_apart}

    def draw():
        return {name: places[name](x) for name, x in given.items()}

    return draw, lambda tensors, stream: cf.merge_state(**tensors, **({} if stream is None else {"stream": stream}))


def merge_by_class(entry):
    """Of a class: it copies nothing, and results are the caller's."""
    given = parts()
    like = {"out": given["o_a"], "lse": given["lse_a"]}
    op = cf.MergeState(**given, **like).compile()

    def call(tensors, stream):
        results = {name: torch.empty_like(x) for name, x in like.items()}
        if entry == "bind":
            op.bind(**tensors, **results, stream=stream)()
        else:
            op.execute(**tensors, **results, stream=stream)
        return results

    return (lambda: {name: x.clone() for name, x in given.items()}), call


# Rotary.


def rotary_case(place, in_place=False, with_graph=False):
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, CUDA)

    def draw():
        cos, sin = (columns_apart(t) for t in x.table)
        tensors = {"q": place(x.x), "k": place(x.k), "cos": cos, "sin": sin, "positions": elements_apart(x.positions)}
        if with_graph:
            tensors["q"].requires_grad_()
        return tensors

    def call(tensors, stream):
        out = {"q_out": tensors["q"], "k_out": tensors["k"]} if in_place else {}
        return cf.rotary_qk_wrapper(**tensors, **out, interleaved=x.interleaved, stream=stream)

    return draw, call


def rotary_of_one():
    x = rotary.draw(rotary.BY_TOKEN, rotary.PACKED, CUDA)

    def draw():
        return {"x": columns_apart(x.x), "freqs_cis": columns_apart(x.table)}

    return draw, lambda tensors, stream: cf.rotary_wrapper(**tensors, interleaved=x.interleaved, stream=stream)


# Compressor.


def compressor(direction):
    x = csa.small(csa.CSA, CUDA)

    def draw():
        tensors = {"kv": columns_apart(x.kv), "score": rows_misaligned(x.score), "ape": columns_apart(x.ape)}
        tensors |= {"cu_seqlens": x.cu_seqlens.long(), "cu_seqlens_comp": x.cu_seqlens_comp.long()}
        if direction == "backward":
            tensors["grad_out"] = misaligned(x.grad_out)
        return tensors

    def call(tensors, stream):
        if direction == "backward":
            return cf.csa_compressor_backward_wrapper(**tensors, **x.config, stream=stream)
        return cf.csa_compressor_forward_wrapper(**tensors, **x.config, total_comp=x.total_comp, stream=stream)

    return draw, call


CASES = {
    "decode": decode,
    "prefill": prefill,
    "packed prefill": packed_prefill,
    "paged decode": paged_decode,
    "paged decode, appending": paged_decode_appending,
    "paged prefill": paged_prefill,
    "merge": merge,
    "merge, execute": lambda: merge_by_class("execute"),
    "merge, bind": lambda: merge_by_class("bind"),
    "rotary": lambda: rotary_case(columns_apart),
    "rotary of one": rotary_of_one,
    "rotary in place": lambda: rotary_case(torch.clone, in_place=True),
    "rotary with a graph": lambda: rotary_case(columns_apart, with_graph=True),
    "compressor": lambda: compressor("forward"),
    "compressor backward": lambda: compressor("backward"),
}


@pytest.mark.parametrize("case", CASES)
def test_operands_freed_at_once_are_read_first(case, device):
    check_operands_freed_at_once(*CASES[case]())
