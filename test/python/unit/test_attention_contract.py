"""Every line of the attention ops' constructors and check_support, violated once. Metadata only: no GPU; compiled for
an architecture at most."""

import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch

from cuteforge import (
    ContractError,
    GQADecode,
    GQAPrefill,
    PagedGQADecode,
    PagedGQAPrefill,
    TensorSpec,
    UnsupportedError,
    gqa_decode_wrapper,
    gqa_prefill_wrapper,
    paged_gqa_decode_wrapper,
    paged_gqa_prefill_wrapper,
)
from cuteforge.families.attention import MergeState
from cuteforge.families.attention.api import MAX_DECODE_TOKENS
from cuteforge.families.attention.base import signature_of
from cuteforge.families.attention.merge.api import signature_of as merge_signature_of
from cuteforge.families.attention.work.limits import Limits
from cuteforge.runtime.arch import resolve_arch

B, L, S, HQ, HK, D, T, TK, P, PS, R, C = 3, 2, 100, 8, 4, 64, 45, 90, 11, 16, 5, 7
CLASSES = {
    "decode": GQADecode,
    "prefill": GQAPrefill,
    "packed": GQAPrefill,
    "paged": PagedGQADecode,
    "single": PagedGQADecode,
    "tokens": PagedGQADecode,
    "append": PagedGQADecode,
    "paged_prefill": PagedGQAPrefill,
    "merge": MergeState,
    "merge_packed": MergeState,
}
ATTENTION = [kind for kind in CLASSES if not kind.startswith("merge")]
DECODE = ("decode", "paged", "single", "tokens", "append")
INDEX = {"seqlens_k": (B,), "page_table": (R, C), "page_table_rows": (B,), "kv_indptr": (B + 1,)}


def bf16(*shape, dtype="bfloat16", stride=None, device="cuda"):
    return TensorSpec(shape, dtype, stride, device)


def fp32(*shape, stride=None):
    return TensorSpec(shape, "float32", stride)


def int32(*shape, dtype="int32", stride=None, device="cuda"):
    return TensorSpec(shape, dtype, stride, device)


def mask(*shape, dtype="bool", stride=None):
    return TensorSpec(shape, dtype, stride)


def samples(kind, d=D, dv=None, hq=HQ, hk=HK, dtype="bfloat16"):
    """Consistent samples of an op by name."""
    dv = d if dv is None else dv
    tokens = (T,) if kind in ("packed", "paged_prefill", "merge_packed") else (B,) if kind == "single" else (B, L)
    lse = fp32(hq, T) if tokens == (T,) else fp32(B, hq, *(tokens[1:] or (1,)))
    q, out = (bf16(*tokens, hq, width, dtype=dtype) for width in (d, dv))
    if kind.startswith("merge"):
        return {"o_a": out, "lse_a": lse, "o_b": out, "lse_b": lse, "out": out, "lse": lse}
    keys = {"packed": (TK,), "decode": (B, S), "prefill": (B, S), "tokens": (P,)}.get(kind, (P, PS))
    kv = [bf16(*keys, hk, width, dtype=dtype) for width in (d, dv)]
    given = {"q": q, "out": out, "lse": lse}
    if kind in ("packed", "paged_prefill"):
        given["cu_seqlens_q"] = int32(B + 1)
    if kind == "packed":
        return given | {"k": kv[0], "v": kv[1], "cu_seqlens_k": int32(B + 1)}
    given["seqlens_k"] = int32(B)
    if kind in ("decode", "prefill"):
        return given | {"k": kv[0], "v": kv[1]}
    given |= {"k_cache": kv[0], "v_cache": kv[1], "page_table": int32(R, C), "page_table_rows": int32(B)}
    new = {f"new_{name}": bf16(B, hk, width, dtype=dtype) for name, width in (("k", d), ("v", dv))}
    return given | (new if kind == "append" else {})


def make(kind, given=None, **config):
    return CLASSES[kind](**(samples(kind) if given is None else given), **config)


def refuses(kind, name, error=ContractError, base=None, **replaced):
    with pytest.raises(error, match=rf"^{name}\b.*wanted .*, got |^{name}\b.*serves .*, got "):
        make(kind, {**(base or samples(kind)), **replaced}).check_support()


each_kind = pytest.mark.parametrize("kind", CLASSES)
each_attention = pytest.mark.parametrize("kind", ATTENTION)
each_decode = pytest.mark.parametrize("kind", DECODE)

