"""Nonsense given to the policy functions: a refusal that names the argument, or the right answer; never an error of
something inside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cuteforge import (
    ATTN_BACKEND,
    AttentionBackend,
    ContractError,
    CudaBackend,
    KVCache,
    UnsupportedError,
    apply_rotary_emb,
    attention,
    attn_backend,
    compress,
    explain,
    is_available,
    register_backend,
    rotary_table,
)
from helpers.policy import draw, restored_registry
from helpers.torch_ops import OpLog


class Abstract(AttentionBackend):
    name = "abstract"


class Nameless(AttentionBackend):
    def refuse(self, request):
        return None

    def fwd_decode(self, q, *operands, **options):
        return q

    fwd_prefill = fwd_decode


class Demanding(Nameless):
    name = "demanding"

    def __init__(self, wanted):
        self.wanted = wanted


# fmt: off
NONSENSE = [
    None, 3, -1, 2**70, 0, True, 1.5, float("nan"), float("inf"), "x", "", b"x", [], [1], {}, set(), object(), int, len,
    1j, (1, 2), ("a", None), (None, None), slice(1), range(3), np.zeros(3), np.float32(1.5), np.int64(3),
    np.bool_(True), np.array(True), np.zeros((2, 3, 6, 16), np.float32), torch.tensor(1), torch.tensor(True),
    torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 3, 6, 16), torch.zeros(2, 3, 6, 16, dtype=torch.int32),
    torch.zeros(2, 7, dtype=torch.bool), torch.zeros(2, 7, 2, 16, device="meta"),
    torch.zeros(2, 7, 2, 16, dtype=torch.complex64), torch.zeros(2, 7, 2, 16).to(torch.float8_e4m3fn),
    torch.zeros(2, 7, 2, 16).to_sparse(), torch.nested.nested_tensor([torch.zeros(3, 6, 16)]),
    torch.nn.Parameter(torch.zeros(2, 3, 6, 16)), torch.zeros(2, 3, 6, 16, dtype=torch.float64), torch.float32,
    torch.device("cpu"), Abstract, Nameless, Nameless(), Demanding, ATTN_BACKEND, ATTN_BACKEND.CUDA, KVCache,
]
# fmt: on

COS, SIN = rotary_table(32, 16)
X, TOKENS, APE = torch.randn(5, 2, 16), torch.randn(20, 16), torch.zeros(4, 16)
OFFSETS, ROWS = torch.tensor([0, 20]), torch.tensor([0, 5])
ATTENTION = (
    "q",
    "k",
    "v",
    "kv_cache",
    "layer_id",
    "attn_mask",
    "is_causal",
    "fwd",
    "backend",
    "scale",
    "window",
    "softcap",
    "sinks",
)
ROTARY = ("x", "freqs_cis", "cos", "sin", "positions", "interleaved", "inverse", "backend")
COMPRESS = ("kv", "score", "ape", "cu_seqlens", "ratio", "coff", "cu_seqlens_comp", "total_comp", "backend")
# A call that is right, and the arguments to spoil.
CALLS = {
    "attention": (attention, dict(zip("qkv", draw())), ATTENTION),
    "apply_rotary_emb": (apply_rotary_emb, {"x": X, "cos": COS, "sin": SIN, "positions": torch.arange(5)}, ROTARY),
    "apply_rotary_emb, freqs_cis": (
        apply_rotary_emb,
        {"x": X, "freqs_cis": torch.stack((COS[:5], SIN[:5]), -1)},
        ROTARY,
    ),
    "compress": (compress, {"kv": TOKENS, "score": TOKENS, "ape": APE, "cu_seqlens": OFFSETS}, COMPRESS),
    "compress, rows": (
        compress,
        {"kv": TOKENS, "score": TOKENS, "ape": APE, "cu_seqlens": OFFSETS, "cu_seqlens_comp": ROWS, "total_comp": 5},
        COMPRESS,
    ),
}
# Another argument may be named where what was given is right in itself: heads that a table has no rows for.
BESIDE = {"q": "k", "x": "positions|freqs_cis", "freqs_cis": "cos", "kv_cache": "q"}


def refuses_by_name(call, argument: str, value: object) -> None:
    """Either the call works, or its refusal names the argument, and more or less first."""
    try:
        call(value)
    except (ContractError, UnsupportedError) as error:
        names = {argument, *BESIDE.get(argument, argument).split("|")}
        assert any(name in str(error) for name in names), (argument, value, str(error))


@pytest.mark.parametrize(
    ("name", "argument"), [(name, a) for name, (_, _, arguments) in CALLS.items() for a in arguments]
)
def test_each_argument_takes_any_nonsense(name, argument):
    function, right, _ = CALLS[name]
    for value in NONSENSE:
        refuses_by_name(lambda value: function(**{**right, argument: value}), argument, value)
        refuses_by_name(lambda value: explain(function, **{**right, argument: value}), argument, value)


@pytest.mark.parametrize("argument", ATTENTION)
def test_each_argument_takes_any_nonsense_over_a_cache(argument):
    cache = KVCache(1, 2, 16, num_pages=64, max_requests=2, max_seqlen=256, dtype=torch.float32, device="cpu")
    cache.bind_decode([cache.add(), cache.add()])
    right = {**dict(zip("qkv", draw(length=1, num_keys=1))), "kv_cache": cache}
    for value in NONSENSE:
        refuses_by_name(lambda value: attention(**{**right, argument: value}), argument, value)


def test_names_and_backends_take_any_nonsense():
    for value in [*NONSENSE, ["rotary"]]:
        refuses_by_name(is_available, "name", value)
        with restored_registry():
            refuses_by_name(register_backend, "backend", value)
        refuses_by_name(lambda value: attn_backend(value).__enter__().name, "backend", value)
        if not isinstance(value, torch.Tensor):
            refuses_by_name(explain, "function", value)


@pytest.fixture(autouse=True)
def no_context():
    """Contexts that were entered and not left count in no other test."""
    from cuteforge.backends import registry

    token = registry._context.set(None)
    yield
    registry._context.reset(token)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"is_causal": None}, "^is_causal: wanted True or False, got None"),
        ({"is_causal": torch.tensor(True)}, "^is_causal: wanted True or False, got Tensor"),
        ({"attn_mask": 3}, "^attn_mask: wanted a bool tensor, True keeps a score, or .*, got int"),
        (
            {"attn_mask": torch.zeros(2, 7, dtype=torch.int32)},
            r"^attn_mask: wanted .*, got torch\.int32",
        ),
        ({"attn_mask": torch.zeros(2, 7).to(torch.float8_e5m2)}, r"^attn_mask: wanted .*, got torch\.float8_e5m2"),
        ({"kv_cache": torch.ones(2, 7, dtype=torch.bool)}, "^kv_cache: wanted .*; a mask is the argument attn_mask"),
        ({"q": np.zeros((2, 3, 6, 16), np.float32)}, r"^q: wanted a torch\.Tensor, got ndarray"),
        ({"fwd": ["decode"]}, "^fwd: wanted None, 'decode' or 'prefill', got list"),
        ({"backend": Abstract}, "^backend: wanted an AttentionBackend, .*got Abstract"),
        ({"backend": Nameless}, "^backend: wanted a name of type str, got None"),
        ({"scale": torch.tensor(1.0)}, "^scale: wanted a finite number, got Tensor"),
    ],
)
def test_what_attention_says(changed, match):
    with pytest.raises(ContractError, match=match):
        attention(**{**dict(zip("qkv", draw())), **changed})


@pytest.mark.parametrize(("layer", "got"), [(None, "None"), (1, "1"), (-1, "-1"), ("0", "'0'"), (True, "True")])
def test_the_layer_of_a_cache_is_named(layer, got):
    cache = KVCache(1, 2, 16, num_pages=8, max_requests=2, max_seqlen=32, dtype=torch.float32, device="cpu")
    cache.bind_decode([cache.add(), cache.add()])
    with pytest.raises(ContractError, match=rf"^layer_id: wanted .*, got {got}"):
        attention(*draw(length=1, num_keys=1), cache, layer)


def test_8_bit_queries_are_a_call_that_nothing_serves():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw())
    with pytest.raises(
        UnsupportedError, match=r"attention: .*torch_native: torch does not multiply torch\.float8_e4m3fn"
    ):
        attention(q, k, v)


def test_numbers_of_numpy_count_as_numbers():
    q, k, v = draw()
    want = attention(q, k, v, is_causal=True, scale=0.5, window=(2, None), softcap=2.0)
    numbers = {"scale": np.float32(0.5), "window": (np.int64(2), None), "softcap": np.float32(2.0)}
    assert torch.equal(attention(q, k, v, is_causal=np.bool_(True), **numbers), want)
    assert torch.equal(attention(q, k, v, scale=np.int64(1)), attention(q, k, v, scale=1.0))
    tensors = TOKENS, TOKENS, APE, OFFSETS
    want = compress(*tensors, ratio=4, coff=2, total_comp=5)
    assert torch.equal(compress(*tensors, ratio=np.int64(4), coff=np.int32(2), total_comp=np.int64(5)), want)
    table = {"cos": COS, "sin": SIN, "positions": torch.arange(5)}
    assert torch.equal(
        apply_rotary_emb(X, **table, interleaved=np.bool_(False)), apply_rotary_emb(X, **table, interleaved=False)
    )
    cache = KVCache(1, 2, 16, num_pages=8, max_requests=2, max_seqlen=32, dtype=torch.float32, device="cpu")
    cache.bind_decode([cache.add(), cache.add()])
    assert attention(*draw(length=1, num_keys=1), cache, np.int64(0)).shape == (2, 1, 6, 16)


@pytest.mark.parametrize("length", [2, 20])
def test_the_kernels_name_the_mask_as_the_function_does(length, cpu_as_gpu, monkeypatch):
    monkeypatch.setattr(CudaBackend, "refuse", lambda self, request: None)
    q, k, v = draw(length=length, num_keys=20, dtype=torch.bfloat16)
    with OpLog(), pytest.raises(ContractError, match="^attn_mask: wanted"):
        attention(q, k, v, attn_mask=torch.ones(3, 20, dtype=torch.bool), backend="cuda")
