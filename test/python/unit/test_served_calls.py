"""What a wrapper hands to the compiled entry when it serves a call from memory: what it hands over when it does all its
work. No GPU: the entry is a stub, and CPU tensors pass for those of a GPU."""

from __future__ import annotations

import pytest
import torch

import cuteforge as cf
from cuteforge.op import recall
from helpers.stub_gpu import stub_wrappers

BF16, I32 = torch.bfloat16, torch.int32
D = 64


@pytest.fixture
def launches(monkeypatch):
    """Arguments of every entry that was called."""
    yield from stub_wrappers(monkeypatch)


def floats(*shape):
    return torch.zeros(*shape, dtype=BF16)


def ints(*shape):
    return torch.zeros(*shape, dtype=I32)


def lookup(*tokens):
    return {"cos": torch.zeros(128, D // 2), "sin": torch.zeros(128, D // 2), "positions": ints(*tokens)}


def by_token(*tokens):
    return {"freqs_cis": torch.zeros(*tokens, D // 2, 2)}


def rotary(table, where):
    """Of n tokens."""

    def draw(n):
        q, k = floats(n, 4, D), floats(n, 2, D)
        places = {
            "new": {},
            "in place": {"q_out": q, "k_out": k},
            "given": {"q_out": floats(n, 4, D), "k_out": floats(n, 2, D)},
            "one given": {"k_out": floats(n, 2, D)},
        }
        return {"q": q, "k": k, **table(n), **places[where]}

    return cf.rotary_qk_wrapper, draw


def compressor(n, **more):
    return {
        "kv": floats(n, 2 * D),
        "score": floats(n, 2 * D),
        "ape": torch.zeros(4, 2 * D),
        "cu_seqlens": ints(3),
        "cu_seqlens_comp": ints(3),
        **more,
    }


def forward(**tensors):
    return cf.csa_compressor_forward_wrapper(**tensors, ratio=4, head_dim=D, coff=2, total_comp=5)


def backward(**tensors):
    return cf.csa_compressor_backward_wrapper(**tensors, ratio=4, head_dim=D, coff=2)


def heads(n, **more):
    return {"q": floats(2, 1, 8, D), "k": floats(2, n, 2, D), "v": floats(2, n, 2, D), **more}


def decode(**tensors):
    return cf.gqa_decode_wrapper(**tensors, return_lse=True, softmax_scale=0.5)


def packed_prefill(**tensors):
    return cf.gqa_prefill_wrapper(**tensors, causal=True, window=(5, None), softcap=3.0, return_lse=True)


def pages(n):
    return {
        "q": floats(2, 8, D),
        "k_cache": floats(9, 16, 2, D),
        "v_cache": floats(9, 16, 2, D),
        "page_table": ints(2, 4),
        "seqlens_k": ints(2),
        "new_k": floats(2, 2, D),
        "new_v": floats(2, 2, D),
        "sinks": torch.zeros(8),
    }


CASES = {
    **{
        f"rotary, {table.__name__}, {where}": rotary(table, where)
        for table in (lookup, by_token)
        for where in ("new", "in place", "given", "one given")
    },
    "rotary of one": (cf.rotary_wrapper, lambda n: {"x": floats(n, 3, 4, D), **by_token(n, 3), "inverse": True}),
    "compressor forward": (forward, compressor),
    "compressor backward": (backward, lambda n: compressor(n, grad_out=floats(5, D))),
    "decode": (decode, heads),
    "decode, lengths and a mask": (
        decode,
        lambda n: heads(n, seqlens_k=ints(2), mask=torch.ones(2, n, dtype=torch.bool)),
    ),
    "prefill, packed, options": (
        packed_prefill,
        lambda n: {
            "q": floats(n, 8, D),
            "k": floats(n, 2, D),
            "v": floats(n, 2, D),
            "cu_seqlens_q": ints(4),
            "cu_seqlens_k": ints(4),
            "sinks": torch.zeros(8),
        },
    ),
    "decode of pages, appending": (cf.paged_gqa_decode_wrapper, pages),
}


def described(args, tensors):
    """Which of the call's tensors each argument is, the kind of one that was allocated, or the number."""
    addresses = {x.data_ptr(): name for name, x in tensors.items() if isinstance(x, torch.Tensor)}

    def of(x):
        if not isinstance(x, torch.Tensor):
            return x
        return addresses.get(x.data_ptr(), "new"), x.shape, x.stride(), x.dtype

    return [of(x) for x in args]


@pytest.mark.parametrize("case", CASES)
def test_a_served_call_hands_over_what_any_call_does(case, launches, monkeypatch):
    wrapper, draw = CASES[case]
    served, serve = [], recall.recall
    monkeypatch.setattr(recall, "recall", lambda *args: served.append(result := serve(*args)) or result)
    wrapper(**draw(24))
    assert served == [None] and len(launches) == 1
    for n in (24, 31):
        tensors = draw(n)
        versions = {name: x._version for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        launches.clear()
        got = wrapper(**tensors)
        assert served[-1] is not None
        counted = {name: tensors[name]._version - version for name, version in versions.items()}
        recall.forget()
        want = wrapper(**tensors)
        quick, slow = (described(args, tensors) for args in launches)
        assert quick == slow
        # written once by each, and counted
        assert counted == {name: tensors[name]._version - version - counted[name] for name, version in versions.items()}
        assert list(got) and got.keys() == want.keys()
        for name, x in want.items():
            y = got[name]
            assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
            given = any(x is tensor for tensor in tensors.values())
            assert (y is x) is given
        wrapper(**draw(24))


INEXACT = {
    "causal": lambda causal: cf.gqa_decode_wrapper(**heads(24), causal=causal),
    "return_lse": lambda return_lse: cf.gqa_decode_wrapper(**heads(24), return_lse=return_lse),
    "interleaved": lambda interleaved: cf.rotary_wrapper(floats(24, 4, D), **by_token(24), interleaved=interleaved),
    "inverse": lambda inverse: cf.rotary_wrapper(floats(24, 4, D), **by_token(24), inverse=inverse),
    "deterministic": lambda deterministic: cf.csa_compressor_backward_wrapper(
        **compressor(24, grad_out=floats(5, D)), ratio=4, coff=2, deterministic=deterministic
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_a_number_that_equals_a_flag_is_refused_also_after_a_call_with_the_flag(name, launches):
    """1 equals True and hashes like it, so the memory would find the call."""
    for _ in range(3):
        INEXACT[name](True)
    launches.clear()
    with pytest.raises(cf.ContractError, match=rf"^{name}: wanted"):
        INEXACT[name](1)
    assert not launches


def test_a_flag_that_equals_a_size_is_refused_also_after_a_call_with_the_size(launches):
    tensors = {**compressor(24), "ape": torch.zeros(1, 2 * D)}
    for _ in range(3):
        cf.csa_compressor_forward_wrapper(**tensors, ratio=1, coff=2, total_comp=5)
    launches.clear()
    with pytest.raises(cf.ContractError, match="^ratio: wanted"):
        cf.csa_compressor_forward_wrapper(**tensors, ratio=True, coff=2, total_comp=5)
    assert not launches