# (kind, case, argument named, its sample)
BAD_OPERANDS = (
    ("decode", "three dims", "q", bf16(B, HQ, D)),
    ("decode", "fp32", "q", bf16(B, L, HQ, D, dtype="float32")),
    ("decode", "fp8", "q", bf16(B, L, HQ, D, dtype="float8_e4m3fn")),
    ("decode", "columns strided", "q", bf16(B, L, HQ, D, stride=(L * HQ * D * 2, HQ * D * 2, D * 2, 2))),
    ("decode", "heads misaligned", "q", bf16(B, L, HQ, D, stride=(L * HQ * (D + 1), HQ * (D + 1), D + 1, 1))),
    ("decode", "tokens misaligned", "q", bf16(B, L, HQ, D, stride=(L * HQ * D, HQ * D + 4, D, 1))),
    ("decode", "negative stride", "q", bf16(B, L, HQ, D, stride=(-L * HQ * D, HQ * D, D, 1))),
    ("decode", "on the CPU", "q", bf16(B, L, HQ, D, device="cpu")),
    ("decode", "other dtype", "k", bf16(B, S, HK, D, dtype="float16")),
    ("decode", "other batch", "k", bf16(B + 1, S, HK, D)),
    ("decode", "narrower", "k", bf16(B, S, HK, D - 8)),
    ("decode", "packed", "k", bf16(TK, HK, D)),
    ("decode", "on the CPU", "k", bf16(B, S, HK, D, device="cpu")),
    ("decode", "other dtype", "v", bf16(B, S, HK, D, dtype="float16")),
    ("decode", "fewer tokens", "v", bf16(B, S - 1, HK, D)),
    ("decode", "other heads", "v", bf16(B, S, HQ, D)),
    ("decode", "heads misaligned", "v", bf16(B, S, HK, D, stride=(S * HK * (D + 4), HK * (D + 4), D + 4, 1))),
    ("decode", "other dtype", "out", bf16(B, L, HQ, D, dtype="float16")),
    ("decode", "other heads", "out", bf16(B, L, HK, D)),
    ("decode", "narrower", "out", bf16(B, L, HQ, D - 8)),
    ("decode", "one token repeated", "out", bf16(B, L, HQ, D, stride=(L * HQ * D, 0, D, 1))),
    ("decode", "heads overlap", "out", bf16(B, L, HQ, D, stride=(L * HQ * D, HQ * D, D // 2, 1))),
    ("decode", "rounded", "lse", bf16(B, HQ, L)),
    ("decode", "by token", "lse", fp32(B, L, HQ)),
    ("decode", "strided", "lse", fp32(B, HQ, L, stride=(HQ * L, 1, HQ))),
    ("decode", "int64", "seqlens_k", int32(B, dtype="int64")),
    ("decode", "fp32", "seqlens_k", fp32(B)),
    ("decode", "other batch", "seqlens_k", int32(B + 1)),
    ("decode", "strided", "seqlens_k", int32(B, stride=(2,))),
    ("decode", "on the CPU", "seqlens_k", int32(B, device="cpu")),
    ("decode", "one dim", "mask", mask(S)),
    ("decode", "five dims", "mask", mask(1, 1, 1, 1, S)),
    ("decode", "bytes", "mask", mask(B, S, dtype="uint8")),
    ("decode", "additive", "mask", fp32(B, S)),
    ("decode", "other batch", "mask", mask(B + 1, S)),
    ("decode", "fewer keys", "mask", mask(B, S - 1)),
    ("decode", "one key", "mask", mask(B, 1)),
    ("decode", "other tokens", "mask", mask(B, L + 1, S)),
    ("decode", "other heads", "mask", mask(B, HK, L, S)),
    ("decode", "columns strided", "mask", mask(B, S, stride=(2 * S, 2))),
    ("decode", "two dims", "bias", bf16(B, S)),
    ("decode", "fp64", "bias", bf16(B, HQ, L, S, dtype="float64")),
    ("decode", "bools", "bias", mask(B, HQ, L, S)),
    ("decode", "other batch", "bias", bf16(B + 1, 1, 1, S)),
    ("decode", "other heads", "bias", bf16(B, HK, L, S)),
    ("decode", "other tokens", "bias", bf16(B, 1, L + 1, S)),
    ("decode", "one key", "bias", bf16(B, 1, L, 1)),
    ("decode", "negative stride", "bias", bf16(1, 1, 1, S, stride=(S, S, S, -1))),
    ("decode", "on the CPU", "bias", bf16(1, 1, 1, S, device="cpu")),
    ("packed", "other batch", "bias", bf16(B + 1, 1, 9, S)),
    ("paged", "other tokens", "bias", bf16(B, 1, L + 1, S)),
    ("single", "more tokens", "bias", bf16(B, 1, 2, S)),
    ("prefill", "narrower", "k", bf16(B, S, HK, D - 8)),
    ("prefill", "other tokens", "mask", mask(B, L + 1, S)),
    ("packed", "dense", "q", bf16(B, L, HQ, D)),
    ("packed", "dense", "k", bf16(B, S, HK, D)),
    ("packed", "other tokens", "v", bf16(TK - 1, HK, D)),
    ("packed", "other tokens", "out", bf16(T - 1, HQ, D)),
    ("packed", "dense", "lse", fp32(B, HQ, T)),
    ("packed", "no offset", "cu_seqlens_q", int32(0)),
    ("packed", "two dims", "cu_seqlens_q", int32(1, B + 1)),
    ("packed", "int64", "cu_seqlens_q", int32(B + 1, dtype="int64")),
    ("packed", "other batch", "cu_seqlens_k", int32(B)),
    ("packed", "int64", "cu_seqlens_k", int32(B + 1, dtype="int64")),
    ("packed", "other batch", "mask", mask(B + 1, S)),
    ("paged", "two dims", "k_cache", bf16(P, D)),
    ("paged", "other dtype", "k_cache", bf16(P, PS, HK, D, dtype="float16")),
    ("paged", "narrower", "k_cache", bf16(P, PS, HK, D - 8)),
    ("paged", "pages misaligned", "k_cache", bf16(P, PS, HK, D, stride=(PS * HK * D + 4, HK * D, D, 1))),
    ("paged", "on the CPU", "k_cache", bf16(P, PS, HK, D, device="cpu")),
    ("paged", "fewer pages", "v_cache", bf16(P - 1, PS, HK, D)),
    ("paged", "other page size", "v_cache", bf16(P, PS + 1, HK, D)),
    ("paged", "tokens of a flat pool", "v_cache", bf16(P, HK, D)),
    ("paged", "one dim", "page_table", int32(C)),
    ("paged", "int64", "page_table", int32(R, C, dtype="int64")),
    ("paged", "columns strided", "page_table", int32(R, C, stride=(2 * C, 2))),
    ("paged", "int64", "page_table_rows", int32(B, dtype="int64")),
    ("paged", "other batch", "page_table_rows", int32(B + 1)),
    ("paged", "other batch", "seqlens_k", int32(B + 1)),
    ("paged", "other batch", "mask", mask(B + 1, S)),
    ("paged", "other tokens", "mask", mask(B, L + 1, S)),
    ("single", "more tokens", "mask", mask(B, 2, S)),
    ("single", "of several tokens", "lse", fp32(B, HQ, 2)),
    ("tokens", "pages", "v_cache", bf16(P, PS, HK, D)),
    ("append", "other batch", "new_k", bf16(B + 1, HK, D)),
    ("append", "other heads", "new_k", bf16(B, HQ, D)),
    ("append", "other dtype", "new_k", bf16(B, HK, D, dtype="float16")),
    ("append", "with a token dim", "new_v", bf16(B, 1, HK, D)),
    ("append", "narrower", "new_v", bf16(B, HK, D - 8)),
    ("append", "pages overlap, and are written", "k_cache", bf16(P, PS, HK, D, stride=(0, HK * D, D, 1))),
    ("paged_prefill", "dense", "q", bf16(B, L, HQ, D)),
    ("paged_prefill", "no offset", "cu_seqlens_q", int32(0)),
    ("paged_prefill", "int64", "cu_seqlens_q", int32(B + 1, dtype="int64")),
    ("paged_prefill", "by batch", "lse", fp32(B, HQ, L)),
    ("merge", "five dims", "o_a", bf16(1, B, L, HQ, D)),
    ("merge", "fp64", "o_a", bf16(B, L, HQ, D, dtype="float64")),
    ("merge", "rows misaligned", "o_a", bf16(B, L, HQ, D, stride=(L * HQ * (D + 1), HQ * (D + 1), D + 1, 1))),
    ("merge", "by token", "lse_a", fp32(B, L, HQ)),
    ("merge", "rounded", "lse_a", bf16(B, HQ, L)),
    ("merge", "other dtype", "o_b", fp32(B, L, HQ, D)),
    ("merge", "other tokens", "o_b", bf16(B, L + 1, HQ, D)),
    ("merge", "strided", "lse_b", fp32(B, HQ, L, stride=(HQ * L, 1, HQ))),
    ("merge", "one token repeated", "out", bf16(B, L, HQ, D, stride=(L * HQ * D, 0, D, 1))),
    ("merge", "other heads", "lse", fp32(B, HK, L)),
    ("merge_packed", "by token", "lse_a", fp32(T, HQ)),
    ("merge_packed", "other tokens", "o_b", bf16(T + 1, HQ, D)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "case", "name", "sample"),
    BAD_OPERANDS,
    ids=[f"{k}-{n}-{c.replace(' ', '_')}" for k, c, n, _ in BAD_OPERANDS],
)
def test_bad_operand_is_refused_by_name(kind, case, name, sample):
    refuses(kind, name, **{name: sample})


@pytest.mark.parametrize("rank", [0, 1, 5])
@each_attention
def test_a_mask_of_another_rank_is_told_the_right_ones(rank, kind):
    with pytest.raises(ContractError, match=rf"^mask: wanted 2, 3 or 4 dims, \(B, S\), .*, got {rank} dims"):
        make(kind, {**samples(kind), "mask": mask(*(1,) * rank)})


@pytest.mark.parametrize("junk", [None, [1, 2, 3], "x"], ids=["none", "list", "text"])
@each_kind
def test_missing_or_foreign_sample_is_refused_by_name(kind, junk):
    """A required one may not be missing; an optional one may, but not be anything else."""
    for name in samples(kind):
        if junk is None and name not in getattr(CLASSES[kind], "_REQUIRED", samples(kind)):
            continue
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            make(kind, {**samples(kind), name: junk}).check_support()


# (kind, argument named, what it is replaced with)
PRESENCE = (
    ("packed", "cu_seqlens_q", {"cu_seqlens_q": None}),
    ("packed", "cu_seqlens_k", {"cu_seqlens_k": None}),
    ("packed", "seqlens_k", {"seqlens_k": int32(B)}),
    ("paged", "seqlens_k", {"seqlens_k": None}),
    ("paged", "seqlens_k", {"kv_indptr": int32(B + 1)}),
    ("paged_prefill", "seqlens_k", {"seqlens_k": None}),
    ("paged_prefill", "seqlens_k", {"kv_indptr": int32(B + 1)}),
    ("append", "new_k", {"new_k": None}),
    ("append", "new_v", {"new_v": None}),
)


@pytest.mark.parametrize(("kind", "name", "replaced"), PRESENCE, ids=[f"{k}-{n}" for k, n, _ in PRESENCE])
def test_operands_that_need_or_exclude_one_another(kind, name, replaced):
    with pytest.raises(ContractError, match=rf"^{name}\b.*wanted .*, got "):
        make(kind, {**samples(kind), **replaced})


@pytest.mark.parametrize("kind", ["paged", "single", "tokens", "append", "paged_prefill"])
def test_lengths_come_as_offsets_too(kind):
    given = {name: x for name, x in samples(kind).items() if name != "seqlens_k"}
    assert make(kind, {**given, "kv_indptr": int32(B + 1)}).check_support() is True
    refuses(kind, "kv_indptr", base=given, kv_indptr=int32(B))
    refuses(kind, "kv_indptr", base=given, kv_indptr=int32(B + 1, dtype="int64"))


@pytest.mark.parametrize("kind", ["paged", "single", "tokens", "append", "paged_prefill"])
def test_without_rows_every_request_has_its_own(kind):
    given = {name: x for name, x in samples(kind).items() if name != "page_table_rows"}
    refuses(kind, "page_table", base=given)
    assert make(kind, {**given, "page_table": int32(B, C)}).check_support() is True


@pytest.mark.parametrize("kind", ["paged", "append", "paged_prefill"])
def test_pages_have_tokens(kind):
    pools = {name: bf16(P, 0, HK, D) for name in ("k_cache", "v_cache")}
    with pytest.raises(ContractError, match=r"^k_cache\b.*at least one token"):
        make(kind, {**samples(kind), **pools}).check_support()


def test_tokens_have_heads():
    for hq, hk in ((0, HK), (HQ, 0), (0, 0), (HK, HQ), (HQ, 3)):
        with pytest.raises(ContractError, match=r"^q: wanted a multiple of Hkv"):
            make("decode", samples("decode", hq=hq, hk=hk)).check_support()


@each_attention
def test_every_head_dim_is_supported(kind):
    for d in range(8, 257, 8):
        assert make(kind, samples(kind, d)).check_support() is True
    assert make(kind, samples(kind, 192, 128, dtype="float16")).check_support() is True


@each_attention
@pytest.mark.parametrize(
    ("d", "dv", "name"), [(264, 264, "q"), (60, 60, "q"), (0, 0, "q"), (128, 64, "v"), (128, 192, "v"), (256, 128, "v")]
)
def test_other_head_dims_are_unsupported(kind, d, dv, name):
    if name == "v" and "k_cache" in samples(kind):
        name = "v_cache"
    with pytest.raises((ContractError, UnsupportedError), match=rf"^{name}\b"):
        make(kind, samples(kind, d, dv)).check_support()
    assert issubclass(UnsupportedError, RuntimeError), "callers guard kernel calls with `except RuntimeError`"


@each_attention
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 11, 16, 33, 64, 128])
def test_every_group_is_supported(kind, group):
    assert make(kind, samples(kind, hq=2 * group, hk=2)).check_support() is True


@pytest.mark.parametrize("kind", ["decode", "paged", "append"])
def test_decode_serves_a_few_tokens(kind):
    def with_tokens(length):
        given = samples(kind)
        return given | {"q": bf16(B, length, HQ, D), "out": bf16(B, length, HQ, D), "lse": fp32(B, HQ, length)}

    assert make(kind, with_tokens(MAX_DECODE_TOKENS)).check_support() is True
    with pytest.raises(UnsupportedError, match=r"^q: decode serves L = 1 to 16, got L = 17; prefill"):
        make(kind, with_tokens(MAX_DECODE_TOKENS + 1)).check_support()


@pytest.mark.parametrize("shape", [(B, S), (1, S), (B, L, S), (1, 1, S), (B, HQ, L, S), (1, 1, 1, S), (B, 1, L, S)])
@pytest.mark.parametrize("kind", ["decode", "prefill", "paged", "append"])
def test_masks_broadcast_over_batch_heads_and_tokens(kind, shape):
    assert make(kind, {**samples(kind), "mask": mask(*shape)}).check_support() is True


@pytest.mark.parametrize("shape", [(B, 9), (1, 9), (B, 7, 9), (B, HQ, 99, 1), (1, 1, 1, 0)])
@pytest.mark.parametrize("kind", ["packed", "paged_prefill"])
def test_masks_of_ragged_calls_have_any_number_of_rows_and_columns(kind, shape):
    assert make(kind, {**samples(kind), "mask": mask(*shape)}).check_support() is True


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stride", [None, (0, 0, 0, 1), (0, 0, 0, 0), (1, B, 0, 3 * B), (7, 5, 3, 1)])
@each_attention
def test_a_bias_has_any_strides_and_no_dtype_of_the_queries(kind, stride, dtype):
    tokens = {"decode": L, "prefill": L, "paged": L, "append": L}.get(kind, 1)
    bias = bf16(B, HQ, tokens, S, stride=stride, dtype=dtype)
    assert make(kind, {**samples(kind), "bias": bias}).check_support() is True


@pytest.mark.parametrize("shape", [(1, 1, 1, S), (B, 1, 1, S), (1, HQ, L, S), (B, HQ, 1, S)])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_biases_broadcast_over_batch_heads_and_tokens(kind, shape):
    assert make(kind, {**samples(kind), "bias": bf16(*shape)}).check_support() is True


@pytest.mark.parametrize("shape", [(B, HQ, 99, 1), (1, 1, 1, 0), (1, 1, 0, 5)])
@pytest.mark.parametrize("kind", ["packed", "paged_prefill"])
def test_biases_of_ragged_calls_have_any_number_of_rows_and_columns(kind, shape):
    assert make(kind, {**samples(kind), "bias": bf16(*shape)}).check_support() is True


@pytest.mark.parametrize("rank", [0, 3, 5])
@each_attention
def test_a_bias_of_another_rank_is_told_the_right_one(rank, kind):
    with pytest.raises(ContractError, match=rf"^bias: wanted 4 dims, \(B\|1, .*, got {rank}$"):
        make(kind, {**samples(kind), "bias": bf16(*(1,) * rank)})


@each_attention
def test_results_without_lse_and_optional_operands(kind):
    optional = ("lse",) if "k_cache" in samples(kind) or kind == "packed" else ("lse", "seqlens_k")
    given = {name: x for name, x in samples(kind).items() if name not in optional}
    assert make(kind, given, causal=True).check_support() is True


STRIDED = {
    "head-major": ("decode", {n: bf16(B, S, HK, D, stride=(S * HK * D, D, S * D, 1)) for n in ("k", "v")}),
    "one head for all": ("decode", {n: bf16(B, S, HK, D, stride=(S * D, D, 0, 1)) for n in ("k", "v")}),
    "a size-1 dim with any stride": ("decode", {"k": bf16(B, S, HK, D, stride=(S * HK * D, HK * D, D, 1))}),
    "slices of a fused buffer": ("packed", {"q": bf16(T, HQ, D, stride=(999 * 8, D, 1))}),
    "interleaved pools": (
        "paged",
        {n: bf16(P, PS, HK, D, stride=(2 * PS * HK * D, HK * D, D, 1)) for n in ("k_cache", "v_cache")},
    ),
    "pages far apart": ("paged", {"k_cache": bf16(P, PS, HK, D, stride=(2**33, HK * D, D, 1))}),
    "rows of the table apart": ("paged", {"page_table": int32(R, C, stride=(1000, 1))}),
    "out head-major": ("prefill", {"out": bf16(B, L, HQ, D, stride=(L * HQ * D, D, L * D, 1))}),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_are_accepted(layout):
    kind, replaced = STRIDED[layout]
    assert make(kind, {**samples(kind), **replaced}).check_support() is True


@each_kind
def test_empty_calls_are_supported(kind):
    def empty(x):
        return TensorSpec((0, *x.shape[1:]), x.dtype, device=x.device)

    given = samples(kind)
    if kind in ("packed", "paged_prefill", "merge_packed"):
        by_token = ("q", "out", "o_a", "o_b")
        given = {n: empty(x) if n in by_token else fp32(HQ, 0) if n.startswith("lse") else x for n, x in given.items()}
    else:
        given = {n: x if n in ("k_cache", "v_cache", "page_table") else empty(x) for n, x in given.items()}
    assert make(kind, given).check_support() is True


@each_kind
def test_samples_on_two_gpus_are_refused_by_name(kind):
    given = samples(kind)
    first = next(iter(getattr(CLASSES[kind], "_REQUIRED", given)))
    for name in given:
        if name != first:
            x, other = given[first], given[name]
            placed = {first: TensorSpec(x.shape, x.dtype, x.stride, "cuda:0")}
            placed[name] = TensorSpec(other.shape, other.dtype, other.stride, "cuda:1")
            refuses(kind, name, base=given, **placed)


@each_kind
def test_meta_tensors_are_samples(kind):
    was_initialized = torch.cuda.is_initialized()  # by a test before, where there is a GPU
    given = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in samples(kind).items()
    }
    assert make(kind, given).check_support() is True
    assert torch.cuda.is_initialized() == was_initialized


# Configuration.


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), "1", [1.0], torch.ones(1)])
@each_attention
def test_scale_is_a_finite_number(kind, scale):
    with pytest.raises(ContractError, match=r"^softmax_scale: wanted a finite number, got"):
        make(kind, softmax_scale=scale)


