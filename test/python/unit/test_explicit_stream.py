"""What wrappers do on a stream that they are asked for. No GPU: entries and streams are stubs, and CPU tensors pass for
those of a GPU."""

from __future__ import annotations

import pytest
import torch

import cuteforge as cf
from helpers.stub_gpu import STREAM, StubStream, refuse_what_wrappers_copy, stub_streams, stub_wrappers

BF16, D = torch.bfloat16, 64


@pytest.fixture
def launches(monkeypatch):
    yield from stub_wrappers(monkeypatch, refuse_what_wrappers_copy)


@pytest.fixture
def current_stream(monkeypatch):
    return stub_streams(monkeypatch)


@pytest.fixture
def recorded(monkeypatch):
    """Tensors that were recorded on the stream asked for."""
    tensors = []

    def note(tensor, stream):
        assert stream == StubStream.cuda_stream
        tensors.append(tensor)

    monkeypatch.setattr(torch.Tensor, "record_stream", note)
    return tensors


def apart(*shape, dtype=BF16):
    """A tensor that wrappers have to copy."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def floats(*shape):
    return torch.zeros(*shape, dtype=BF16)


def wide(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


def heads(tokens=3):
    return {"q": apart(2, tokens, 8, D), "k": apart(2, 9, 2, D), "v": apart(2, 9, 2, D), "seqlens_k": wide(2)}


def packed():
    return {
        "q": apart(5, 8, D),
        "k": apart(9, 2, D),
        "v": apart(9, 2, D),
        "cu_seqlens_q": wide(3),
        "cu_seqlens_k": wide(3),
    }


def pages(*tokens, pool=apart):
    pools = {"k_cache": pool(9, 16, 2, D), "v_cache": pool(9, 16, 2, D)}
    return {"q": apart(*tokens, 8, D), **pools, "page_table": wide(2, 4), "seqlens_k": wide(2)}


def appending():
    return {**pages(2, pool=floats), "new_k": apart(2, 2, D), "new_v": apart(2, 2, D)}


def parts():
    return {"o_a": apart(5, 4, D), "lse_a": torch.zeros(4, 5), "o_b": apart(5, 4, D), "lse_b": torch.zeros(4, 5)}


def turned(in_place=False):
    place = floats if in_place else apart
    q, k = place(5, 4, D), place(5, 2, D)
    tables = {name: apart(128, D // 2, dtype=torch.float32) for name in ("cos", "sin")}
    out = {"q_out": q, "k_out": k} if in_place else {}
    return {"q": q, "k": k, **tables, "positions": torch.zeros(5, dtype=torch.int32), **out}


def pooled(**more):
    rows = {"kv": apart(24, 2 * D), "score": apart(24, 2 * D), "ape": apart(4, 2 * D, dtype=torch.float32)}
    return {**rows, "cu_seqlens": wide(3), "cu_seqlens_comp": wide(3), **more}


POOLING = {"ratio": 4, "head_dim": D, "coff": 2}
CASES = {
    "decode": (cf.gqa_decode_wrapper, heads, {"return_lse": True}),
    "decode into out": (cf.gqa_decode_wrapper, lambda: {**heads(), "out": floats(2, 3, 8, D)}, {}),
    "prefill": (cf.gqa_prefill_wrapper, lambda: heads(40), {}),
    "packed prefill": (cf.gqa_prefill_wrapper, packed, {}),
    "paged decode": (cf.paged_gqa_decode_wrapper, lambda: pages(2), {}),
    "paged decode, appending": (cf.paged_gqa_decode_wrapper, appending, {}),
    "paged prefill": (cf.paged_gqa_prefill_wrapper, lambda: {**pages(5), "cu_seqlens_q": wide(3)}, {}),
    "merge": (cf.merge_state, parts, {}),
    "rotary": (cf.rotary_qk_wrapper, turned, {}),
    "rotary in place": (cf.rotary_qk_wrapper, lambda: turned(in_place=True), {}),
    "rotary of one": (cf.rotary_wrapper, lambda: {"x": apart(5, 4, D), "freqs_cis": torch.zeros(5, D // 2, 2)}, {}),
    "compressor": (cf.csa_compressor_forward_wrapper, pooled, {**POOLING, "total_comp": 5}),
    "compressor backward": (cf.csa_compressor_backward_wrapper, lambda: pooled(grad_out=apart(5, D)), POOLING),
}


@pytest.mark.parametrize("case", CASES)
def test_all_that_was_given_is_recorded_and_all_work_is_on_the_stream(
    case, launches, current_stream, recorded, monkeypatch
):
    wrapper, draw, options = CASES[case]
    copied_on = []

    def noting(method, x, *args, **kwargs):
        copied_on.append(current_stream())
        return method(x, *args, **kwargs)

    for name in ("clone", "to"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, method=method, **kwargs: noting(method, *args, **kwargs))
    # a call that is remembered changes nothing
    for _ in range(2):
        wrapper(**draw(), **options)
    assert not recorded and set(copied_on) == {STREAM}
    launches.clear(), copied_on.clear()
    tensors = draw()
    wrapper(**tensors, **options, stream=StubStream())
    assert [args[-1] for args in launches] == [StubStream.cuda_stream]
    assert copied_on and set(copied_on) == {StubStream.cuda_stream}
    missed = [name for name, x in tensors.items() if not any(x is y for y in recorded)]
    assert not missed, f"freed too early: {missed}"
    assert current_stream() == STREAM


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_stream_is_refused_before_anything(case, launches, current_stream, recorded):
    wrapper, draw, options = CASES[case]
    with pytest.raises(cf.ContractError, match="^stream: wanted"):
        wrapper(**draw(), **options, stream="side")
    assert not launches and not recorded
