"""Every op of torch that the library registers, on a CPU under autocast: the results and gradients of the call
without."""

from __future__ import annotations

import pytest
import torch

import cuteforge.backends.compressor
import cuteforge.families.attention.torch_ops  # noqa: F401
from cuteforge import rotary_table
from helpers import budget

BF16, FP16 = torch.bfloat16, torch.float16


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rotary(dtype, count=1):
    cos, sin = rotary_table(16, 16)
    return (*(randn(5, 2, 16, dtype=dtype) for _ in range(count)), None, cos, sin, torch.arange(5), True, False)


def compressor(dtype, *rest):
    tokens = randn(21, 16, dtype=dtype)
    return (tokens, tokens * 2, randn(4, 16, dtype=torch.float32), ints(0, 9, 21), ints(0, 2, 5), *rest)


def dense(dtype, *offsets):
    q, k, v = randn(2, 3, 4, 16, dtype=dtype), randn(2, 7, 2, 16, dtype=dtype), randn(2, 7, 2, 16, dtype=dtype)
    return (
        q,
        k,
        v,
        *offsets,
        ints(5, 7),
        torch.arange(14).view(2, 7) % 3 > 0,
        randn(2, 1, 3, 7, dtype=torch.float32),
        torch.zeros(4),
        None,
        True,
        4,
        None,
        2.0,
    )


def paged(dtype, q, *rows):
    pool = randn(6, 4, 2, 16, dtype=dtype)
    table = ints(0, 1, 2, 3).view(2, 2)
    return (q, pool, pool * 0.5, table, *rows, None, None, torch.zeros(4), None, True, None, None, None)


def merge(dtype):
    return (randn(5, 4, 16, dtype=dtype), randn(4, 5, dtype=torch.float32)) * 2


def grad_rows(dtype):
    return randn(5, 8, dtype=dtype)


# The arguments of each op for a dtype.
ARGUMENTS = {
    "rotary": rotary,
    "rotary_": rotary,
    "rotary_qk": lambda dtype: rotary(dtype, 2),
    "rotary_qk_": lambda dtype: rotary(dtype, 2),
    "csa_compressor_forward": lambda dtype: compressor(dtype, 5, 4, 2),
    "csa_compressor_eager": lambda dtype: compressor(dtype, 5, 4, 2),
    "csa_compressor_backward": lambda dtype: compressor(dtype, grad_rows(dtype), 4, 2, True),
    "csa_compressor_eager_backward": lambda dtype: compressor(dtype, grad_rows(dtype), 4, 2),
    "gqa_decode": lambda dtype: (*dense(dtype), None),
    "gqa_prefill": lambda dtype: dense(dtype, None, None),
    "paged_gqa_decode": lambda dtype: (*paged(dtype, randn(2, 4, 16, dtype=dtype), ints(5, 8), None, None), None),
    "paged_gqa_decode_append": lambda dtype: (
        *paged(dtype, randn(2, 4, 16, dtype=dtype), ints(5, 8), None, None, *[randn(2, 2, 16, dtype=dtype)] * 2),
        None,
    ),
    "paged_gqa_prefill": lambda dtype: paged(
        dtype, randn(5, 4, 16, dtype=dtype), ints(0, 2, 5), ints(5, 8), None, None
    ),
    "merge_state": merge,
}
DIFFERENTIABLE = ("rotary", "rotary_qk", "csa_compressor_forward", "csa_compressor_eager")
each_pair = pytest.mark.parametrize(("dtype", "other"), [(BF16, FP16), (FP16, BF16), (torch.float32, BF16)])


def call(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """All tensors of a call: its results, and its arguments, which it may have written."""
    arguments = ARGUMENTS[name](dtype)
    result = getattr(torch.ops.cuteforge, name).default(*arguments)
    results = () if result is None else (result,) if isinstance(result, torch.Tensor) else result
    return [*results, *(x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point())]


def test_no_op_is_left_out():
    names = {
        name.removeprefix("cuteforge::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("cuteforge::")
    }
    assert names == set(ARGUMENTS)


@each_pair
@pytest.mark.parametrize("name", ARGUMENTS)
def test_forward(name, dtype, other):
    if dtype is torch.float32 and "gqa" in name:
        dtype = BF16  # attention takes 16 bits
        other = FP16
    want = call(name, dtype)
    with torch.autocast("cpu", other):
        got = call(name, dtype)
    assert all(a.dtype == b.dtype and budget.same_bits(a, b) for a, b in zip(got, want, strict=True))


@each_pair
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward(name, dtype, other):
    def gradients(is_on: bool) -> tuple:
        arguments = ARGUMENTS[name](dtype)
        leaves = [x.requires_grad_() for x in arguments[: 3 if "csa" in name else 1 + ("qk" in name)]]
        with torch.autocast("cpu", other, enabled=is_on):
            result = getattr(torch.ops.cuteforge, name).default(*arguments)
            results = (result,) if isinstance(result, torch.Tensor) else result
            return torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert got.dtype == want.dtype and budget.same_bits(got, want)