@pytest.mark.parametrize("scale", [None, 0, -1.5, 1e30, True])
@each_attention
def test_any_finite_scale_is_taken(kind, scale):
    assert make(kind, softmax_scale=scale).check_support() is True


BAD_WINDOWS = [
    0,
    5,
    -1,
    (1,),
    (1, 2, 3),
    (-1, 0),
    (0, -1),
    (1.0, None),
    (True, None),
    ("1", None),
    "12",
    torch.ones(2),
    (torch.ones(()), 1),
]


@pytest.mark.parametrize("window", BAD_WINDOWS, ids=str)
@each_attention
def test_window_is_a_pair_of_limits(kind, window):
    """-1, which means no limit elsewhere, too."""
    with pytest.raises(
        ContractError, match=r"^window: wanted None or \(left, right\), each None or an int of 0 or more, got "
    ):
        make(kind, window=window)


@pytest.mark.parametrize("window", [None, (None, None), (0, 0), [5, None], (None, 2**40), (np.int64(3), 1)], ids=str)
@each_attention
def test_any_window_is_taken(kind, window):
    assert make(kind, window=window).check_support() is True
    assert make(kind, window=window, causal=True).check_support() is True


@pytest.mark.parametrize("softcap", [float("nan"), float("inf"), -1.0, "1", [1.0], torch.ones(1)], ids=str)
@each_attention
def test_softcap_is_a_positive_number_or_none(kind, softcap):
    with pytest.raises(ContractError, match=r"^softcap: wanted None, 0 or a number from 1e-06 to 10000, got "):
        make(kind, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 0, 0.0, 30, 0.5])
