"""Integers that callers pass, checked. Integers of numpy count; bool, float and tensors do not. Pure Python."""

from __future__ import annotations

import operator
from typing import Any

from cuteforge.errors import ContractError

_PLAIN = {int}


def checked_int(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """`value` as an int.

    Raises:
        ContractError: no integer, or out of range; the text names `name`.
    """
    number = value if type(value) is int else _as_int(value)
    if number is None or (at_least is not None and number < at_least):
        limit = "" if at_least is None else f" of {at_least} or more"
        raise ContractError(f"{name}: wanted an int{limit}, got {value!r:.80}")
    if at_most is not None and number > at_most:
        raise ContractError(f"{name}: wanted at most {at_most}, got {number}")
    return number


def checked_ints(name: str, values: Any, *, at_least: int | None = None) -> list[int]:
    """`values`, a sequence or an array of numpy, as a new list of int.

    Raises:
        ContractError: as `checked_int`, for ``name[i]``; or no sequence, or a tensor, which could be on a GPU.
    """
    numbers = values if type(values) is list else _as_list(name, values)
    if at_least is None and _PLAIN.issuperset(map(type, numbers)):
        return numbers.copy()
    return [checked_int(f"{name}[{i}]", number, at_least=at_least) for i, number in enumerate(numbers)]


def _as_list(name: str, values: Any) -> list:
    hint = f"; pass {name}.tolist()" if _is_tensor(values) else ""
    if not hint and not isinstance(values, (dict, set, frozenset)):
        try:
            # Of an array of numpy, with ints of Python in it.
            return list(values.tolist() if hasattr(values, "tolist") else values)
        except TypeError:
            pass
    got = type(values).__name__ if hint else f"{values!r:.80}"
    raise ContractError(f"{name}: wanted a sequence of int, got {got}{hint}")


def _as_int(value: Any) -> int | None:
    # bool is an int to Python, and torch reads an integer out of a tensor, from a GPU too.
    if isinstance(value, bool) or _is_tensor(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "requires_grad")
