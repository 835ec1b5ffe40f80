"""Arguments that are no tensors, checked where a call is looked at for the first time. Pure Python: no torch."""

from __future__ import annotations

import contextlib
import math
import numbers
import sys
from typing import Any

from cuteforge.errors import ContractError

# No extent, count or offset of the library is larger.
MOST = 2**63 - 1
# The largest finite number of the kernels' arithmetic.
MOST_FP32 = 3.4028234663852886e38
_NUMPY_BOOLS = ("bool", "bool_")
_PLAIN = {int}
# Kinds of stream without an attribute that tells them, of cuda.bindings.
_STREAMS = ("CUstream", "cudaStream_t")
_MOST_TEXT = 40


def flag(name: str, value: Any, *, or_number: bool = False) -> bool:
    """`value` as a plain bool: a bool, numpy's too, or one that torch.compile lets vary.

    Args:
        or_number: whether 0 and 1 are flags as well. Where streams are taken they are not: 0 and 1 are raw streams.

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
    """`value` as an int, or None where that is allowed; one that torch.compile lets vary stays as it is.

    Raises:
        ContractError: no integer, or one out of range. numpy's count as integers, bools and tensors do not.
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
    """`values`, a sequence or an array of numpy, as a new list of int.

    Raises:
        ContractError: as `integer`, for ``name[i]``; or no sequence, or a tensor, which could be on a GPU.
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
    """Whether it is a finite number; by comparison, for a number that torch.compile lets vary is no argument of `math.isfinite`."""
    return isinstance(value, numbers.Real) and -math.inf < value < math.inf


def finite(name: str, value: Any) -> float:
    """`value` as a finite number of Python, numpy's are taken; one that torch.compile lets vary stays as it is and is not pinned.

    Raises:
        ContractError: anything else; a tensor is none.
    """
    if type(value).__name__ in ("float", "SymInt", "SymFloat") and is_finite(value):
        return value
    return number(name, value, most=sys.float_info.max)


def number(name: str, value: Any, least: float | None = None, most: float = MOST_FP32) -> float:
    """`value` as a finite float, in fp32 too unless `most` says otherwise; numpy's are taken. A bool is none where there is a `least`.

    Raises:
        ContractError: no such number; a tensor is none.
    """
    if type(value) is float and least is None and -most <= value <= most:
        return value  # 0.3 us less, for a scale that is given at every launch
    as_float = math.inf
    if is_finite(value) and (least is None or not isinstance(value, bool)):
        with contextlib.suppress(OverflowError):  # an int may be larger than any float
            as_float = float(value)
    if (-most if least is None else least) <= as_float <= most:
        return as_float
    wanted = "a finite number" if least is None else f"a finite number of {least:g} or more"
    raise ContractError(f"{name}: wanted {wanted}, got {described(value)}")


def described(value: Any) -> str:
    """What was got instead of a number or a flag, for the error. Of a stream the text says where it goes."""
    if value is None or isinstance(value, (bool, numbers.Number, str)):
        text = repr(value)
        return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}... ({type(value).__name__})"
    return kind_of(value)


def kind_of(value: Any) -> str:
    """What was got instead of a tensor, for the error. Of a stream, also a raw one, the text says where it goes."""
    kind = type(value).__name__
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return f"{kind} (a raw stream goes to stream=)"
    is_stream = kind in _STREAMS or hasattr(value, "cuda_stream") or hasattr(value, "__cuda_stream__")
    return f"{kind} (a stream goes to stream=)" if is_stream else kind
