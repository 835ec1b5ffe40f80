"""Arithmetic of `cuteforge.device.math` on a GPU: what is rounded once has the bits of exact arithmetic, what is
approximate keeps its bound."""

import functools

import pytest
import torch

from cuteforge.runtime.arch import resolve_arch
from cuteforge.runtime.compile_cache import load_kernel

COUNT = 1 << 16


@pytest.fixture
def applied(device, monkeypatch, tmp_path):
    """A function that gives the result of every function on two vectors, by name."""
    from helpers import device_kernel

    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    entry = load_kernel(device_kernel.key(resolve_arch(None, device.index).name)).entry

    def apply(x, y):
        out = torch.full((len(device_kernel.FUNCTIONS), len(x)), torch.nan, device=device)
        entry(x.to(device), y.to(device), out, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        return dict(zip(device_kernel.FUNCTIONS, out.cpu()))

    return apply


@functools.cache
def operands():
    """Numbers of 0.5 … 2 and their negatives: fp64 holds all sums and products of two exactly, so that rounding it to
    fp32 rounds once."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        (torch.rand(COUNT, generator=generator) * 1.5 + 0.5) * (torch.randint(2, (COUNT,), generator=generator) * 2 - 1)
        for _ in range(2)
    )


def rounded(x):
    return x.float().double()


# In fp64, each step that is rounded written out. A quotient rounded to fp64 and then to fp32 is that rounded once.
EXACT = {
    "mul_rn": lambda a, b: a * b,
    "add_rn": lambda a, b: a + b,
    "fma_rn": lambda a, b: a * b + a,
    "rcp_rn": lambda a, b: 1 / b,
    "div_by": lambda a, b: a / b,
    "div_rn": lambda a, b: a / b,
    "sum_rn": lambda a, b: rounded(a + b) + a,
    "dot": lambda a, b: rounded(a * b) + b * b,
    "max_of": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, -7.0),
    "unfused": lambda a, b: rounded(a * b) + a,
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_rounded_once_has_the_bits_of_exact_arithmetic(name, applied):
    a, b = operands()
    want = EXACT[name](a.double(), b.double()).float()
    assert torch.equal(applied(a, b)[name], want)


def test_fused_and_unfused_differ_on_these_operands(applied):
    """Else the test above could not tell them apart."""
    results = applied(*operands())
    assert not torch.equal(results["fma_rn"], results["unfused"])


# name: (exact in fp64, what a result of x may be off by: relative to the result, or to 1)
APPROXIMATE = {
    "exp_accurate": (torch.exp, lambda x: 2 * 2.0**-23 * torch.exp(x)),
    # x is multiplied by log2(e): the product is rounded, and so is the constant
    "exp_fast": (torch.exp, lambda x: (x.abs() * 1.5 * 2.0**-24 + 2.0**-21) * torch.exp(x)),
    "exp2_fast": (torch.exp2, lambda x: 2.0**-21 * torch.exp2(x)),
    "tanh_scaled": (torch.tanh, lambda x: torch.full_like(x, 2.0**-20)),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_what_is_approximate_keeps_its_bound(name, applied):
    x = torch.linspace(-80, 80, COUNT)
    function, bound = APPROXIMATE[name]
    error = (applied(x, x)[name].double() - function(x.double())).abs()
    assert bool((error <= bound(x.double())).all()), float((error / bound(x.double())).max())


def test_the_library_exponential_has_the_bits_of_torch(applied, device):
    x = torch.linspace(-80, 80, COUNT)
    assert torch.equal(applied(x, x)["exp_accurate"], torch.exp(x.to(device)).cpu())


def test_ends_of_the_exponentials_and_what_a_maximum_makes_of_nan(applied):
    """Too small is 0, too large infinite; a maximum passes over a NaN."""
    x = torch.tensor([-torch.inf, -1000.0, 0.0, 1000.0, torch.nan])
    results = applied(x, torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0]))
    for name in ("exp_fast", "exp2_fast", "exp_accurate"):
        assert torch.equal(results[name][:4], torch.tensor([0.0, 0.0, 1.0, torch.inf])), name
    assert torch.equal(results["max_of"], torch.tensor([1.0, 1.0, 1.0, 1000.0, 3.0]))
    tanh = results["tanh_scaled"]
    assert bool(((tanh[:4] - torch.tensor([-1.0, -1.0, 0.0, 1.0])).abs() <= 2.0**-20).all()) and tanh[4].isnan()
