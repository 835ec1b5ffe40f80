"""Arguments of the policy functions that are no tensors: checked, and as plain Python values."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from cuteforge.errors import ContractError
from cuteforge.gqa.options import is_finite
from cuteforge.torch_library import check_layout

# What torch.compile lets vary counts as what it stands for.
_INTEGERS = (numbers.Integral, torch.SymInt)
_MOST = 2**63 - 1  # that torch's ops take
_MOST_FLOAT = 1.7976931348623157e308  # an int may be larger
_LEFT_ALONE = (float, torch.SymInt, torch.SymFloat)
_FLAGS = (bool, torch.SymBool)


def flag(name: str, value: Any) -> bool:
    """`value` as a plain bool: a bool, numpy's too, or 0 or 1. A comparison of sizes, traced by torch.compile, is one as well.

    Raises:
        ContractError: anything else, None and tensors included.
    """
    if not (
        isinstance(value, _FLAGS) or _is_numpy_bool(value) or (isinstance(value, numbers.Integral) and value in (0, 1))
    ):
        raise ContractError(f"{name}: wanted True or False, got {described(value)}")
    return True if value else False  # noqa: SIM210  bool() of a traced comparison stays one


def _is_numpy_bool(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", None) == "b" and not value.ndim


def integer(name: str, value: Any, least: int) -> int:
    """`value` as an int: one of Python, of numpy, or a size that torch.compile lets vary.

    Raises:
        ContractError: no integer of 64 bits, or less than `least`; a bool and a tensor are none.
    """
    if isinstance(value, bool) or not isinstance(value, _INTEGERS) or not least <= value <= _MOST:
        raise ContractError(f"{name}: wanted an int of {least} or more, got {described(value)}")
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def finite(name: str, value: Any) -> float:
    """`value` as a number of Python: one of Python or of numpy, neither infinite nor NaN.

    Raises:
        ContractError: anything else; a tensor is none.
    """
    if not is_finite(value) or not -_MOST_FLOAT <= value <= _MOST_FLOAT:
        raise ContractError(f"{name}: wanted a finite number, got {described(value)}")
    return value if isinstance(value, _LEFT_ALONE) else float(value)


def require_tensor(name: str, value: Any) -> None:
    """Refuse what is no tensor, and tensors that are sparse, nested or quantized.

    Raises:
        ContractError: names the argument.
    """
    if not isinstance(value, torch.Tensor):
        raise ContractError(f"{name}: wanted a torch.Tensor, got {type(value).__name__}")
    check_layout(name, value)


def described(value: Any) -> str:
    """`value` in an error: itself where that is short, else its type."""
    is_short = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if is_short else type(value).__name__