@each_attention
def test_any_softcap_is_taken(kind, softcap):
    assert make(kind, softcap=softcap).check_support() is True


BAD_SINKS = {
    "rounded": bf16(HQ),
    "of KV heads": fp32(HK),
    "two dims": fp32(1, HQ),
    "by request": fp32(B, HQ),
    "strided": fp32(HQ, stride=(2,)),
    "on the CPU": TensorSpec((HQ,), "float32", device="cpu"),
}


@pytest.mark.parametrize("case", BAD_SINKS)
@each_attention
def test_sinks_are_one_fp32_for_each_query_head(kind, case):
    assert make(kind, {**samples(kind), "sinks": fp32(HQ)}).check_support() is True
    refuses(kind, "sinks", sinks=BAD_SINKS[case])


def keys_of(kind, **config):
    arch = resolve_arch("sm_90a", None)
    op = make(kind, **config)
    return op._kernel_key(op.dims, arch)


@each_attention
def test_numbers_of_options_share_a_binary(kind):
    """And without any of them the binary is the one it is without this choice."""
    plain = keys_of(kind)
    assert keys_of(kind, window=(None, None), softcap=0) == keys_of(kind, window=None, softcap=None) == plain
    assert keys_of(kind, window=(5, 7), softcap=3) == keys_of(kind, window=(0, 100), softcap=0.5) != plain
    assert keys_of(kind, window=(None, 0)) == keys_of(kind, causal=True) == keys_of(kind, causal=True, window=(None, 9))


