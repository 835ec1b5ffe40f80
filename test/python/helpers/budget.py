"""How far a result may be from the truth, computed from the truth rather than chosen."""

from __future__ import annotations

import torch

_EPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbours of ``dtype`` at ``|value|``, fp64, elementwise; subnormal spacing near 0."""
    smallest = torch.finfo(dtype).tiny
    magnitude = value.abs().double().clamp(min=smallest)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * _EPS[dtype]


def same_values(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal shape, dtype and values; NaN equals NaN, and +0 equals -0 (eager adds gradients into +0)."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(((got == want) | (got.isnan() & want.isnan())).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, NaN payloads and zero signs included."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def assert_same_values(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}, {want.shape}"
    differs = ~((got == want) | (got.isnan() & want.isnan()))
    if bool(differs.any()):
        where = differs.nonzero()[0].tolist()
        pair = f"{got[tuple(where)].item()!r}, wanted {want[tuple(where)].item()!r}"
        raise AssertionError(f"{name}: {int(differs.sum())} of {got.numel()} differ, first at {where}: {pair}")


def assert_same_specials(got: torch.Tensor, want: torch.Tensor, name: str) -> torch.Tensor:
    """NaN and infinities sit where ``want`` has them; returns the mask of the finite rest."""
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = test(got) != test(want)
        where = differs.nonzero()[0].tolist() if bool(differs.any()) else None
        assert where is None, f"{name}: {kind} at {int(differs.sum())} wrong or missing places, first {where}"
    return torch.isfinite(want)


def assert_within_budget(got: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, name: str) -> None:
    """Largest error against the fp64 ``oracle`` at most ``2 * (same-dtype eager's + one ulp of the largest value)``.

    Non-finite values have to be where ``eager`` (rounded to the dtype of ``got``) has them.
    """
    finite = assert_same_specials(got, eager.to(got.dtype), name) & torch.isfinite(oracle)
    if not bool(finite.any()):
        return
    truth = oracle.double()[finite]
    error = (got.double()[finite] - truth).abs().max()
    eager_error = (eager.double()[finite] - truth).abs().max()
    limit = 2 * (eager_error + ulp(truth.abs().max(), got.dtype))
    assert error <= limit, f"{name}: error {error:.3e} over the budget {limit:.3e} (eager {eager_error:.3e})"


def assert_one_rounding_step(got: torch.Tensor, eager: torch.Tensor, mass: torch.Tensor, window: int, name: str):
    """``got`` is fp32 ``eager`` rounded once, or a neighbour of it.

    Two fp32 sums of ``window`` terms in different orders differ by up to ``window * 2**-24 * mass`` with ``mass`` the
    sum of the terms' magnitudes, and the hardware exponential has an error of ``2**-22``, 4 of these units, in each
    weight; where the terms cancel that exceeds an ulp of the result, so it is allowed on top.
    """
    finite = assert_same_specials(got, eager.to(got.dtype), name)
    distance = (got.double() - eager.double()).abs()[finite]
    limit = (ulp(eager, got.dtype) + (window + 4) * 2.0**-24 * mass.double())[finite]
    over = distance > limit
    worst = float((distance / limit).max()) if distance.numel() else 0.0
    assert not bool(over.any()), f"{name}: {int(over.sum())} elements off by more than a step, worst {worst:.2f} steps"


def assert_as_close(
    got: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, name: str, num_sums: int | None = None
) -> None:
    """At least as close to the fp64 ``oracle`` as fp32 ``eager`` rounded to the same dtype.

    Measured as the root mean square over all elements with 5 % slack (a handful of elements near a rounding boundary
    may fall either way) plus, for single elements, a largest error within one ulp of the largest value of eager's.
    Elements that share a sum share its error: ``num_sums`` independent ones, the number of elements by default, give
    the root mean square itself a relative scatter of ``1 / sqrt(num_sums)``, which is allowed on top.
    """
    eager = eager.to(got.dtype)
    finite = assert_same_specials(got, eager, name) & torch.isfinite(oracle)
    if not bool(finite.any()):
        return
    truth = oracle.double()[finite]
    error, eager_error = ((t.double()[finite] - truth).abs() for t in (got, eager))
    rms, eager_rms = (float(e.square().mean().sqrt()) for e in (error, eager_error))
    step = float(ulp(truth.abs().max(), got.dtype))
    slack = 1.05 + (num_sums or truth.numel()) ** -0.5
    assert rms <= slack * eager_rms + 1e-3 * step, f"{name}: rms error {rms:.3e} against eager's {eager_rms:.3e}"
    worst, eager_worst = float(error.max()), float(eager_error.max())
    assert worst <= eager_worst + step, f"{name}: largest error {worst:.3e} against eager's {eager_worst:.3e}"
