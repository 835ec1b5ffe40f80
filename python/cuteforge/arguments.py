"""Checks of flags, integers and numbers, done the first time a call is seen. Pure Python: no torch."""

from __future__ import annotations

import contextlib
import math
import numbers
import sys
from typing import Any

from cuteforge.errors import ContractError

# No extent, count or offset in the library is larger.
MOST = 2**63 - 1
# The largest finite fp32 number: kernels compute in fp32.
MOST_FP32 = 3.4028234663852886e38
_NUMPY_BOOLS = ("bool", "bool_")
_PLAIN = {int}
# The streams of cuda.bindings: only the name of their type gives them away.
_STREAMS = ("CUstream", "cudaStream_t")
_MOST_TEXT = 40


def flag(name: str, value: Any, *, or_number: bool = False) -> bool:
    """`value` as a plain bool. It may be a bool, a bool of numpy, or one that torch.compile treats as a variable.

    Args:
        or_number: whether 0 and 1 are accepted too. Not where the call also takes a stream: 0 and 1 are raw streams.

    Raises:
        ContractError: anything else, None and tensors included.
    """
    kind = type(value)
    if kind is bool or kind.__name__ == "SymBool" or (kind.__module__ == "numpy" and kind.__name__ in _NUMPY_BOOLS):
        return True if value else False  # noqa: SIM210  bool() of a traced comparison stays one
    if or_number and isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    raise ContractError(f"{name}: wanted True or False, got {described(value)}")


def integer(name: str, value: Any, least: int | None = None, most: int = MOST, *, or_none: bool = False) -> Any:
    """`value` as an int, or None where that is allowed. A variable of torch.compile is returned unchanged.

    Raises:
        ContractError: not an integer, or out of range. Integers of numpy are accepted, bools and tensors are not.
    """
    if value is None and or_none:
        return None
    if type(value).__name__ == "SymInt":
        if least is None or value >= least:
            return value
    elif type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool)):
        as_int = int(value)
        if as_int <= most and (least is None or as_int >= least):
            return as_int
    wanted = "" if least is None else f" of {least} or more" if most == MOST else f" from {least} to {most}"
    raise ContractError(f"{name}: wanted {'None or ' * or_none}an int{wanted}, got {described(value)}")


def integers(name: str, values: Any, least: int | None = None) -> list[int]:
    """`values`, a sequence or a numpy array, as a new list of int.

    Raises:
        ContractError: as `integer`, for ``name[i]``; or not a sequence; or a tensor, which could be on a GPU.
    """
    if hasattr(values, "requires_grad"):
        raise ContractError(f"{name}: wanted a sequence of int, got {kind_of(values)}; pass {name}.tolist()")
    try:
        if isinstance(values, (dict, set, frozenset)):
            raise TypeError("it has no order")
        items = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError as error:
        raise ContractError(f"{name}: wanted a sequence of int, got {described(values)} ({error})") from None
    if least is None and _PLAIN.issuperset(map(type, items)):
        return items
    return [integer(f"{name}[{i}]", item, least) for i, item in enumerate(items)]


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number. Compares: `math.isfinite` refuses the variables of torch.compile."""
    return isinstance(value, numbers.Real) and -math.inf < value < math.inf


def finite(name: str, value: Any) -> float:
    """`value` as a finite Python number. numpy's are accepted; a variable of torch.compile is returned unchanged.

    Raises:
        ContractError: anything else, tensors included.
    """
    if type(value).__name__ in ("float", "SymInt", "SymFloat") and is_finite(value):
        return value
    return number(name, value, most=sys.float_info.max)


def number(name: str, value: Any, least: float | None = None, most: float = MOST_FP32) -> float:
    """`value` as a float that is finite in fp32 too, unless `most` says otherwise. numpy's numbers are accepted.

    A bool is refused where there is a `least`.

    Raises:
        ContractError: anything else, tensors included.
    """
    if type(value) is float and least is None and -most <= value <= most:
        return value  # saves 0.3 us for a scale that is given at every launch
    as_float = math.inf
    if is_finite(value) and (least is None or not isinstance(value, bool)):
        with contextlib.suppress(OverflowError):  # an int may be larger than any float
            as_float = float(value)
    if (-most if least is None else least) <= as_float <= most:
        return as_float
    wanted = "a finite number" if least is None else f"a finite number of {least:g} or more"
    raise ContractError(f"{name}: wanted {wanted}, got {described(value)}")


def described(value: Any) -> str:
    """What an error says it got instead of a number or a flag. If that is a stream, the text says where streams go."""
    if value is None or isinstance(value, (bool, numbers.Number, str)):
        text = repr(value)
        return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}... ({type(value).__name__})"
    return kind_of(value)


def kind_of(value: Any) -> str:
    """What an error says it got instead of a tensor. If it is a stream, raw or not, the text says where streams go."""
    kind = type(value).__name__
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return f"{kind} (a raw stream goes to stream=)"
    is_stream = kind in _STREAMS or hasattr(value, "cuda_stream") or hasattr(value, "__cuda_stream__")
    return f"{kind} (a stream goes to stream=)" if is_stream else kind
