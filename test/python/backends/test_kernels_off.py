"""CUTEFORGE_KERNELS=0: what means "run this kernel" refuses and names the variable, policy functions are served by
torch."""

from __future__ import annotations

import pytest
import torch

import cuteforge
from cuteforge import (
    KERNEL_NAMES,
    ContractError,
    RotaryEmbedding,
    TensorSpec,
    UnsupportedError,
    attention,
    explain,
    is_available,
)
from helpers.policy import check, draw

REFUSAL = "CUTEFORGE_KERNELS=0 switches the kernels off"
ROWS, OFFSETS = torch.zeros(8, 16), torch.tensor([0, 8], dtype=torch.int32)
APE, COMP = torch.zeros(4, 16), torch.tensor([0, 2], dtype=torch.int32)
TABLE, ONE = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
ANGLES = torch.zeros(2, 4, 2)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


DENSE = (half(1, 1, 2, 16), *[half(1, 4, 2, 16)] * 2)
PAGED = (*[half(1, 4, 2, 16)] * 2, TABLE)
STRICT = {
    "gqa_decode_wrapper": lambda f: f(*DENSE),
    "gqa_prefill_wrapper": lambda f: f(*DENSE),
    "attn_decode": lambda f: f(*DENSE),
    "attn_prefill": lambda f: f(*DENSE),
    "paged_gqa_decode_wrapper": lambda f: f(half(1, 2, 16), *PAGED, seqlens_k=ONE),
    "paged_gqa_prefill_wrapper": lambda f: f(
        half(1, 2, 16), *PAGED, torch.tensor([0, 1], dtype=torch.int32), seqlens_k=ONE
    ),
    "attn_paged_decode": lambda f: f(half(1, 2, 16), *PAGED, ONE),
    "attn_paged_prefill": lambda f: f(half(1, 2, 16), *PAGED, torch.tensor([0, 1], dtype=torch.int32), ONE),
    "merge_state": lambda f: f(*[half(1, 2, 16), torch.zeros(2, 1)] * 2),
    "rotary_wrapper": lambda f: f(half(2, 2, 8), ANGLES),
    "rotary_emb": lambda f: f(half(2, 2, 8), ANGLES),
    "rotary_qk_wrapper": lambda f: f(half(2, 2, 8), half(2, 1, 8), ANGLES),
    "csa_compressor_forward_wrapper": lambda f: f(ROWS, ROWS, APE, OFFSETS, COMP),
    "csa_compressor_backward_wrapper": lambda f: f(ROWS, ROWS, APE, OFFSETS, COMP, torch.zeros(2, 8)),
}


@pytest.fixture
def kernels_off(monkeypatch):
    monkeypatch.setenv("CUTEFORGE_KERNELS", "0")


def test_every_strict_entry_is_in_the_table():
    entries = {n for n in cuteforge.__all__ if n.endswith("_wrapper") or n.startswith("attn_")} - {"attn_backend"}
    assert entries | {"merge_state", "rotary_emb"} == set(STRICT)


@pytest.mark.parametrize("name", STRICT)
def test_strict_entries_refuse_naming_the_variable(kernels_off, name):
    with pytest.raises(UnsupportedError, match=REFUSAL) as caught:
        STRICT[name](getattr(cuteforge, name))
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("name", STRICT)
def test_set_to_one_it_changes_nothing(monkeypatch, name):
    monkeypatch.setenv("CUTEFORGE_KERNELS", "1")
    with pytest.raises((UnsupportedError, ContractError)) as caught:
        STRICT[name](getattr(cuteforge, name))
    assert "CUTEFORGE_KERNELS" not in str(caught.value)


def test_bound_launches_are_refused_too(kernels_off):
    x = half(2, 2, 8)
    op = RotaryEmbedding(*(TensorSpec(tuple(t.shape), t.dtype) for t in (x, ANGLES, x)))
    with pytest.raises(UnsupportedError, match=REFUSAL):
        op.bind(x, ANGLES, x)


def test_policy_is_served_by_torch_and_says_why(kernels_off):
    q, k, v = draw()
    check(attention(q, k, v), q, k, v)
    decision = explain(q, k, v)
    assert decision.chosen == "torch_native" and REFUSAL in decision.verdicts[0].refusal


def test_a_choice_follows_the_variable(monkeypatch):
    q, k, v = draw()
    with pytest.raises(UnsupportedError) as caught:
        attention(q, k, v, backend="cuda")
    assert REFUSAL not in str(caught.value)
    monkeypatch.setenv("CUTEFORGE_KERNELS", "0")
    with pytest.raises(UnsupportedError, match=REFUSAL):
        attention(q, k, v, backend="cuda")


def test_no_kernel_is_available_then(kernels_off):
    assert not any(map(is_available, KERNEL_NAMES))
    with pytest.raises(ContractError, match="name: wanted one of gqa_decode, .*got 'gqa'"):
        is_available("gqa")
