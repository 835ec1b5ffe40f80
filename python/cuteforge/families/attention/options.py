"""Options of attention that are numbers: checked, and as the scalars of a launch. Pure Python: no torch, no cutlass."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from cuteforge.arguments import described, integer, is_finite, number
from cuteforge.errors import ContractError

Window = tuple[int | None, int | None]
UNLIMITED: Window = (None, None)
_MOST_KEYS = 2**31 - 1  # no request has more: a longer window limits nothing
# An fp32 kernel knows tanh to 2**-20: at a cap of 1e4 a score is off by 0.01, at 1e6 by 1. Models cap at 20 to 50.
_CAPS = 1e-6, 1e4


@dataclass(frozen=True)
class ScoreOptions:
    """Which scores count, and what becomes of them.

    Args:
        window: keys before and after a query's own position that it sees, None for all on that side.
        softcap: what scores are capped at, None for no cap.
    """

    causal: bool
    window: Window
    softcap: float | None

    @property
    def left(self) -> int | None:
        """Keys before a query's position that it sees."""
        return self.window[0]

    @property
    def right(self) -> int | None:
        """Keys after it, 0 with causality."""
        return 0 if self.causal else self.window[1]

    @property
    def facts(self) -> dict[str, bool]:
        """What a kernel is compiled for; that a query sees no later key is causality, however it was said."""
        return {
            "causal": self.right == 0,
            "has_left": self.left is not None,
            "has_right": bool(self.right),
            "has_softcap": self.softcap is not None,
        }


def checked_window(value: Any) -> Window:
    """`value` as a pair.

    Raises:
        ContractError: no pair of None or ints of 0 or more. A negative one, which elsewhere means no limit, is refused.
    """
    if value is None:
        return UNLIMITED
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(_is_limit, value)):
        got = repr(value) if isinstance(value, (tuple, list)) else described(value)
        raise ContractError(f"window: wanted None or (left, right), each None or an int of 0 or more, got {got}")
    left, right = (None if side is None else min(int(side), _MOST_KEYS) for side in value)
    return left, right


def _is_limit(side: Any) -> bool:
    return side is None or (isinstance(side, numbers.Integral) and not isinstance(side, bool) and side >= 0)


def checked_softcap(value: Any) -> float | None:
    """`value` as a float; None for 0, which is no cap.

    Raises:
        ContractError: neither 0 nor a number from 1e-6 to 1e4; a tensor is none.
    """
    least, most = _CAPS
    if value is None or (is_finite(value) and value == 0):
        return None
    if isinstance(value, bool) or not (is_finite(value) and least <= value <= most):
        raise ContractError(f"softcap: wanted None, 0 or a number from {least:g} to {most:g}, got {described(value)}")
    return float(value)


def checked_scale(value: Any, is_traced: bool = False) -> float | None:
    """`value` as a float, or None.

    Args:
        is_traced: torch.compile may let the number vary. A comparison with anything but the infinities would pin it;
            the op that it goes to checks it.

    Raises:
        ContractError: no finite number; a tensor is none.
    """
    if is_traced and is_finite(value):
        return value
    return None if value is None else number("softmax_scale", value)


def checked_splits(value: Any) -> int | None:
    """`value` as an int, or None. There is no upper limit: more splits than keys do no harm.

    Raises:
        ContractError: no int of 1 or more.
    """
    splits = integer("num_splits", value, least=1, or_none=True)
    return None if splits is None else min(splits, _MOST_KEYS)
