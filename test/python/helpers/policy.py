"""Backends that only exist in tests, and calls of `attention` small enough for a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cuteforge import AttentionBackend
from cuteforge.backends import registry
from cuteforge.families.attention import reference
from helpers import budget
from helpers.packs import offsets


class StubBackend(AttentionBackend):
    """Says what it was called for: its result is its `mark` everywhere."""

    name = "stub"
    mark = 7.0

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.calls = []

    def refuse(self, request):
        return self.refusal

    def fwd_decode(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale):
        self.calls.append("decode")
        return torch.full((*q.shape[:-1], v.shape[-1]), self.mark, dtype=q.dtype, device=q.device)

    def fwd_prefill(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale):
        self.calls.append("prefill")
        return torch.full((*q.shape[:-1], v.shape[-1]), self.mark, dtype=q.dtype, device=q.device)


@contextmanager
def restored_registry() -> Iterator[None]:
    """What is registered within is forgotten, and so is what was chosen."""
    before = registry._backends
    try:
        yield
    finally:
        registry._backends = before
        for listener in registry._listeners:
            listener()


def draw(batch=2, length=3, num_keys=7, heads=6, kv_heads=2, d=16, dv=None, dtype=torch.float32, device="cpu", seed=0):
    """(q, k, v)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((length, heads, d), (num_keys, kv_heads, d), (num_keys, kv_heads, dv or d))
    return tuple(torch.randn(batch, *shape, generator=generator).to(device, dtype) for shape in shapes)


def check(got: torch.Tensor, q, k, v, **options) -> None:
    """Against the oracle, within the budget of eager code of that dtype."""
    oracle, _ = reference.attend(q, k, v, **options, out_dtype=torch.float64)
    eager, _ = reference.attend(q, k, v, **options, compute_dtype=q.dtype)
    assert got.dtype == q.dtype
    budget.assert_within_budget(got, oracle, eager, "out")


def check_packed(got: torch.Tensor, q: torch.Tensor, lens_q: Sequence[int], k, v, lens_k: Sequence[int], **options):
    """As `check`, of packed q over padded k and v."""
    cuts = offsets(lens_q)
    padded, lens = reference.unpack(q, cuts)
    ragged = {"lens_q": lens, "lens_k": torch.tensor(lens_k), **options}
    results = [
        reference.attend(padded, k, v, **ragged, **dtypes)[0]
        for dtypes in ({"out_dtype": torch.float64}, {"compute_dtype": q.dtype})
    ]
    oracle, eager = (reference.pack(x, cuts) for x in results)
    budget.assert_within_budget(got, oracle, eager, "out")