def test_one_query_token_has_no_key_after_it():
    """Causality and a right side change nothing, a left side does."""
    assert keys_of("single", window=(None, 3)) == keys_of("single", causal=True) == keys_of("single")
    assert keys_of("single", window=(3, 3)) == keys_of("single", window=(3, 0)) != keys_of("single")


LIMITS = len(Limits._fields)  # come first


@pytest.mark.parametrize(
    ("config", "scalars"),
    [
        ({}, (None, None, None)),
        ({"window": (5, 7)}, (5, 7, None)),
        ({"window": (5, 7), "causal": True, "softcap": 30}, (5, None, 30.0)),
        ({"window": (0, 0)}, (0, None, None)),
    ],
)
def test_numbers_of_options_are_scalars_of_the_launch(config, scalars):
    """None where nothing was compiled in that would read them."""
    for kind in ("prefill", "decode"):
        assert make(kind, **config)._scalars(resolve_arch("sm_90a", None))[LIMITS:] == scalars
    assert make("single", window=(5, 7))._scalars(resolve_arch("sm_90a", None))[LIMITS:] == (5, None, None)


@pytest.mark.parametrize("num_splits", [0, -1, 1.5, "2", True, torch.ones(1)])
@each_decode
def test_num_splits_is_a_positive_integer(kind, num_splits):
    with pytest.raises(ContractError, match=r"^num_splits\b.*wanted None or an int of 1 or more, got"):
        make(kind, num_splits=num_splits)


