"""Calls of wrappers that are served by what an earlier one found out, beside calls that know of none."""

from collections.abc import Callable, Mapping

import torch

from cuteforge.op import recall


def fresh(wrapper: Callable, *tensors: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """The result of a call that knows of none before it."""
    recall.forget()
    return copied(wrapper(*tensors, **options))


def copied(results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in results.items()}


def check_equal(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """The same names, shapes and bits. A position outside of the table gives NaN, which no comparison of numbers
    equals."""
    assert list(got.keys()) == list(want.keys())
    for name, x in want.items():
        assert got[name].shape == x.shape and torch.equal(_bits(got[name]), _bits(x)), name


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)