@each_attention
def test_only_shared_keys_need_a_workspace(kind, monkeypatch):
    """It does not depend on the sizes of the call."""
    monkeypatch.setenv("CUTEFORGE_ARCH", "sm_90a")
    config = {"num_splits": 1} if kind in DECODE else {}
    assert make(kind, **config).workspace_bytes() == 0
    if kind in DECODE:
        needed = make(kind).workspace_bytes()
        assert 0 < needed <= 64 * 2**20
        assert make(kind, num_splits=5).workspace_bytes() == needed


# Life cycle, without a GPU.

COMPILED = [("decode", {"num_splits": 1}), ("append", {}), ("packed", {"causal": True}), ("merge", {})]


@pytest.mark.parametrize(("kind", "config"), COMPILED, ids=[kind for kind, _ in COMPILED])
def test_compiles_for_an_arch_without_a_gpu(kind, config, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path))
    op = make(kind, **config)
    with pytest.raises(RuntimeError, match=r"compile\(\)"):
        run(op, kind)
    assert op.compile(arch="sm_90a") is op and op.compile(arch="sm_90a") is op
    if not torch.cuda.is_available():
        with pytest.raises(ContractError, match=r"^(q|o_a): wanted a CUDA device, got cpu"):
            run(op, kind)
    for copy in (deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert copy.samples == op.samples and copy.check_support() is True


def run(op, kind):
    """Execute on tensors of the CPU, which no op takes."""
    tensors = {name: torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for name, x in samples(kind).items()}
    if kind == "append":
        tensors["workspace"] = torch.zeros(16, dtype=torch.uint8)
    op.execute(**tensors)


@each_attention
def test_execute_takes_what_the_samples_had(kind):
    """Operands by the same names; one more or one less is refused by name, before anything is compiled."""
    given = samples(kind)
    op = make(kind)
    tensors = {name: torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for name, x in given.items()}
    for attempt in (op.execute, op.bind):
        with pytest.raises(ContractError, match=r"^lse: wanted a tensor, as in the samples, got None"):
            attempt(**{name: tensor for name, tensor in tensors.items() if name != "lse"})
        with pytest.raises(ContractError, match=r"^mask: wanted None, as in the samples, got Tensor"):
            attempt(**tensors, mask=torch.ones(B, S, dtype=torch.bool))
        with pytest.raises(TypeError, match="out"):
            attempt(**{name: tensor for name, tensor in tensors.items() if name != "out"})


@pytest.mark.parametrize("names", [("out", "lse"), ("k_cache", "v_cache", "out", "lse", "workspace")])
def test_what_is_written_is_told_from_what_is_read(names):
    """Outputs are checked for memory of their own; the pools are outputs where they are appended to."""
    given = samples("append") if "k_cache" in names else samples("prefill")
    signature = make("append" if "k_cache" in names else "prefill", given).signature
    assert {operand.name for operand in signature.operands if operand.is_written} == set(names)


def test_a_merge_may_write_over_its_first_part():
    """And over nothing else."""
    o = torch.zeros(T, HQ, D, dtype=torch.bfloat16)
    lse = torch.zeros(HQ, T)
    signature = merge_signature_of(3)
    names = ("o_a", "lse_a", "o_b", "lse_b", "out", "lse")
    signature.bind_pointers(dict(zip(names, (o, lse, o.clone(), lse.clone(), o, lse))))
    for replaced in ({"out": 2}, {"lse": 3}):
        tensors = [o, lse, o.clone(), lse.clone(), o.clone(), lse.clone()]
        for name, source in replaced.items():
            tensors[names.index(name)] = tensors[source]
            with pytest.raises(ContractError, match=rf"^{name}: wanted memory of its own"):
                signature.bind_pointers(dict(zip(names, tensors)))


def test_signatures_are_shared():
    assert make("decode").signature is make("decode").signature
    assert signature_of.cache_info().hits > 0


# Wrappers.


def cpu(kind):
    return {
        name: torch.zeros(x.shape, dtype=getattr(torch, x.dtype))
        for name, x in samples(kind).items()
        if name not in ("out", "lse")
    }


WRAPPERS = {
    "decode": gqa_decode_wrapper,
    "prefill": gqa_prefill_wrapper,
    "packed": gqa_prefill_wrapper,
    "paged": paged_gqa_decode_wrapper,
    "single": paged_gqa_decode_wrapper,
    "append": paged_gqa_decode_wrapper,
    "paged_prefill": paged_gqa_prefill_wrapper,
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize(
    "junk", [None, [1.0], torch.zeros(3), torch.zeros(2, 2, 2, 2, 2)], ids=["none", "list", "1d", "5d"]
)
def test_wrappers_refuse_what_is_no_tensor_of_heads_by_name(kind, junk):
    for name in list(cpu(kind)):
        if name in ("q", "k", "v", "k_cache", "v_cache"):
            with pytest.raises(ContractError, match=rf"^{name}\b"):
                WRAPPERS[kind](**{**cpu(kind), name: junk})


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize(
    ("name", "value"), [("window", 5), ("window", (-1, 0)), ("softcap", -1.0), ("softcap", [1])], ids=str
)
def test_wrappers_refuse_options_by_name(kind, name, value):
    with pytest.raises(ContractError, match=rf"^{name}: wanted None"):
        WRAPPERS[kind](**cpu(kind), **{name: value})


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_refuse_the_cpu_by_name(kind):
    with pytest.raises(ContractError, match=r"(?i)^q\b.*cuda.*cpu"):
        WRAPPERS[kind](**cpu(kind))
